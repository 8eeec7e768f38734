"""Advantages, losses and normalisation against numpy formulas that know nothing of packing, masks
or ranks."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness import ranks
from minirl.algo import advantages, losses, normalize
from minirl.algo.shaping import kth_largest
from minirl.base.errors import UserError
from minirl.base.oversight import Oversight
from minirl.batch.packing import pack, unpack
from minirl.config.policy import PolicyConfig
from minirl.config.rl import AlgoConfig, CorrectionConfig, RLConfig
from minirl.rl import Trainer
from minirl.run import user_algorithms
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory

CPU = torch.device("cpu")


def alone(values):
    """`sums` of a world of one."""
    return values


OF_ANSWERS = sorted(n for n, e in advantages.ESTIMATORS.items() if not e.by_token)


def estimate(name, rewards, groups):
    return advantages.ESTIMATORS[name](
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64)
    ).numpy()


# --------------------------------------------------------------------------------------------------
# advantages

RAGGED = [
    2,
    0,
    1,
    0,
    2,
    2,
    1,
    0,
    2,
    3,
]  # groups of 3, 2, 4 and a single one, their members not side by side


def by_group(formula, rewards, groups):
    out = np.zeros(len(rewards))
    for g in set(groups):
        members = np.flatnonzero(np.array(groups) == g)
        out[members] = formula(np.array(rewards)[members]) if len(members) > 1 else 0.0
    return out


def rloo_formula(r):
    return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])


def numpy_formula(name, rewards, groups):
    if name == "grpo":
        return by_group(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6), rewards, groups)
    if name == "rloo":
        return by_group(rloo_formula, rewards, groups)
    centered = by_group(lambda r: r - r.mean(), rewards, groups)
    return centered if name == "dr_grpo" else centered / (np.sqrt((centered**2).mean()) + 1e-8)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_estimator_equals_its_formula_on_ragged_groups(name):
    rewards = np.random.default_rng(0).normal(size=len(RAGGED)).tolist()
    np.testing.assert_allclose(
        estimate(name, rewards, RAGGED),
        numpy_formula(name, rewards, RAGGED),
        rtol=1e-12,
        atol=1e-14,
    )


def test_every_registered_estimator_is_tested_here():
    """A new one needs its formula above and its name there; the tests below take it up by
    themselves."""
    assert set(OF_ANSWERS) == {"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"}


@pytest.mark.parametrize("name", OF_ANSWERS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e9, -7.3])
def test_equal_rewards_get_exactly_zero(name, reward):
    """The mean of equal floats is off by rounding (3 * 0.1 / 3 != 0.1); over a deviation of the
    same size that would be an advantage near 1."""
    assert (estimate(name, [reward] * 7, [0, 1, 0, 1, 0, 2, 0]) == 0).all()
    mixed = estimate(name, [reward, 1.0, reward, 0.0, reward, 0.5], [0, 1, 0, 1, 0, 1])
    assert (mixed[[0, 2, 4]] == 0).all()
    assert (mixed[[1, 3]] != 0).all()


def sample(group, episode, reward, num_prompt=2, num_answer=3):
    sampled = np.arange(num_prompt + num_answer) >= num_prompt
    return Trajectory(
        tokens=np.arange(5, 5 + len(sampled), dtype=np.int32),
        sampled=sampled,
        logprobs=np.zeros(len(sampled), np.float32),
        reward=reward,
        group=group,
        episode=episode,
    )


def batch_of_groups():
    rng = np.random.default_rng(1)
    return [
        sample(g, e, float(rng.normal()), 1 + g % 3, 1 + e)
        for g in (4, 9, 11)
        for e in range(2 + g % 3)
    ]


def assign_on_rank(mesh, owners):
    """owners[rank]: groups that this rank sampled."""
    own = [t for t in batch_of_groups() if t.group in owners[mesh.rank]]
    out, batch = {}, pack(own, CPU)
    for name in OF_ANSWERS:
        advantages.assign(
            [batch],
            advantages.find(name),
            AlgoConfig(advantage=name),
            dtype=torch.float32,
            sum_over_ranks=mesh.data_sums,
            max_over_ranks=mesh.maxima,
            gather_rows=mesh.gather_rows,
        )
        out[name] = {
            (t.group, t.episode): found
            for t, found in zip(
                own, unpack(batch.advantages, own, batch) if own else [], strict=True
            )
        }
    return out


@pytest.mark.parametrize(
    "owners", [[{4, 11}, {9}], [{4, 9, 11}, set()]], ids=["split", "empty rank"]
)
def test_two_ranks_assign_what_one_would(owners):
    whole = batch_of_groups()
    results = ranks(2, assign_on_rank, owners)
    for name in OF_ANSWERS:
        expected = numpy_formula(name, [t.reward for t in whole], [t.group for t in whole])
        got = results[0][name] | results[1][name]
        assert len(got) == len(whole)
        for t, value in zip(whole, expected, strict=True):
            mine = got[t.group, t.episode]
            assert mine.dtype == np.float32
            np.testing.assert_allclose(
                mine, np.where(t.sampled, value, 0.0), rtol=1e-6, err_msg=name
            )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-15), ("float32", 1e-7), ("bfloat16", 1e-7)]
)
def test_advantages_are_as_exact_as_the_log_probs_of_the_policy(dtype, tolerance):
    """Also where only the engine's are known, which are float32."""
    whole = batch_of_groups()
    batch = pack(whole, CPU)
    policy = SimpleNamespace(cfg=PolicyConfig(dtype=dtype))
    policy.output_dtype = Policy.output_dtype.fget(policy)
    given = SimpleNamespace(
        inputs=SimpleNamespace(estimator=advantages.find("grpo")),
        algo=AlgoConfig(),
        policy=policy,
        mesh=SimpleNamespace(data_sums=alone, maxima=alone, gather_rows=lambda rows: [rows]),
    )
    Trainer.assign_advantages(given, [[batch]])
    expected = numpy_formula("grpo", [t.reward for t in whole], [t.group for t in whole])
    for t, value, found in zip(
        whole, expected, unpack(batch.advantages, whole, batch), strict=True
    ):
        np.testing.assert_allclose(found, np.where(t.sampled, value, 0.0), rtol=tolerance)


def test_an_estimator_is_found_by_name_or_in_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("def halved(rewards, groups):\n    return rewards / 2\n")
    found = assign_alone(f"{tmp_path}/mine.py:halved")
    assert found == [[0, 0, 1.5, 1.5, 1.5], [0, 0, 2.5, 2.5, 2.5]]
    assert advantages.find("rloo").function is advantages.rloo
    with pytest.raises(
        UserError,
        match=r"algo.advantage = 'grpoo' is neither registered \(grpo, dr_grpo, rloo, "
        r"reinforce_pp_baseline, reinforce_pp, gae, on_policy_distill\)",
    ):
        advantages.find("grpoo")


WRONG_ESTIMATORS = {
    "not a number": ("return rewards * float('nan')", r"2 of them are not finite.*reward \[3.0\]"),
    "infinite": ("return rewards / 0.0", "2 of them are not finite"),
    "nothing": ("pass", "it returned None"),
    "a list": ("return rewards.tolist()", r"it returned \[3.0, 5.0\]"),
    "complex": ("return rewards * 1j", "it returned tensor"),
    "too many": ("return rewards.repeat(2)", r"it returned one of shape \[4\]"),
    "one": ("return rewards.mean()", r"it returned one of shape \[\]"),
    "a column": ("return rewards[:, None]", r"it returned one of shape \[2, 1\]"),
    "raises": ("raise ValueError('mine')", "it raised ValueError: mine"),
    "leaves": ("raise SystemExit(0)", "it raised SystemExit: 0"),
}


@pytest.mark.parametrize("name", WRONG_ESTIMATORS)
def test_an_estimator_that_returns_no_advantages_is_told_by_name(tmp_path, name):
    body, message = WRONG_ESTIMATORS[name]
    (tmp_path / "mine.py").write_text(f"def wrong(rewards, groups):\n    {body}\n")
    setting = f"{tmp_path}/mine.py:wrong"
    with pytest.raises(UserError, match=rf"algo.advantage = .*mine.py:wrong must .*{message}"):
        assign_alone(setting)


@pytest.mark.parametrize(
    "body",
    ["rewards.int()", "(rewards.float() * torch.ones(2, requires_grad=True))", "rewards.half()"],
)
def test_an_estimator_may_return_numbers_of_any_dtype(tmp_path, body):
    text = f"import torch\n\n\ndef mine(rewards, groups):\n    return {body}\n"
    (tmp_path / "mine.py").write_text(text)
    assert assign_alone(f"{tmp_path}/mine.py:mine") == [[0, 0, 3, 3, 3], [0, 0, 5, 5, 5]]


def assign_alone(setting):
    own = [sample(0, 0, 3.0), sample(0, 1, 5.0)]
    batch = pack(own, CPU)
    cfg = RLConfig(algo=AlgoConfig(advantage=setting))
    advantages.assign(
        [batch],
        user_algorithms.checked(advantages.find(setting), cfg, Oversight()),
        cfg.algo,
        dtype=torch.float32,
        sum_over_ranks=alone,
        max_over_ranks=alone,
        gather_rows=lambda value: [value],
    )
    return [found.tolist() for found in unpack(batch.advantages, own, batch)]


# --------------------------------------------------------------------------------------------------
# ppo_clip

# Every combination of a ratio below, in and above the clip range, far above it, and an advantage of
# each sign.
RATIOS = np.array([0.3, 0.79, 0.81, 1.0, 1.15, 1.27, 1.29, 2.0, 9.0])


def clip_formula(ratio, advantage, low, high, dual):
    surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return -max(surrogate, dual * advantage) if dual and advantage < 0 else -surrogate


def clip_gradient(ratio, advantage, low, high, dual):
    """d loss / d ratio: -A where the unclipped branch is the smaller one, else 0."""
    free = ratio <= 1 + high if advantage > 0 else ratio >= 1 - low and not (dual and ratio > dual)
    return -advantage if free else 0.0


@pytest.mark.parametrize(
    ("low", "high", "dual"), [(0.2, 0.2, 0.0), (0.2, 0.28, 0.0), (0.2, 0.28, 3.0), (0.2, 0.2, 1.5)]
)
def test_ppo_clip_equals_its_formula_and_gradient(low, high, dual):
    r, a = (x.flatten() for x in np.meshgrid(RATIOS, [-1.7, 0.6]))
    ratio = torch.tensor(r, requires_grad=True)
    loss = losses.ppo_clip(
        ratio,
        torch.tensor(a),
        AlgoConfig(clip_low=low, clip_high=high, dual_clip=dual),
    )
    np.testing.assert_allclose(
        loss.detach(),
        [clip_formula(x, y, low, high, dual) for x, y in zip(r, a, strict=True)],
        rtol=0,
        atol=1e-10,
    )
    (gradient,) = torch.autograd.grad(loss.sum(), ratio)
    np.testing.assert_allclose(
        gradient,
        [clip_gradient(x, y, low, high, dual) for x, y in zip(r, a, strict=True)],
        rtol=0,
        atol=1e-10,
    )


def test_kl_estimators_equal_their_formulas_and_gradients():
    rng = np.random.default_rng(2)
    x, ref = rng.normal(-2, 1, 20), rng.normal(-2, 1, 20)
    d = ref - x
    values = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}
    gradients = {"k1": np.ones(20), "k2": -d, "k3": 1 - np.exp(d)}
    for name in values:
        logprobs = torch.tensor(x, requires_grad=True)
        got = losses.kl(logprobs, torch.tensor(ref), name)
        np.testing.assert_allclose(got.detach(), values[name], rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            torch.autograd.grad(got.sum(), logprobs)[0], gradients[name], rtol=0, atol=1e-12
        )


def test_k1_and_k3_average_to_the_true_kl():
    """Over the policy's own distribution both are unbiased."""
    rng = np.random.default_rng(3)
    p, q = (torch.tensor(rng.dirichlet(np.ones(7))) for _ in range(2))
    true = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        assert (p * losses.kl(p.log(), q.log(), name)).sum().item() == pytest.approx(
            true.item(), rel=1e-12
        )


# --------------------------------------------------------------------------------------------------
# the policy loss


def random_batch(seed=4):
    """Ragged answers, two of which share a prompt; all the fields that the loss reads."""
    rng = np.random.default_rng(seed)
    out = []
    for group, num_prompt, num_answer in ((0, 4, 3), (0, 4, 6), (1, 2, 1), (2, 3, 5)):
        t = sample(group, len(out), 0.0, num_prompt, num_answer)
        t.tokens[:num_prompt] = 20 * (group + 1) + np.arange(num_prompt)
        t.logprobs = (rng.normal(-2, 0.5, len(t.tokens)) * t.sampled).astype(np.float32)
        t.turn_rewards = (rng.normal(size=len(t.tokens)) * t.sampled).astype(np.float32)
        out.append(t)
    batch = pack(out, CPU)
    batch.advantages, mask = batch.turn_rewards, batch.loss_mask.numpy()
    for name in ("old_logprobs", "ref_logprobs"):
        setattr(
            batch,
            name,
            torch.tensor(
                np.where(mask, batch.engine_logprobs.numpy() + rng.normal(0, 0.4, len(mask)), 0.0)
            ),
        )
    logprobs = np.where(mask, batch.old_logprobs.numpy() + rng.normal(0, 0.3, len(mask)), 0.0)
    return batch, logprobs, np.where(mask, rng.uniform(0.1, 3, len(mask)), 0.0)


def test_policy_loss_with_every_term_equals_its_formula_and_gradient():
    cfg = AlgoConfig(
        clip_high=0.28,
        dual_clip=3.0,
        correction=CorrectionConfig(high=1.2),
        kl_coef=0.05,
        kl_estimator="k3",
        entropy_coef=0.01,
    )
    batch, x, h = random_batch()
    old, ref = batch.old_logprobs.numpy(), batch.ref_logprobs.numpy()
    engine, adv = batch.engine_logprobs.double().numpy(), batch.advantages.double().numpy()
    ratio, weight, d = np.exp(x - old), np.minimum(np.exp(old - engine), 1.2), ref - x
    clipped = np.array(
        [clip_formula(r, a, 0.2, 0.28, 3.0) for r, a in zip(ratio, adv, strict=True)]
    )
    expected = clipped * weight + 0.05 * (np.exp(d) - 1 - d) - 0.01 * h
    by_logprob = np.array(
        [clip_gradient(r, a, 0.2, 0.28, 3.0) * r for r, a in zip(ratio, adv, strict=True)]
    ) * weight + 0.05 * (1 - np.exp(d))

    logprobs, entropy = (torch.tensor(v, requires_grad=True) for v in (x, h))
    loss = losses.policy(cfg, 20)
    value, metrics = loss.token_loss(batch, logprobs, entropy)
    np.testing.assert_allclose(value.detach(), expected, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad(value.sum(), (logprobs, entropy))
    mask = batch.loss_mask.numpy()
    np.testing.assert_allclose(gradients[0][mask], by_logprob[mask], rtol=0, atol=1e-10)
    np.testing.assert_allclose(gradients[1], np.full(len(h), -0.01), rtol=0, atol=1e-12)
    assert (loss.aggregation, loss.fixed_length, loss.entropy_gradient) == ("token", 20, True)

    outside = (ratio < 0.8) & (adv < 0) | (ratio > 1.28) & (adv > 0)
    assert 0 < outside.sum() < mask.sum()  # or the clip fraction below could be anything
    shown = {
        "entropy": h,
        "clip_fraction": outside,
        "mismatch": abs(old - engine),
        "mismatch_max": abs(old - engine),
        "correction_weight": weight,
        "correction_outside": np.exp(old - engine) > 1.2,
        "policy_kl": np.exp(x - old) - 1 - (x - old),
        "ref_kl": np.exp(d) - 1 - d,
    }
    assert set(metrics) == set(shown)
    for name, per_token in shown.items():
        assert not metrics[name].requires_grad
        np.testing.assert_allclose(metrics[name], per_token, rtol=0, atol=1e-10, err_msg=name)


def test_without_old_logprobs_the_ratio_is_one_and_its_gradient_the_policy_gradient():
    """One update per batch: the trainer's log-probs before the update are the current ones, TIS
    included."""
    batch, x, h = random_batch()
    batch.old_logprobs = batch.ref_logprobs = None
    logprobs = torch.tensor(x, requires_grad=True)
    loss = losses.policy(AlgoConfig(correction=CorrectionConfig(high=1.1)), 20)
    value, metrics = loss.token_loss(batch, logprobs, torch.tensor(h))
    weighted = batch.advantages.double().numpy() * np.minimum(
        np.exp(x - batch.engine_logprobs.double().numpy()), 1.1
    )
    np.testing.assert_allclose(value.detach(), -weighted, rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        torch.autograd.grad(value.sum(), logprobs)[0], -weighted, rtol=0, atol=1e-10
    )
    assert not loss.entropy_gradient
    assert "ref_kl" not in metrics


@pytest.mark.parametrize("preset, bound", [("dppo-tv", 0.1), ("dppo-kl", 0.02)])
@pytest.mark.parametrize("has_old", [True, False])  # without: one update per batch
def test_dppo_is_the_masked_ratio_to_the_engine(preset, bound, has_old):
    """A token is left out only if it is far from the engine, and its gradient leads further."""
    batch, x, h = random_batch()
    mask = batch.loss_mask.numpy()
    batch.engine_logprobs = batch.engine_logprobs.double()
    x = np.where(mask, np.minimum(x, -1e-3), 0.0)
    batch.ref_logprobs = None
    if not has_old:
        batch.old_logprobs = None
    cfg = AlgoConfig(correction=CorrectionConfig(preset=preset, divergence=bound))
    logprobs = torch.tensor(x, requires_grad=True)
    value, metrics = losses.policy(cfg, 20).token_loss(batch, logprobs, torch.tensor(h))
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)

    adv, engine = batch.advantages.double().numpy(), batch.engine_logprobs.numpy()
    cases = set()
    for t in np.flatnonzero(mask):
        p, q = np.exp(x[t]), np.exp(engine[t])
        if preset == "dppo-tv":
            is_far = abs(p - q) > bound
        else:
            is_far = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)) > bound
        leads_away = p > q if adv[t] > 0 else p < q
        expected = 0.0 if is_far and leads_away else -p / q * adv[t]
        np.testing.assert_allclose(value[t].item(), expected, rtol=1e-12)
        np.testing.assert_allclose(gradient[t], expected, rtol=1e-12)  # d(r A) = r A d log p
        assert metrics["correction_outside"][t] == (is_far and leads_away)
        cases.add((is_far, leads_away))
    assert len(cases) == 4


@pytest.mark.parametrize("preset, advantage", [("dppo-tv", 1.0), ("dppo-kl", -1.0)])
def test_one_stale_token_does_not_outweigh_a_step_of_dppo(preset, advantage):
    """Neither mask bounds the ratio to the engine: 1e-6 against 0.1 is 100,000 times."""
    batch, x, h = random_batch()
    batch.ref_logprobs = None
    x = np.where(batch.loss_mask, math.log(0.1), 0.0)
    engine = torch.tensor(x).masked_fill(batch.loss_mask, math.log(1e-6))
    batch.advantages = torch.full_like(batch.advantages, advantage)
    for old in (x, x - 3.0, engine.numpy()):
        batch.engine_logprobs, batch.old_logprobs = engine, torch.tensor(old)
        logprobs = torch.tensor(x, requires_grad=True)
        loss = losses.policy(AlgoConfig(correction=CorrectionConfig(preset=preset)), 20)
        value, _ = loss.token_loss(batch, logprobs, torch.tensor(h))
        (gradient,) = torch.autograd.grad(value.sum(), logprobs)
        of_loss = gradient[batch.loss_mask]
        torch.testing.assert_close(of_loss, torch.full_like(of_loss, -20.0 * advantage))


def test_without_correction_the_loss_is_left_alone():
    batch, x, h = random_batch()
    value, metrics = losses.policy(
        AlgoConfig(correction=CorrectionConfig(preset="off")), 20
    ).token_loss(batch, torch.tensor(x), torch.tensor(h))
    ratio = np.exp(x - batch.old_logprobs.numpy())
    expected = [
        clip_formula(r, a, 0.2, 0.2, 0)
        for r, a in zip(ratio, batch.advantages.double().numpy(), strict=True)
    ]
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)
    assert "correction_weight" not in metrics


# --------------------------------------------------------------------------------------------------
# normalisation


def ragged_answers():
    """Six answers to three prompts (two prompts shared), several runs of sampled tokens in one,
    none in the last."""
    rng = np.random.default_rng(6)
    out = []
    for group, num_prompt, num_answer in (
        (0, 5, 1),
        (0, 5, 7),
        (0, 5, 4),
        (1, 3, 2),
        (1, 3, 9),
        (2, 1, 6),
        (3, 4, 2),
    ):
        t = sample(group, len(out), 0.0, num_prompt, num_answer)
        t.tokens[:num_prompt] = 20 * (group + 1) + np.arange(num_prompt)
        t.logprobs = (rng.normal(-2, 1, len(t.tokens)) * t.sampled).astype(np.float32)
        out.append(t)
    out[5].sampled[3:5] = False  # an observation between two actions
    out[6].sampled[:] = False
    return out


def brute_force(aggregation, trajectories, fixed_length):
    """The mean of the engine's log-probs over the trajectories themselves."""
    values = [t.logprobs[t.sampled].astype(np.float64) for t in trajectories if t.sampled.any()]
    if aggregation == "token":
        return np.concatenate(values).mean()
    if aggregation == "sequence":
        return np.mean([v.mean() for v in values])
    return sum(v.sum() for v in values) / (len(values) * fixed_length)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
@pytest.mark.parametrize(
    "cuts",
    [(7,), (1, 4, 7), (3, 3, 7), (0, 7)],
    ids=["one batch", "three", "with a filler between", "filler first"],
)
def test_weights_over_the_global_count_give_the_mean_however_it_is_packed(aggregation, cuts):
    """Micro-batches share one denominator, a prompt's shared rows count for nothing, and a filler
    adds nothing to either sum."""
    whole = ragged_answers()
    batches = [pack(whole[a:b], CPU) for a, b in zip((0, *cuts), cuts, strict=False)]
    assert (
        sum(
            len(b.attention.blocks[0].key_rows) > len(b.inputs)
            for b in batches
            if b.attention.blocks[0].key_rows is not None
        )
        >= 1
    )  # a shared prompt is among them
    total = sum(
        (b.engine_logprobs.double() * normalize.weights(b, aggregation, 16)).sum() for b in batches
    )
    count = sum(normalize.count(b, aggregation) for b in batches)
    assert count.item() == pytest.approx(
        sum(int(t.sampled.sum()) for t in whole) if aggregation == "token" else 6, rel=1e-14
    )
    assert (total / count).item() == pytest.approx(brute_force(aggregation, whole, 16), rel=1e-6)


def test_a_filler_batch_weighs_and_counts_nothing():
    filler = pack([], CPU)
    assert len(filler.inputs) == 1
    for aggregation in ("token", "sequence", "fixed"):
        assert normalize.weights(filler, aggregation, 16).tolist() == [0.0]
        assert normalize.count(filler, aggregation).item() == 0.0


# --------------------------------------------------------------------------------------------------
# the threshold of high entropy


def thresholds(mesh, share):
    """[(found by counting, found by sorting all that is gathered)] of several kinds of numbers."""
    rng = np.random.default_rng(mesh.rank)
    many = rng.gamma(0.3, 1.0, 20_000)
    cases = [
        many.astype(np.float32).astype(np.float64),
        many[:5],
        np.repeat(many[:3], [500, 1, 40]),  # ties
        many[:300] - 0.2,  # rounding makes an entropy negative
        np.array([0.0, -0.0, 5e-324, np.inf, 1.0]),
        many[: 7 * mesh.rank],  # nothing on the first rank
    ]
    found = []
    for values in cases:
        everything = np.sort(np.concatenate(mesh.gather(values)))
        if len(everything):
            k = math.ceil(share * len(everything))
            found.append((kth_largest(values, k, mesh.sums), float(everything[-k])))
    return found


@pytest.mark.parametrize(("world", "share"), [(1, 0.2), (2, 0.2), (3, 0.001), (2, 1.0)])
def test_counting_finds_the_threshold_that_sorting_finds(world, share):
    for found in ranks(world, thresholds, share):
        assert len(found) == 5 + (world > 1)
        assert [np.float64(a + 0.0).tobytes() for a, _ in found] == [
            np.float64(b + 0.0).tobytes() for _, b in found
        ]
