"""Environments of the package `verifiers` (github.com/PrimeIntellect-ai/verifiers) that have a `load_environment`, such as those of its hub:

    pip install "verifiers>=0.1.14,<0.4"       # and the environment's own package
    --env.name "verifiers:my-env?key=value" --data.train "verifiers:my-env?key=value" --data.eval "verifiers:my-env?key=value"

The environment leads the episode: it asks the policy through the endpoint, with its own limit of turns, and scores it by its own rubric. Its rows are
the source `verifiers:` of data/sources.py; rows from elsewhere do as well if they have what it wants of them. From 0.4 on the package has no such
environments any more.
"""

import json

from minirl.data.sources import load_verifiers
from minirl.rollout.env import Agent, Result, Session


class Verifiers(Agent):
    """Raises ValueError for an environment that scores the answers to a prompt only together."""

    def __init__(self, name: str, **arguments: object):
        self.environment = load_verifiers(name, json.dumps(arguments), "env.name")
        if self.environment.requires_group_rollouts:
            raise ValueError("its rubric compares the answers of a group, and here each episode has a reward of its own")

    async def run(self, row: dict, session: Session) -> Result:
        import verifiers
        from openai import AsyncOpenAI

        given = {name: row[name] for name in ("prompt", "example_id", "task", "answer", "info") if row.get(name) is not None}
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            output = await self.environment.run_rollout(given, verifiers.OpenAIChatCompletionsClient(client), session.model, {})
        if output["error"] is not None:
            raise RuntimeError(f"verifiers: {output['error']}")
        return Result(reward=output["reward"], truncated=output["is_truncated"], info=output["metrics"])
