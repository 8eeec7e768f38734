"""Environments of the package `verifiers` (github.com/PrimeIntellect-ai/verifiers) that have a
`load_environment`, such as those of its hub:

    pip install "verifiers>=0.1.14,<0.4"       # and the environment's own package
    python -c "import verifiers;
    verifiers.load_environment('my-env').get_dataset().to_json('rows.jsonl')"
    --env.name "verifiers:my-env?key=value" --data.train rows.jsonl

The environment leads the episode: it asks the policy through the endpoint, with its own limit of
turns, and scores it by its own rubric. Rows from elsewhere do as well if they have what it wants of
them. From 0.4 on the package has no such environments any more.
"""

import json
import signal
from functools import cache
from typing import Any

from minirl.envs.base import Agent, Result, Session
from minirl.errors import UserError


class Verifiers(Agent):
    """Raises ValueError for an environment that scores the answers to a prompt only together."""

    def __init__(self, name: str, **arguments: object):
        self.environment = load(name, json.dumps(arguments))
        if self.environment.requires_group_rollouts:
            raise ValueError(
                "its rubric compares the answers of a group, and here each episode has a reward of its own"
            )

    async def run(self, row: dict, session: Session) -> Result:
        import verifiers
        from openai import AsyncOpenAI

        given = {
            name: row[name]
            for name in ("prompt", "example_id", "task", "answer", "info")
            if row.get(name) is not None
        }
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            output = await self.environment.run_rollout(
                given, verifiers.OpenAIChatCompletionsClient(client), session.model, {}
            )
        if output["error"] is not None:
            raise RuntimeError(f"verifiers: {output['error']}")
        return Result(
            reward=output["reward"], truncated=output["is_truncated"], info=output["metrics"]
        )


@cache
def load(name: str, arguments: str) -> Any:
    """`arguments`: JSON. Raises UserError."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        import verifiers  # here, because it takes a while

        return verifiers.load_environment(name, **json.loads(arguments))
    except (
        ImportError,
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # what it makes of whatever an environment raises
        raise UserError(
            f"env.name = verifiers:{name}: {error} (it takes the environment's own package, and pip install 'verifiers>=0.1.14,<0.4')"
        ) from error
    finally:
        for (
            number,
            handler,
        ) in (
            handlers.items()
        ):  # an environment takes them for itself; how a rank ends is not its business
            signal.signal(number, handler)
