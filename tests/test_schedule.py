"""Learning rates beside what the words of each schedule say; passes over rollouts and prompts."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tiny
from harness import ranks
from minirl import rl
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack
from minirl.config.parse import load_config, parse_flags
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.config.supervised import SFTConfig
from minirl.config.validate import resolve_lengths, validate_rl, validate_supervised
from minirl.run.inputs import num_rl_steps
from minirl.train.policy import Policy
from minirl.train.updates import learning_rate, minibatch_order, update_in_passes
from test_critic import metrics_of
from test_gradients import exact_norm, trajectories, worst

# --------------------------------------------------------------------------------------------------
# learning rates


def obvious(cfg: PolicyConfig, num_steps: int) -> list[float]:
    """The rates of a run, as points on a drawing joined by lines or half a cosine."""
    warmup = cfg.lr_warmup_steps
    if cfg.lr_warmup_ratio:
        warmup = math.ceil(cfg.lr_warmup_ratio * num_steps)
    rising = list(np.linspace(0, cfg.lr, warmup + 1)[1:])
    low = cfg.lr * cfg.lr_min_ratio
    rest = max(0, num_steps - warmup)
    if cfg.lr_schedule == "constant":
        return rising + [cfg.lr] * rest
    if cfg.lr_schedule == "linear":
        return rising + list(np.linspace(cfg.lr, low, rest + 1)[:-1])
    if cfg.lr_schedule == "cosine":
        angles = np.linspace(0, np.pi, rest + 1)[:-1]
        return rising + list(low + (cfg.lr - low) * (1 + np.cos(angles)) / 2)
    decay = min(rest, math.ceil(cfg.lr_decay_ratio * num_steps))
    falling = list(np.linspace(cfg.lr, low, decay + 1)[:-1])
    return rising + [cfg.lr] * (rest - decay) + falling


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [{}, {"lr_warmup_steps": 4}, {"lr_warmup_ratio": 0.13}])
@pytest.mark.parametrize("num_steps", [1, 7, 40])
def test_every_schedule_is_its_drawing(schedule, warmup, num_steps):
    for low in (0.0, 0.1, 1.0):
        cfg = PolicyConfig(
            lr=3.0, lr_schedule=schedule, lr_min_ratio=low, lr_decay_ratio=0.3, **warmup
        )
        rates = [learning_rate(cfg, step, num_steps) for step in range(num_steps)]
        # A warm-up that is longer than the run is cut off.
        np.testing.assert_allclose(rates, obvious(cfg, num_steps)[:num_steps], rtol=1e-12)


def test_schedules_end_where_they_should():
    cfg = PolicyConfig(lr=1.0, lr_schedule="wsd", lr_warmup_ratio=0.1, lr_decay_ratio=0.2)
    rates = [learning_rate(cfg, step, 100) for step in range(100)]
    assert rates[9] == rates[79] == rates[80] == 1.0
    assert rates[81] < 1.0
    assert learning_rate(cfg, 100, 100) == pytest.approx(0.1)
    # A resumed run that was longer before.
    assert learning_rate(cfg, 150, 100) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--policy.lr-warmup-steps", "3", "--policy.lr-warmup-ratio", "0.1"],
            r"policy.lr_warmup_steps = 3, policy.lr_warmup_ratio = 0.1: both say",
        ),
        (
            ["--critic.lr-warmup-steps", "3", "--critic.lr-warmup-ratio", "0.1"],
            r"critic.lr_warmup_steps = 3, critic.lr_warmup_ratio = 0.1: both say",
        ),
        (
            [
                "--policy.lr-schedule",
                "wsd",
                "--policy.lr-warmup-ratio",
                "0.6",
                "--policy.lr-decay-ratio",
                "0.5",
            ],
            r"policy.lr_warmup_ratio = 0.6, policy.lr_decay_ratio = 0.5: they are more than all",
        ),
        (
            ["--num-steps", "7", "--num-epochs", "2"],
            r"num_steps = 7, num_epochs = 2.0: both say when the run ends; set one of them to 0",
        ),
        (
            ["--num-epochs", "2", "--rollout.replay", "there"],
            r"num_epochs = 2.0, rollout.replay = 'there': a replay draws no prompts",
        ),
    ],
)
def test_what_is_said_twice_is_refused(flags, message):
    cfg = parse_flags(RLConfig, ["--policy.model", "scratch", "--data.train", "a.jsonl", *flags])
    resolve_lengths(cfg)
    with pytest.raises(UserError, match=message):
        validate_rl(cfg, 1)


def test_supervised_schedules_are_checked_too():
    cfg = SFTConfig(policy=PolicyConfig(lr_warmup_steps=3, lr_warmup_ratio=0.1))
    cfg.data.train = "a.jsonl"
    with pytest.raises(UserError, match="both say how long the warm-up is"):
        validate_supervised(cfg, 1)


def test_adam_s_eps_reaches_the_optimizer(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama")
    assert ranks(1, eps_of, folder, 1e-3) == [[1e-3, 1e-3]]


def eps_of(mesh, folder, eps):
    policy = Policy(PolicyConfig(adam_eps=eps), folder, mesh)
    return [group["eps"] for group in policy.optimizer.parts[0].param_groups]


# --------------------------------------------------------------------------------------------------
# the number of steps


def test_passes_over_prompts_are_steps():
    cfg = RLConfig(num_epochs=2.0)
    cfg.rollout.prompts_per_step = 16
    assert num_rl_steps(cfg, 160) == 20
    assert num_rl_steps(cfg, 161) == 21  # the last step goes into the third pass
    assert num_rl_steps(cfg, 1) == 1
    cfg.num_epochs = 0.1
    cfg.rollout.prompts_per_step = 1
    assert num_rl_steps(cfg, 30) == 3
    assert num_rl_steps(RLConfig(num_steps=7), 160) == 7
    assert num_rl_steps(RLConfig(num_steps=0), 160) == 0


def test_the_critic_s_warm_up_is_checked_once_the_rows_are_known():
    cfg = RLConfig(num_epochs=1.0)
    cfg.critic.warmup_steps = 10
    assert num_rl_steps(cfg, 176) == 11
    with pytest.raises(UserError, match="the policy none of the run.s 10 steps"):
        num_rl_steps(cfg, 160)


# --------------------------------------------------------------------------------------------------
# passes over a batch of rollouts


def test_each_pass_takes_every_minibatch_once_in_an_order_of_its_own():
    assert minibatch_order(6, seed=1, step=5, epoch=0) == [0, 1, 2, 3, 4, 5]
    orders = {
        (seed, step, epoch): tuple(minibatch_order(6, seed=seed, step=step, epoch=epoch))
        for seed in (1, 2)
        for step in (0, 1)
        for epoch in (1, 2)
    }
    assert all(sorted(order) == [0, 1, 2, 3, 4, 5] for order in orders.values())
    assert len(set(orders.values())) == len(orders)


def passes(mesh, folder, num_epochs, num_minibatches):
    """Two steps of PPO on recorded trajectories. Also what each update was of."""
    LlamaRMSNorm.forward = exact_norm
    algo = AlgoConfig(updates_per_step=num_minibatches, num_epochs=num_epochs, clip_high=0.02)
    cfg = RLConfig(algo=algo, seed=4)
    settings = PolicyConfig(
        dtype="float64", max_grad_norm=0.0, lr=1e-3, lr_schedule="linear", lr_min_ratio=0.0
    )
    policy = Policy(settings, folder, mesh)
    updated = []
    update = policy.update

    def note(minibatch, loss, lr):
        own = [int(rows) for batch in minibatch for rows in batch.sequences.loss_tokens.tolist()]
        num_tokens = round(mesh.data_sums(torch.tensor(sum(own), dtype=torch.float64)).item())
        updated.append((num_tokens, round(lr * 1e6)))
        return update(minibatch, loss, lr)

    policy.update = note
    metrics = []
    for step in range(2):
        own = trajectories()[mesh.rank :: mesh.world_size]
        minibatches = []
        for micros in exchange(own, mesh, 100, num_minibatches):
            batches = [pack(m, mesh.device, layout=policy.layout) for m in micros]
            for batch in batches:
                batch.advantages = batch.turn_rewards
            minibatches.append(batches)
        policy.annotate(minibatches, "old_logprobs")
        loss = losses.policy(algo, 20)
        metrics.append(update_in_passes(policy, minibatches, loss, cfg, step=step, num_steps=2))
    return {
        "params": {n: p.full_tensor() for n, p in policy.shards().items()},
        "updated": updated,
        "metrics": metrics,
        "num_updates": policy.num_updates,
    }


def test_passes_do_not_depend_on_the_ranks(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    (expected,) = ranks(1, passes, folder, 3, 3)
    assert expected["num_updates"] == 2 * 3 * 3
    assert [lr for _, lr in expected["updated"]] == [
        round(1000 * (1 - n / 18)) for n in range(18)
    ]  # the schedule counts all updates
    by_pass = [[size for size, _ in expected["updated"][n : n + 3]] for n in range(0, 18, 3)]
    assert all(sorted(sizes) == sorted(by_pass[0]) for sizes in by_pass)
    assert len(set(by_pass[0])) == 3
    assert by_pass[0] == by_pass[3]
    assert any(sizes != by_pass[0] for sizes in by_pass)
    # Ratios are to the policy before the first update of the step.
    assert expected["metrics"][0]["clip_fraction"] > 0
    for world, parallel in ((2, ParallelConfig()), (2, ParallelConfig(tensor=2))):
        for result in ranks(world, passes, folder, 3, 3, parallel=parallel):
            assert result["updated"] == expected["updated"]
            assert worst(result["params"], expected["params"]) < 1e-9
            for got, wanted in zip(result["metrics"], expected["metrics"], strict=True):
                for name in ("loss", "grad_norm", "policy_kl", "clip_fraction"):
                    assert got[name] == pytest.approx(wanted[name], rel=1e-9, abs=1e-13)


class Rates:
    """A model of which only the learning rates are noted."""

    def __init__(self, **settings):
        self.cfg = PolicyConfig(lr=1.0, lr_schedule="linear", lr_min_ratio=0.0, **settings)
        self.rates = []

    def update(self, minibatch, loss, lr):
        self.rates.append(lr)
        return {}


def test_a_resumed_run_may_have_other_updates_in_a_step():
    """The schedule is where the steps are, whatever earlier ones were made of."""
    model = Rates()
    model.num_updates = 2 * 4  # of two steps before
    cfg = RLConfig(algo=AlgoConfig(updates_per_step=1))
    for step in (2, 3):
        update_in_passes(model, [[]], losses.sft(), cfg, step, 4)
    assert model.rates == [0.5, 0.25]

    cfg = RLConfig(algo=AlgoConfig(updates_per_step=2))
    model = Rates()
    for step in (2, 3):  # a critic has warmed up for two of the four
        update_in_passes(model, [[], []], losses.sft(), cfg, step, 4, 2)
    assert model.rates == [1.0, 0.75, 0.5, 0.25]


def a_group(mesh, folder, num_trained, num_minibatches):
    """A step on the answers to so many prompts. Returns its metrics and the weights after it."""
    LlamaRMSNorm.forward = exact_norm
    cfg = RLConfig(algo=AlgoConfig(updates_per_step=num_minibatches))
    policy = Policy(PolicyConfig(dtype="float64", lr=1e-3), folder, mesh)
    trained = [t for t in trajectories() if t.group < num_trained]
    minibatches = []
    for micros in exchange(trained[mesh.rank :: mesh.world_size], mesh, 100, num_minibatches):
        batches = [pack(m, mesh.device, layout=policy.layout) for m in micros]
        for batch in batches:
            batch.advantages = batch.turn_rewards
        minibatches.append(batches)
    policy.annotate(minibatches, "old_logprobs")
    loss = losses.policy(cfg.algo, 20)
    metrics = update_in_passes(policy, minibatches, loss, cfg, step=0, num_steps=2)
    return metrics, {name: p.full_tensor() for name, p in policy.shards().items()}


def test_no_step_is_made_on_what_has_no_tokens(tmp_path):
    """Neither do its zeros count in the means of the other updates."""
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    ((expected, weights),) = ranks(1, a_group, folder, 1, 1)
    for world in (1, 2):
        for metrics, found in ranks(world, a_group, folder, 1, 2):
            assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert worst(found, weights) < 1e-9
    ((nothing, before),) = ranks(1, a_group, folder, 0, 2)
    assert nothing == {}
    assert worst(before, weights) > 1e-4


def lowest_ratio(batch, logprobs, entropy):
    return -logprobs, {"lowest_max": torch.full_like(logprobs.detach(), -4.0)}


def largest_of_few(mesh, folder):
    """A metric that is below 0 everywhere, where one rank has no tokens."""
    policy = Policy(PolicyConfig(dtype="float64", lr=1e-3), folder, mesh)
    trained = trajectories()[: 1 - mesh.rank]
    ((micros),) = exchange(trained, mesh, 100, 1)
    batches = [pack(m, mesh.device, layout=policy.layout) for m in micros]
    return policy.update(batches, losses.Loss(token_loss=lowest_ratio), 0.0)["lowest_max"]


def test_a_maximum_is_of_ranks_with_tokens(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    assert ranks(2, largest_of_few, folder) == [-4.0, -4.0]


def run(mesh, given):
    rl.Trainer.main(parse_flags(RLConfig, [str(x) for x in given]), mesh)


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise repeatable on CPU only")
def test_a_run_of_passes_resumes_bitwise(tmp_path):
    """1.25 passes over 16 prompts, 8 a step, are 3 steps; each makes two passes of two updates,
    of the policy and of its critic."""
    data, output, again = tmp_path / "rows.jsonl", tmp_path / "run", tmp_path / "again"
    data.write_text(
        "".join(json.dumps({"prompt": f"say {n}", "answer": str(n)}) + "\n" for n in range(20))
    )
    (tmp_path / "reward.py").write_text(
        "def count(prompt, completion, row):\n    return float(len(completion))\n"
    )
    tiny.make(tmp_path / "model")
    settings = {
        "output": output,
        "num_epochs": 1.25,
        "policy.model": tmp_path / "model",
        "policy.dtype": "float32",
        "policy.lr": 1e-3,
        "policy.lr_schedule": "wsd",
        "policy.lr_decay_ratio": 0.5,
        "policy.lr_warmup_ratio": 0.2,
        "critic.dtype": "float32",
        "critic.lr": 1e-3,
        "critic.lr_schedule": "linear",
        "algo.advantage": "gae",
        "algo.updates_per_step": 2,
        "algo.num_epochs": 2,
        "data.train": data,
        "data.held_out": 4,
        "data.max_prompt_tokens": 24,
        "rollout.max_tokens": 8,
        "rollout.prompts_per_step": 8,
        "rollout.samples_per_prompt": 1,
        "tokens_per_rank": 64,
        "eval.every": 0,
        "checkpoint.every": 1,
        "checkpoint.keep": 3,
        "engine.kv_cache_gb": 0.05,
        "reward.function": f"{tmp_path / 'reward.py'}:count",
    }
    given = []
    for name, value in settings.items():
        given += [f"--{name.replace('_', '-')}", value]
    ranks(2, run, given)
    rows = [row for row in metrics_of(output) if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    saved = json.loads((output / "checkpoints" / "step-3" / "progress.json").read_text())
    assert (saved["num_updates"], saved["critic"]["num_updates"]) == (12, 12)
    # Means over the four updates of a step.
    for section, name in (("policy", "lr"), ("critic", "critic_lr")):
        cfg = getattr(load_config(RLConfig, str(output / "config.yaml")), section)
        rates = np.array([learning_rate(cfg, n, 12) for n in range(12)]).reshape(3, 4)
        np.testing.assert_allclose([row[name] for row in rows], rates.mean(1), rtol=1e-9)

    shutil.copytree(output, again)
    for step in (2, 3):
        shutil.rmtree(again / "checkpoints" / f"step-{step}")
    shutil.rmtree(again / "model")
    ranks(2, run, ["--config", output / "config.yaml", "--output", again, "--resume"])
    assert metrics_of(again) == metrics_of(output)
    assert (again / "model" / "model.safetensors").read_bytes() == (
        output / "model" / "model.safetensors"
    ).read_bytes()
