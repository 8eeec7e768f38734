"""The variants of policy optimisation against numpy formulas over the trajectories themselves:
losses, KL, correction, token estimators, shaping."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness import ranks
from minirl.algo import (
    advantages,
    correction,
    losses,
    normalize,
    shaping,
    token_advantages,
)
from minirl.algo.normalize import bounded_exp
from minirl.base.errors import UserError
from minirl.batch.attention_plan import RowLayout
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack
from minirl.config.policy import ParallelConfig
from minirl.config.rl import AlgoConfig, CorrectionConfig, RLConfig
from minirl.config.shared import RewardConfig
from minirl.rl import Trainer
from minirl.types.packed import Trajectory
from test_algo import clip_formula, clip_gradient, ragged_answers, rloo_formula

CPU = torch.device("cpu")
ALONE = {  # The collectives of a world of one.
    "dtype": torch.float64,
    "sum_over_ranks": lambda v: v,
    "max_over_ranks": lambda v: v,
    "gather_rows": lambda v: [v],
}


def answers():
    """Ragged ones with rewards and the sizes of their groups."""
    rng = np.random.default_rng(8)
    out = ragged_answers()
    for t in out:
        t.reward = float(rng.normal())
        t.group_tokens = sum(int(s.sampled.sum()) for s in out if s.group == t.group)
    return out


def draw(t, name):
    """A log-prob of each token that depends on nothing but the token's place, so that any packing
    gets the same: float64 [L]."""
    rng = np.random.default_rng([t.group, t.episode, ["x", "old", "ref"].index(name)])
    return np.where(t.sampled, t.logprobs + rng.normal(0, 0.35, len(t.tokens)), 0.0)


def advantage(t):
    """Of each token, likewise: float32 [L]."""
    return (
        np.random.default_rng([t.group, t.episode, 9]).normal(size=len(t.tokens)) * t.sampled
    ).astype(np.float32)


def lay(batch, whole, column):
    """[T] of a value per token of each trajectory, found again by its engine log-prob, which no two
    tokens share."""
    place = {float(t.logprobs[i]): column(t)[i] for t in whole for i in np.flatnonzero(t.sampled)}
    return torch.tensor(
        [
            place[x] if m else 0.0
            for x, m in zip(batch.engine_logprobs.tolist(), batch.loss_mask.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )


def packed(whole, *cuts):
    batches = [pack(whole[a:b], CPU) for a, b in zip((0, *cuts), (*cuts, len(whole)), strict=True)]
    for b in batches:
        b.old_logprobs, b.ref_logprobs = (
            lay(b, whole, lambda t, n=name: draw(t, n)) for name in ("old", "ref")
        )
        b.advantages = lay(b, whole, advantage)
    return batches


def aggregate(per_token, whole, how, fixed):
    """per_token: trajectory -> its values at sampled tokens."""
    kept = [t for t in whole if t.sampled.any()]
    if how == "token":
        return np.concatenate([per_token(t) for t in kept]).mean()
    if how == "sequence":
        return np.mean([per_token(t).mean() for t in kept])
    if how == "prompt":
        return np.mean(
            [
                np.concatenate([per_token(t) for t in kept if t.group == g]).mean()
                for g in {t.group for t in kept}
            ]
        )
    return sum(per_token(t).sum() for t in kept) / (len(kept) * fixed)


def ppo_token(t, x, cfg):
    r = np.exp(x - draw(t, "old")[t.sampled])
    return np.array(
        [
            clip_formula(a, b, cfg.clip_low, cfg.clip_high, cfg.dual_clip)
            for a, b in zip(r, advantage(t)[t.sampled].astype(float), strict=True)
        ]
    )


def gspo_token(t, x, cfg):
    r = np.exp((x - draw(t, "old")[t.sampled]).mean())
    return np.array(
        [
            clip_formula(r, a, cfg.clip_low, cfg.clip_high, 0)
            for a in advantage(t)[t.sampled].astype(float)
        ]
    )


def cispo_token(t, x, cfg):
    r = np.exp(draw(t, "x")[t.sampled] - draw(t, "old")[t.sampled])  # a constant to the gradient
    return (
        -np.clip(r, 1 - cfg.clip_low, 1 + cfg.clip_high) * advantage(t)[t.sampled].astype(float) * x
    )


def unbiased_token(t, x, cfg):
    d = draw(t, "ref")[t.sampled] - x
    return ppo_token(t, x, cfg) + 0.3 * np.exp(x - draw(t, "old")[t.sampled]) * (np.exp(d) - 1 - d)


METHODS = {
    "ppo": (AlgoConfig(clip_high=0.28), ppo_token),
    "gspo": (AlgoConfig(loss="gspo", clip_low=0.1, clip_high=0.15), gspo_token),
    "cispo": (AlgoConfig(loss="cispo", clip_low=1.0, clip_high=0.2), cispo_token),
    "unbiased KL": (AlgoConfig(kl_coef=0.3, kl_estimator="unbiased"), unbiased_token),
}


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "fixed"])
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradient_equal_the_formula_however_it_is_packed(method, aggregation):
    """The same value and gradient from one micro-batch, from three, and with a filler among
    them."""
    cfg, formula = METHODS[method]
    cfg = AlgoConfig(
        **{**vars(cfg), "aggregation": aggregation, "correction": CorrectionConfig(preset="off")}
    )
    whole = answers()
    x = {t.episode: draw(t, "x")[t.sampled] for t in whole}
    expected = aggregate(lambda t: formula(t, x[t.episode], cfg), whole, aggregation, 16)
    results = []
    for cuts in ((), (1, 4), (3, 3, 6)):
        batches = packed(whole, *cuts)
        logprobs = [lay(b, whole, lambda t: draw(t, "x")).requires_grad_() for b in batches]
        loss = losses.policy(cfg, 16)
        total = sum(
            (
                loss.token_loss(b, lp, torch.zeros_like(lp))[0]
                * normalize.weights(b, aggregation, 16)
            ).sum()
            for b, lp in zip(batches, logprobs, strict=True)
        )
        value = total / sum(normalize.count(b, aggregation) for b in batches)
        assert value.item() == pytest.approx(expected, abs=1e-10)
        value.backward()
        results.append(
            {
                float(e): g
                for b, lp in zip(batches, logprobs, strict=True)
                for e, g, m in zip(b.engine_logprobs, lp.grad.tolist(), b.loss_mask, strict=True)
                if m
            }
        )
    for got in results[1:]:
        assert got.keys() == results[0].keys()
        np.testing.assert_allclose(
            [got[k] for k in results[0]], list(results[0].values()), rtol=0, atol=1e-15
        )
    for t in whole:
        for i, place in enumerate(np.flatnonzero(t.sampled)):
            exact = gradient(method, t, x[t.episode], i, cfg) * weight_of(t, whole, aggregation)
            assert results[0][float(t.logprobs[place])] == pytest.approx(exact, abs=1e-10)


def gradient(method, t, x, i, cfg):
    """d (sum of the trajectory's token losses) / d x_i, by hand."""
    old, adv = draw(t, "old")[t.sampled], advantage(t)[t.sampled].astype(float)
    r = np.exp(x - old)
    if method == "cispo":
        return -np.clip(r[i], 1 - cfg.clip_low, 1 + cfg.clip_high) * adv[i]
    if method == "gspo":
        # Of GSPO-token (eq. 14), which is GSPO's where all advantages of an answer are the same.
        s = np.exp((x - old).mean())
        return clip_gradient(s, adv[i], cfg.clip_low, cfg.clip_high, 0) * s
    d = draw(t, "ref")[t.sampled][i] - x[i]
    return clip_gradient(r[i], adv[i], cfg.clip_low, cfg.clip_high, 0) * r[i] + (
        0.3 * r[i] * -d if method == "unbiased KL" else 0.0
    )


def weight_of(t, whole, aggregation):
    kept = [s for s in whole if s.sampled.any()]
    groups = len({s.group for s in kept})
    return {
        "token": 1 / sum(s.sampled.sum() for s in kept),
        "sequence": 1 / (len(kept) * max(1, t.sampled.sum())),
        "prompt": 1 / (groups * max(1, t.group_tokens)),
        "fixed": 1 / (16 * len(kept)),
    }[aggregation]


def test_unbiased_kl_has_the_gradient_of_the_kl_and_k3_has_not():
    """Over the whole distribution of one token, sampled from an older policy."""
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(size=7), requires_grad=True)
    old, ref = (torch.tensor(rng.dirichlet(np.ones(7))).log() for _ in range(2))
    logprobs = logits.log_softmax(0)
    (true,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True
    )
    got = {
        e: torch.autograd.grad(
            (old.exp() * losses.kl_loss(logprobs, old, ref, e)).sum(), logits, retain_graph=True
        )[0]
        for e in ("unbiased", "k3", "k1")
    }
    np.testing.assert_allclose(got["unbiased"], true, atol=1e-14)
    assert (got["k3"] - true).abs().max() > 0.01 and (got["k1"] - true).abs().max() > 0.01


def test_k1_in_the_reward_has_the_gradient_of_the_kl_and_k3_has_not():
    """Over the whole distribution of one token, near the reference: the policy gradient of what a
    token pays, sum p pays grad log p, beside the gradient of sum p log(p / ref)."""
    rng = np.random.default_rng(4)
    logits = torch.tensor(rng.normal(size=7), requires_grad=True)
    ref = (logits.detach() + 0.1 * torch.tensor(rng.normal(size=7))).log_softmax(0)
    logprobs = logits.log_softmax(0)
    p = logprobs.exp()
    (true,) = torch.autograd.grad((p * (logprobs - ref)).sum(), logits, retain_graph=True)
    length = {}
    for name in ("k1", "k2", "k3"):
        paid = losses.kl(logprobs, ref, name).detach()
        (got,) = torch.autograd.grad((p.detach() * paid * logprobs).sum(), logits, None, True)
        length[name] = float(got.norm() / true.norm())
        if name == "k1":
            np.testing.assert_allclose(got, true, atol=1e-15)
    assert length["k2"] < 0.1 and length["k3"] < 0.1  # hardly any pull back


def test_auto_is_k1_in_the_reward_and_k3_in_the_loss():
    assert losses.kl_estimator(AlgoConfig(kl_in="reward")) == "k1"
    assert losses.kl_estimator(AlgoConfig()) == "k3"
    assert losses.kl_estimator(AlgoConfig(kl_in="reward", kl_estimator="k3")) == "k3"
    whole = answers()
    of = {}
    for name in ("auto", "k1", "k3"):
        (batch,) = packed(whole)
        cfg = AlgoConfig(advantage="reinforce_pp", kl_coef=0.1, kl_in="reward", kl_estimator=name)
        advantages.assign([batch], advantages.find("reinforce_pp"), cfg, **ALONE)
        x = lay(batch, whole, lambda t: draw(t, "x"))
        in_loss = AlgoConfig(kl_coef=0.1, kl_estimator=name)
        of[name] = batch.advantages, losses.policy(in_loss, 16).token_loss(batch, x, x)[1]["ref_kl"]
    assert torch.equal(of["auto"][0], of["k1"][0]) and not torch.equal(of["auto"][0], of["k3"][0])
    assert torch.equal(of["auto"][1], of["k3"][1]) and not torch.equal(of["auto"][1], of["k1"][1])


# --------------------------------------------------------------------------------------------------
# extremes


def far_batch(log_ratio, advantage, num=4):
    """An answer of tokens one of which has become e^log_ratio times as likely, in float32."""
    (t,) = [t for t in answers() if t.sampled.sum() >= num][:1]
    batch = pack([t], CPU)
    batch.old_logprobs = batch.engine_logprobs.clone()
    batch.advantages = torch.where(batch.loss_mask, advantage, 0.0)
    place = int(batch.loss_mask.nonzero()[1])
    logprobs = batch.old_logprobs.clone()
    logprobs[place] += log_ratio
    return batch, logprobs.requires_grad_(), place


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", [-100.0, -30.0, 19.9, 30.0, 100.0, 1e4])
@pytest.mark.parametrize("method", ["ppo", "gspo", "cispo"])
def test_a_token_far_from_the_old_policy_leaves_the_gradient_finite(method, log_ratio, advantage):
    batch, x, place = far_batch(log_ratio, advantage)
    off = CorrectionConfig(preset="off")
    loss = losses.policy(AlgoConfig(loss=method, correction=off), 16)
    value, metrics = loss.token_loss(batch, x, x.detach())
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert all(v.isfinite().all() for v in metrics.values())
    others = batch.loss_mask.clone()
    others[place] = False
    if method == "ppo":  # The far token alone is clamped.
        torch.testing.assert_close(gradient[others], torch.full_like(gradient[others], -advantage))
        far = log_ratio < 0 or advantage > 0 or log_ratio > 20
        expected = 0.0 if far and not (log_ratio < 0 < advantage) else None
        if expected is None and log_ratio > 0:
            assert gradient[place] == pytest.approx(1.5 * math.exp(log_ratio), rel=1e-4)
        else:
            assert abs(float(gradient[place])) < 1e-8


def test_gspo_is_the_gradient_of_whole_ratios_where_an_answer_has_one_advantage():
    """Eq. 5 and 7 by autograd: minus the mean over answers of min(s A, clip(s) A)."""
    batch, x, _ = far_batch(0.05, 1.5)
    off = CorrectionConfig(preset="off")
    cfg = AlgoConfig(loss="gspo", clip_low=0.5, clip_high=0.5, correction=off)
    value, _ = losses.policy(cfg, 16).token_loss(batch, x, x.detach())
    weights = normalize.weights(batch, "sequence")
    (gradient,) = torch.autograd.grad((value * weights).sum(), x)

    y = x.detach().double().requires_grad_()
    log_ratio = torch.where(batch.loss_mask, y - batch.old_logprobs.double(), 0.0)
    tokens = batch.sequences.loss_tokens
    ratios = (normalize.sequence_sums(log_ratio, batch) / tokens.clamp(min=1)).exp()
    loss = -(ratios[tokens > 0] * 1.5).sum()
    (expected,) = torch.autograd.grad(loss, y)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-7)


def test_gspo_keeps_masks_and_advantages_of_single_tokens():
    """As with ppo, a token that a correction masks has no gradient, and others keep theirs."""
    batch, x, place = far_batch(0.0, 1.0)
    batch.engine_logprobs = batch.old_logprobs.clone()
    batch.engine_logprobs[place] -= 3.0
    batch.advantages = torch.where(batch.loss_mask, torch.arange(len(x)) - 3.0, 0.0)
    gradients = {}
    for name in ("ppo", "gspo"):
        cfg = AlgoConfig(loss=name, correction=CorrectionConfig(preset="icepop"))
        value, _ = losses.policy(cfg, 16).token_loss(batch, x, x.detach())
        (gradients[name],) = torch.autograd.grad(value.sum(), x)
    assert gradients["gspo"][place] == 0
    torch.testing.assert_close(gradients["gspo"], gradients["ppo"])


@pytest.mark.parametrize("d", [8.0, 20.0, 30.0, 100.0, -30.0])
def test_a_token_far_from_the_reference_leaves_the_gradient_finite(d):
    old = torch.full((3,), -2.0)
    ref = torch.full((3,), d - 2.0)
    for name in ("k1", "k2", "k3", "unbiased"):
        x = torch.full((3,), -2.0, requires_grad=True)
        value = losses.kl_loss(x, old, ref, name)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        right = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(min(d, 10)), "unbiased": -d}[name]
        if name == "k3" and d > 10:
            right = 0.0
        np.testing.assert_allclose(gradient, np.full(3, right), rtol=1e-6, err_msg=name)
        assert value.isfinite().all()


def test_what_is_not_clamped_is_the_plain_formula_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator) * 3
    old, ref = (torch.randn(1000, generator=generator) * 3 for _ in range(2))
    x, old, ref = x - 12, old - 12, ref - 12
    keep = (ref - x).abs() < 10
    x, old, ref = x[keep].requires_grad_(), old[keep], ref[keep]
    ratio = bounded_exp(x - old)
    assert torch.equal(ratio, (x - old).exp())
    (gradient,) = torch.autograd.grad(ratio.sum(), x)
    assert torch.equal(gradient, (x - old).exp().detach())
    d = ref - x
    k3 = losses.kl(x, ref, "k3")
    assert torch.equal(k3, torch.expm1(d) - d)
    (plain,) = torch.autograd.grad((torch.expm1(d) - d).sum(), x, retain_graph=True)
    (gradient,) = torch.autograd.grad(k3.sum(), x, retain_graph=True)
    assert torch.equal(gradient, plain)
    assert torch.equal(losses.kl_loss(x, old, ref, "unbiased"), (x - old).exp() * k3)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["clip", "mask", "mis", "truncate"])
@pytest.mark.parametrize("gate", ["ratio", "binary_kl", "tv"])
@pytest.mark.parametrize("apart", [-200.0, 200.0])
def test_a_token_far_from_the_engine_has_a_finite_weight(level, mode, gate, apart):
    batch, old, place = far_batch(0.0, 1.0)
    batch.engine_logprobs[place] = old[place].detach() - apart
    cfg = correction.resolve(CorrectionConfig(level=level, mode=mode, gate=gate))
    assert correction.weights(old, old, batch, cfg)[0].isfinite().all()


def test_kl_controller_follows_ziegler():
    assert losses.adapt_kl_coef(0.1, 0.06, 0.05) == pytest.approx(0.1 * 1.02)
    assert losses.adapt_kl_coef(0.1, 0.05, 0.05) == 0.1
    assert losses.adapt_kl_coef(0.1, 0.055, 0.05) == pytest.approx(0.1 * 1.01)
    assert losses.adapt_kl_coef(0.1, 0.0, 0.05) == pytest.approx(0.1 * 0.98)


# --------------------------------------------------------------------------------------------------
# correction


def correction_formula(t, level, mode, gate, low, high, bound):
    """(weights, outside) at the trajectory's sampled tokens."""
    old, engine = draw(t, "old")[t.sampled], t.logprobs[t.sampled].astype(float)
    old, engine = np.minimum(old, -1e-3), np.minimum(engine, -1e-3)
    p, q = np.exp(old), np.exp(engine)
    apart = {
        "binary_kl": q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)),
        "tv": abs(p - q),
        "ratio": p,
    }[gate]
    own = p / q
    ratio, apart = {
        "token": (own, apart),
        "sequence": (np.full(len(p), own.prod()), np.full(len(p), apart.sum())),
        "geometric": (np.full(len(p), own.prod() ** (1 / len(p))), np.full(len(p), apart.mean())),
    }[level]
    outside = (ratio < low) | (ratio > high) if gate == "ratio" else apart > bound
    if mode == "mask":
        return np.where(outside, 0.0, own), outside
    if mode == "mis":
        return np.where(outside, 0.0, ratio), outside
    brought = np.minimum(ratio, high) if mode == "truncate" else np.clip(ratio, low, high)
    return np.where(outside, brought, ratio), outside


@pytest.mark.parametrize("gate", ["ratio", "binary_kl", "tv"])
@pytest.mark.parametrize("mode", ["clip", "mask", "mis", "truncate"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_correction_equals_its_formula(level, mode, gate):
    whole = answers()
    for t in whole:
        t.logprobs = np.where(t.sampled, np.minimum(t.logprobs, -2e-3), 0).astype(np.float32)
    bound = {
        "binary_kl": {"token": 0.02, "sequence": 0.1, "geometric": 0.02},
        "tv": {"token": 0.1, "sequence": 0.3, "geometric": 0.06},
    }.get(gate, {}).get(level, 1.0)
    batches = packed(whole, 1, 4)
    cfg = correction.resolve(
        CorrectionConfig(level=level, mode=mode, gate=gate, low=0.8, high=1.2, divergence=bound)
    )
    seen = []
    for b in batches:
        old = lay(b, whole, lambda t: np.minimum(draw(t, "old"), -1e-3)).requires_grad_()
        weight, outside = correction.weights(old, old, b, cfg)
        assert not weight.requires_grad
        where = b.loss_mask

        def column(t, which):
            out = np.zeros(len(t.tokens))
            if t.sampled.any():
                out[t.sampled] = correction_formula(t, level, mode, gate, 0.8, 1.2, bound)[which]
            return out

        np.testing.assert_allclose(
            weight[where], lay(b, whole, lambda t: column(t, 0))[where], rtol=0, atol=1e-10
        )
        np.testing.assert_array_equal(
            outside[where], lay(b, whole, lambda t: column(t, 1))[where].bool()
        )
        seen += outside[where].tolist()
    assert any(seen) and not all(seen)  # both sides of the gate are met


def test_presets_are_what_their_sources_say():
    shown = {
        name: correction.resolve(CorrectionConfig(preset=name))
        for name in ("tis", "icepop", "seq-mask-tis", "seq-mis")
    }
    assert {name: (c.level, c.mode, c.gate, c.low, c.high) for name, c in shown.items()} == {
        "tis": ("token", "truncate", "ratio", 0.0, 2.0),
        "icepop": ("token", "mask", "ratio", 0.5, 5.0),
        "seq-mask-tis": ("geometric", "mask", "ratio", 0.5, 5.0),
        "seq-mis": ("sequence", "mis", "ratio", 0.0, 3.0),
    }
    dppo = [correction.resolve(CorrectionConfig(preset=f"dppo-{name}")) for name in ("tv", "kl")]
    assert [(c.trust_region, c.gate, c.divergence) for c in dppo] == [
        (True, "tv", 0.15),
        (True, "binary_kl", 0.05),
    ]
    assert correction.resolve(CorrectionConfig(preset="off")).level == "off"
    assert correction.resolve(CorrectionConfig(preset="icepop", high=3.0)).high == 3.0
    with pytest.raises(UserError, match="high = 0.5"):
        correction.resolve(CorrectionConfig(high=0.5))
    with pytest.raises(UserError, match="preset = dppo-tv has one setting.*unset level, high"):
        correction.resolve(CorrectionConfig(preset="dppo-tv", level="off", high=3.0))


def test_a_sure_token_has_a_finite_divergence():
    sure = torch.tensor([0.0, -1e-9, -3.0], dtype=torch.float64)
    for gate in ("binary_kl", "tv"):
        assert torch.isfinite(correction.divergence(sure, sure.flip(0), gate)).all()
        assert correction.divergence(sure, sure, gate).tolist() == [0, 0, 0]


# --------------------------------------------------------------------------------------------------
# token estimators, KL in the reward


def returns_formula(t, coef, gamma):
    r = -coef * (draw(t, "old") - draw(t, "ref"))[t.sampled]
    r[-1] += t.reward
    return np.array([sum(gamma ** (k - i) * r[k] for k in range(i, len(r))) for i in range(len(r))])


def by_token(batches, whole):
    """engine log-prob -> advantage"""
    return {
        float(e): a
        for b in batches
        for e, a, m in zip(b.engine_logprobs, b.advantages.tolist(), b.loss_mask, strict=True)
        if m
    }


def expected_by_token(whole, per_token):
    return {
        float(x): v
        for t in whole
        if t.sampled.any()
        for x, v in zip(t.logprobs[t.sampled], per_token(t), strict=True)
    }


def assert_equal_tokens(got, expected, atol=1e-10):
    assert got.keys() == expected.keys()
    np.testing.assert_allclose(
        [got[k] for k in expected], list(expected.values()), rtol=0, atol=atol
    )


@pytest.mark.parametrize(("coef", "gamma"), [(0.1, 1.0), (0.1, 0.9), (0.0, 0.5)])
def test_reinforce_pp_equals_its_formula(coef, gamma):
    whole = answers()
    kept = [t for t in whole if t.sampled.any()]
    raw = np.concatenate([returns_formula(t, coef, gamma) for t in kept])
    expected = expected_by_token(
        whole, lambda t: (returns_formula(t, coef, gamma) - raw.mean()) / (raw.std() + 1e-8)
    )
    for cuts in ((), (1, 4), (0, 3)):
        batches = packed(whole, *cuts)
        advantages.assign(
            batches,
            advantages.find("reinforce_pp"),
            AlgoConfig(
                advantage="reinforce_pp",
                gamma=gamma,
                kl_coef=coef,
                kl_in="reward",
                kl_estimator="k1",
            ),
            **ALONE,
        )
        assert_equal_tokens(by_token(batches, whole), expected)
        assert all((b.advantages[~b.loss_mask] == 0).all() for b in batches)


def test_equal_rewards_give_reinforce_pp_exactly_zero():
    whole = answers()
    for t in whole:
        t.reward = 0.1
    batches = packed(whole, 2)
    advantages.assign(
        batches, advantages.find("reinforce_pp"), AlgoConfig(advantage="reinforce_pp"), **ALONE
    )
    assert all((b.advantages == 0).all() for b in batches)


def test_distillation_is_minus_the_reverse_kl():
    whole = answers()
    batches = packed(whole, 1, 4)
    advantages.assign(
        batches,
        advantages.find("on_policy_distill"),
        AlgoConfig(advantage="on_policy_distill"),
        **ALONE,
    )
    assert_equal_tokens(
        by_token(batches, whole),
        expected_by_token(whole, lambda t: (draw(t, "ref") - draw(t, "old"))[t.sampled]),
    )


def test_an_episode_without_tokens_has_a_part_in_the_mean_of_its_group():
    whole = answers()
    batches = packed(whole, 1, 4)
    first = next(t for t in whole if t.sampled.any())
    nothing = np.zeros(0)
    silent = Trajectory(
        tokens=nothing,
        sampled=nothing.astype(bool),
        logprobs=nothing,
        reward=first.reward + 3.0,
        group=first.group,
        episode=99,
    )
    cfg = AlgoConfig(advantage="dr_grpo")
    advantages.assign(batches, advantages.find("dr_grpo"), cfg, without_tokens=[silent], **ALONE)
    values = {}
    for group in {t.group for t in whole}:
        siblings = [t for t in whole if t.group == group and t.sampled.any()]
        silents = [silent] if group == silent.group else []
        mean = np.mean([t.reward for t in siblings + silents] or [0.0])
        values |= {t.episode: t.reward - mean for t in siblings}
    assert_equal_tokens(
        by_token(batches, whole),
        expected_by_token(whole, lambda t: np.full(int(t.sampled.sum()), values[t.episode])),
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_group_estimators_with_the_kl_in_the_reward(estimator):
    whole = answers()

    def charged(t):
        d = (draw(t, "ref") - draw(t, "old"))[t.sampled]
        return t.reward - 0.2 * {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[estimator].sum()

    members = [[t for t in whole if t.group == g and t.sampled.any()] for g in range(4)]
    values = {
        t.episode: v
        for group in members
        for t, v in zip(
            group,
            rloo_formula([charged(t) for t in group]) if len(group) > 1 else [0.0] * len(group),
            strict=True,
        )
    }
    batches = packed(whole, 1, 4)
    advantages.assign(
        batches,
        advantages.find("rloo"),
        AlgoConfig(advantage="rloo", kl_coef=0.2, kl_in="reward", kl_estimator=estimator),
        **ALONE,
    )
    assert_equal_tokens(
        by_token(batches, whole),
        expected_by_token(whole, lambda t: np.full(int(t.sampled.sum()), values[t.episode])),
    )


def test_whitening_over_tokens_is_that_of_the_authors():
    """The group's mean is gone; then mean and deviation over all tokens, long answers more."""
    whole = answers()
    kept = [t for t in whole if t.sampled.any()]
    centered = {}
    for t in kept:
        rewards = [s.reward for s in kept if s.group == t.group]
        centered[t.episode] = t.reward - np.mean(rewards) if len(rewards) > 1 else 0.0
    tokens = np.concatenate([np.full(int(t.sampled.sum()), centered[t.episode]) for t in kept])
    assert abs(tokens.mean()) > 0.05  # over tokens the mean is not 0
    expected = expected_by_token(
        whole,
        lambda t: np.full(
            int(t.sampled.sum()), (centered[t.episode] - tokens.mean()) / tokens.std()
        ),
    )
    found = {}
    for whitened in (True, False):
        batches = packed(whole, 1, 4)
        cfg = AlgoConfig(advantage="reinforce_pp_baseline", whiten_tokens=whitened)
        advantages.assign(batches, advantages.find(cfg.advantage), cfg, **ALONE)
        found[whitened] = by_token(batches, whole)
    assert_equal_tokens(found[True], expected, atol=1e-6)
    assert max(abs(found[True][k] - found[False][k]) for k in expected) > 0.05


def test_discounted_sums_stop_at_the_end_of_a_sequence():
    rng = np.random.default_rng(5)
    sequence = np.repeat([0, 1, 2, 5], [1, 7, 13, 2])
    r = rng.normal(size=len(sequence))
    expected = [
        sum(0.7 ** (k - i) * r[k] for k in range(i, len(r)) if sequence[k] == sequence[i])
        for i in range(len(r))
    ]
    np.testing.assert_allclose(
        token_advantages.discounted(torch.tensor(sequence), torch.tensor(r), 0.7),
        expected,
        rtol=0,
        atol=1e-14,
    )
    assert (
        len(token_advantages.discounted(torch.empty(0, dtype=torch.int64), torch.empty(0), 0.7))
        == 0
    )


# --------------------------------------------------------------------------------------------------
# on several ranks


def spread(mesh, budget):
    """What rl.py does between rollout and update, of the numbers of `draw`; and losses with
    gradients that need sums over sequences or prompts."""
    whole = answers()
    (micros,) = exchange(whole[mesh.rank :: mesh.world_size], mesh, budget)
    batches = [pack(m, CPU, layout=RowLayout(context=mesh.context)) for m in micros]
    for b in batches:
        b.old_logprobs, b.ref_logprobs = (
            lay(b, whole, lambda t, n=name: draw(t, n)) for name in ("old", "ref")
        )
    out = {"micros": len(batches)}
    for name, coef, whitened in (
        ("reinforce_pp", 0.1, False),
        ("grpo", 0.1, False),
        ("reinforce_pp_baseline", 0.1, False),
        ("reinforce_pp_baseline", 0.1, True),
        ("on_policy_distill", 0.0, False),
    ):
        advantages.assign(
            batches,
            advantages.find(name),
            AlgoConfig(
                advantage=name, gamma=0.9, kl_coef=coef, kl_in="reward", whiten_tokens=whitened
            ),
            dtype=torch.float64,
            sum_over_ranks=mesh.data_sums,
            max_over_ranks=mesh.maxima,
            gather_rows=mesh.gather_rows,
        )
        out[f"{name} whitened" if whitened else name] = by_token(batches, whole)
    for method, aggregation in (("gspo", "sequence"), ("cispo", "prompt"), ("ppo", "prompt")):
        cfg = AlgoConfig(
            loss=method,
            aggregation=aggregation,
            clip_low=0.1,
            clip_high=0.1,
            correction=CorrectionConfig(preset="seq-mask-tis", low=0.9, high=1.1),
        )
        gradients = {}
        count = mesh.data_sums(sum(normalize.count(b, aggregation) for b in batches)[None]).item()
        for b in batches:
            b.advantages = lay(b, whole, advantage)
            x = lay(b, whole, lambda t: draw(t, "x")).requires_grad_()
            value = (
                losses.policy(cfg, 16).token_loss(b, x, x.detach())[0]
                * normalize.weights(b, aggregation)
            ).sum() / count
            value.backward()
            gradients |= {
                float(e): g
                for e, g, m in zip(b.engine_logprobs, x.grad.tolist(), b.loss_mask, strict=True)
                if m
            }
        out[f"{method} {aggregation}"] = gradients
    for b in batches:
        b.old_entropy = -b.old_logprobs
    shaping.mark_high_entropy(batches, 0.2, mesh.sums)
    out["forks"] = {
        float(e): v
        for b in batches
        for e, v, m in zip(
            b.engine_logprobs, b.high_entropy_mask.tolist(), b.loss_mask, strict=True
        )
        if m
    }
    return out


def test_entropies_that_rounding_makes_differ_are_marked_alike():
    entropies = torch.tensor([3.0, 3.0 * (1 - 1e-6), 2.0, 1.0], dtype=torch.float64)
    batch = SimpleNamespace(old_entropy=entropies, loss_mask=torch.tensor([True] * 4))
    shaping.mark_high_entropy([batch], 0.25, lambda counts: counts)
    assert batch.high_entropy_mask.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("world", "parallel", "budget"),
    [
        (2, ParallelConfig(), 1000),
        (2, ParallelConfig(context=2), 1000),
        (2, ParallelConfig(), 12),
        (4, ParallelConfig(context=2), 6),
        (2, ParallelConfig(tensor=2), 16),
    ],
    ids=["dp2", "cp2", "dp2, micro-batches", "dp2 cp2, micro-batches", "tp2"],
)
def test_ranks_and_micro_batches_change_nothing(world, parallel, budget):
    (expected,) = ranks(1, spread, 1000)
    results = ranks(world, spread, budget, parallel=parallel)
    assert expected["micros"] == 1 and (budget == 1000 or results[0]["micros"] >= 3)
    assert sum(expected["forks"].values()) == math.ceil(0.2 * len(expected["forks"]))
    for name in expected.keys() - {"micros"}:
        got = {k: v for r in results for k, v in r[name].items()}
        assert_equal_tokens(got, expected[name], atol=1e-12)
        assert any(v != 0 for v in got.values())


# --------------------------------------------------------------------------------------------------
# shaping


def test_shaping_equals_its_formulas():
    rewards, lengths = (
        torch.tensor([1.0, 0.5, -2.0, 1.0], dtype=torch.float64),
        torch.tensor([4, 8, 9, 10], dtype=torch.float64),
    )
    stopped = torch.tensor([True, True, False, False])

    def shaped(**settings):
        return shaping.shape(
            rewards, lengths, stopped, RewardConfig(**settings), 10, [0.0, 0.0, 0.0], lambda v: v
        )[0]

    assert shaped(unstopped="scale", unstopped_value=0.5).tolist() == [1.0, 0.5, -1.0, 0.5]
    assert shaped(unstopped="set", unstopped_value=-1.0).tolist() == [1.0, 0.5, -1.0, -1.0]
    dapo = [0 if n <= 6 else ((10 - 4) - n) / 4 if n <= 10 else -1 for n in lengths.tolist()]
    np.testing.assert_allclose(shaped(overlong_tokens=4) - rewards, dapo, atol=1e-15)
    np.testing.assert_allclose(
        shaped(overlong_tokens=4, overlong_penalty=0.5) - rewards, np.array(dapo) / 2, atol=1e-15
    )
    cfg = RewardConfig(unstopped="set", unstopped_value=0.0, overlong_tokens=4, clip=0.4)
    got, _, stats = shaping.shape(rewards, lengths, stopped, cfg, 10, [0.0, 0.0, 0.0], lambda v: v)
    np.testing.assert_allclose(got, [0.4, 0.0, -0.4, -0.4], atol=1e-15)
    assert stats == [0.0, 0.0, 0.0]
    assert (
        shaping.shape(rewards, lengths, stopped, RewardConfig(), 10, stats, lambda v: v)[0]
        is rewards
    )


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"unstopped": "scale", "unstopped_value": 0.5}, [1.0, 1.0, 0.5, 0.5]),
        ({"unstopped": "set", "unstopped_value": -1.0}, [1.0, 1.0, 0.0, 0.0]),
        ({"overlong_tokens": 4}, [1.0, 1.0, 1.0, 1.0]),
        ({"clip": 2.0}, [0.2, 1.0, 1.0, 0.5]),
        ({"unstopped": "scale", "unstopped_value": 0.5, "clip": 1.0}, [0.1, 1.0, 0.5, 0.25]),
    ],
)
def test_what_turns_have_earned_is_scaled_with_the_reward(settings, scales):
    """Else a clip of 1 would leave -9 to the end of an episode whose first turn has earned 10."""
    rewards = torch.tensor([10.0, 0.0, 2.0, 4.0], dtype=torch.float64)
    lengths = torch.tensor([4, 8, 9, 10], dtype=torch.float64)
    stopped = torch.tensor([True, True, False, False])
    cfg = RewardConfig(**settings)
    got = shaping.shape(rewards, lengths, stopped, cfg, 10, [0.0, 0.0, 0.0], lambda v: v)[1]
    assert got.tolist() == scales


@pytest.mark.parametrize("rewards", [[1.0, 3.0, 5.0], [2.0, 2.0, 2.0], [2.0, 2.0 + 1e-15, 2.0]])
def test_normalised_turns_have_the_deviation_of_the_rewards(rewards):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    stopped = torch.ones(3, dtype=torch.bool)
    cfg = RewardConfig(normalize=True)
    scales = shaping.shape(rewards, rewards, stopped, cfg, 10, [0.0, 0.0, 0.0], lambda v: v)[1]
    deviation = rewards.std(correction=0).item()
    expected = 1 / deviation if deviation > 1e-6 else 0.0
    np.testing.assert_allclose(scales, [expected] * 3, rtol=1e-7)


def test_segments_of_an_episode_share_its_age_and_its_scale():
    """The first one was sampled by weights that are two updates older than the second's."""
    trajectories = []
    for segment, version in enumerate((3, 5)):
        info = trajectories[0].info if segment else {"answer_tokens": 2, "stopped": True}
        none = np.zeros(1, np.float32)
        turns = np.array([10.0, 0.0], np.float32) if segment == 0 else none
        trajectories.append(
            Trajectory(
                tokens=np.zeros(2, np.int32),
                sampled=np.ones(2, bool),
                logprobs=np.zeros(2, np.float32),
                reward=10.0,
                segment=segment,
                version=version,
                turn_rewards=turns,
                info=info,
            )
        )
    trainer = SimpleNamespace(
        cfg=RLConfig(reward=RewardConfig(clip=1.0)),
        policy=SimpleNamespace(num_updates=5),
        progress=SimpleNamespace(reward_stats=[0.0, 0.0, 0.0]),
        mesh=SimpleNamespace(sums=lambda v: v),
        curriculum=None,
    )
    Trainer.shape(trainer, trajectories)
    assert [t.info["staleness"] for t in trajectories] == [2, 2]
    assert [t.reward for t in trajectories] == [1.0, 1.0]
    assert trajectories[0].turn_rewards.tolist() == [1.0, 0.0]


def normalised(mesh, batches):
    stats, out = [0.0, 0.0, 0.0], []
    for batch in batches:
        own, stats = shaping.normalize(
            torch.tensor(batch[mesh.rank :: mesh.world_size], dtype=torch.float64), stats, mesh.sums
        )
        out.append(own.tolist())
    return out, stats


def test_running_normalisation_is_that_of_all_rewards_so_far():
    rng = np.random.default_rng(9)
    batches = [(1e6 + rng.normal(size=n)).tolist() for n in (5, 2, 8)]
    (first, stats), (second, other) = ranks(2, normalised, batches)
    assert stats == other and stats[0] == 15
    for i, (batch, a, b) in enumerate(zip(batches, first, second, strict=True)):
        seen = np.concatenate(batches[: i + 1])
        expected = (np.array(batch) - seen.mean()) / (seen.std() + 1e-8)
        np.testing.assert_allclose(a, expected[::2], atol=1e-8)
        np.testing.assert_allclose(b, expected[1::2], atol=1e-8)
