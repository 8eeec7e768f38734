"""Rewards over HTTP, both ends: `RemoteReward` asks, `serve` answers. The protocol is OpenRLHF's
for remote reward models:

    POST  {"query": [prompt and answer, ...], "prompts": [prompt, ...], "labels": [answer column of
    the row or null, ...]} 200   {"rewards": [number, ...]}         one for each query; other keys
    are left alone

Texts are as the policy reads and writes them: the prompt with its chat template, the answer without
special tokens.
"""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated
from urllib.parse import urlsplit

import httpx

from minirl.config.shared import RewardConfig
from minirl.errors import UserError


class RemoteReward:
    """A reward function that endpoints compute. Threads call it one answer each; while every
    endpoint is busy their answers gather, and go together in the next request.
    """

    def __init__(self, name: str, cfg: RewardConfig):
        """`name`: URLs separated by commas. Raises UserError."""
        self.name, self.cfg, urls = name, cfg, [url.strip() for url in name.split(",")]
        if bad := [
            url
            for url in urls
            if not urlsplit(url).scheme.startswith("http") or not urlsplit(url).hostname
        ]:
            raise UserError(
                f"reward.function = {name}: {bad[0]!r} is not of the form http://host:port/path"
            )
        self.client = httpx.Client(timeout=cfg.timeout_seconds)
        self.urls, self.senders, self.lock = (
            itertools.cycle(urls),
            ThreadPoolExecutor(len(urls), thread_name_prefix="endpoint"),
            threading.Lock(),
        )
        self.gathered: list[
            tuple[str, str, object]
        ] = []  # what the next request asks; `self.request` is its promise

    def __call__(self, prompt: str | list[dict], completion: str, row: dict) -> float:
        """`row["rendered_prompt"]` is the prompt as the policy reads it. Raises UserError if no
        endpoint answers rightly.
        """
        with self.lock:
            if not self.gathered:
                self.request = self.senders.submit(self._ask)
            self.gathered.append(
                (row["rendered_prompt"] + completion, row["rendered_prompt"], row.get("answer"))
            )
            number, request = len(self.gathered) - 1, self.request
        return request.result()[number]

    def _ask(self) -> list[float]:
        with self.lock:
            asked, self.gathered = self.gathered, []
        body = dict(
            zip(("query", "prompts", "labels"), map(list, zip(*asked, strict=True)), strict=True)
        )
        for attempt in range(self.cfg.retries + 1):
            if attempt:
                time.sleep(self.cfg.backoff_seconds * 2 ** (attempt - 1))
            url = next(self.urls)
            try:
                response = self.client.post(url, json=body)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    if len(rewards := response.json()["rewards"]) == len(asked):
                        return list(rewards)
                raise UserError(
                    f"reward.function = {self.name}: {url} answered {response.text[:200]!r} to {len(asked)} queries; "
                    'it must answer {"rewards": [one number for each]}'
                )
            problem = f"status {response.status_code}: {response.text[:200]}"
            if response.status_code < 500 and response.status_code not in (408, 429):
                break  # asking again would not help
        raise UserError(
            f"reward.function = {self.name}: {url} failed after {attempt + 1} tries (reward.retries = {self.cfg.retries}, "
            f"reward.timeout_seconds = {self.cfg.timeout_seconds}), the last with {problem}; see that it runs and can be reached from every node"
        )


def serve(score: Callable[[list[str]], list[float]], host: str, port: int) -> None:
    """Answer the protocol at `/` and `/get_reward` until the process is told to stop. `score`:
    texts -> rewards, called for one request at a time. Raises UserError if the address cannot be
    had.
    """
    import uvicorn  # here, because only this program needs them and they take a while
    from fastapi import Body, FastAPI

    app = FastAPI()

    @app.post("/")
    @app.post("/get_reward")
    async def get_reward(query: Annotated[list[str], Body(embed=True)]) -> dict[str, list[float]]:
        return {"rewards": list(score(query))}  # in the loop itself, so one at a time

    with listen(host, port) as listening:
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def listen(host: str, port: int, section: str = "") -> socket.socket:
    """`section`: of the config, for the message. Raises UserError if the address cannot be had."""
    try:
        return socket.create_server((host, port), backlog=4096)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{section}host = {host}, {section}port = {port}: {error}; choose a free one"
        ) from error
