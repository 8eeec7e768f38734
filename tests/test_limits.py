"""Clients that ask too much of the endpoint or of a reward model's server: raw sockets and the
clients that people use. Both servers have the limits of minirl/endpoint/http.py."""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import resource
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

import tiny
from minirl.base.errors import UserError
from minirl.config.shared import EndpointConfig, LimitsConfig, RewardConfig
from minirl.config.supervised import ServeConfig
from minirl.data import images
from minirl.endpoint import completions
from minirl.endpoint.http import bind
from minirl.endpoint.reward_server import serve
from minirl.endpoint.server import Endpoint
from minirl.engine.engine import Sampling
from minirl.rewards.http import RemoteReward
from minirl.types.packed import Trajectory
from programs import hold_port
from test_server import HI, Scripted

MB = 2**20


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving(*texts, vision=None, max_model_len=4000, **options):
    """An endpoint in a thread, whose engine says `texts`."""
    loop = asyncio.new_event_loop()
    engine = Scripted(*texts, max_model_len=max_model_len)
    engine.loop = loop
    engine.prompts = SimpleNamespace(tokenizer=engine.tokenizer, vision=vision)
    limits = LimitsConfig(**{k: v for k, v in options.items() if hasattr(LimitsConfig, k)})
    rest = {k: v for k, v in options.items() if not hasattr(LimitsConfig, k)}
    endpoint = Endpoint(engine, engine.prompts, EndpointConfig(limits=limits, **rest))
    session = endpoint.open(
        (1,), Sampling(max_tokens=30, stop_token_ids=(engine.tokenizer.eos_token_id,))
    )
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = int(session.base_url.split(":")[2].split("/")[0])
    try:
        yield SimpleNamespace(
            engine=engine, endpoint=endpoint, session=session, port=port, loop=loop
        )
    finally:
        asyncio.run_coroutine_threadsafe(endpoint.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def head(session, length, path="/v1/chat/completions", key=None, more=""):
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}"
        f"Authorization: Bearer {session.api_key if key is None else key}\r\n\r\n"
    ).encode()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def answer(sock):
    """Status, headers and JSON of a response."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(65536)
        if not more:
            raise ConnectionError(data)
        data += more
    top, _, body = data.partition(b"\r\n\r\n")
    lines = top.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(headers["content-length"]):
        body += sock.recv(65536)
    return int(lines[0].split()[1]), headers, json.loads(body)


def ask(world, **options):
    with openai.OpenAI(
        base_url=world.session.base_url, api_key=world.session.api_key, max_retries=0, timeout=20
    ) as client:
        options.setdefault("messages", HI)
        return client.chat.completions.create(model="any", **options).choices[0].message.content


def post(world, fields, path="chat/completions"):
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    key = world.session.api_key
    reply = httpx.post(
        f"{world.session.base_url}/{path}",
        content=body,
        headers={"Authorization": f"Bearer {key}"},
        timeout=20,
    )
    assert reply.status_code == 200 or reply.json()["error"]["message"]
    return reply


# --------------------------------------------------------------------------------------------------
# bodies and heads


def test_the_key_is_read_before_the_body():
    with serving() as world:
        before = resident()
        with connect(world.port) as sock:
            sock.sendall(head(world.session, 9 * MB, key="wrong"))
            status, _, body = answer(sock)  # and no byte of the body was sent
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            for _ in range(9):  # the rest is read and forgotten, so that the client sees the answer
                sock.sendall(bytes(MB))
            sock.sendall(head(world.session, 2) + b"{}")
            assert answer(sock)[0] == 400
        assert resident() - before < 5 * MB


def test_bodies_have_a_limit():
    with serving("ok", body_mb=1.0) as world:
        with connect(world.port) as sock:
            sock.sendall(head(world.session, 200 * MB))
            status, _, body = answer(sock)
            assert (status, body["error"]["type"]) == (413, "request_too_large")
            assert "limits.body_mb = 1 MB" in body["error"]["message"]
        with connect(world.port) as sock:  # one that does not say its length
            sock.sendall(
                head(world.session, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            )
            with contextlib.suppress(OSError):
                for _ in range(20):
                    sock.sendall(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            assert answer(sock)[0] == 413
        text = "x" * 500_000
        with pytest.raises(openai.BadRequestError, match=r"engine\.max_model_len"):
            ask(world, messages=[{"role": "user", "content": text}])
        assert ask(world) == "ok"


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_heads_have_a_limit():
    with serving("ok") as world:
        before = resident()
        with connect(world.port) as sock:  # one that never ends
            with contextlib.suppress(OSError):
                for _ in range(60):
                    sock.sendall(b"GET /" + b"x" * MB)
            with contextlib.suppress(OSError):
                assert sock.recv(1000).startswith(b"HTTP/1.1 400 ")
        for bad in (b"\x00\xff\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"nonsense\r\n\r\n"):
            with connect(world.port) as sock:
                sock.sendall(bad)
                assert sock.recv(1000).startswith(b"HTTP/1.1 400 ")
        with connect(world.port) as sock:
            sock.sendall(b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 401 " in sock.recv(1000)
        for path, status in (("/v1/models", 401), ("/none", 404), ("/v1/completions", 405)):
            with connect(world.port) as sock:
                sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert answer(sock)[0] == status
        assert ask(world) == "ok"
        assert resident() - before < 10 * MB


def test_json_that_is_nested_too_deep_is_refused():
    with serving("ok") as world:
        for body in (
            b"[" * 100_000,
            b'{"messages": ' + b"[" * 100_000,
            b'{"messages": [{"role": "user", "content": "x", "y": '
            + b"[" * 5000
            + b"]" * 5000
            + b"}]}",
            b'{"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": '
            b'"f", "arguments": "' + b"[" * 100_000 + b'"}}]}]}',
            b"1" * 10_000,
            b"\xff\xfe",
        ):
            reply = post(world, body)
            assert (reply.status_code, reply.json()["error"]["type"]) == (
                400,
                "invalid_request_error",
            ), reply.text
        assert ask(world) == "ok"


@pytest.mark.parametrize(
    "call", ["[" * 100_000, '{"name": "f", "arguments": {"x": ' + "[" * 300 + "]" * 300 + "}}"]
)
def test_what_the_policy_nests_is_no_call(call):
    text = f"a<tool_call>{call}</tool_call>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with serving(text, text[:20] + " " * 60_000 + "b", max_model_len=10**6) as world:
        session = world.endpoint._sessions[world.session.api_key]
        session.sampling = Sampling(max_tokens=200_000, stop_token_ids=())
        world.engine.generate = at_once(world.engine)
        for expected in (text, text[:20] + " " * 60_000 + "b"):
            assert ask(world, tools=[tool]) == expected


def at_once(engine):
    """generate() of an engine that says its whole text in one step."""

    async def generate(request):
        tokens = engine.tokenizer(engine.texts.pop(0), add_special_tokens=False)["input_ids"]
        request.done.tokens += tokens
        request.done.logprobs += [0.0] * len(tokens)
        request.done.versions += [0] * len(tokens)
        request.done.stopped = True
        return request.done

    return generate


# --------------------------------------------------------------------------------------------------
# what a request asks for


def test_a_request_asks_for_so_much():
    with serving(max_model_len=100) as world:
        begin = time.process_time()
        for fields, why in (
            ({"prompt": ["x"] * 1_000}, "1000 prompts, more than endpoint.limits.prompts = 128"),
            ({"prompt": [[5]] * 100_000}, "100000 prompts"),
            ({"prompt": "x", "n": 129}, "less than or equal to 128"),
            ({"prompt": "x", "stop": ["y"] * 65}, "at most 64"),
        ):
            reply = post(world, fields, "completions")
            assert reply.status_code == 400 and why in reply.json()["error"]["message"], reply.text
        assert time.process_time() - begin < 5
        assert world.engine.requests == []
        assert ask(world, max_tokens=4000) == "x" * 30  # as many as there is room for
        reply = post(world, {"prompt": ["x"] * 128, "max_tokens": 1}, "completions")
        assert len(reply.json()["choices"]) == 128


class Reads:
    """A policy that reads images, as far as the endpoint looks."""

    token = 7
    max_images = 2

    def expand(self, ids, urls, begin=0):
        if ids.count(self.token) != len(urls):
            raise images.BadImage("other images than places")
        return ids, []


def huge_png(width, height):
    """A small file of many pixels, all black."""

    def chunk(kind, data):
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    data = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    file = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", data) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def showing(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}


def test_images_of_a_chat_are_not_decoded_when_it_is_read(monkeypatch):
    """Each request brings all images so far; each is decoded once, when its tokens are counted."""

    def decoded(*_):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(images, "rgb", decoded)
    url = huge_png(8, 8)
    [message] = showing(url)["messages"]
    read = completions.read_message(message)["content"]
    assert read == [{"type": "image", "image": url}, {"type": "text", "text": "?"}]


def test_images_are_refused_before_they_are_decoded(monkeypatch):
    def decoded(*_):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(Image.Image, "convert", decoded)
    bomb = huge_png(13_000, 13_000)
    with serving() as world:
        post(world, showing("data:,AAAA"))  # The first request imports what it needs.
        before = resident()
        reply = post(world, showing(bomb))
        assert reply.status_code == 400 and "reads none" in reply.json()["error"]["message"]
    with serving(vision=Reads()) as world:
        for fields, why in (
            (showing(bomb), "13000 x 13000 pixels, more than endpoint.image_megapixels = 16"),
            (showing(*[huge_png(8, 8)] * 3), "3 images, more than engine.max_images = 2"),
            (showing("data:,AAAA"), "cannot be read"),
            (
                showing("data:;base64," + base64.b64encode(b"%!PS-Adobe-3.0 EPSF").decode()),
                "cannot",
            ),
            ({"prompt": [5, 7, 5]}, "other images than places"),
        ):
            path = "completions" if "prompt" in fields else "chat/completions"
            reply = post(world, fields, path)
            assert reply.status_code == 400 and why in reply.json()["error"]["message"], reply.text
        assert world.engine.requests == []
    assert resident() - before < 20 * MB


def test_decoded_images_are_kept_within_a_number_of_bytes():
    url = tiny.picture(30, 40)
    assert images.rgb(url) is images.rgb(url) and images.size(url) == images.rgb(url).size
    assert images.rgb.cache.maxsize == images.DECODED_BYTES
    assert images.rgb.cache.getsizeof(images.rgb(url)) == 3 * 30 * 40


def test_damaged_images_are_told():
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8))
    num_bad = 0
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"):
        picture.save(file := io.BytesIO(), kind)
        whole = file.getvalue()
        for _ in range(60):
            data = bytearray(whole[: rng.integers(1, len(whole) + 1)])
            for place in rng.integers(0, min(len(data), 300), 4):
                data[place] = rng.integers(0, 256)
            url = f"data:;base64,{base64.b64encode(data).decode()}"
            try:
                if np.prod(images.size(url)) < 1e6:
                    images.rgb(url)
            except images.BadImage:
                num_bad += 1
    assert num_bad > 100


# --------------------------------------------------------------------------------------------------
# connections


def test_two_thousand_connections():
    """Each of them needs two file descriptors here, which is more than some systems begin with."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    with serving("ok") as world, contextlib.ExitStack() as stack:
        before = resident()
        for i in range(2000):
            sock = stack.enter_context(connect(world.port))
            sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nX: " if i % 2 else b"")
        begin = time.monotonic()
        assert ask(world) == "ok"
        assert time.monotonic() - begin < 5
        assert resident() - before < 60 * MB


def test_a_client_that_leaves_with_its_answer_unread_is_forgotten():
    """It resets the connection, and uvicorn's timer for the next request would keep it."""
    with serving("ok") as world:
        for _ in range(20):
            with connect(world.port) as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                sock.recv(20)
                time.sleep(0.01)  # the rest is here, too
        end = time.monotonic() + 20
        while world.endpoint._server.server_state.connections and time.monotonic() < end:
            time.sleep(0.01)
        timers = [t for t in world.loop._scheduled if t.when() > world.loop.time() + 1e5]
        assert [timer for timer in timers if not timer.cancelled()] == []


def test_connections_have_a_limit():
    with serving("ok", "ok", connections=3) as world, contextlib.ExitStack() as stack:
        connections = world.endpoint._server.server_state.connections
        for _ in range(2):
            stack.enter_context(connect(world.port))
        until(lambda: len(connections) == 2)
        assert ask(world) == "ok"  # the third
        until(lambda: len(connections) == 2)
        stack.enter_context(connect(world.port))
        until(lambda: len(connections) == 3)
        with pytest.raises(openai.InternalServerError):  # 503, after which clients try again
            ask(world)
        stack.close()
        until(lambda: not connections)
        assert ask(world) == "ok"


# --------------------------------------------------------------------------------------------------
# a reward model's server


@contextlib.contextmanager
def scoring(score, **options):
    """A server whose score of a text is what `score` makes of its characters' codes."""

    def encode(text):
        if "\ud800" in text:
            raise UserError("half a character")
        tokens = np.array([ord(c) for c in text], np.int32)
        return Trajectory(
            tokens=tokens,
            sampled=np.zeros(len(tokens), bool),
            logprobs=np.zeros(len(tokens), np.float32),
        )

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"host = 127.0.0.1, port = {port}: .*choose a free port"
        ):
            serve(encode, score, ServeConfig(command="serve", model="x", port=port))
    held, port = hold_port("127.0.0.1")
    cfg = ServeConfig(command="serve", model="x", port=port, **options)
    threading.Thread(target=serve, args=(encode, score, cfg), daemon=True).start()
    until(lambda: is_up(port))
    yield f"http://127.0.0.1:{port}/get_reward"
    held.close()


def is_up(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True


def lengths(rows):
    return [len(row.tokens) / 4 for row in rows]


def test_equal_texts_have_equal_scores_whatever_they_are_scored_with():
    """Rounding depends on the batch, and equal answers to a prompt must teach nothing."""
    numbers = itertools.count()
    with scoring(lambda rows: [float(next(numbers)) for _ in rows]) as url:
        asked = [httpx.post(url, json={"query": query}) for query in (["a", "b"], ["c", "a"])]
        assert [reply.json()["rewards"] for reply in asked] == [[0.0, 1.0], [2.0, 0.0]]


def test_a_dead_endpoint_is_passed_over():
    """By each request, whatever others ask meanwhile."""
    with scoring(lengths) as url, socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        closed.close()
        cfg = RewardConfig(retries=1, backoff_seconds=0.0)
        reward = RemoteReward(f"{url},{dead}", cfg)
        with ThreadPoolExecutor(4) as threads:
            ask = partial(reward, "q", row={"rendered_prompt": "ab"})
            assert list(threads.map(ask, ["cd"] * 40)) == [1.0] * 40


@pytest.mark.parametrize(
    "url", ["http://[::1/x", "http://a:b/x", "http://a:99999/x", "ftp://a/b", "a"]
)
def test_what_is_no_address_of_an_endpoint_is_refused(url):
    with pytest.raises(UserError, match="is not of the form http://host:port/path"):
        RemoteReward(url, RewardConfig())


def test_servers_answer_without_waiting_for_the_client():
    """Nagle's algorithm and delayed acknowledgements make 40 ms of each request."""
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_requests_that_come_together_share_a_forward():
    batches = []

    def score(rows):
        batches.append([len(row.tokens) for row in rows])
        time.sleep(0.05)
        return lengths(rows)

    async def main(url):
        async with httpx.AsyncClient(timeout=20) as client:

            async def one(i):
                texts = ["x" * (i + j) for j in range(3)]
                reply = await client.post(url, json={"query": texts, "labels": [None]})
                assert reply.json() == {"rewards": [(i + j) / 4 for j in range(3)]}

            await asyncio.gather(*(one(i) for i in range(30)))

    with scoring(score) as url:
        asyncio.run(main(url))
        assert sum(map(len, batches)) == 90 and len(batches) < 30
        assert httpx.post(url, json={"query": []}).json() == {"rewards": []}


def test_a_bad_request_does_not_spoil_its_neighbours():
    def score(rows):
        time.sleep(0.05)
        if any(ord("!") in row.tokens for row in rows):
            raise RuntimeError("a bad forward")
        return [float("nan") if ord("?") in row.tokens else len(row.tokens) for row in rows]

    async def main(url):
        async with httpx.AsyncClient(timeout=20) as client:
            bodies = [{"query": [text]} for text in ("a", "!", "bc", "?", "def", "\ud800")]
            bodies += [{}, [], {"query": "x"}, {"query": [1]}, {"query": ["x"] * 129}]
            replies = await asyncio.gather(
                *(client.post(url, content=json.dumps(body)) for body in bodies * 3)
            )
            return [(reply.status_code, reply.json()) for reply in replies]

    with scoring(score) as url:
        found = asyncio.run(main(url))
        for begin in range(0, len(found), 11):
            statuses = [status for status, _ in found[begin : begin + 11]]
            assert statuses == [200, 500, 200, 422, 200, 400, 400, 400, 400, 400, 400]
            bodies = [body for _, body in found[begin : begin + 11]]
            assert [bodies[i]["rewards"] for i in (0, 2, 4)] == [[1], [2], [3]]
            messages = [body["error"]["message"] for body in bodies if "error" in body]
            assert "a bad forward" in messages[0] and "nan" in messages[1]
            assert messages[2] == "query 0: half a character" and "limits.prompts" in messages[-1]


def test_the_reward_server_has_a_key_and_limits(monkeypatch, capsys):
    monkeypatch.setenv("REWARD_KEY", "s3cret")
    reward = {"prompt": "q", "rendered_prompt": "ab"}
    with scoring(lengths, api_key_env="REWARD_KEY") as url:
        assert f"rewards are served at {url}" in capsys.readouterr().err
        port = int(url.split(":")[2].split("/")[0])
        for key in (None, "s3cre", "s3crét"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            reply = httpx.post(url, content=bytes(100), headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert RemoteReward(url, RewardConfig(api_key_env="REWARD_KEY"))("", "cd", reward) == 1.0
        with pytest.raises(UserError, match="status 401"):
            RemoteReward(url, RewardConfig())("", "cd", reward)
        session = SimpleNamespace(api_key="s3cret")
        with connect(port) as sock:
            sock.sendall(head(session, 200 * MB, "/get_reward"))
            assert answer(sock)[0] == 413
        with connect(port) as sock:
            sock.sendall(head(session, 100_000, "/get_reward") + b"[" * 100_000)
            assert answer(sock)[0] == 400
        assert httpx.get(url).status_code == 405
    refused = {" ": "not set or empty", "ключ": "that no key has", "one\ntwo": "that no key has"}
    for wrong, why in refused.items():
        monkeypatch.setenv("REWARD_KEY", wrong)
        with pytest.raises(UserError, match=f"reward.api_key_env = REWARD_KEY: .*{why}"):
            RemoteReward(url, RewardConfig(api_key_env="REWARD_KEY"))
