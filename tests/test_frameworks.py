"""Agent frameworks against the real endpoint: two training steps in which every episode is led by
one of them, with a random tiny model that is held to calls and formats where they demand them."""

import importlib
import json
import re
import subprocess
import venv

import pytest

import tiny
from minirl.rollout import records
from programs import BEHIND_A_PROXY, ROOT, fork
from test_readme import printed
from test_server import TEMPLATE

# Modes that demand a call or a format and return it, so that even a random model picks.
MUST_PICK = {
    "anthropic",
    "openai-agents, Responses (its default)",
    "openai-agents, ChatCompletions",
    "pydantic-ai, `output_type`",
    "langchain-openai, `with_structured_output`",
}
REFUSED = """
import openai
from minirl.envs import Agent, Result


class Refused(Agent):
    def run(self, row, session):
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            chat = [{"role": "user", "content": "hi"}]
            wanted = row["wanted"] or None
            format = {"type": wanted} if wanted else openai.NOT_GIVEN
            client.chat.completions.create(
                model=session.model, messages=chat, response_format=format
            )
            return Result(reward=1.0)
"""


def evaluate(folder, wanted, agent="agent.py:Refused"):
    """`minirl.evaluate` of an agent that wants these formats, one a row: its end and scores. The
    machine reaches others by a proxy, which knows nothing of this one."""
    rows = [{"prompt": f"Row {i}.", "wanted": w, "answer": ""} for i, w in enumerate(wanted)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if agent == "agent.py:Refused":
        (folder / "agent.py").write_text(REFUSED)
    flags = {
        "model": tiny.make(folder / "model"),
        "data.eval": folder / "rows.jsonl",
        "env.name": f"{folder}/{agent}",
        "env.error-reward": -1,
        "env.timeout-seconds": 300,
        "eval.samples": 1,
        "rollout.max-tokens": 8,
        "engine.dtype": "float32",
        "engine.max-model-len": 0,
        "engine.kv-cache-gb": 0.05,
        "output": folder / "scores.json",
    }
    arguments = [x for name, value in flags.items() for x in (f"--{name}", value)]
    log = folder / "log"
    ended = fork("minirl.evaluate", arguments, log, seconds=500, env=BEHIND_A_PROXY)
    written = folder / "scores.json"
    return ended, json.loads(written.read_text()) if written.exists() else None


def test_episodes_without_a_token_count_in_an_evaluation(tmp_path):
    ended, scores = evaluate(tmp_path, ["", "grammar", "", "grammar"])
    assert ended.code == 0, ended.err[-3000:]
    expected = {"accuracy": 0.5, "reward": 0.0, "env/failed": 0.5, "endpoint/refused": 0.5}
    assert {name: scores[name] for name in expected} == expected


def test_an_evaluation_in_which_all_is_refused_ends_with_the_refusal(tmp_path):
    ended, _ = evaluate(tmp_path, ["grammar", "grammar"])
    assert ended.code == 2
    (message,) = ended.errors()
    assert "none of the 2 held-out prompts got an answer to evaluate" in message
    assert "response_format has the type 'grammar'; give text, json_object or json_sch" in message
    assert "Traceback" not in ended.err


def test_an_agent_in_an_environment_of_its_own(tmp_path):
    """The printed one, whose interpreter has no minirl."""
    for name in ("my_process.py", "agent.py"):
        printed("minirl/endpoint/README.md", name, tmp_path)
    venv.create(tmp_path / "venv")
    python = [tmp_path / "venv" / "bin" / "python", "-E", "-c"]
    assert subprocess.run([*python, "import json"], cwd=tmp_path).returncode == 0
    assert (
        subprocess.run(
            [*python, "import minirl"], cwd=tmp_path, stderr=subprocess.DEVNULL
        ).returncode
        == 1
    )
    ended, scores = evaluate(tmp_path, ["", ""], "my_process.py:Process")
    assert ended.code == 0, ended.err[-3000:]
    expected = {"accuracy": 1.0, "env/failed": 0.0, "endpoint/refused": 0.0, "env/turns": 1.0}
    assert {name: scores[name] for name in expected} == expected
    assert scores["answer_tokens"] > 0


def test_answers_that_are_all_the_grammars_count_in_an_evaluation(tmp_path):
    ended, scores = evaluate(tmp_path, ["json_object", "json_object"])
    assert ended.code == 0, ended.err[-3000:]
    assert scores["accuracy"] == scores["endpoint/outside_loss"] == 1.0
    assert 0.0 < scores["answer_tokens"] <= 8.0


def test_training_on_answers_that_are_all_the_grammars_ends_with_the_reason(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "hi", "wanted": "json_object"}))
    (tmp_path / "agent.py").write_text(REFUSED)
    flags = {
        "output": tmp_path / "run",
        "policy.model": tiny.make(tmp_path / "model"),
        "policy.dtype": "float32",
        "data.train": tmp_path / "rows.jsonl",
        "data.eval": tmp_path / "rows.jsonl",
        "env.name": f"{tmp_path / 'agent.py'}:Refused",
        "env.timeout-seconds": 300,
        "rollout.prompts-per-step": 1,
        "rollout.samples-per-prompt": 2,
        "rollout.max-tokens": 8,
        "engine.kv-cache-gb": 0.05,
        "num-steps": 1,
        "checkpoint.every": 0,
        "eval.every": 0,
    }
    arguments = [x for name, value in flags.items() for x in (f"--{name}", value)]
    ended = fork("minirl.rl", arguments, tmp_path / "log", seconds=500)
    assert ended.code == 2, ended.err[-3000:]
    (message,) = ended.errors()
    assert re.search("can be trained on: all \\d+ sampled tokens were the grammar's", message)


@pytest.fixture(scope="module")
def modes():
    """By name. Importing all frameworks takes seconds, which only one process is to wait."""
    return importlib.import_module("frameworks").MODES


@pytest.fixture(scope="module")
def ended(tmp_path_factory, modes):
    folder = tmp_path_factory.mktemp("frameworks")
    (folder / "template.jinja").write_text(TEMPLATE)
    rows = [json.dumps({"prompt": f"Be {mode}.", "mode": mode, "answer": ""}) for mode in modes]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "one.jsonl").write_text(rows[0])
    flags = {
        "output": folder / "run",
        "policy.model": tiny.make(folder / "model", max_position_embeddings=8192),
        "policy.dtype": "float32",
        "data.train": folder / "rows.jsonl",
        "data.eval": folder / "one.jsonl",
        "data.chat-template": folder / "template.jinja",
        "env.name": f"{ROOT / 'tests' / 'frameworks.py'}:Any",
        "env.max-tokens": 4000,
        "env.timeout-seconds": 500,
        "rollout.prompts-per-step": len(modes),
        "rollout.samples-per-prompt": 2,
        "rollout.max-tokens": 300,
        "engine.max-model-len": 6000,
        "engine.kv-cache-gb": 0.3,
        "engine.max-num-seqs": 18,
        "tokens-per-rank": 12000,
        "num-steps": 1,
        "checkpoint.every": 0,
        "eval.every": 0,
        # OpenAI's agents end with a free answer that is cut. With this seed one of each is not, in
        # both versions of vLLM.
        "seed": 1,
    }
    arguments = [x for name, value in flags.items() for x in (f"--{name}", value)]
    ended = fork("minirl.rl", [*arguments, "--rollout.dump"], folder / "log", seconds=500)
    return ended, folder / "run"


def test_every_framework_is_trained(ended, modes):
    result, output = ended
    assert result.code == 0, result.err[-3000:]
    picked = set()
    found = list(records.read_file(output / "rollouts" / "step-0-rank-0.jsonl"))
    of_mode = {mode: [t for t in found if t.info["prompt"] == f"Be {mode}."] for mode in modes}
    for mode, trajectories in of_mode.items():
        assert len({t.episode for t in trajectories}) == 2, mode
        for t in trajectories:
            assert not t.info["error"] and t.info["endpoint"]["refused"] == 0.0, (mode, t.info)
            assert t.info["endpoint"]["unguided"] == 0.0, mode
            assert t.sampled.any(), mode
            if t.info["env"]["picked"]:
                picked.add(mode)
    assert picked >= MUST_PICK


def test_guided_tokens_stay_outside_the_loss(ended):
    """A random model is off any format, so that nothing that was demanded is trained on."""
    _, output = ended
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if row["phase"] == "rl" and "endpoint/refused" in row]
    assert step["endpoint/refused"] == 0.0 and 0.0 < step["endpoint/outside_loss"] < 1.0
    assert step["env/failed"] == 0.0 and step["mismatch"] < 1e-3


def test_the_table_of_frameworks_is_what_is_tested(modes):
    text = (ROOT / "minirl" / "endpoint" / "README.md").read_text()
    table = text.partition("| framework | works |")[2].partition("\n\n")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert rows == list(modes)
