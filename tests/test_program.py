"""The whole program on two ranks, as a user runs it: what a run leaves, that it repeats bit by bit,
that it can be killed and resumed."""

import itertools
import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from matplotlib import image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness import ranks
from minirl.checkpoint.state import read_best
from minirl.config.parse import load_config, parse_flags
from minirl.config.rl import RLConfig
from minirl.config.validate import resolve_dtypes, resolve_learning_rates, resolve_lengths
from minirl.rl import Trainer
from minirl.run import inputs
from nodes import Job, Node
from programs import QUICKSTART, ROOT, Ended, as_flags, fork
from test_preference import export_scored

NUM_STEPS, SAVED = 10, 5
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="two ranks with a CPU engine each; bitwise repeatable there only",
)


@dataclass
class Run:
    folder: Path
    flags: list[str]
    ended: Ended

    def rows(self, phase: str) -> list[dict]:
        return [row for row in read(self.folder / "metrics.jsonl") if row["phase"] == phase]

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def repeatable(rows: list[dict]) -> list[dict]:
    """All but clocks."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("time/", "tokens_per_second/", "host_gib/"))
        }
        for row in rows
    ]


EARNED_UNTRAINED = """
def vowels(prompt, completion, row):
    return sum(letter in "aeiou" for letter in completion) / 10
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Say the last letter of a word: easy enough for 30 steps of SFT to be right now and then,
    which RL needs to learn at all."""
    folder = tmp_path_factory.mktemp("data")
    words = ["".join(letters) for letters in itertools.product("abcd", repeat=4)]
    rows = [json.dumps({"prompt": word, "answer": word[-1]}) + "\n" for word in words]
    (folder / "reward.py").write_text(EARNED_UNTRAINED)
    (folder / "held_out.jsonl").write_text("".join(rows[::7]))
    (folder / "train.jsonl").write_text("".join(row for i, row in enumerate(rows) if i % 7))
    return folder


def flags(data: Path, output: Path) -> list[str]:
    given = as_flags(f"""
        --config {QUICKSTART} --output {output} --data.train {data}/train.jsonl
        --data.eval {data}/held_out.jsonl --num-steps {NUM_STEPS} --sft.num-steps 30
        --eval.every {SAVED} --eval.temperature 0 --checkpoint.every {SAVED}
        --checkpoint.best-metric accuracy --debug.check-refit --rollout.prompts-per-step 8
    """)
    return [str(flag) for flag in given]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Run:
    """Start to end, undisturbed. The same run under an agent of torchrun is `repeated`."""
    folder = tmp_path_factory.mktemp("run")
    given = flags(data, folder / "out")
    return Run(folder / "out", given, fork("minirl.rl", given, folder, 300, world=2))


# --------------------------------------------------------------------------------------------------
# what a run leaves


def test_run_ends_well_and_prints_its_table(run):
    assert run.ended.code == 0, run.ended.err
    assert "Traceback" not in run.ended.err and not run.ended.errors()
    for title in (
        "held-out accuracy before SFT",
        "held-out accuracy after SFT",
        "held-out accuracy after RL",
        "tokens/s, generated",
        "tokens/s, trained",
        "seconds, rollout",
        "seconds, refit",
        "peak memory of a rank, MiB",
    ):
        assert re.search(rf"^{title} +[\d.,]+$", run.ended.out, re.MULTILINE), run.ended.out
    assert run.ended.err.count(": answers\n") == 4 and run.ended.err.count(" -> ") == 12
    # The console is no terminal: each step is a line.
    steps = [x for x in run.ended.err.splitlines() if x.startswith("minirl: rl step ")]
    assert [x.split(":")[1] for x in steps] == [
        f" rl step {step}/{NUM_STEPS}" for step in range(1, NUM_STEPS + 1)
    ]
    assert all("reward" in x and "s/step" in x and " left" in x for x in steps)


def test_summary(run):
    summary = run.summary()
    assert summary["state"] == "finished" and summary["reason"] == ""
    assert (
        summary["accuracy_before_sft"]
        <= 0.1
        < summary["accuracy_after_sft"]
        == summary["accuracy_before_rl"]
    )
    evaluations = {row["step"]: row["accuracy"] for row in run.rows("eval")}
    assert list(evaluations) == [-1, 0, 5, 10]
    assert [evaluations[step] for step in (-1, 0, 10)] == [
        summary[f"accuracy_{name}"] for name in ("before_sft", "after_sft", "after_rl")
    ]
    phases = {
        "start",
        "sft",
        "evaluate",
        "rollout",
        "idle",
        "refit",
        "prepare",
        "annotate",
        "forward",
        "backward",
        "optimizer",
        "checkpoint",
        "export",
    }
    assert phases <= summary["seconds"].keys() and all(
        value >= 0 for value in summary["seconds"].values()
    )
    assert (
        0.8 * summary["wall_seconds"]
        < sum(summary["seconds"].values())
        < summary["wall_seconds"] + 0.1
    )
    assert summary["tokens_per_second"] > 0 and summary["tokens_per_second_by_phase"].keys() == {
        "generated",
        "trained",
    }
    assert (
        100 < summary["peak_rss_mb"] == max(summary["peak_rss_mb_by_rank"])
        and len(summary["peak_rss_mb_by_rank"]) == 2
    )


def test_metrics_of_every_step(run):
    rows = run.rows("rl")
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    assert [row["step"] for row in run.rows("sft")] == list(range(30))
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if not isinstance(value, str)), (
            row
        )
        assert 0 <= row["reward"] <= 1 and 1 <= row["answer_tokens"] <= 10 and row["entropy"] > 0
        assert (
            row["clip_fraction"] == 0 and row["policy_kl"] == 0
        )  # one update: still the policy that sampled
        assert 0 < row["mismatch"] < 1e-5 and row["mismatch"] <= row["mismatch_max"] < 1e-4
        assert (
            row["skipped_updates"] == 0
            and 0 <= row["stopped"] <= 1
            and 0 <= row["equal_groups"] <= 1
        )
        for name in (
            "refit_bytes",
            "kv_cache_tokens",
            "time/refit",
            "time/rollout",
            "time/forward",
            "time/backward",
            "tokens_per_second/generated",
            "tokens_per_second/trained",
        ):
            assert row[name] > 0
        idle = [row[f"time/idle{name}"] for name in ("_min", "_median", "")]
        assert 0 <= idle[0] <= idle[1] == pytest.approx((idle[0] + idle[2]) / 2)
        assert row["time/idle_max_rank"] in (0, 1)
    assert any(row["grad_norm"] > 0 for row in rows), (
        "nothing was learnt from, so nothing below proves anything"
    )


def test_curves_tensorboard_and_answers(run):
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = image.imread(run.folder / "curves.png").shape
    assert height > 300 and width > 600
    board = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("rl/reward")] == list(range(NUM_STEPS))
    assert [event.value for event in board.Scalars("rl/reward")] == pytest.approx(
        [row["reward"] for row in run.rows("rl")]
    )
    assert {"eval/accuracy", "sft/loss", "rl/mismatch", "rl/time/refit"} <= set(
        board.Tags()["scalars"]
    )
    (tag,) = (tag for tag in board.Tags()["tensors"] if tag.startswith("answers"))
    texts = [event.tensor_proto.string_val[0].decode() for event in board.Tensors(tag)]
    assert len(texts) == 4 and all(text.count("reward") == 3 for text in texts)
    found = read(run.folder / "answers.jsonl")
    assert [(row["step"], row["name"]) for row in found] == [
        (-1, "before_sft"),
        (0, "before_rl"),
        (SAVED, None),
        (NUM_STEPS, "after_rl"),
    ]
    answers = {row["name"]: row["answers"] for row in found}
    for shown in answers.values():
        assert len(shown) == 5 and all(a.keys() == {"prompt", "answer", "reward"} for a in shown)
    assert [a["prompt"] for a in answers["before_rl"]] == [a["prompt"] for a in answers["after_rl"]]


def test_config_can_be_run_again(run):
    expected = parse_flags(RLConfig, run.flags)
    resolve_lengths(expected)
    resolve_learning_rates(expected)
    assert expected.engine.max_model_len == 26  # what 0 came to
    written = load_config(RLConfig, str(run.folder / "config.yaml"))
    assert written.critic.dtype in ("bfloat16", "float32")  # what auto came to on this CPU
    resolve_dtypes(expected, written.critic.dtype)
    assert written == expected


def test_model_loads_in_transformers(run):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(run.folder / "model"),
        AutoTokenizer.from_pretrained(run.folder / "model"),
    )
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abca"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        logits = model(**ids).logits
    assert model.dtype == torch.float32 and logits.isfinite().all()
    assert "<|assistant|>" in tokenizer.decode(ids["input_ids"][0])


# --------------------------------------------------------------------------------------------------
# repeated, killed, resumed


@dataclass
class Killed:
    ended: Ended
    seconds: float
    survivors: list[psutil.Process]
    rows: list[dict]
    summary: dict
    has_curves: bool


@pytest.fixture(scope="module")
def repeated(data, tmp_path_factory) -> tuple[Killed, Run]:
    """The same run in another folder. Rank 1 is killed after the checkpoint of step 5; then the run
    is resumed by its own config."""
    folder = tmp_path_factory.mktemp("repeated")
    output = folder / "out"
    job = Job([Node("127.0.0.1", ROOT)], "minirl.rl", [flags(data, output)], folder / "killed")
    job.wait_for((output / "checkpoints" / f"step-{SAVED}").exists, 300)
    processes = job.agents[0].ranks()
    processes[1].kill()
    began = time.monotonic()
    ended = job.end(120)
    killed = Killed(
        ended,
        time.monotonic() - began,
        [p for p in processes.values() if p.is_running()],
        read(output / "metrics.jsonl"),
        json.loads((output / "summary.json").read_text()),
        (output / "curves.png").exists(),
    )
    given = ["--config", str(output / "config.yaml"), "--resume"]
    return killed, Run(output, given, fork("minirl.rl", given, folder / "resumed", 300, world=2))


def test_kill_of_one_rank_ends_all(repeated):
    killed, _ = repeated
    assert killed.ended.code != 0 and killed.seconds < 60
    assert not killed.survivors
    assert "Signal 9 (SIGKILL)" in killed.ended.err and " FAILED\n" in killed.ended.err
    # Rank 0 has noted it, although it was not killed itself.
    assert killed.summary["state"] == "failed" and "rank 1" in killed.summary["reason"]
    assert killed.has_curves


def test_same_seed_same_run(run, repeated):
    """Two runs side by side, as far as the second one came before it was killed."""
    killed, _ = repeated
    assert [row["step"] for row in killed.rows if row["phase"] == "rl"][:SAVED] == list(
        range(SAVED)
    )
    assert (
        repeatable(killed.rows)
        == repeatable(read(run.folder / "metrics.jsonl"))[: len(killed.rows)]
    )
    assert (run.folder / "sft" / "model.safetensors").read_bytes() == (
        repeated[1].folder / "sft" / "model.safetensors"
    ).read_bytes()


def test_resumed_run_is_the_uninterrupted_run(run, repeated):
    _, resumed = repeated
    assert resumed.ended.code == 0, resumed.ended.err
    assert f"resuming at step {SAVED}" in resumed.ended.err
    assert repeatable(read(resumed.folder / "metrics.jsonl")) == repeatable(
        read(run.folder / "metrics.jsonl")
    )
    assert (resumed.folder / "model" / "model.safetensors").read_bytes() == (
        run.folder / "model" / "model.safetensors"
    ).read_bytes()
    # TensorBoard hides what a resumed run repeats, and nothing of the warm start.
    board = EventAccumulator(str(resumed.folder / "tensorboard")).Reload()
    for tag, num_steps in (("sft/loss", 30), ("rl/reward", NUM_STEPS)):
        assert [event.step for event in board.Scalars(tag)] == list(range(num_steps))
    assert read_best(resumed.folder) == read_best(run.folder)
    best = max(
        (row for row in run.rows("eval") if row["step"] in (SAVED, NUM_STEPS)),
        key=lambda row: row["accuracy"],
    )  # the first of equals
    assert read_best(run.folder) == {
        "step": best["step"],
        "metric": "accuracy",
        "value": best["accuracy"],
    }
    assert (resumed.folder / "answers.jsonl").read_text() == (
        run.folder / "answers.jsonl"
    ).read_text()
    for name in ("accuracy_before_sft", "accuracy_after_sft", "accuracy_after_rl"):
        assert resumed.summary()[name] == run.summary()[name]
    before, after = (
        load_file(run.folder / name / "model.safetensors") for name in ("sft", "model")
    )
    assert any(not torch.equal(before[name], after[name]) for name in before), (
        "RL changed nothing, so equal weights prove nothing"
    )


# --------------------------------------------------------------------------------------------------
# evaluate


def test_evaluate_the_exported_model(run, data, tmp_path):
    ranks(1, export_scored, run.folder / "model", tmp_path / "judge")
    given = as_flags(f"""
        --model {run.folder}/model --data.eval {data}/held_out.jsonl --reward.function exact
        --data.max-prompt-tokens 16 --reward.model {tmp_path}/judge --reward.model-weight 0
        --rollout.max-tokens 10 --engine.dtype float32 --engine.kv-cache-gb 0.1
        --eval.temperature 0 --eval.samples 2
    """)
    file = ["--output", tmp_path / "one.json"]
    one = fork("minirl.evaluate", [*given, *file], tmp_path / "one", 200)
    two = fork("minirl.evaluate", given, tmp_path / "two", 200, world=2)
    assert one.code == two.code == 0, one.err + two.err
    result, other = json.loads(one.out), json.loads(two.out)
    assert abs(result["reward/model"]) > 1e-3 and other.pop("reward/model") == pytest.approx(
        result["reward/model"], rel=1e-4
    )
    assert (
        result
        == other | {"reward/model": result["reward/model"]}
        == json.loads((tmp_path / "one.json").read_text())
    )
    assert result["prompts"] == 37 and len(result["answers"]) == 5
    assert 0 < result["accuracy"] == result["pass@2"] <= 1  # greedy: both samples are the same
    assert (
        result["accuracy"] == run.summary()["accuracy_after_rl"]
    )  # another program, other ranks, weights from files instead of a refit


# --------------------------------------------------------------------------------------------------
# evaluations of their own, and the end that one makes


def own_evaluation(data: Path, output: Path) -> list:
    """Short answers in training, to which the budget of a micro-batch is cut."""
    return [
        *flags(data, output),
        *("--policy.model", "scratch", "--sft.num-steps", 0, "--checkpoint.best-metric", ""),
        *("--data.max-prompt-tokens", 16, "--tokens-per-rank", 24, "--reward.function"),
        *(f"{data / 'reward.py'}:vowels", "--rollout.prompts-per-step", 4, "--eval.threshold", 0),
        *("--rollout.max-tokens", 4, "--eval.max-tokens", 12, "--eval.every", 2),
        *("--num-steps", 6, "--checkpoint.every", 2),
    ]


def test_a_run_ends_where_an_evaluation_reaches_stop_at(data, tmp_path):
    """Every answer counts as correct, so that `accuracy` is reached at once."""
    given = own_evaluation(data, tmp_path / "r")
    ended = fork("minirl.rl", [*given, "--stop-at", "accuracy", 1], tmp_path / "log", 200)
    assert ended.code == 0, ended.err
    said = [line for line in ended.err.splitlines() if "stop_at" in line]
    assert len(said) == 1 and "step 0: stop_at = accuracy 1 is reached" in said[0]
    stopped = Run(tmp_path / "r", given, ended)
    assert [row["step"] for row in stopped.rows("eval")] == [0] and stopped.rows("rl") == []
    summary = stopped.summary()
    assert summary["state"] == "finished"
    assert summary["accuracy_after_rl"] == summary["accuracy_before_rl"] == 1
    assert (tmp_path / "r" / "model" / "config.json").exists()


def test_evaluation_has_longer_answers_than_training(data, tmp_path):
    """Prompts are cut to their end, too."""
    given = own_evaluation(data, tmp_path / "r")
    given += ["--data.max-prompt-tokens", 4, "--data.too-long", "truncate_left"]
    given += ["--num-steps", 1, "--stop-at", "accuracy", 1, "reward", 9]
    ended = fork("minirl.rl", given, tmp_path / "log", 200)
    assert ended.code == 0, ended.err
    run = Run(tmp_path / "r", given, ended)
    assert [row["longest_answer"] for row in run.rows("rl")] == [4]
    assert all(4 < row["answer_tokens"] <= 12 for row in run.rows("eval"))
    assert [row["step"] for row in run.rows("eval")] == [0, 1]


# --------------------------------------------------------------------------------------------------
# the other switches


ASIDE = as_flags("""
    --num-steps 2 --rollout.prompts-per-step 8 --rollout.samples-per-prompt 8
    --algo.updates-per-step 2 --algo.kl-coef 0.05 --algo.clip-high 0.28 --algo.dual-clip 3
    --algo.aggregation sequence --rollout.tickets pull --policy.activation-checkpointing full
    --policy.lr-warmup-steps 0 --eval.every 0 --debug.check-refit --rollout.dump
""")


def test_two_ranks_share_an_engine(data, tmp_path):
    output = tmp_path / "out"
    given = [
        *as_flags(f"""
        --config {QUICKSTART} --output {output} --data.train {data}/train.jsonl
        --data.eval {data}/held_out.jsonl
    """),
        *ASIDE,
        *as_flags(f"""
        --reward.function {data}/reward.py:vowels --sft.num-steps 5
        --engine.tensor-parallel-size 2 --parallel.tensor 2
        --parallel.sequence
    """),
    ]
    ended = fork("minirl.rl", given, tmp_path, 300, world=2)
    assert ended.code == 0, ended.err
    rows = [row for row in read(output / "metrics.jsonl") if row["phase"] == "rl"]
    check_two_updates(rows)
    for step in (0, 1):
        leader, follower = (
            read(output / "rollouts" / f"step-{step}-rank-{rank}.jsonl") for rank in (0, 1)
        )
        assert not follower
        assert [(t["group"], t["episode"]) for t in leader] == [
            (g, e) for g in range(8 * step, 8 * step + 8) for e in range(8)
        ]
        assert {t["version"] for t in leader} == {2 * step}
        assert sum(t["reward"] for t in leader) / 64 == pytest.approx(rows[step]["reward"])
        assert sum(sum(t["sampled"]) for t in leader) / 64 == pytest.approx(
            rows[step]["answer_tokens"]
        )


def test_two_engines_pull_from_one_queue(data, tmp_path):
    """On the generated words of the quickstart, with every number of every update kept."""
    output = tmp_path / "out"
    words = "reasoning_gym:spell_backward?size=200&seed=3&min_word_len=3&max_word_len=6"
    given = [
        *as_flags(f"""
        --config {QUICKSTART} --output {output}
    """),
        *ASIDE,
        *as_flags(f"""
        --data.train {words} --data.held-out 16 --reward.function {data}/reward.py:vowels
        --sft.num-steps 0
    """),
    ]
    updates, groups = zip(*ranks(2, train_and_tell, [str(flag) for flag in given]), strict=True)
    assert updates[0] == updates[1]
    rows = [row for row in read(output / "metrics.jsonl") if row["phase"] == "rl"]
    check_two_updates(rows)
    (first, second), (third, fourth) = updates[0]
    assert abs(first["ref_kl"]) < 1e-5 < min(update["ref_kl"] for update in (second, third, fourth))
    assert (
        abs(first["policy_kl"]) < 1e-9 < second["policy_kl"]
        and abs(third["policy_kl"]) < 1e-9 < fourth["policy_kl"]
    )
    for step in (0, 1):
        assert sorted(groups[0][step] + groups[1][step]) == list(
            range(8 * step, 8 * step + 8)
        )  # each ticket went to one engine


def dtypes_of_auto(mesh, given: list[str], has_bfloat16: list[bool]) -> dict:
    """What a run computes in, and what is said of it, on CPUs of which some multiply bfloat16."""
    said: list[str] = []
    instructions = {
        "_is_avx512_bf16_supported": lambda: has_bfloat16[mesh.rank],
        "_is_amx_tile_supported": lambda: False,
    }
    with (
        mock.patch.multiple(torch.cpu, **instructions),
        mock.patch.object(inputs, "say", said.append),
    ):
        chosen = inputs.choose_dtype("auto", "engine.dtype", mesh)
        trainer = Trainer(parse_flags(RLConfig, given), mesh)
    dtypes = {str(t.dtype) for t in trainer.generation.engine.parameters().values()}
    of_run = (trainer.cfg.policy.dtype, trainer.cfg.critic.dtype, trainer.policy.cfg.dtype)
    trainer.generation.close()
    return {
        "chosen": {chosen, *of_run},
        "of engine": dtypes,
        "mismatch": trainer.mismatch.dtype,
        "said": said,
    }


@pytest.mark.parametrize(
    ("has_bfloat16", "dtype"),
    [([True, True], "bfloat16"), ([True, False], "float32"), ([False, False], "float32")],
)
def test_all_ranks_compute_in_the_dtype_that_all_cpus_have(tmp_path, has_bfloat16, dtype):
    given = ["--config", QUICKSTART, "--output", tmp_path / "out", "--policy.dtype", "auto"]
    given += ["--data.train", "reasoning_gym:spell_backward?size=40&seed=3"]
    given += ["--data.held-out", 8, "--sft.num-steps", 0]
    found = ranks(2, dtypes_of_auto, [str(flag) for flag in given], has_bfloat16)
    for rank, of_rank in enumerate(found):
        assert of_rank["chosen"] == {dtype} and of_rank["of engine"] == {f"torch.{dtype}"}
        assert of_rank["mismatch"] == dtype
        says = dtype == "float32" and rank == 0
        names = ["engine.dtype", "policy.dtype"] if says else []
        assert [line.split()[0] for line in of_rank["said"]] == names
        assert all("auto is float32" in line and "avx512_bf16" in line for line in of_rank["said"])


# A rank that torchrun starts has a resource tracker of its own, and a fork that of the tests.
OWN_TRACKER = """
from multiprocessing import resource_tracker
resource_tracker._resource_tracker._fd = None
"""


def test_killed_ranks_of_one_engine_leave_no_shared_memory(data, tmp_path):
    """Their segments have no name any more when they work, or Python's resource tracker, which
    outlives them, takes it away."""
    output = tmp_path / "out"
    (tmp_path / "own.py").write_text(OWN_TRACKER + EARNED_UNTRAINED)
    given = as_flags(f"""
        --config {QUICKSTART} --output {output} --data.train {data}/train.jsonl
        --data.held-out 8 --num-steps 1000 --sft.num-steps 0 --engine.tensor-parallel-size 2
        --reward.function {tmp_path}/own.py:vowels
    """)
    job = Job([Node("127.0.0.1", tmp_path)], "minirl.rl", [given], tmp_path)
    job.wait_for((output / "metrics.jsonl").exists, 200)
    ranks = job.agents[0].ranks()
    lines = [
        line
        for p in ranks.values()
        for line in Path(f"/proc/{p.pid}/maps").read_text().splitlines()
    ]
    segments = {
        line.split(maxsplit=5)[5].removesuffix(" (deleted)")
        for line in lines
        if "/dev/shm/" in line
    }
    # vLLM's build for AVX2 has no exchange by shared memory: what is left are Python's queues.
    exchanges = not any("_C_AVX2" in line for line in lines)
    assert len(segments) >= 2 and any("minirl-" in path for path in segments) is exchanges, segments
    ranks[0].kill()
    assert job.end(60).code == 1
    end = time.monotonic() + 10
    while any(Path(path).exists() for path in segments) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [path for path in segments if Path(path).exists()]


def check_two_updates(rows: list[dict]) -> None:
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if not isinstance(value, str)), (
            row
        )
        assert (
            0 < row["mismatch"] < 1e-5 and row["mismatch_max"] < 1e-4
        )  # of the policy before the updates, also in the second one
        assert (
            row["policy_kl"] > 0
            and 0 <= row["clip_fraction"] < 0.5
            and row["grad_norm"] > 0
            and row["time/annotate"] > 0
        )
    assert 0 < rows[0]["ref_kl"] < rows[1]["ref_kl"] < 1


def train_and_tell(mesh, given: list[str]) -> tuple[list[list[dict]], list[list[int]]]:
    updates, groups = [], []

    class Told(Trainer):
        def report(self, step, trajectories, minibatches, means):
            groups.append(sorted({t.group for t in trajectories}))
            super().report(step, trajectories, minibatches, means)

    trainer = Told(parse_flags(RLConfig, given), mesh)
    update = trainer.policy.update

    def tell(*args, **kwargs):
        updates.append(update(*args, **kwargs))
        return updates[-1]

    trainer.policy.update = tell
    trainer.train()
    return [updates[:2], updates[2:]], groups
