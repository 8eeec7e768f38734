"""The environment of verifiable rewards: one prompt, one answer, scored by the reward functions."""

from minirl.envs.base import Env, Observation, Result, State


class SingleTurn(Env):
    """One answer to the row's prompt."""

    graded = True
    needs_prompt = True

    async def reset(self, row: dict) -> Observation:
        """Return the row's prompt. Not in a thread, which would cost more than it does."""
        return row["prompt"]

    async def step(self, state: State) -> Result:
        """End the episode."""
        return Result(done=True)
