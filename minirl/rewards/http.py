"""Rewards over HTTP: `RemoteReward` sends requests, and endpoint/reward_server.py answers them.

The protocol is OpenRLHF's for remote reward models:

    POST  {"query": [prompt and completion, ...],
           "prompts": [prompt, ...],
           "labels": [the row's answer column or null, ...]}
    200   {"rewards": [number, ...]}    one for each query; other keys are ignored

Texts are as the policy reads and writes them: prompts with their chat template, completions without
special tokens. A key, if there is one, goes as `Authorization: Bearer KEY`.
"""

import contextlib
import itertools
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from minirl.base.errors import UserError, require
from minirl.base.reading import key_of_environment
from minirl.config.shared import RewardConfig
from minirl.rewards import RowPrompt

# What an endpoint may answer, in bytes: besides the rewards it may send what is ignored here.
MAX_BYTES = 2**20
MAX_BYTES_OF_QUERY = 100


class RemoteReward:
    """A reward function that endpoints compute.

    Threads call it, each for one completion. While every endpoint is busy their completions wait,
    and go together in the next request.
    """

    def __init__(self, name: str, cfg: RewardConfig):
        """`name`: URLs separated by commas.

        Raises:
            UserError: One of them has no host, or there is no key where one is named.
        """
        urls = [url.strip() for url in name.split(",")]
        for url in urls:
            is_address = False
            with contextlib.suppress(ValueError, httpx.InvalidURL):
                parts = httpx.URL(url)
                is_address = parts.scheme in ("http", "https") and bool(parts.host)
                is_address &= parts.port is None or 0 < parts.port < 2**16
            require(
                is_address,
                f"reward.function = {name}: {url!r} is not of the form http://host:port/path",
            )
        self.name = name
        self.cfg = cfg
        key = key_of_environment("reward.api_key_env", cfg.api_key_env)
        headers = {"Accept-Encoding": "identity"}  # A few numbers need no compression.
        if key:
            headers["Authorization"] = f"Bearer {key}"
        # `_send` keeps the time; this ends what it has abandoned.
        self.client = httpx.Client(timeout=2 * cfg.timeout_seconds, headers=headers)
        self.urls = urls
        self.numbers = itertools.count()  # Of requests: the next one begins at the next endpoint.
        self.pool = ThreadPoolExecutor(len(urls), thread_name_prefix="endpoint")
        # More than one for each, because those that are late are abandoned.
        self.requests = ThreadPoolExecutor(4 * len(urls), thread_name_prefix="request")
        self.lock = threading.Lock()
        # Query, prompt and label of what the next request sends, and the rewards it will return.
        self.waiting: list[tuple[str, str, object]] = []
        self.rewards: Future[list[float]] = Future()

    def __call__(self, prompt: RowPrompt, completion: str, row: dict) -> float:
        """Return the endpoint's reward of `row["rendered_prompt"]` with this completion.

        Raises:
            UserError: No endpoint answers as the protocol says.
        """
        text = row["rendered_prompt"]
        with self.lock:
            if not self.waiting:
                self.rewards = self.pool.submit(self._send)
            number = len(self.waiting)
            self.waiting.append((text + completion, text, row.get("answer")))
            rewards = self.rewards
        return rewards.result()[number]

    def _send(self) -> list[float]:
        """Send all that waits, until an endpoint returns its rewards. Raises UserError."""
        with self.lock:
            sent = self.waiting
            self.waiting = []
        queries, prompts, labels = zip(*sent, strict=True)
        body = {"query": queries, "prompts": prompts, "labels": labels}
        max_bytes = MAX_BYTES + MAX_BYTES_OF_QUERY * len(sent)
        first = next(self.numbers)
        for attempt in range(self.cfg.retries + 1):
            if attempt:
                time.sleep(self.cfg.backoff_seconds * 2 ** (attempt - 1))
            url = self.urls[(first + attempt) % len(self.urls)]
            try:
                # httpx limits the time between two bytes, and a server may send them slowly.
                pending = self.requests.submit(self._post, url, body, max_bytes)
                status, content = pending.result(self.cfg.timeout_seconds)
            except (httpx.RequestError, TimeoutError) as error:
                reason = str(error) or "the response was not whole in time"
                problem = f"{type(error).__name__}: {reason}"
                continue
            text = content[:200].decode(errors="replace")
            if httpx.codes.is_success(status):
                require(
                    len(content) <= max_bytes,
                    f"reward.function = {self.name}: {url} answered with more than {max_bytes} "
                    f"bytes to {len(sent)} queries, {text[:80]!r}...; it must answer "
                    '{"rewards": [one number for each]}',
                )
                unlike = (ValueError, KeyError, TypeError, RecursionError, OverflowError)
                with contextlib.suppress(*unlike):
                    rewards = json.loads(content)["rewards"]
                    if len(rewards) == len(sent) and all(type(r) in (int, float) for r in rewards):
                        return [float(reward) for reward in rewards]
                raise UserError(
                    f"reward.function = {self.name}: {url} answered {text!r} "
                    f'to {len(sent)} queries; it must answer {{"rewards": [one number for each]}}'
                )
            problem = f"status {status}: {text}"
            if status < 500 and status not in (408, 429):
                break  # another try would not help
        raise UserError(
            f"reward.function = {self.name}: {url} failed after {attempt + 1} tries "
            f"(reward.retries = {self.cfg.retries}, "
            f"reward.timeout_seconds = {self.cfg.timeout_seconds}), the last with {problem}; "
            "see that it runs and can be reached from every node"
        )

    def _post(self, url: str, body: dict, max_bytes: int) -> tuple[int, bytes]:
        """Send a request, and return status and content of the response.

        Args:
            url: of the endpoint.
            body: of the request.
            max_bytes: of the content; of a longer one the beginning is returned, more than so many.

        Raises:
            UserError: the response is compressed.
            httpx.RequestError: there is no response.
        """
        content = bytearray()
        with self.client.stream("POST", url, json=body) as response:
            # It was not asked for. Decompressed, a few bytes can be more than the memory holds.
            encoding = response.headers.get("Content-Encoding", "identity")
            require(
                encoding == "identity",
                f"reward.function = {self.name}: {url} answered with Content-Encoding {encoding}; "
                "let it send the JSON as it is, as the request's Accept-Encoding says",
            )
            for part in response.iter_raw():
                content += part
                if len(content) > max_bytes:
                    break
        return response.status_code, bytes(content)
