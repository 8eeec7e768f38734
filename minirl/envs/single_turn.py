"""The environment of verifiable rewards: one prompt, one answer, scored by the reward functions."""

from minirl.envs.base import Env, Observation, Result, State


class SingleTurn(Env):
    """One answer, scored by the reward functions."""

    graded = True

    async def reset(
        self, row: dict
    ) -> Observation:  # not in a thread, which would cost more than it does
        return row["prompt"]

    async def step(self, state: State) -> Result:
        return Result(done=True)
