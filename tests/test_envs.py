"""The shipped environments and their tools, without an engine; and every environment's config, two
steps of it."""

import asyncio
import inspect
import json
import math
import random
import re
import runpy
import time
from pathlib import Path

import pytest
import reasoning_gym
import torch
import yaml

from harness import ranks, two_at_once
from minirl.base.errors import UserError
from minirl.config.policy import ParallelConfig
from minirl.config.shared import RewardConfig
from minirl.envs import Env, Result, State, tools
from minirl.envs.registry import make_env
from minirl.rewards.loading import make_rewards
from programs import ROOT
from test_recipes import ENVIRONMENTS, rows, train, train_apart


def begin(env, row):
    said = env.reset(row)
    return asyncio.run(said) if inspect.iscoroutine(said) else said


def play(env: Env, row: dict, answers: list[str]) -> list[Result]:
    """What the environment replies to each."""
    begin(env, row)
    return [
        env.step(State(row=row, answer=answer, stopped=True, turn=turn, messages=[]))
        for turn, answer in enumerate(answers)
    ]


# --------------------------------------------------------------------------------------------------
# guess


CLOSING = """
from minirl.envs import Env

class Mine(Env):
    def reset(self, row): return "?"
    def close(self): raise OSError("mine")
"""


def test_a_close_that_fails_is_one_message(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CLOSING)
    with pytest.raises(UserError, match="its close raised OSError: mine"):
        make_env(f"{path}:Mine")


def test_guess_by_halving_always_wins_in_six_turns():
    make = make_env("guess?high=32")
    for number in range(32):
        env, low, high, total = make(), 1, 32, 0.0
        assert env.reset({"answer": str(number + 32)}) == "I think of a number from 1 to 32. Which?"
        for turn in range(6):
            guess = (low + high) // 2
            result = env.step(
                State(row={}, answer=f" {guess}\n", stopped=True, turn=turn, messages=[])
            )
            total += result.reward
            if result.done:
                break
            low, high = (guess + 1, high) if result.observation == "higher" else (low, guess - 1)
        assert (
            result.done
            and total == 1.0
            and guess == number + 1
            and result.info == {"turns": turn + 1}
        )


def test_guess_rewards_one_number_only():
    """All numbers in one answer are no guess."""
    results = play(
        make_env("guess")(), {"answer": "4"}, ["1 2 3 4 5", "", "five", "9" * 5000, "-5", "5"]
    )
    assert [r.observation for r in results[:5]] == ["That is not a number."] * 5 and not any(
        r.reward or r.done for r in results[:5]
    )
    assert results[5].done and results[5].reward == 1.0


def test_guess_refuses_what_it_cannot_play():
    for name in ("guess?high=1", "guess?high=many", "guess?low=3"):
        with pytest.raises(UserError, match="env.name = guess"):
            make_env(name)
    for row in ({}, {"answer": "a word"}):
        with pytest.raises(UserError, match="integer `answer`"):
            make_env("guess")().reset(row)


def demonstrated(num: int) -> list[tuple[dict, bool]]:
    game, rng = runpy.run_path(ROOT / "launch" / "guess_games.py")["play"], random.Random(1)
    return [game(rng.randint(1, 16), rng) for _ in range(num)]


def test_demonstrated_games_are_chats_to_imitate():
    """Those of the script beside the recipe end with the winning guess, or after four."""
    games = demonstrated(500)
    guesses = [
        [m["content"] for m in row["completion"] if m["role"] == "assistant"] for row, _ in games
    ]
    assert {len(g) for g in guesses} == {1, 2, 3, 4} and all(
        1 <= int(n) <= 16 for g in guesses for n in g
    )
    assert all(
        won == (row["completion"][-1]["role"] == "assistant")
        and row["completion"][0]["role"] == "assistant"
        for row, won in games
    )
    assert sum(won for _, won in games) / 500 == pytest.approx(0.38, abs=0.07)


# --------------------------------------------------------------------------------------------------
# countdown

ROW = {"prompt": "Make 24 of 2, 3, 4.", "metadata": {"numbers": [4, 2, 3], "target": 24}}


@pytest.mark.parametrize(
    ("answer", "score", "told"),
    [
        ("4*3*2", 1.0, ""),
        ("I think of 4 + 3.\n(4 * 3) * 2 ", 1.0, ""),
        ("4+3+2", 0.1, "That is 9, not 24."),
        ("3/2*4", 0.1, "That is 6, not 24."),
        ("4/3/2", 0.1, "That is 2/3, not 24."),
        ("4*3*2*1", 0.0, "Use each of 2, 3, 4 once"),
        ("24", 0.0, "Use each of"),
        ("4*3*2 = 24", 0.0, "and nothing else"),
        ("(4*3*2", 0.0, "cannot be calculated"),
        ("4/(3-3)*2", 0.0, "cannot be calculated"),
        ("2**3*4", 0.0, "cannot be calculated"),
        ("", 0.0, "and nothing else"),
        ("4_3*2", 0.0, "and nothing else"),
        ("__import__('os').abort()", 0.0, "and nothing else"),
        ("2(3)(4)", 0.0, "cannot be calculated"),
    ],
)
def test_countdown_judges_an_answer(answer, score, told):
    (result,) = play(make_env("countdown")(), ROW, [answer])
    assert result.reward == score and result.done == (score == 1.0) and told in result.observation


def test_countdown_earns_what_its_best_answer_does():
    """Form is paid once, so wrong answers before the right one gain nothing."""
    results = play(make_env("countdown?form=0.25")(), ROW, ["4+3+2", "no", "4-3-2", "4*3*2"])
    assert [r.reward for r in results] == [0.25, 0.0, 0.0, 0.75]


def test_countdown_agrees_with_the_generator_of_its_rows():
    gym = reasoning_gym.create_dataset("countdown", size=100, seed=3, min_numbers=3, max_numbers=4)
    for entry in gym:
        (result,) = play(
            make_env("countdown")(), {**entry, "prompt": entry["question"]}, [entry["answer"]]
        )
        assert result.reward == gym.score_answer(entry["answer"], entry) == 1.0
    with pytest.raises(UserError, match="reasoning_gym:countdown"):
        make_env("countdown")().reset({"prompt": "?", "metadata": {"numbers": [1]}})


# --------------------------------------------------------------------------------------------------
# tools


def fenced(tool: str, text: str) -> str:
    return f"Let me see.\n```{tool}\n{text}\n```"


def test_python_tool_runs_the_last_block_and_an_answer_without_one_is_final():
    row = {"prompt": "?"}
    results = play(
        make_env("tools:python")(),
        row,
        [
            fenced("python", "print(1)") + fenced("python", "print(6 * 7)"),
            fenced("python", "x = 1"),
            "1. Try:\n   ```python\n   print(3)\n   ```",
            "42",
        ],
    )
    assert [r.observation for r in results] == ["42", "(no output)", "3", None]
    assert [r.done for r in results] == [False, False, False, True]
    assert not any(r.reward for r in results)
    assert begin(make_env("tools:python")(), row) == "?" and make_env("tools:python")().graded


def test_python_tool_is_kept_within_its_limits():
    results = play(
        make_env("tools:python?seconds=1&output=200&memory_mb=256")(),
        {"prompt": "?"},
        [
            fenced("python", "print('é' * 5000)"),
            fenced("python", "print('so far')\nwhile True: pass"),
            fenced("python", "1 / 0"),
            fenced("python", "print(open('/etc/passwd').read())"),
            fenced("python", "x = bytearray(2**30)"),
        ],
    )
    said = [r.observation for r in results]
    assert said[0] == "é" * 200 + "\n... (cut)" and said[1] == "(timeout)\nso far"
    assert (
        said[2].startswith("(error)\n")
        and "ZeroDivisionError" in said[2]
        and "PermissionError" in said[3]
        and "MemoryError" in said[4]
    )


def test_a_program_as_an_answer_is_graded_by_its_tests():
    """In a block without a name it is no call, and python_tests finds it."""
    answer = "```\ndef double(x):\n    return 2 * x\n```"
    (result,) = play(make_env("tools:python")(), {"prompt": "?"}, [answer])
    assert (
        result.done
        and make_rewards(RewardConfig(function="python_tests"))(
            {"prompt": "?", "tests": "assert double(4) == 8"}, answer
        )
        == 1.0
    )


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17 * 23", "391"),
        (" (1 + 2) / 4\n", "0.75"),
        ("0.1 + 0.2", "0.3"),
        ("-3 - -5", "2"),
        ("1 / 3", "0." + "3" * 28),
        ("1e300 * 1e300", "1.000000000000000000000000000E+600"),
        ("9007199254740993.0 - 9007199254740992.0", "1"),
        ("12345678901234567890123456789 * 10", "123456789012345678901234567890"),
        ("0x10 + 1_000", "1016"),
    ],
)
def test_calculator(expression, value):
    (result,) = play(
        make_env("tools:calculate")(), {"prompt": "?"}, [fenced("calculate", expression)]
    )
    assert result.observation == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 / 0",
        "9 ** 9 ** 9 ** 9",
        "__import__('os')",
        "(1).real",
        "1j",
        "True",
        "'3' * 9",
        "1e999",
        "9e999999999",
        "+".join("1" * 200),
        "(" * 150,
        "-" * 199 + "1" * 2,
        "1 +",
        "x",
    ],
)
def test_calculator_says_what_it_cannot_do(expression):
    began = time.monotonic()
    with pytest.raises(ValueError, match="."):
        tools.calculate(expression)
    (result,) = play(
        make_env("tools:calculate")(), {"prompt": "?"}, [fenced("calculate", expression)]
    )
    assert (
        result.observation.startswith("Error: ")
        and not result.done
        and time.monotonic() - began < 1
    )


def corpus(folder: Path) -> Path:
    rows = [
        {"title": "Nile", "text": "The Nile is a river in Africa. " * 20},
        {"text": "Paris is the capital of France; the Seine is its river."},
        {"text": "Berlin is the capital of Germany."},
    ]
    (folder / "passages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "passages.jsonl"


def test_search_finds_the_passages_with_the_words(tmp_path):
    make = make_env(f"tools:search,calculate?corpus={corpus(tmp_path)}&passages=2&output=100")
    queries = ["capital of France", "river", "a river in Africa", "quasar", "the", "", "CAPITAL"]
    said = [
        r.observation
        for r in play(make(), {"prompt": "?"}, [fenced("search", query) for query in queries])
    ]
    assert (
        said[0]
        == "Paris is the capital of France; the Seine is its river.\n\nBerlin is the capital of "
        "Germany."
    )
    assert "Seine" in said[1] or "Nile" in said[1]
    assert (
        said[2].startswith("Nile\nThe Nile is a river")
        and said[2].endswith("\n... (cut)")
        and len(said[2]) == 100 + len("\n... (cut)")
    )
    assert said[3] == said[4] == said[5] == "Nothing found."
    assert "Paris" in said[6] and "Berlin" in said[6]
    (result,) = play(make(), {"prompt": "?"}, [fenced("calculate", "2 * 3")])
    assert result.observation == "6"
    (result,) = play(make(), {"prompt": "?"}, [fenced("python", "print(1)")])
    assert result.done  # not a tool of this environment, so no call


def test_index_of_a_corpus_is_made_once(tmp_path, monkeypatch):
    path, made, index = corpus(tmp_path), [], tools.bm25s.BM25
    monkeypatch.setattr(tools.bm25s, "BM25", lambda: made.append(1) or index())
    make = make_env(f"tools:search?corpus={path}")
    for _ in range(3):
        play(make(), {"prompt": "?"}, [fenced("search", "river")])
    assert made == [1]


def test_tools_refuse_what_they_cannot_be(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    for name, told in (
        ("tools", "names"),
        ("tools:shell", "no tool 'shell'; there are python, search, calculate"),
        ("tools:python?seconds=0", "above 0"),
        ("tools:python?seconds=soon", "env.name"),
        ("tools:search", "corpus = '': no such file"),
        (f"tools:search?corpus={tmp_path}/bad.jsonl", "line 2 has no `text`"),
    ):
        with pytest.raises(UserError, match=told):
            make_env(name)


# --------------------------------------------------------------------------------------------------
# their configs


SPLIT = "qwen3_4b_split_8gpu"  # Needs two ranks.


def flags(folder: Path, name: str) -> list[str]:
    """The config with few of its rows (the user's where it names a file), small batches and a tiny
    model of one vocabulary, so that all share an engine."""
    sources = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["data"]["train"]
    sources = [
        re.sub(r"size=\d+", "size=50", text)
        for text in ([sources] if isinstance(sources, str) else sources)
    ]
    if not sources[0].startswith("reasoning_gym:"):
        sources = [folder / ("games.jsonl" if name == "sft_guess" else "rows.jsonl")]
    given = [
        "--config",
        ROOT / "configs" / f"{name}.yaml",
        "--data.train",
        *sources,
        "--output",
        folder / name,
        "--num-steps",
        2,
        "--eval.every",
        0,
        "--checkpoint.every",
        0,
        "--data.held-out",
        2,
        "--policy.model",
        folder / "math" / "model" if "lora" in name else "scratch",  # adapters need a trained one
        "--policy.scratch.phrases",
        "```python\n",
        "--policy.scratch.num-layers",
        1,
        "--policy.scratch.hidden-size",
        32,
        "--policy.dtype",
        "float32",
        "--policy.lr-warmup-steps",
        0,
    ]
    if name != "sft_guess":
        given += [
            "--sft.num-steps",
            0,
            "--data.max-prompt-tokens",
            640,
            "--rollout.prompts-per-step",
            4,
            "--rollout.samples-per-prompt",
            4,
            "--rollout.max-tokens",
            8,
            "--engine.max-model-len",
            1024,
            "--engine.kv-cache-gb",
            0.1,
            "--engine.max-num-seqs",
            64,
            "--engine.tensor-parallel-size",
            1,
            "--parallel.tensor",
            1,
        ]
    if "lora" in name:  # whose rank and blocks are too large for the tiny model
        given += ["--policy.lora.rank", 4, "--policy.lora.quantization", "none"]
    if name == SPLIT:
        given += ["--parallel.generators", 1]
    if name == "search":
        given += ["--env.name", f"tools:search,calculate?corpus={corpus(folder)}"]
    return [str(flag) for flag in given]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder with a folder of each run. Search is the first to start the engine: its index is
    then made before, as it is for a user."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "rows.jsonl").write_text(
        "\n".join(
            json.dumps({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)}) for n in range(50)
        )
    )
    (folder / "games.jsonl").write_text("\n".join(json.dumps(row) for row, _ in demonstrated(200)))
    together = [name for name in ENVIRONMENTS if name != SPLIT]
    with two_at_once(
        {
            name: (1, train, [flags(folder, name) for name in half])
            for name, half in (("first", together[:4]), ("second", together[4:]))
        }
    ) as results:
        for future in results.values():
            future.result()
    ranks(2, train_apart, flags(folder, SPLIT), parallel=ParallelConfig(generators=1))
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU engines")
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_config_trains_two_steps(runs, name):
    found = rows(runs / name, "train" if name == "sft_guess" else "rl")
    assert [row["step"] for row in found] == [0, 1]
    assert all(math.isfinite(v) for row in found for v in row.values() if not isinstance(v, str)), (
        found
    )
    if name in (
        "guess",
        "countdown",
        "python_tool",
        "search",
    ):  # an untrained model plays games to their last turn, and calls no tool
        assert [(row["env/turns"], row["env/failed"]) for row in found] == [
            ({"guess": 4, "countdown": 2}.get(name, 1), 0)
        ] * 2
