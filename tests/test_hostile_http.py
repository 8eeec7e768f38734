"""Requests that no client sends, one after the other to one endpoint and to one server of a reward
model: each has an error of the client's kind, soon, and the next honest request is answered."""

import json
import socket
import time
from types import SimpleNamespace

import httpx
import pytest

from test_limits import ask, head, lengths, scoring, serving

HI = [{"role": "user", "content": "x"}]
MODELS = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n"
CHUNKED = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    "Authorization: Bearer KEY\r\n\r\n"
)
# name: (what is sent in place of a head and a body, statuses it may have; None: no answer at all)
HEADS = {
    "a negative length": ("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", {400}),
    "a length of letters": ("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n", {400}),
    "a length of 30 digits": (
        f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {10**30}\r\n\r\n",
        {400, 413},
    ),
    "two lengths": (
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
        {400},
    ),
    "a length and chunks": (
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        "0\r\n\r\n",
        {400},
    ),
    "a chunk of no size": (CHUNKED + "ZZ\r\n", {400}),
    "a chunk of negative size": (CHUNKED + "-5\r\nhello\r\n", {400}),
    "chunks with long extensions": (CHUNKED + "5;" + "a" * 200_000 + "\r\n", {400, 431, None}),
    "long trailers": (CHUNKED + "0\r\n" + "A: b\r\n" * 20_000, {400, 431, None}),
    "no version": ("GET /\r\n\r\n", {400}),
    "version 2": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404}),
    "version 9": ("GET / HTTP/9.9\r\nHost: x\r\n\r\n", {400, 404, 505}),
    "version 1.0": ("GET /v1/models HTTP/1.0\r\n\r\n", {401}),
    "TLS": ("\x16\x03\x01\x02\x00\x01" + "\x00\xff\x80" * 200, {400}),
    "a web socket": (MODELS + "Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n", {200, 400}),
    "a zero byte in the path": ("GET /v1/\0models HTTP/1.1\r\nHost: x\r\n\r\n", {400}),
    "bad percents": ("GET /v1/%zz%ff HTTP/1.1\r\nHost: x\r\n\r\n", {404}),
    "dots": ("GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", {404}),
    "a key of bytes": (MODELS.replace("KEY", "\xff\xfe") + "\r\n", {401}),
    "two keys": (MODELS + "x-api-key: other\r\n\r\n", {401}),
    "a header without a name": ("GET / HTTP/1.1\r\nHost: x\r\n : a\r\n\r\n", {400, 404}),
    "a folded header": ("GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", {400, 404}),
    "a line feed in a header": ("GET / HTTP/1.1\r\nHost: x\r\nA: b\nc\r\n\r\n", {400, 404}),
    "no host": ("GET /v1/models HTTP/1.1\r\n\r\n", {400, 401}),
    "another method": ("DELETE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", {405}),
    "TRACE": ("TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", {404, 405}),
    "CONNECT": ("CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404, 405}),
    "a proxy's path": ("GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404}),
    "a method of 60,000 letters": ("A" * 60_000 + " / HTTP/1.1\r\nHost: x\r\n\r\n", {404, 405}),
}
CHAT, TEXT, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def chat(**fields):
    return CHAT, {"messages": HI} | fields


def content(value):
    return CHAT, {"messages": [{"role": "user", "content": value}]}


def image(url):
    return content([{"type": "image_url", "image_url": {"url": url}}])


def deep(begin, end, levels=90_000):
    return f'{{"messages": [{{"role": "user", "content": {begin * levels}1{end * levels}}}]}}'


# name: path and body; each has status 400.
BODIES = {
    "nothing": (CHAT, ""),
    "null": (CHAT, None),
    "a list": (CHAT, [1]),
    "a text": (CHAT, "'x"),
    "zero bytes": (CHAT, "\0" * 100),
    "gzip": (CHAT, b"\x1f\x8b" + b"0" * 99),
    "bytes that are no UTF-8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}'),
    "lists in lists": (CHAT, deep("[", "]")),
    "objects in objects": (CHAT, deep('{"a": ', "}")),
    "100 levels of parts": (CHAT, deep('[{"type": "text", "text": ', "}]", 100)),
    "NaN tokens": (CHAT, '{"messages": [{"role": "user", "content": "x"}], "max_tokens": NaN}'),
    "1e400 tokens": (CHAT, '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}'),
    "5,000 digits": (CHAT, '{"n": ' + "9" * 5000 + "}"),
    "n = 0": chat(n=0),
    "n of a text": chat(n="many"),
    "stop of numbers": chat(stop=[1]),
    "options of a number": chat(stream=True, stream_options=3),
    "tools of a text": chat(tools="all"),
    "messages of an object": (CHAT, {"messages": HI[0]}),
    "no messages": (CHAT, {"messages": []}),
    "messages of texts": (CHAT, {"messages": ["x"]}),
    "no role": (CHAT, {"messages": [{"content": "x"}]}),
    "content of a number": content(5),
    "content of an object": content({"text": "x"}),
    "a part of no type": content([{"text": "x"}]),
    "half of a character": content("\ud800"),
    "half of a character as a role": (CHAT, {"messages": [{"role": "\ud800", "content": "x"}]}),
    "a text of 9 MB": content("x" * 9_000_000),
    "100,000 messages": (CHAT, {"messages": HI * 100_000}),
    "a call of no arguments": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
    ),
    "a call of deep arguments": (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[" * 50_000}}],
                }
            ]
        },
    ),
    "a chat as a completion": (TEXT, {"messages": HI}),
    "a prompt as a chat": (CHAT, {"prompt": "x"}),
    "no prompt": (TEXT, {"prompt": []}),
    "an empty prompt": (TEXT, {"prompt": ""}),
    "tokens of 30 digits": (TEXT, {"prompt": [10**30]}),
    "negative tokens": (TEXT, {"prompt": [-1]}),
    "fractions": (TEXT, {"prompt": [1.5]}),
    "texts and tokens": (TEXT, {"prompt": ["x", [1]]}),
    "a prompt of 9 MB": (TEXT, {"prompt": "x" * 9_000_000}),
    "a prompt of a million tokens": (TEXT, {"prompt": [5] * 1_000_000}),
    "half of a character to go on": (TEXT, {"prompt": "\ud800"}),
    "a picture of another place": image("http://127.0.0.1:1/a.png"),
    "a picture of a file": image("file:///etc/passwd"),
    "a picture of a path": image("/etc/passwd"),
    "a picture of a program": image("data:image/svg+xml;base64,PHN2Zy8+"),
    "a picture by its path": content([{"type": "image", "image": "/etc/passwd"}]),
    "nothing of Anthropic's": (ANTHROPIC, {}),
    "Anthropic's, other types": (
        ANTHROPIC,
        {"max_tokens": "x", "messages": [{"role": 3, "content": {}}], "system": [3]},
    ),
    "Anthropic's results in results": (
        ANTHROPIC,
        '{"max_tokens": 5, "messages": [{"role": "user", "content": '
        + '[{"type": "tool_result", "tool_use_id": "a", "content": ' * 3000
        + "[]"
        + "}]" * 3000
        + "}]}",
    ),
}


@pytest.fixture(scope="module")
def world():
    with serving(*["ok"] * 100) as world:
        yield world


def status_of(world, data):
    """The status of the answer to some bytes; None: the connection ended without one."""
    with socket.create_connection(("127.0.0.1", world.port), timeout=120) as sock:
        answer = b""
        try:
            sock.sendall(data)
            while b"\r\n" not in answer and (more := sock.recv(65536)):
                answer += more
        except ConnectionError:
            return None
    return int(answer.split()[1]) if answer else None


@pytest.mark.parametrize("name", HEADS)
def test_what_is_hardly_http(world, name):
    text, statuses = HEADS[name]
    data = text.replace("KEY", world.session.api_key).encode("latin-1")
    assert status_of(world, data) in statuses


def test_what_follows_a_length_and_chunks_is_no_second_request(world):
    """Where such a request ends two readers may see in two places (RFC 9112, section 6.3)."""
    models = (MODELS + "\r\n").replace("KEY", world.session.api_key)
    first = CHUNKED.replace("\r\n\r\n", f"\r\nContent-Length: {5 + len(models)}\r\n\r\n")
    with socket.create_connection(("127.0.0.1", world.port), timeout=120) as sock:
        sock.sendall(f"{first}0\r\n\r\n{models}".replace("KEY", world.session.api_key).encode())
        said = b""
        while more := sock.recv(65536):
            said += more
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1") == 1
    assert b"a request has both Content-Length and Transfer-Encoding" in said


@pytest.mark.parametrize("name", BODIES)
def test_what_is_no_request(world, name):
    path, body = BODIES[name]
    if isinstance(body, str):
        body = body.encode()
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    begin = time.process_time()
    assert status_of(world, head(world.session, len(body), path) + body) == 400
    assert time.process_time() - begin < 5
    assert world.engine.requests == []


def test_the_endpoint_still_answers(world):
    assert status_of(world, (MODELS + "\r\n").replace("KEY", world.session.api_key).encode()) == 200
    assert ask(world) == "ok"


@pytest.fixture(scope="module")
def rewards():
    with scoring(lengths) as url:
        port = int(url.split(":")[2].split("/")[0])
        yield SimpleNamespace(port=port, url=url, session=SimpleNamespace(api_key="KEY"))


QUERIES = {
    "nothing": "",
    "null": None,
    "a list": ["x"],
    "no query": {"prompts": ["x"]},
    "a text": {"query": "x"},
    "numbers": {"query": [1]},
    "null in it": {"query": ["x", None]},
    "lists in it": {"query": [["x"]]},
    "too many": {"query": ["x"] * 129},
    "half of a character": {"query": ["\ud800"]},
    "deep": '{"query": ' + "[" * 90_000 + "]" * 90_000 + "}",
    "no UTF-8": b'{"query": ["\xff"]}',
    "5,000 digits": '{"query": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("name", QUERIES)
def test_what_is_no_query(rewards, name):
    body = QUERIES[name]
    if isinstance(body, str):
        body = body.encode()
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    assert status_of(rewards, head(rewards.session, len(body), "/get_reward") + body) == 400


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://example.org"}, {"Origin": "null"}, {"Host": "example.org:5000"}],
)
def test_web_pages_get_no_scores_without_a_key(rewards, headers):
    """A page that a browser shows here may post a text; a rebound name makes it one's own host."""
    headers["Content-Type"] = "text/plain"
    with httpx.Client(trust_env=False) as client:
        reply = client.post(rewards.url, json={"query": ["abcd"]}, headers=headers)
    assert reply.status_code == 403, reply.text


def test_the_reward_model_still_answers(rewards, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert httpx.post(rewards.url, json={"query": ["abcd"]}).json() == {"rewards": [1.0]}
