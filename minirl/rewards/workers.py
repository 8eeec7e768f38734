"""Reward functions that use signals, in processes of their own.

Python lets only the main thread of a process handle signals, and rewards run in other threads. A
function with a time limit by `signal.alarm`, as math-verify's `parse` has one, therefore runs in
workers: a process imports it once and forks them, and each calls it in its main thread for one
completion after the other. They end with the rank.
"""

import json
import os
import pickle
import queue
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import minirl
from minirl.base.errors import UserError
from minirl.config.shared import RewardConfig
from minirl.rewards import AdaptedReward, Answer, RewardCall, RowPrompt
from minirl.rewards.functions import RaisedThereError, find_reward, grade, is_mistake, to_plain
from minirl.sandbox.inside import frames
from minirl.sandbox.inside.kernel import end_with_parent

START = "from minirl.rewards.workers import main; main()"
ROOT = Path(minirl.__file__).parents[1]


class ProcessReward(AdaptedReward):
    """A reward function that workers call.

    Args:
        name: of the function, as reward.function has it.
        function: the function, if it is another library's.
        num_workers: calls that can run at once.

    Raises:
        UserError: the workers do not start.
    """

    def __init__(self, name: str, function: object, num_workers: int):
        self.name = name
        self.function = function
        self.together = isinstance(function, AdaptedReward) and function.together
        pairs = [socket.socketpair() for _ in range(num_workers)]
        descriptors = [inner.fileno() for _, inner in pairs]
        settings = {"name": name, "sockets": descriptors}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C is not for it.
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
            | {"OMP_NUM_THREADS": "1"},
        )
        self.free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for own, inner in pairs:
            inner.close()
            self.free.put(own)

    def why_not(self, row: dict) -> str:
        """Return why no answer to this row can be scored; empty: it can."""
        return self.function.why_not(row) if isinstance(self.function, AdaptedReward) else ""

    def score(
        self, prompt: RowPrompt, completion: str, row: dict, call: RewardCall
    ) -> float | None:
        """Return the reward of a completion alone. Raises as `score_all` does."""
        [value] = self.score_all([Answer(row=row, completion=completion, call=call)])
        return value

    def score_all(self, answers: Sequence[Answer]) -> Sequence[float | None]:
        """Return the rewards of completions; None: the function does not apply to this row.

        Raises:
            UserError: The function fails, or its process has ended.
        """
        worker = self.free.get()
        try:
            frames.send(worker, pickle.dumps(answers))
            reply = frames.receive(worker)
        except OSError:
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
    """Import a function, then fork a worker for each socket. Settings are in sys.argv[1]."""
    settings = json.loads(sys.argv[1])
    end_with_parent()
    function = find_reward(settings["name"], RewardConfig())
    pids = []
    for descriptor in settings["sockets"]:
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        end_with_parent()
        for other in settings["sockets"]:
            if other != descriptor:
                os.close(other)  # Whoever has one open hides that its worker has ended.
        trainer = socket.socket(fileno=descriptor)
        while request := frames.receive(trainer):
            answers = pickle.loads(request)
            values, problem, is_its_mistake = [], "", False
            try:
                values = grade(function, settings["name"], answers)
            except UserError as error:
                problem = str(error)
                is_its_mistake = is_mistake(error.__cause__)
            calls = []
            for answer in answers:
                columns = {name: to_plain(each) for name, each in answer.call.columns.items()}
                calls.append((answer.call.metrics, columns))
            frames.send(trainer, pickle.dumps((values, calls, problem, is_its_mistake)))
        os._exit(0)
    for descriptor in settings["sockets"]:
        os.close(descriptor)
    for pid in pids:
        os.waitpid(pid, 0)
