"""Rewards over HTTP, against real servers, and weighted sums: every answer gets its own number, and
what fails says which endpoint and why."""

import contextlib
import gzip
import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from harness import ranks
from minirl.base.errors import UserError
from minirl.config.shared import RewardConfig
from minirl.rewards import RewardCall, http, loading, scoring
from minirl.run.metrics import breakdown
from minirl.types.packed import Trajectory
from programs import BEHIND_A_PROXY, fork, hold_port

ROW = {"prompt": "q", "rendered_prompt": "<|user|>q<|end|>", "answer": "42"}


class Scripted(ThreadingHTTPServer):
    """Answers each request by `reply(body) -> (status, text)`, and keeps the bodies. Bytes for a
    text are compressed by gzip."""

    def __init__(self, reply):
        self.reply, self.bodies, self.paths = reply, [], []
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/get_reward"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        status, text = self.server.reply(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        if isinstance(text, bytes):
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client may have left
            self.wfile.write(text if isinstance(text, bytes) else text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def start(reply):
        servers.append(Scripted(reply))
        threading.Thread(
            target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def lengths(body):
    return 200, json.dumps(
        {"rewards": [float(len(q)) for q in body["query"]], "extra_logs": {"x": [1]}}
    )


def made(function, **cfg):
    return loading.make_rewards(RewardConfig(function=function, **{"backoff_seconds": 0.0, **cfg}))


# --------------------------------------------------------------------------------------------------
# the protocol


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_is_refused(value):
    call = RewardCall()
    call.log_metric("x", 1)
    with pytest.raises(ValueError, match="its metric y is (nan|inf), and must be finite"):
        call.log_metric("y", value)
    assert call.metrics == {"x": [1.0]}


def test_a_request_has_queries_prompts_and_labels(endpoint):
    server = endpoint(lengths)
    assert made(server.url)(ROW, "abc") == len("<|user|>q<|end|>abc")
    assert made(server.url)({"prompt": "q", "rendered_prompt": "r"}, "") == 1.0
    assert server.bodies == [
        {"query": ["<|user|>q<|end|>abc"], "prompts": ["<|user|>q<|end|>"], "labels": ["42"]},
        {"query": ["r"], "prompts": ["r"], "labels": [None]},
    ]


def test_threads_share_requests_and_each_gets_its_own_reward(endpoint):
    def slow(body):
        time.sleep(0.05)
        return lengths(body)

    server = endpoint(slow)
    graded = made(server.url)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: graded(ROW, "x" * n), range(64)))
    assert found == [len(ROW["rendered_prompt"]) + n for n in range(64)]
    sizes = [len(body["query"]) for body in server.bodies]
    assert (
        sum(sizes) == 64 and len(sizes) < 40 and 4 < max(sizes) <= 16
    )  # alone they would be 64 requests


def test_endpoints_take_turns(endpoint):
    servers = [endpoint(lengths) for _ in range(3)]
    graded = made(" , ".join(s.url for s in servers))
    for _ in range(9):
        graded(ROW, "a")
    assert [len(s.bodies) for s in servers] == [3, 3, 3]


# --------------------------------------------------------------------------------------------------
# what goes wrong


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_failure_that_may_pass_is_tried_again_at_the_next_endpoint(endpoint, status, monkeypatch):
    pauses = []
    # Only there: other threads of this process may sleep, too.
    monkeypatch.setattr(http, "time", SimpleNamespace(sleep=pauses.append))
    bad, good = endpoint(lambda body: (status, "busy")), endpoint(lengths)
    assert made(f"{bad.url},{good.url}", backoff_seconds=0.5)(ROW, "") == len(
        ROW["rendered_prompt"]
    )
    assert len(bad.bodies) == len(good.bodies) == 1 and pauses == [0.5]
    with pytest.raises(
        UserError,
        match=(
            rf"reward.function = {bad.url}: {bad.url} failed after 4 tries .*reward.retries = 3.* "
            rf"status {status}: busy"
        ),
    ):
        made(bad.url, retries=3, backoff_seconds=0.5)(ROW, "")
    assert pauses[1:] == [0.5, 1.0, 2.0]


def test_a_refusal_is_not_tried_again(endpoint):
    server = endpoint(lambda body: (404, "no such path"))
    with pytest.raises(UserError, match="failed after 1 tries .* status 404: no such path"):
        made(server.url)(ROW, "")
    assert len(server.bodies) == 1


def test_an_endpoint_that_is_down_or_slow_is_named(endpoint, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    held, port = hold_port("127.0.0.1")  # where nobody listens
    url = f"http://127.0.0.1:{port}/r"
    with held, pytest.raises(UserError, match=rf"{url} failed after 2 tries .* ConnectError"):
        made(url, retries=1)(ROW, "")
    release = threading.Event()
    slow = endpoint(lambda body: (release.wait(5), lengths(body))[1])
    with pytest.raises(
        UserError,
        match=rf"{slow.url} failed after 2 tries .*reward.timeout_seconds = 0.1.* "
        "TimeoutError: the response was not whole in time",
    ):
        made(slow.url, retries=1, timeout_seconds=0.1)(ROW, "")
    release.set()


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "{}",
        "[1.0]",
        '{"rewards": 1.0}',
        '{"rewards": [1.0, 2.0]}',
        '{"rewards": []}',
        '{"rewards": [1' + "0" * 400 + "]}",
    ],
)
def test_an_answer_that_is_not_the_protocol_is_shown(endpoint, text):
    server = endpoint(lambda body: (200, text))
    with pytest.raises(UserError) as error:
        made(server.url)(ROW, "")
    assert (
        f"{server.url} answered {text[:200]!r} to 1 queries; it must answer" in str(error.value)
        and len(server.bodies) == 1
    )


def test_an_answer_that_is_too_long_is_not_read(endpoint):
    """Neither one of 10 MB, nor one that gunzip makes 200 MB of."""
    honest = '{"rewards": [1.0]}'
    answers = {"bomb": gzip.compress(b" " * 2 * 10**8, 1), "long": honest.ljust(10**7)}
    server = endpoint(lambda body: (200, answers[body["labels"][0]]))
    graded = made(server.url)
    for kind, says in (
        ("bomb", "answered with Content-Encoding gzip; let it send the JSON as it is"),
        ("long", 'answered with more than 1048676 bytes to 1 queries, \'{"rewards": '),
    ):
        tracemalloc.start()
        with pytest.raises(UserError, match=says):
            graded({**ROW, "answer": kind}, "abc")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 1.5e7, kind  # The server's own 10 MB among them.


@pytest.mark.parametrize("value", ["NaN", "null", "true", "[0.5]", '"0.5"'])
def test_a_reward_that_is_not_a_finite_number_is_refused(endpoint, value):
    server = endpoint(lambda body: (200, f'{{"rewards": [{value}]}}'))
    with pytest.raises(
        UserError,
        match=r"(returned nan for prompt 'q', completion 'a'; it must return one finite number"
        r"|answered .* to 1 queries; it must answer)",
    ):
        made(server.url)(ROW, "a")


def test_all_threads_of_a_failed_request_get_its_error(endpoint):
    def broken(body):
        time.sleep(0.05)
        return 500, "out of memory"

    graded = made(endpoint(broken).url, retries=0)

    def told(n):
        with pytest.raises(UserError, match="status 500: out of memory"):
            graded(ROW, "x" * n)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(told, range(16), timeout=20))


def test_a_label_that_is_no_json_ends_all_threads_too(endpoint):
    server = endpoint(lambda body: (time.sleep(0.05), lengths(body))[1])
    graded = made(server.url)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(graded, {**ROW, "answer": {1, 2}}, "x") for _ in range(8)]
        assert all(isinstance(f.exception(timeout=20), UserError) for f in futures)
    assert "raised TypeError" in str(futures[0].exception())


@pytest.mark.parametrize("url", ["http:///path", "http://a:1/x,ftp://b/y", "http://a,"])
def test_a_url_without_a_host_is_refused(url):
    with pytest.raises(
        UserError, match=r"reward.function = .*is not of the form http://host:port/path"
    ):
        made(url)


# --------------------------------------------------------------------------------------------------
# sums


def test_rewards_are_summed_by_weight_and_told_apart(endpoint, tmp_path):
    (tmp_path / "own.py").write_text(
        "def brevity(prompt, completion, row):\n    return -len(completion)\n"
    )
    server, own = endpoint(lengths), f"{tmp_path}/own.py:brevity"
    graded, info = made(["exact", own, server.url], weights=[1.0, 0.25, -0.5]), {}
    total = len(ROW["rendered_prompt"]) + 2
    assert graded(ROW, "42", info) == 1.0 - 0.25 * 2 - 0.5 * total
    assert info == {"rewards": {"exact": 1.0, own: -2.0, server.url: float(total)}}
    assert made(["exact", own])(ROW, "42") == 1.0 - 2.0
    alone = {}
    assert made("exact", weights=[0.5])(ROW, "42", alone) == 0.5 and alone == {}


def test_a_function_beside_a_reward_model_is_told_apart(tmp_path):
    config = RewardConfig(function=["exact"], model="runs/rm/model")
    info = {}
    assert loading.make_rewards(config)(ROW, "42", info) == 1.0
    assert info == {"rewards": {"exact": 1.0}}


def test_a_function_that_takes_its_arguments_in_another_order_is_refused(tmp_path):
    (tmp_path / "r.py").write_text(
        "def swapped(completion, prompt, row):\n    return 1.0\n"
        "def right(text, completion, *rest, row=None):\n    return 1.0\n"
    )
    loading.find_reward(f"{tmp_path}/r.py:right", RewardConfig())
    with pytest.raises(UserError, match=r"has the parameter 'completion' where .* the prompt: it"):
        loading.find_reward(f"{tmp_path}/r.py:swapped", RewardConfig())


@pytest.mark.parametrize("text", ["async def f", "def f"])
def test_what_only_functions_of_trl_may_return_is_told(text, tmp_path):
    (tmp_path / "own.py").write_text(f"{text}(prompt, completion, row):\n    return None\n")
    with pytest.raises(UserError, match="one finite number .those of TRL, trl:file"):
        made(f"{tmp_path}/own.py:f")(ROW, "42")


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.7, 0.2]])
def test_what_is_right_by_all_functions_earns_all_of_it(weights, tmp_path):
    """Or an answer would be below an `eval.threshold` of 1 by a rounding."""
    names = ("first", "second", "third")
    functions = [f"def {name}(prompt, completion, row):\n    return 1.0\n" for name in names]
    (tmp_path / "own.py").write_text("".join(functions))
    graded = made([f"{tmp_path}/own.py:{name}" for name in names], weights=weights)
    assert graded(ROW, "42") == 1.0


@pytest.mark.parametrize(
    ("function", "weights", "why"),
    [
        ([], [], "nothing scores; name a function, or set reward.model"),
        (["exact", "exact"], [], "a function is named twice; name it once"),
        (["exact"], [1.0, 2.0], "there are 2 weights for 1 functions; give one for each, or none"),
    ],
)
def test_weights_that_do_not_fit_are_refused(function, weights, why):
    with pytest.raises(UserError, match=rf"reward.function = .*reward.weights = .*: {why}"):
        made(function, weights=weights)


def test_each_reward_of_a_sum_checks_its_rows():
    with pytest.raises(UserError, match="reward.function = exact compares with the answer"):
        scoring.Rewards((1.0, None, "my.py:score"), (1.0, None, "exact")).check_row({"prompt": "p"})


def answer(source, reward, **rewards):
    info = {"source": source, **({"rewards": rewards} if rewards else {})}
    return Trajectory(tokens=None, sampled=None, logprobs=None, reward=reward, info=info)


def breakdowns(mesh):
    """Of answers of which two ranks have half each; of one without a name; and of nothing."""
    here = [answer("math", 1.0, exact=1.0, brief=0.0), answer("code", 0.5)]
    there = [answer("math", 0.0, exact=0.0, brief=-0.5), answer(None, 9.0)]
    own = {0: here, 1: there} if mesh.world_size == 2 else {0: here + there}
    return [
        breakdown(own[mesh.rank], 1.0, mesh, [("more", 0.1 * (1 + mesh.rank))]),
        breakdown([answer(None, 1.0)], 1.0, mesh),
        breakdown([], 1.0, mesh),
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_means_by_source_and_by_reward(world):
    for found, *nothing in ranks(world, breakdowns):
        assert found.pop("more") == (0.1 if world == 1 else (0.1 + 0.2) / 2)
        assert nothing == [{}, {}]
        assert found == {
            "reward/brief": -0.25,
            "reward/exact": 0.5,
            "source/code/accuracy": 0.0,
            "source/code/reward": 0.5,
            "source/math/accuracy": 0.5,
            "source/math/reward": 0.5,
        }


# --------------------------------------------------------------------------------------------------
# a run


def test_a_run_on_two_sources_with_two_rewards(endpoint, tmp_path):
    """Mixed by weight under a plain template, long prompts dropped, warm start, an endpoint beside
    a registered reward: all in its metrics."""
    server = endpoint(
        lambda body: (
            200,
            json.dumps({"rewards": [0.125 * (label == "7") for label in body["labels"]]}),
        )
    )
    for name, rows in (
        ("short", [{"prompt": f"{i}+", "solution": "7"} for i in range(20)]),
        ("mixed", [{"input": "x" * i, "label": "y"} for i in range(1, 13)]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rl.yaml").write_text(
        f"data:\n  train:\n    - {tmp_path}/short.jsonl?weight=3\n    - "
        f"{tmp_path}/mixed.jsonl?weight=1&name=other\n"
    )
    flags = [
        "--config",
        tmp_path / "rl.yaml",
        "--output",
        tmp_path / "run",
        "--policy.model",
        "scratch",
        "--policy.dtype",
        "float32",
        "--num-steps",
        "1",
        "--data.held-out",
        "6",
        "--data.max-prompt-tokens",
        "14",
        "--data.too-long",
        "drop",
        "--data.input-template",
        "say {}: ",
        "--rollout.max-tokens",
        "4",
        "--engine.max-num-seqs",
        "16",
        "--rollout.prompts-per-step",
        "4",
        "--rollout.samples-per-prompt",
        "2",
        "--sft.num-steps",
        "1",
        "--sft.batch-size",
        "4",
        "--reward.function",
        "exact",
        server.url,
        "--reward.weights",
        "1",
        "2",
        "--rollout.dump",
    ]
    ended = fork("minirl.rl", flags, tmp_path / "log", env=BEHIND_A_PROXY)
    assert ended.code == 0, ended.err
    assert (
        "(4 dropped as too long)" in ended.err
    )  # beside `say ` and `: ` 14 tokens hold 8 characters
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    sources = {
        f"source/{name}/{what}" for name in ("short", "other") for what in ("accuracy", "reward")
    }
    for row in rows:
        if row["phase"] in ("eval", "rl"):
            assert {"reward/exact", f"reward/{server.url}"} < row.keys() and sources & row.keys()
            assert row["reward"] == pytest.approx(
                row["reward/exact"] + 2 * row[f"reward/{server.url}"]
            )
    assert all(row["source/short/reward"] >= 0.25 for row in rows if "source/short/reward" in row)
    sampled = [
        json.loads(line)
        for line in (tmp_path / "run" / "rollouts" / "step-0-rank-0.jsonl").read_text().splitlines()
    ]
    assert len(sampled) == 8 and {t["info"]["source"] for t in sampled} <= {"short", "other"}
    queries = [query for body in server.bodies for query in body["query"]]
    assert all(query.startswith("say ") and ": " in query for query in queries)
