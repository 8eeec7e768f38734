"""The first call of the user's reward functions: before a model is loaded, on a made-up completion.

What would end the run after its first rollout, minutes later, ends it here. Only what cannot be the
completion's fault does: a function that cannot be called, uses a name or a module that is not
there, or returns anything but a number. Another error is only shown, and the run continues: the
function may be right to refuse a text that no policy would write.

A function that uses signals is called in processes of its own from then on (loading.py).
"""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, cast

from minirl.base.errors import UserError
from minirl.base.log import say
from minirl.data import chat
from minirl.data.prompts import Prompts
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import Mesh
from minirl.rewards import Answer, RewardCall, TrainerState
from minirl.rewards.functions import REWARDS
from minirl.rewards.http import RemoteReward
from minirl.rewards.loading import ProcessReward, is_mistake
from minirl.rewards.scoring import Rewards, needs_main_thread


def make_up_completion(row: dict) -> str:
    """Return a completion with the answer of a row in all the forms that rewards look for."""
    answer = str(row.get("answer") or 42)
    return (
        f"<think>\nIt follows that it is {answer}.\n</think>\n<answer>{answer}</answer>\n"
        f"Answer: {answer}\n#### {answer}\nSo it is $\\boxed{{{answer}}}$."
    )


def try_rewards(rewards: Rewards, prompts: Prompts, num_threads: int, mesh: Mesh) -> None:
    """Call the functions of files once, on rank 0. Collective.

    Args:
        rewards: the functions; those that use signals are replaced, on all ranks.
        prompts: of which the first is taken.
        num_threads: reward.threads.
        mesh: the ranks.

    Raises:
        UserError: a function cannot work.
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_workers = min(num_threads, max(2, cores))
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
            process = ProcessReward(name, function, num_workers)
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
    completion = make_up_completion(row)
    tokens = chat.encode(prompts.tokenizer, completion)
    call = RewardCall(tokens=tokens, state=TrainerState(max_steps=1, num_train_epochs=1.0))
    answer = Answer(row=row, completion=completion, call=call)
    uses_signals = False

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal uses_signals
        if event == "call" and frame.f_code is cast(Any, signal.signal).__code__:
            uses_signals = True

    def call_it() -> None:
        # An error of it may be caught by the function, which would then return 0 for all answers.
        sys.setprofile(look)
        try:
            rewards.grade_in_time(function, name, [answer])
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(1, thread_name_prefix="reward") as thread:
        failure = thread.submit(call_it).exception()
    if uses_signals or needs_main_thread(failure):
        return True
    if failure:
        if not isinstance(failure, UserError) or is_mistake(failure.__cause__):
            raise failure
        say(f"{failure} (a made-up completion); a run ends where one of the policy does the same")
    return False
