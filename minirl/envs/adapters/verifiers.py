"""Environments of the package `verifiers` (github.com/PrimeIntellect-ai/verifiers).

Those that have a `load_environment` run here, such as the ones of its hub:

    pip install "verifiers>=0.1.14,<0.4"       # and the environment's own package
    python -c "import verifiers;
    verifiers.load_environment('my-env').get_dataset().to_json('rows.jsonl')"
    --env.name "verifiers:my-env?key=value" --data.train rows.jsonl

The environment leads the episode: it asks the policy through the endpoint, with its own limit of
turns, and scores it by its own rubric. Rows from elsewhere work as well if they have the columns it
needs. From 0.4 on the package has no such environments any more.
"""

import json
import signal
from functools import cache
from typing import Any

from minirl.base.errors import UserError
from minirl.envs import Agent, Result, Session


class Verifiers(Agent):
    """An environment that scores every answer alone.

    Raises ValueError for one that scores the answers to a prompt only together.
    """

    def __init__(self, name: str, **arguments: object):
        self.environment = load_environment(name, json.dumps(arguments))
        if self.environment.requires_group_rollouts:
            raise ValueError(
                "its rubric compares the answers of a group, and here each episode has a reward of "
                "its own"
            )

    async def run(self, row: dict, session: Session) -> Result:
        """Let the environment run the episode."""
        import verifiers
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        columns = ("prompt", "example_id", "task", "answer", "info")
        row = {name: row[name] for name in columns if row.get(name) is not None}
        # Without certificates, which take 25 ms to read: the endpoint speaks plain HTTP.
        transport = DefaultAsyncHttpxClient(verify=False)
        async with AsyncOpenAI(
            base_url=session.base_url, api_key=session.api_key, http_client=transport
        ) as openai:
            client = verifiers.OpenAIChatCompletionsClient(openai)
            output = await self.environment.run_rollout(row, client, session.model, {})
        if output["error"] is not None:
            raise RuntimeError(f"verifiers: {output['error']}")
        return Result(
            reward=output["reward"], truncated=output["is_truncated"], info=output["metrics"]
        )


@cache
def load_environment(name: str, arguments: str) -> Any:
    """Load an environment once in a process.

    Args:
        name: as `verifiers.load_environment` knows it.
        arguments: for it, as a JSON object.

    Raises:
        UserError: if it cannot be loaded.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        import verifiers  # here, because it is slow

        return verifiers.load_environment(name, **json.loads(arguments))
    # What the package makes of anything that an environment raises.
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"env.name = verifiers:{name}: {error} (it needs the environment's own package, and "
            "pip install 'verifiers>=0.1.14,<0.4')"
        ) from error
    finally:
        # An environment takes the handlers for itself, but how a rank ends is up to minirl.
        for number, handler in handlers.items():
            signal.signal(number, handler)
