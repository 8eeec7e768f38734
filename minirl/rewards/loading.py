"""From `reward.function` to functions that work.

1. Each name is found: a registered function, one in a file, another library's, or an endpoint.
2. Those of files are called once, before a model is loaded, on a made-up completion. What would end
   the run after its first rollout, minutes later, ends it here. Only what cannot be the
   completion's fault does: a function that cannot be called, uses a name or a module that is not
   there, or returns anything but a number. Another error is only shown, and the run continues: the
   function may be right to refuse a text that no policy would write.
3. One that uses signals, as math-verify's `parse` does for its time limit, is called in other
   processes from then on: Python lets only the main thread of a process handle signals, and rewards
   run in other threads. A process imports it once and forks workers, and each calls it in its main
   thread for one completion after the other. They end with the rank.
"""

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any, cast

import minirl
from minirl.base.errors import UserError, require
from minirl.base.log import say
from minirl.base.oversight import Oversight
from minirl.config.lookup import cure_of, find_function
from minirl.config.shared import RewardConfig
from minirl.data import chat
from minirl.data.prompts import Prompts
from minirl.parallel.machines import errors_of_all, num_cores, ranks_of_node
from minirl.parallel.mesh import World
from minirl.rewards import AdaptedReward, Answer, RewardCall, RewardFunction, TrainerState
from minirl.rewards.adapters import foreign_prefix, parameters_of
from minirl.rewards.functions import REWARDS
from minirl.rewards.http import RemoteReward
from minirl.rewards.scoring import Rewards, grade
from minirl.sandbox.inside.kernel import end_with_parent

# What makes a reward function of the text after a prefix; imported when it is needed.
ADAPTERS = {
    "openrlhf": "minirl.envs.adapters.openrlhf:OpenRLHFReward",
    "trl": "minirl.rewards.adapters:trl_reward",
    "verl": "minirl.rewards.adapters:VerlReward",
}
GIVEN = ("prompt", "completion", "row")  # What a function of a file is called with.
PACKAGE = Path(minirl.__file__).parent
START = "from minirl.rewards.loading import main; main()"


def make_rewards(cfg: RewardConfig, watch: Oversight | None = None) -> Rewards:
    """Return the sum that `reward.function` and `reward.weights` describe.

    Args:
        cfg: the section of the config.
        watch: of the process, for reward.timeout_seconds; None: there is no time limit.

    Raises:
        UserError: A function is not found, or functions and weights do not fit.
    """
    names = [cfg.function] if isinstance(cfg.function, str) else cfg.function
    names = [name for name in names if name]
    settings = f"reward.function = {cfg.function}, reward.weights = {cfg.weights}"
    require(names or cfg.model, f"{settings}: nothing scores; name a function, or set reward.model")
    require(len(set(names)) == len(names), f"{settings}: a function is named twice; name it once")
    require(
        len(cfg.weights) in (0, len(names)),
        f"{settings}: there are {len(cfg.weights)} weights for {len(names)} functions; "
        "give one for each, or none",
    )
    functions = [find_reward(name, cfg) for name in names]
    weights = cfg.weights or [1.0] * len(names)
    weighted = zip(weights, functions, names, strict=True)
    has_model = bool(cfg.model)
    return Rewards(*weighted, seconds=cfg.timeout_seconds, watch=watch, has_model=has_model)


def find_reward(name: str, cfg: RewardConfig) -> RewardFunction | AdaptedReward:
    """Return the function of one name. Raises UserError if there is none, or it cannot work."""
    kind, _, argument = name.partition(":")
    if kind in ("http", "https"):
        return RemoteReward(name, cfg)
    if kind in ADAPTERS:
        return resolve_name(ADAPTERS[kind])(argument)
    function = find_function("reward.function", name, REWARDS)
    prefix, parameter = foreign_prefix(function)
    if prefix:
        place = name.rpartition(":")[0] if prefix == "openrlhf" else name
        raise UserError(
            f"reward.function = {name} has a parameter {parameter!r}, as functions of {prefix} "
            f"have, and would be called with (prompt, completion, row); name it {prefix}:{place}, "
            "or give its parameters other names"
        )
    for given, taken in zip(GIVEN, parameters_of(function), strict=False):
        require(
            taken == given or taken not in GIVEN,
            f"reward.function = {name} has the parameter {taken!r} where it is called with the "
            f"{given}: it gets ({', '.join(GIVEN)}), by place; put them in this order",
        )
    return function


# --------------------------------------------------------------------------------------------------
# the first call


def try_rewards(rewards: Rewards, prompts: Prompts, num_threads: int, mesh: World) -> None:
    """Call the functions of files once, on rank 0. Collective.

    Args:
        rewards: the functions; those that use signals are replaced, on all ranks.
        prompts: of which the first is taken.
        num_threads: reward.threads.
        mesh: the ranks.

    Raises:
        UserError: a function cannot work.
    """
    num_workers = min(num_threads, max(2, num_cores() // ranks_of_node()))
    for number, (weight, function, name) in enumerate(rewards.weighted):
        if name in REWARDS or isinstance(function, RemoteReward):
            continue
        uses_signals = False
        with errors_of_all(mesh):
            if mesh.rank == 0:
                uses_signals = try_reward(rewards, function, name, prompts)
        if not mesh.gather(uses_signals)[0]:
            continue
        with errors_of_all(mesh):
            process = ProcessReward(name, function, num_workers, rewards.watch)
            rewards.weighted[number] = (weight, process, name)
            if mesh.rank == 0:
                say(
                    f"reward.function = {name} uses signals, which only a main thread handles: "
                    f"{num_workers} processes on each rank call it"
                )
                try_reward(rewards, process, name, prompts)


def try_reward(rewards: Rewards, function: Any, name: str, prompts: Prompts) -> bool:
    """Call a function in a thread, as a run does. Returns whether it uses signals.

    Raises:
        UserError: it cannot work.
    """
    row = dict(prompts.rows[0])
    row["rendered_prompt"] = prompts.rendered(row)
    # The answer of the row in all the forms that rewards look for.
    answer = str(row.get("answer") or 42)
    completion = (
        f"<think>\nIt follows that it is {answer}.\n</think>\n<answer>{answer}</answer>\n"
        f"Answer: {answer}\n#### {answer}\nSo it is $\\boxed{{{answer}}}$."
    )
    tokens = chat.encode(prompts.tokenizer, completion)
    call = RewardCall(tokens=tokens, state=TrainerState(max_steps=1, num_train_epochs=1.0))
    made_up = Answer(row=row, completion=completion, call=call)
    uses_signals = False

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal uses_signals
        if event == "call" and frame.f_code is cast(Any, signal.signal).__code__:
            uses_signals = True

    # Seen from outside: the function may catch the error, and would then return 0 for all answers.
    with ThreadPoolExecutor(1, "reward", initializer=sys.setprofile, initargs=(look,)) as thread:
        failure = thread.submit(rewards.grade_in_time, function, name, [made_up]).exception()
    if uses_signals or cure_of(failure):
        return True
    if failure:
        if not isinstance(failure, UserError) or is_mistake(failure.__cause__):
            raise failure
        say(f"{failure} (a made-up completion); a run ends where one of the policy does the same")
    names = {each for _, _, each in rewards.weighted} if rewards.is_one_of_several else set()
    taken = sorted(call.metrics.keys() & names)
    require(
        not taken,
        f"reward.function = {name} logs {taken}, and the metric reward/NAME of a function has this "
        "name; log it under another one",
    )
    return False


# --------------------------------------------------------------------------------------------------
# processes for functions that use signals


class RaisedThereError(Exception):
    """What a function has raised in a worker.

    Args:
        is_mistake: as the function of this name says.
    """

    def __init__(self, is_mistake: bool):
        super().__init__()
        self.is_mistake = is_mistake


def is_mistake(error: BaseException | None) -> bool:
    """Return whether an error is of a reward function itself, whatever the completion was.

    Args:
        error: what it raised; None: it returned what is no number.
    """
    if isinstance(error, RaisedThereError):
        return error.is_mistake
    if error is None or type(error) in (NameError, ImportError, ModuleNotFoundError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    has_entered = any(not frame.filename.startswith(str(PACKAGE)) for frame in frames)
    return bool(cure_of(error)) or not has_entered


class ProcessReward(AdaptedReward):
    """A reward function that workers call.

    Args:
        name: of the function, as reward.function has it.
        function: the function, if it is another library's.
        num_workers: calls that can run at once.
        watch: of this process. The time of a call begins when a worker is free.

    Raises:
        UserError: the workers do not start.
    """

    def __init__(self, name: str, function: object, num_workers: int, watch: Oversight):
        self.name = name
        self.function = function
        self.together = isinstance(function, AdaptedReward) and function.together
        pairs = [Pipe() for _ in range(num_workers)]
        descriptors = [inner.fileno() for _, inner in pairs]
        settings = {"name": name, "descriptors": descriptors}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C is not for it.
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)])}
            | {"OMP_NUM_THREADS": "1"},
        )
        self.watch = watch
        self.free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for own, inner in pairs:
            inner.close()
            self.free.put(own)

    def why_not(self, row: dict) -> str:
        """Return why no answer to this row can be scored; empty: it can."""
        return self.function.why_not(row) if isinstance(self.function, AdaptedReward) else ""

    def score_all(self, answers: Sequence[Answer]) -> Sequence[float | None]:
        """Return the rewards of completions; None: the function does not apply to this row.

        Raises:
            UserError: The function fails, or its process has ended.
        """
        worker = self.free.get()
        for limit in self.watch.limits.copy():
            if limit.thread == threading.get_ident():
                self.watch.renew(limit)
        try:
            worker.send_bytes(pickle.dumps(answers))
            reply = worker.recv_bytes()
        except (EOFError, OSError):
            reply = b""
        self.free.put(worker)
        if not reply:
            raise UserError(
                f"reward.function = {self.name} ended its process, for the completion "
                f"{answers[0].completion[:80]!r}; let it return, or raise an error"
            )
        values, calls, problem, is_its_mistake = pickle.loads(reply)
        if problem:
            raise UserError(problem) from RaisedThereError(is_its_mistake)
        for answer, (metrics, columns) in zip(answers, calls, strict=True):
            answer.call.metrics.update(metrics)
            answer.call.columns.update(columns)
        return values


def main() -> None:
    """Import a function, then fork a worker for each connection. Settings are in sys.argv[1]."""
    settings = json.loads(sys.argv[1])
    end_with_parent()
    function = find_reward(settings["name"], RewardConfig())
    pids = []
    for descriptor in settings["descriptors"]:
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        end_with_parent()
        for other in settings["descriptors"]:
            if other != descriptor:
                os.close(other)  # Whoever has one open hides that its worker has ended.
        trainer = Connection(descriptor)
        while True:
            try:
                answers = pickle.loads(trainer.recv_bytes())
            except EOFError:
                os._exit(0)
            values, problem, is_its_mistake = [], "", False
            try:
                values = grade(function, settings["name"], answers)
            except UserError as error:
                problem = str(error)
                is_its_mistake = is_mistake(error.__cause__)
            calls = [(answer.call.metrics, answer.call.columns) for answer in answers]
            trainer.send_bytes(pickle.dumps((values, calls, problem, is_its_mistake)))
    for descriptor in settings["descriptors"]:
        os.close(descriptor)
    for pid in pids:
        os.waitpid(pid, 0)
