"""Environments of OpenEnv (github.com/meta-pytorch/OpenEnv) behind a server: one WebSocket session
an episode.

    --env.name openenv:http://127.0.0.1:8000?action=message&observation=echoed_message
    --env.max-turns 4

`action` is the field of the environment's action that an answer fills; without it the answer (or
its last fenced block) is the action, a JSON object. `observation` is the field of its observations
that the policy reads; without it it reads all of them as JSON. A row's `prompt` says what the task
is, the first observation stands below it, and a row's `reset`, if it has one, is a dict of
arguments for the environment's reset (`{"seed": 3}`).

The server must take as many sessions as episodes run at once (`max_concurrent_envs`). Its package
is not needed here: what is spoken is the protocol of its `/ws`: {"type": "reset" | "step", "data":
...} is answered by {"type": "observation", "data": {"observation", "reward", "done"}} or {"type":
"error", "data": {"code", "message"}}.
"""

import contextlib
import json
import re
from functools import cache

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from minirl.data.chat import to_messages
from minirl.envs.base import Env, Result, State
from minirl.errors import UserError


def begin_session(url: str) -> ClientConnection:
    """Raises UserError."""
    try:
        return connect(
            "ws" + url.removeprefix("http").rstrip("/") + "/ws", max_size=None, close_timeout=1.0
        )
    except (OSError, WebSocketException, ValueError) as error:
        raise UserError(
            f"env.name = openenv:{url}: no session with an OpenEnv server there: {error}; start it, and give its address as http://host:port"
        ) from error


def end_session(session: ClientConnection) -> None:
    with contextlib.suppress(
        WebSocketException, TimeoutError
    ):  # nothing is lost if the server is stuck, or a step that took too long still waits for it
        session.send(
            '{"type": "close"}'
        )  # one that finds its client gone would take it for a failure
        session.recv(timeout=1.0)
    session.close()


check = cache(
    lambda url: end_session(begin_session(url))
)  # one session before the first episode, to see that the server is there


class OpenEnv(Env):
    """A session with a server. Raises RuntimeError in an episode if the server fails or has no
    room.
    """

    def __init__(self, url: str, action: str = "", observation: str = ""):
        check(url)
        self.url, self.action, self.observation, self.session = url, action, observation, None

    def reset(self, row: dict) -> list[dict]:
        self.session = begin_session(self.url)
        *before, last = to_messages(row["prompt"], "")
        return [
            *before,
            {
                **last,
                "content": f"{last['content']}\n\n{self._read(self._ask('reset', row.get('reset') or {}))}",
            },
        ]

    def step(self, state: State) -> Result:
        blocks = re.findall(r"```(?:json)?\n(.*?)```", state.answer, flags=re.DOTALL)
        try:
            given = self._ask(
                "step",
                {self.action: state.answer}
                if self.action
                else json.loads(blocks[-1] if blocks else state.answer),
            )
        except ValueError as error:  # the policy's mistake, of which it is told
            return Result(observation=f"That is not an action: {error}")
        return Result(
            observation=self._read(given),
            reward=float(given["reward"] or 0.0),
            done=bool(given["done"]),
        )

    def close(self) -> None:
        if self.session is not None:
            end_session(self.session)

    def _ask(self, kind: str, data: dict) -> dict:
        with contextlib.suppress(
            ConnectionClosed
        ):  # a server without room says so and closes; what it said can still be read
            self.session.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.session.recv())
        if answer["type"] != "error":
            return answer["data"]
        if answer["data"]["code"] == "VALIDATION_ERROR":
            raise ValueError(
                "; ".join(
                    f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in answer["data"]["errors"]
                )
            )
        raise RuntimeError(
            f"the OpenEnv server at {self.url} answered {kind} with {answer['data']['code']}: {answer['data']['message']}"
        )

    def _read(self, given: dict) -> str:
        fields = {name: value for name, value in given["observation"].items() if name != "metadata"}
        if self.observation and self.observation not in fields:
            raise UserError(
                f"env.name = openenv:{self.url}: its observations have no {self.observation!r}; they have {', '.join(fields)}"
            )
        return (
            str(fields[self.observation])
            if self.observation
            else json.dumps(fields, ensure_ascii=False)
        )
