"""PPO with a critic: GAE and the value loss are their formulas, every mesh is one process, a run
resumes bitwise, and PPO learns."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import tiny
from harness import RankFailed, ranks
from minirl import rl
from minirl.algo import advantages, losses, token_advantages
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack, unpack
from minirl.checkpoint import exporting
from minirl.checkpoint.state import restore
from minirl.config.parse import parse_flags
from minirl.config.policy import PolicyConfig
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory
from programs import as_flags
from test_gradients import exact_norm, worst
from test_preference import MESHES, by_difference, random, same, value_and_gradient

# --------------------------------------------------------------------------------------------------
# formulas


def test_value_loss_is_its_formula():
    v, old, returns = random(3, 60)
    for clip in (0.0, 0.5):

        def formula(v, clip=clip):
            loss = (v - returns) ** 2
            return (
                np.maximum(loss, (np.clip(v, old - clip, old + clip) - returns) ** 2)
                if clip
                else loss
            ) / 2

        same(
            value_and_gradient(
                lambda v, clip=clip: losses.value_clip(
                    v, torch.tensor(old), torch.tensor(returns), clip
                ),
                v,
            ),
            by_difference(formula, v),
        )


def turns(num: int) -> list[Trajectory]:
    """Ragged, some with several turns: what an environment said in between is not sampled. Siblings
    share prompts."""
    rng, out = np.random.default_rng(11), []
    for i in range(num):
        prompt = np.random.default_rng(i // 2).integers(5, 250, 1 + i // 2 * 3 % 17)
        spans = [(True, rng.integers(1, 9))] + [
            (k % 2 == 1, rng.integers(1, 9)) for k in range(2 * (i % 3))
        ]
        sampled = np.concatenate([np.zeros(len(prompt), bool), *(np.full(n, s) for s, n in spans)])
        tokens = np.concatenate([prompt, rng.integers(5, 250, len(sampled) - len(prompt))]).astype(
            np.int32
        )
        out.append(
            Trajectory(
                tokens=tokens,
                sampled=sampled,
                logprobs=(rng.normal(-3, 0.3, len(tokens)) * sampled).astype(np.float32),
                group=i // 2,
                episode=i % 2,
                reward=float(rng.normal()),
            )
        )
    return out


def gae_by_hand(rewards, values, gamma, lam):
    """Over the sampled tokens of one trajectory, from the last to the first."""
    out, later = np.zeros(len(values)), 0.0
    for t in reversed(range(len(values))):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        later = rewards[t] + gamma * after - values[t] + gamma * lam * later
        out[t] = later
    return out


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_gae_is_its_recursion_over_sampled_tokens(gamma, lam):
    rows = turns(9)
    batch = pack(rows, torch.device("cpu"))
    batch.values = torch.tensor(random(len(batch.inputs))) * batch.loss_mask
    rewards = torch.tensor(random(len(batch.inputs), seed=4)) * batch.loss_mask
    got = token_advantages.gae(batch, rewards, AlgoConfig(gamma=gamma, gae_lambda=lam))
    for t, a, ret, r, v in zip(
        rows,
        *(unpack(x, rows, batch) for x in (got, batch.returns, rewards, batch.values)),
        strict=True,
    ):
        wanted = gae_by_hand(r[t.sampled], v[t.sampled], gamma, lam)
        np.testing.assert_allclose(a[t.sampled], wanted, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(ret[t.sampled], wanted + v[t.sampled], rtol=1e-12, atol=1e-12)
        assert not a[~t.sampled].any() and not ret[~t.sampled].any()
        if lam == 1.0 == gamma:
            np.testing.assert_allclose(
                ret[t.sampled], np.cumsum(r[t.sampled][::-1])[::-1], atol=1e-12
            )  # the rewards to come


# --------------------------------------------------------------------------------------------------
# every mesh


def step(mesh, folder, budget, sequence):
    """Values, GAE with a KL in the reward, whitening, a step of the critic."""
    Qwen3RMSNorm.forward = exact_norm
    critic = Policy(
        PolicyConfig(dtype="float64", max_grad_norm=0.0),
        folder,
        mesh,
        score=True,
        sequence_parallel=sequence,
    )
    policy = Policy(
        PolicyConfig(dtype="float64"), folder, mesh, trainable=False, sequence_parallel=sequence
    )
    with torch.no_grad():
        head = critic.shards()["score.weight"]
        whole = torch.linspace(-1, 1, head.numel(), dtype=head.dtype).reshape(head.shape)
        head.copy_(
            torch.distributed.tensor.distribute_tensor(whole, head.device_mesh, head.placements)
        )
    grads, take = {}, critic.optimizer.step
    critic.optimizer.step = lambda: (
        grads.update({n: p.grad.full_tensor() for n, p in critic.shards().items()}),
        take(),
    )
    (micros,) = exchange(turns(12)[mesh.rank :: mesh.world_size], mesh, budget)
    batches = [pack(m, mesh.device, layout=critic.layout) for m in micros]
    critic.annotate([batches], "values")
    policy.annotate([batches], "old_logprobs")
    for batch in batches:
        batch.ref_logprobs = batch.old_logprobs + 0.1 * batch.loss_mask
    algo = AlgoConfig(
        advantage="gae", gamma=0.98, gae_lambda=0.9, kl_coef=0.1, kl_in="reward", kl_estimator="k1"
    )
    advantages.assign(
        batches,
        advantages.find("gae"),
        algo,
        dtype=policy.output_dtype,
        sum_over_ranks=mesh.data_sums,
        max_over_ranks=mesh.maxima,
        gather_rows=mesh.gather_rows,
    )
    for (
        batch
    ) in batches:  # as if updates had moved it from where it made the advantages: some are clipped
        batch.values = batch.values + 0.15 * batch.loss_mask * torch.where(
            batch.advantages > 0, 2.0, -1.0
        )
    metrics = critic.update(batches, losses.value(0.2), lr=1e-3)
    found = {
        name: {
            (t.group, t.episode): v
            for b, m in zip(batches, micros, strict=True)
            for t, v in zip(m, unpack(vars(b)[name], m, b), strict=True)
        }
        for name in ("advantages", "returns")
    }
    return {"grads": grads, "metrics": metrics, **found}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tiny.make(tmp_path_factory.mktemp("models") / "model", dtype=torch.float64)
    return folder, ranks(1, step, folder, 1000, False)[0]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_is_one_process(one_process, mesh):
    folder, wanted = one_process
    world, parallel, sequence = MESHES[mesh]
    assert 0.1 < wanted["metrics"]["clip_fraction"] < 0.9 and wanted["metrics"]["grad_norm"] > 0
    results = ranks(world, step, folder, 60 // parallel.context, sequence, parallel=parallel)
    assert {key for r in results for key in r["returns"]} == wanted["returns"].keys()
    for result in results:
        assert worst(result["grads"], wanted["grads"]) < 1e-12
        for name in ("advantages", "returns"):
            for key, value in result[name].items():
                np.testing.assert_allclose(value, wanted[name][key], rtol=1e-11, atol=1e-11)
        for name, value in wanted["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, rel=1e-11, abs=1e-13), name


# --------------------------------------------------------------------------------------------------
# the program


def run(mesh, given):
    rl.Trainer.main(parse_flags(RLConfig, [str(x) for x in given]), mesh)


def metrics_of(output):
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            k: v
            for k, v in row.items()
            if not k.startswith(("time/", "tokens_per_second", "host_gib/"))
        }
        for row in rows
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise repeatable on CPU only")
def test_resumed_run_is_the_uninterrupted_run(tmp_path):
    """Two ranks, two updates a step, the KL in the reward; the critic begins as a reward model and
    learns a step alone."""
    data, output, again = tmp_path / "rows.jsonl", tmp_path / "run", tmp_path / "again"
    data.write_text(
        "".join(json.dumps({"prompt": f"say {n}", "answer": str(n)}) + "\n" for n in range(24))
    )
    tiny.make(tmp_path / "model")
    ranks(1, export_with_head, tmp_path / "model", tmp_path / "reward_model")
    given = [
        *as_flags(f"""
        --output {output} --policy.model {tmp_path}/model --policy.dtype float32
        --policy.lr 1e-3 --critic.model {tmp_path}/reward_model --critic.dtype float32
        --critic.lr 1e-3 --critic.warmup-steps 1 --critic.value-clip 0.05 --algo.advantage gae
        --algo.kl-coef 0.1 --algo.kl-in reward --algo.updates-per-step 2 --data.train {data}
        --data.held-out 4 --data.max-prompt-tokens 24 --rollout.max-tokens 8
        --rollout.prompts-per-step 8 --rollout.samples-per-prompt 1 --tokens-per-rank 64
        --num-steps 4 --eval.every 0 --checkpoint.every 2 --engine.kv-cache-gb 0.05
        --reward.function
    """),
        f"{tmp_path / 'reward.py'}:count",
    ]
    (tmp_path / "reward.py").write_text(
        "def count(prompt, completion, row):\n    return float(len(completion))\n"
    )
    ranks(2, run, given)
    rows = [row for row in metrics_of(output) if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert (
        "policy_kl" not in rows[0] and "policy_kl" in rows[1] and rows[0]["critic_grad_norm"] > 0
    )  # the first step is the critic's
    assert (
        rows[-1]["critic_clip_fraction"] > 0 and rows[-1]["critic_value"] != rows[0]["critic_value"]
    )
    saved = json.loads((output / "checkpoints" / "step-4" / "progress.json").read_text())
    assert (saved["num_updates"], saved["critic"]["num_updates"]) == (6, 8)
    shutil.copytree(output, again)
    shutil.rmtree(again / "checkpoints" / "step-4")
    shutil.rmtree(again / "model")
    ranks(2, run, ["--config", output / "config.yaml", "--output", again, "--resume"])
    assert metrics_of(again) == metrics_of(output)
    assert (again / "model" / "model.safetensors").read_bytes() == (
        output / "model" / "model.safetensors"
    ).read_bytes()
    tiny.make(tmp_path / "small", num_hidden_layers=1)
    for name, folder, says in (
        ("critic", "small", "step-4 is of another model .* than critic.model = .*small"),
        ("judge", "model", "step-4 has no judge"),
    ):
        with pytest.raises(RankFailed, match=f"resume: .*{says}"):
            ranks(1, load_other, output / "checkpoints" / "step-4", name, tmp_path / folder)


def load_other(mesh, saved, name, folder):
    restore(saved, Policy(PolicyConfig(), folder, mesh, score=True), name)


def export_with_head(mesh, folder, output):
    """A reward model whose scores are not all 0."""
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh, score=True)
    with torch.no_grad():
        policy.shards()["score.weight"].to_local().copy_(torch.linspace(-0.1, 0.1, 128)[None])
    exporting.export(policy, output)
