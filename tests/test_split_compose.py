"""What works where some ranks train and others generate: refits from any mesh of trainers to any
engine, and features of whole programs. In test_split.py is when the two sides meet."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import tiny
from harness import RankFailed, ranks
from minirl import split
from minirl.base.errors import UserError
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.config.rl import RefitConfig
from minirl.config.shared import EngineConfig
from minirl.engine.engine import RolloutEngine
from minirl.parallel.machines import check_on_one_machine
from minirl.refit import refit as refits
from minirl.refit.refit import Refit
from minirl.rollout import records
from minirl.train.policy import Policy
from minirl.view.trajectories import Table
from test_critic import export_with_head
from test_lora_program import PPO
from test_rollout import ENGINE, greedy, overwrite
from test_split import EXACT, behind_main, colocated_main, difference, rows_of, train

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks with an engine")

# --------------------------------------------------------------------------------------------------
# refits


def make_policy(folder, mesh, rank):
    cfg = PolicyConfig(model=str(folder), dtype="float32", lora=LoraConfig(rank=rank))
    return Policy(cfg, folder, mesh)


def change_adapters(policy):
    """Change the adapters in place, as an optimizer would."""
    with torch.no_grad():
        for p in policy.parameters().values():
            if p.requires_grad:
                p.add_(0.05)


def refit_program(mesh, a, b, tp, dtype, lora_rank):
    """Send two checkpoints' weights to the engines, each three times, or adapters that change."""
    settings = RefitConfig(bucket_mb=1)
    if mesh.side == "trainers":
        policy = make_policy(a, mesh, lora_rank)
        refit = Refit(
            settings,
            policy.shards(),
            policy.parts(),
            None,
            mesh=mesh,
            read=policy.merged,
            check=True,
        )
        refit()  # It raises if one element differs from a full gather.
        for folder in (b, a, b):
            if lora_rank:
                change_adapters(policy)
            else:
                overwrite(policy, folder)
            refit()
        refit.wait()
        return {"peak": refit.peak_bytes}
    cfg = EngineConfig(**ENGINE | {"tensor_parallel_size": tp})
    engine = RolloutEngine(cfg, a, mesh, dtype=dtype)
    refit = Refit(settings, {}, {}, engine, check=True)
    for p in engine.parameters().values():
        p.fill_(torch.nan)
    found = []
    for _ in range(4):
        engine.change_weights(refit, keeps_cache=False)
        found.append(greedy(engine))
    fresh = RolloutEngine(cfg, b, mesh, dtype=dtype, load_weights=True)
    num_padding = sum(engine.padding().values())
    itemsize = getattr(torch, dtype).itemsize
    return {
        "found": found,
        "fresh": greedy(fresh),
        "received": refit.bytes_received,
        "engine": sum(p.nbytes for p in engine.parameters().values()) - num_padding * itemsize,
    }


REFITS = {
    "1 + 1": (1, 1, 1, "qwen2", {}, "bfloat16"),
    "2 + 1, experts": (2, 1, 1, "qwen3_moe", {"experts": 2}, "float32"),
    "2 + 1, tensor": (2, 1, 1, "qwen3", {"tensor": 2}, "float32"),
    "1 + 2, an engine, adapters": (1, 2, 2, "qwen3", {}, "float32"),
    "2 + 2, an engine, copies": (2, 2, 2, "qwen3_moe", {"replicate": 2}, "float32"),
}


@pytest.mark.parametrize("name", REFITS)
def test_a_refit_across_sides_equals_a_full_gather(tmp_path, name):
    num_trainers, generators, tp, family, mesh, dtype = REFITS[name]
    lora_rank = 4 if "adapters" in name else 0
    a, b = (tiny.make(tmp_path / f"{seed}", family, seed=seed) for seed in (0, 1))
    results = ranks(
        num_trainers + generators,
        refit_program,
        a,
        b,
        tp,
        dtype,
        lora_rank,
        parallel=ParallelConfig(generators=generators, **mesh),
    )
    for engine in results[num_trainers:]:
        before, second, third, fourth = engine["found"]
        if lora_rank:
            assert before != second != third != fourth
        else:
            assert [second, third, fourth] == [engine["fresh"], before, engine["fresh"]]
        assert engine["fresh"] != before
        assert engine["received"] == engine["engine"]


def bounded_program(mesh, folder, most):
    """Send weights with so many bytes on their way; return those of each bucket, and of all."""
    settings = RefitConfig(bucket_mb=1)
    if mesh.side == "generators":
        engine = RolloutEngine(EngineConfig(**ENGINE), folder, mesh, dtype="float32")
        Refit(settings, {}, {}, engine, check=True)()
        return None
    policy = make_policy(folder, mesh, 0)
    sizes: list[int] = []
    on_the_way: list[int] = []
    with mock.patch.object(refits, "MOST_IN_FLIGHT", most):
        refit = Refit(settings, policy.shards(), policy.parts(), None, mesh=mesh, check=True)
        start = refit._start

        def counted(*args):
            flight = start(*args)
            sizes.append(flight.send_buffer.nbytes)
            on_the_way.append(sizes[-1] + sum(each.send_buffer.nbytes for each in refit._sending))
            return flight

        refit._start = counted
        refit()  # It raises if one element differs from a full gather.
    refit.wait()
    assert max(on_the_way) <= refit.peak_bytes
    return sizes, on_the_way


@pytest.mark.parametrize("most", [4 * 2**30, 200_000, 1])
def test_a_trainer_packs_little_that_is_not_sent_yet(tmp_path, most):
    folder = tiny.make(tmp_path / "model", "qwen3", seed=0)
    parallel = ParallelConfig(generators=1)
    (sizes, on_the_way), _ = ranks(2, bounded_program, folder, most, parallel=parallel)
    assert len(sizes) > 3
    if most > sum(sizes):
        assert on_the_way == np.cumsum(sizes).tolist()
    else:
        assert max(on_the_way) < most + max(sizes) < sum(sizes)


def test_engines_of_ranks_that_only_generate_begin_behind_the_trainers():
    """Of 5 trainers and an engine of 2 ranks, as of which machine each rank is."""

    def check(hosts):
        world = SimpleNamespace(world_size=7, gather=lambda _: hosts)
        check_on_one_machine(2, "engine.tensor_parallel_size", world, 5)

    check(["a"] * 5 + ["b"] * 2)
    with pytest.raises(UserError, match=r"puts ranks of a \(rank 5\), b \(rank 6\) together"):
        check(["a"] * 6 + ["b"])


# --------------------------------------------------------------------------------------------------
# programs

USER = """
import openai
import torch
from minirl.algo.advantages import estimator
from minirl.envs import Agent, Env, Result

def letters(prompt, completion, row):
    return float(len(completion) > 4 and sum(map(ord, completion)) % 3 > 0)

def score(text):
    return sum(map(ord, text)) % 7 / 7

class Talk(Env):
    def reset(self, row):
        self.is_long = int(row["answer"]) % 3 == 0
        return row["prompt"]

    def step(self, state):
        return Result(
            observation="go on",
            reward=score(state.answer),
            done=state.turn == (3 if self.is_long else 1),
            sampling={"max_tokens": 10 if self.is_long else 2},
        )

CLIENT = openai.OpenAI(base_url="http://session", api_key="session", max_retries=0)

class Caller(Agent):
    graded = True

    def run(self, row, session):
        client = CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
        chat = [{"role": "user", "content": row["prompt"]}]
        for _ in range(2):
            reply = client.chat.completions.create(model=session.model, messages=chat)
            said = reply.choices[0].message.content
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
        return Result(reward=score(said))

@estimator(by_token=True)
def scaled(batch, rewards, cfg):
    return rewards * 0.5

def plain(batch, logprobs, entropy, cfg):
    ratio = torch.exp(logprobs - batch.old_logprobs)
    return -ratio * batch.advantages, {"ratio": ratio.detach()}
"""
SMALL = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two models, a judge, rows with and without pictures, and what users write."""
    folder = tmp_path_factory.mktemp("compose")
    tiny.make(folder / "dense", "qwen3", **SMALL)
    tiny.make(folder / "teacher", "qwen3", seed=1, **SMALL)
    tiny.make(folder / "mixture", "qwen3_moe", hidden_size=64)
    tiny.make(folder / "sees", "qwen2_vl")
    tiny.make(folder / "wide", "qwen3")
    ranks(1, export_with_head, folder / "wide", folder / "judge")
    (folder / "user.py").write_text(USER)
    rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(36)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    images = []
    for n in range(12):
        image = tiny.picture(28 + 28 * (n % 3), 56)
        images.append({"prompt": f"which {n}?", "image": image, "answer": str(n)})
    (folder / "images.jsonl").write_text("\n".join(map(json.dumps, images)))
    # Each fills a block of keys.
    large = [row | {"image": tiny.picture(224, 224 + 28 * n)} for n, row in enumerate(images)]
    (folder / "large.jsonl").write_text("\n".join(map(json.dumps, large)))
    return folder


def flags_of(folder, output, settings):
    given = {
        "policy.model": "HERE/dense",
        "policy.dtype": "float32",
        "policy.lr": 1e-2,
        "data.train": "HERE/rows.jsonl",
        "data.held_out": 4,
        "data.max_prompt_tokens": 24,
        "reward.function": "HERE/user.py:letters",
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens": 8,
        "engine.kv_cache_gb": 0.05,
        "tokens_per_rank": 128,
        "eval.every": 2,
        "num_steps": 3,
        "output": output,
    }
    flags = []
    for name, value in (given | settings).items():
        flags.append(f"--{name}")
        if value is not True:
            values = value if isinstance(value, tuple) else [value]
            flags += [str(x).replace("HERE", str(folder)) for x in values]
    return flags


STREAMED = {
    "adapters, an environment, a curriculum, methods of a file": {
        "policy.lora.rank": 4,
        "algo.kl_coef": 0.1,
        "algo.advantage": "HERE/user.py:scaled",
        "algo.loss": "HERE/user.py:plain",
        "rollout.curriculum_floor": 0.1,
        "env.name": "HERE/user.py:Talk",
        "env.max_turns": 4,
        "engine.max_model_len": 96,
        "eval.threshold": 0.5,
    },
    "a warm start, a reference that moves, dynamic sampling": {
        "sft.num_steps": 1,
        "sft.batch_size": 4,
        "algo.kl_coef": 0.1,
        "ref.every": 2,
        "reward.clip": 0.9,
        "rollout.extra_prompts": 3,
        "rollout.dump": True,
    },
    "a mixture with routes of the engine": {
        "policy.model": "HERE/mixture",
        "algo.router_replay": True,
    },
    "a judge, epochs": {
        "policy.model": "HERE/wide",
        "reward.model": "HERE/judge",
        "num_steps": 0,
        "num_epochs": 0.3,
    },
    "a teacher": {
        "algo.advantage": "on_policy_distill",
        "ref.model": "HERE/teacher",
        "rollout.samples_per_prompt": 1,
    },
}


@pytest.mark.parametrize("name", STREAMED)
def test_stream_is_the_colocated_run(folder, tmp_path, name):
    """In every row of its metrics, with what those features add to them. (Prompts that answers
    share are computed once in each micro-batch, and parts have more of those.)"""
    settings = EXACT | STREAMED[name]
    expected = train(colocated_main, 1, flags_of(folder, tmp_path / "one", settings))
    settings |= {"rollout.overlap": "stream", "debug.check_refit": True}
    run = train(split.main, 2, flags_of(folder, tmp_path / "two", settings), 1)
    is_exact = "mixture" not in name  # The library's routers compute in float32.
    assert difference(run, expected) < (1e-11 if is_exact else 1e-6)
    found, rows = (rows_of(one, without=("total/trained",)) for one in (run, expected))
    assert len(found) == len(rows)
    for row, other in zip(found, rows, strict=True):
        assert row.pop("phase") == other.pop("phase")
        assert row == pytest.approx(other, rel=1e-6, abs=1e-9 if is_exact else 1e-6)
    if "rollout.dump" in settings:
        assert is_same_table(run.folder, expected.folder)


def table_of(run):
    table = Table(run / "rollouts")
    table.refresh()
    return table.rows


def is_same_table(run, other):
    """Whether the pages of two runs show the same trajectories, all of them trained on."""
    rows, others = table_of(run), table_of(other)
    assert (rows["trained_rank"] >= 0).all()
    for name in ("step", "group", "episode", "reward", "shaped", "num_tokens", "staleness"):
        assert (rows[name] == others[name]).all(), name
    return np.allclose(rows["advantage"], others["advantage"], atol=1e-6)


LOCKSTEP = {
    "a critic on a base in four bits, two updates a step": PPO
    | {"policy.lora.rank": 4, "algo.kl_coef": 0.1, "algo.updates_per_step": 2},
    "pictures": {
        "policy.model": "HERE/sees",
        "data.train": "HERE/images.jsonl",
        "data.max_prompt_tokens": 128,
        "tokens_per_rank": 256,
        "algo.num_epochs": 2,
    },
}


@pytest.mark.parametrize("name", LOCKSTEP)
def test_lockstep_samples_one_step_behind(folder, tmp_path, name):
    settings = LOCKSTEP[name]
    expected = train(behind_main, 1, flags_of(folder, tmp_path / "one", settings))
    run = train(split.main, 2, flags_of(folder, tmp_path / "two", settings), 1)
    assert difference(run, expected) == 0
    assert rows_of(run) == rows_of(expected)


# Weights that do not change have the same log-probs whenever an answer is drawn, if all that the
# engine keeps of them is computed again.
FIXED = {
    "rollout.overlap": "inflight",
    "policy.lr": 0,
    "rollout.max_tokens": 40,
    "tokens_per_rank": 512,
    "num_steps": 4,
    "eval.every": 0,
    "rollout.dump": True,
    "engine.max_num_seqs": 12,
    "algo.correction.preset": "off",
}
INFLIGHT = {
    "pictures": {
        "policy.model": "HERE/sees",
        "data.train": "HERE/large.jsonl",
        "data.max_prompt_tokens": 176,
    },
    "routers that are replayed, an environment": {
        "policy.model": "HERE/mixture",
        "algo.router_replay": True,
        "env.name": "HERE/user.py:Talk",
        "env.max_turns": 4,
        "engine.max_model_len": 160,
    },
    "an agent": {
        "env.name": "HERE/user.py:Caller",
        "env.max_turns": 2,
        "rollout.max_tokens": 20,
    },
    "adapters, keys that are kept": {"policy.lora.rank": 4, "rollout.kv": "keep"},
}


def slowly_main(cfg, mesh):
    """An answer takes longer than a step of training, on any machine."""
    step = RolloutEngine.step

    def step_slowly(engine):
        time.sleep(0.01)
        return step(engine)

    with mock.patch.object(RolloutEngine, "step", step_slowly):
        split.main(cfg, mesh)


@pytest.mark.parametrize("name", INFLIGHT)
def test_inflight_answers_have_the_trainers_logprobs(folder, tmp_path, name):
    settings = FIXED | INFLIGHT[name]
    run = train(slowly_main, 2, flags_of(folder, tmp_path / "run", settings), 1)
    steps = [row for row in rows_of(run) if row["phase"] == "rl"]
    assert len(steps) == settings["num_steps"]
    assert all(0 < row["mismatch_max"] < 2e-5 for row in steps)
    assert all(row["extra_prompts"] == 0 for row in steps)
    if "router" in name:
        assert all(row["router_replayed"] == 1 for row in steps)
    trajectories = []
    for file in (run.folder / "rollouts").glob("*.jsonl"):
        trajectories += records.read_file(file)
    assert len({t.group for t in trajectories}) == 4 * 4
    versions = [t.versions[t.sampled] for t in trajectories]
    assert any(len(set(v.tolist())) > 1 for v in versions), "no refit came under an answer"
    assert (table_of(run.folder)["trained_rank"] >= 0).all()


MESHES = {
    "2 + 1, context": (2, 1, {"parallel.context": 2}),
    "2 + 1, copies": (2, 1, {"parallel.replicate": 2}),
    "2 + 2, tensor and sequence, an engine": (
        2,
        2,
        {
            "parallel.tensor": 2,
            "parallel.sequence": True,
            "engine.tensor_parallel_size": 2,
        },
    ),
}


@pytest.fixture(scope="module")
def one_and_one(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("mesh") / "run"
    return train(split.main, 2, flags_of(folder, output, EXACT | ON_MESHES), 1)


ON_MESHES = {"rollout.overlap": "stream", "rollout.extra_prompts": 3, "rollout.dump": True}


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_of_trainers_is_one(folder, one_and_one, tmp_path, name):
    trainers, generators, mesh = MESHES[name]
    flags = flags_of(folder, tmp_path / "run", EXACT | ON_MESHES | mesh)
    run = train(split.main, trainers + generators, flags, generators)
    assert difference(run, one_and_one) < 1e-11
    assert is_same_table(run.folder, one_and_one.folder)


def test_experts_are_divided_over_trainers(folder, tmp_path):
    """Which are on one node, though a node has more ranks."""
    settings = {"policy.model": "HERE/mixture", "algo.router_replay": True, "parallel.experts": 2}
    run = train(split.main, 3, flags_of(folder, tmp_path / "run", settings | FIXED), 1)
    steps = [row for row in rows_of(run) if row["phase"] == "rl"]
    assert all(0 < row["mismatch_max"] < 2e-5 for row in steps)


def test_a_run_ends_where_an_evaluation_reaches_stop_at(folder, tmp_path):
    """The weights at the end, which are a step later, are evaluated once."""
    settings = {"stop_at": ("accuracy", 0), "eval.every": 1, "rollout.dump": True}
    run = train(split.main, 2, flags_of(folder, tmp_path / "run", settings), 1)
    rows = [(row["phase"], row["step"]) for row in rows_of(run)]
    assert rows == [("eval", 0), ("eval", 1), ("rl", 0)]
    # Another batch is drawn by then, and is of no step.
    assert {path.name[:7] for path in (run.folder / "rollouts").glob("step-*")} == {"step-0-"}
    assert json.loads((run.folder / "summary.json").read_text())["discarded_tokens"] > 0


def test_keys_of_pictures_are_not_kept(folder, tmp_path):
    settings = FIXED | INFLIGHT["pictures"] | {"rollout.kv": "keep"}
    with pytest.raises(RankFailed, match="rollout.kv = keep: .* reads images"):
        train(split.main, 2, flags_of(folder, tmp_path / "run", settings), 1)
