"""Environments of OpenEnv (github.com/meta-pytorch/OpenEnv) on a server.

    --env.name openenv:http://127.0.0.1:8000?action=message&observation=echoed_message
    --env.max-turns 4

An episode is a WebSocket session. `action` is the field of the environment's action that an answer
fills; without it the answer (or its last fenced block) is the action, a JSON object. `observation`
is the field of its observations that the policy reads; without it the policy reads all of them as
JSON. A row's `prompt` says what the task is, and the first observation stands below it. A row's
`reset`, if it has one, is a dict of arguments for the environment's reset (`{"seed": 3}`).

The server must take as many sessions as episodes run at once (`max_concurrent_envs`). Its package
is not needed here. The protocol is that of its `/ws`: {"type": "reset" | "step", "data": ...} is
answered by {"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error",
"data": {"code", "message"}}.
"""

import contextlib
import json
import re
from functools import cache

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from minirl.base.errors import UserError, require
from minirl.base.reading import parse_json
from minirl.data.chat import to_messages
from minirl.envs import Env, Result, State


def begin_session(url: str) -> ClientConnection:
    """Connect to a server. Raises OSError, WebSocketException or ValueError if that fails."""
    address = "ws" + url.removeprefix("http").rstrip("/") + "/ws"
    return connect(address, max_size=None, close_timeout=1.0)


def end_session(session: ClientConnection) -> None:
    """Say goodbye and close.

    A server that finds its client gone would take it for a failure. Nothing is lost if the server
    is stuck, or if a step that took too long still waits for it.
    """
    with contextlib.suppress(WebSocketException, TimeoutError):
        session.send('{"type": "close"}')
        session.recv(timeout=1.0)
    session.close()


@cache
def check_server(url: str) -> None:
    """Hold one session before the first episode. Raises UserError if there is no server."""
    try:
        end_session(begin_session(url))
    except (OSError, WebSocketException, ValueError) as error:
        raise UserError(
            f"env.name = openenv:{url}: no session with an OpenEnv server there: {error}; start "
            "it, and give its address as http://host:port"
        ) from error


# What to do, by the code of a server's error.
REMEDIES = {
    "CAPACITY_REACHED": "; start the server with max_concurrent_envs of at least as many sessions "
    "as episodes run at once"
}


class OpenEnv(Env):
    """A session with a server.

    Raises an error in an episode if the server fails, cannot be reached or has no room.
    """

    needs_prompt = True

    def __init__(self, url: str, action: str = "", observation: str = ""):
        check_server(url)
        self.url = url
        self.action = action
        self.observation = observation
        self.session: ClientConnection | None = None  # begun by `reset`

    def reset(self, row: dict) -> list[dict]:
        """Begin a session. Return the row's prompt with the first observation below it."""
        self.session = begin_session(self.url)
        reply = self._request("reset", row.get("reset") or {})
        *before, last = to_messages(row["prompt"], "")
        observation = f"\n\n{self._text_of(reply)}"
        content = last["content"]
        if isinstance(content, list):  # parts, of which some may be images
            content = [*content, {"type": "text", "text": observation}]
        else:
            content += observation
        return [*before, {**last, "content": content}]

    def step(self, state: State) -> Result:
        """Pass an answer to the server and return what it replies."""
        try:
            if self.action:
                action = {self.action: state.answer}
            else:
                blocks = re.findall(r"```(?:json)?\n(.*?)```", state.answer, flags=re.DOTALL)
                action = parse_json(blocks[-1] if blocks else state.answer)
            reply = self._request("step", action)
        except ValueError as error:  # a mistake of the policy, which gets it as a reply
            return Result(observation=f"That is not an action: {error}")
        return Result(
            observation=self._text_of(reply),
            reward=float(reply["reward"] or 0.0),
            done=bool(reply["done"]),
        )

    def close(self) -> None:  # type: ignore[override]  # sync, so that it runs in a thread
        """End the session."""
        if self.session is not None:
            end_session(self.session)

    def _request(self, kind: str, data: dict) -> dict:
        """Send a request and return the data of the reply. Raises ValueError for a bad action."""
        if self.session is None:
            raise RuntimeError("the session has not begun; call reset first")
        # A server without room says so and closes; what it said can still be read.
        with contextlib.suppress(ConnectionClosed):
            self.session.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self.session.recv())
        data = reply["data"]
        if reply["type"] != "error":
            return data
        if data["code"] == "VALIDATION_ERROR":
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in data["errors"]]
            raise ValueError("; ".join(problems))
        raise RuntimeError(
            f"the OpenEnv server at {self.url} answered {kind} with {data['code']}: "
            f"{data['message']}{REMEDIES.get(data['code'], '')}"
        )

    def _text_of(self, reply: dict) -> str:
        """Return the part of a reply that the policy reads."""
        fields = reply["observation"]
        fields.pop("metadata", None)
        if not self.observation:
            return json.dumps(fields, ensure_ascii=False)
        require(
            self.observation in fields,
            f"env.name = openenv:{self.url}: its observations have no {self.observation!r}; "
            f"they have {', '.join(fields)}",
        )
        return str(fields[self.observation])
