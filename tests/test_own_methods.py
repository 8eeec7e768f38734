"""Estimators and losses from files of the user: of answers or by token, tried before anything is
loaded, and the same as minirl's own where they say the same."""

import inspect
import json

import pytest
import torch

from minirl.algo import advantages, losses, token_advantages
from minirl.base.errors import UserError
from minirl.base.oversight import Oversight
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.config.validate import resolve_lengths, validate_rl
from minirl.run import user_algorithms
from programs import fork

ALONE = {
    "dtype": torch.float32,
    "sum_over_ranks": lambda x: x,
    "max_over_ranks": lambda x: x,
    "gather_rows": lambda x: [x],
}


@pytest.fixture
def file(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(inspect.cleandoc(text) + "\n")
        return path

    return write


def config(advantage="grpo", loss="ppo", samples=2, **algo):
    cfg = RLConfig(algo=AlgoConfig(advantage=str(advantage), loss=str(loss), **algo))
    cfg.policy.model = "scratch"
    cfg.data.train = "rows.jsonl"
    cfg.rollout.samples_per_prompt = samples
    resolve_lengths(cfg)
    return cfg


def assigned(name):
    batch = user_algorithms.make_batch(3, with_reference=False)
    cfg = AlgoConfig(advantage=str(name))
    advantages.assign([batch], advantages.find(cfg.advantage), cfg, **ALONE)
    return batch.advantages


# --------------------------------------------------------------------------------------------------
# estimators

ESTIMATORS = """
    from minirl.algo.advantages import estimator
    from minirl.algo.normalize import over_sequences
    from minirl.algo.token_advantages import discounted


    @estimator(compares_nothing=True)
    def as_it_is(rewards, groups):
        return rewards


    def centered(rewards, groups):
        return rewards - rewards.mean()


    @estimator(by_token=True, whitened=True)
    def to_go(batch, rewards, cfg):
        return over_sequences(lambda s, r: discounted(s, r, cfg.gamma), batch, rewards)


    @estimator(by_token=True)
    def last(batch, rewards, cfg):
        return rewards * 2
"""


def test_an_estimator_is_what_its_decorator_declares(file):
    path = file(ESTIMATORS)
    found = {n: advantages.find(f"{path}:{n}") for n in ("as_it_is", "centered", "to_go", "last")}
    assert [f.by_token for f in found.values()] == [False, False, True, True]
    assert [f.compares_answers for f in found.values()] == [False, True, False, False]
    assert all(f.by_token != f.compares_answers for f in advantages.ESTIMATORS.values())
    # Declared to be whitened, it is reinforce_pp; not declared, it is left as it is.
    assert torch.equal(assigned(f"{path}:to_go"), assigned("reinforce_pp"))
    batch = user_algorithms.make_batch(3, with_reference=False)
    zeros = torch.zeros(len(batch.inputs), dtype=torch.float64)
    rewards = token_advantages.token_rewards(batch, zeros)
    assert torch.equal(assigned(f"{path}:last"), (2 * rewards).float() * batch.loss_mask)


def test_one_answer_a_prompt_is_enough_for_those_that_compare_none(file):
    path = file(ESTIMATORS)
    for name in ("as_it_is", "to_go", "last"):
        cfg = config(f"{path}:{name}", samples=1)
        validate_rl(cfg, 1)
        user_algorithms.check_methods(cfg, Oversight())
    cfg = config(f"{path}:centered", samples=1)
    validate_rl(cfg, 1)
    with pytest.raises(UserError, match=r"samples_per_prompt = 1: .*compares_nothing=True"):
        user_algorithms.check_methods(cfg, Oversight())


def test_old_logprobs_are_there_for_an_estimator_by_token(file):
    path = file(ESTIMATORS)
    for name, needs in ((f"{path}:last", True), (f"{path}:centered", False), ("gae", False)):
        cfg = AlgoConfig(advantage=name)
        assert advantages.need_old_logprobs(cfg, advantages.find(name)) == needs


WRONG_ESTIMATORS = {
    "by token, one number": ("batch, rewards, cfg", "return rewards.mean()", r"of shape \[\]"),
    "by token, not declared": (
        "a, b, c",
        "return a",
        r"as f\(rewards, .*raised TypeError",
    ),
    "by token, NaN": ("batch, rewards, cfg", "return rewards / 0", "are not finite"),
    "by token, raises": ("batch, rewards, cfg", "return batch.valeus", "raised AttributeError"),
    "by token, of the batch": (
        "batch, rewards, cfg",
        "return rewards - rewards.mean()",
        "the advantage of a token must not depend on other sequences",
    ),
    "by token, changes": (
        "batch, rewards, cfg",
        "batch.old_logprobs.zero_(); return rewards",
        "it changes old_logprobs, which is read again",
    ),
    "of answers, 0 / 0": (
        "rewards, groups",
        "return (rewards - 0.5) / (rewards - 0.5) * (groups == 2)",
        "1 of them are not finite, the first for an answer with reward .0.5.",
    ),
    "of answers, in rows": (
        "rewards, groups",
        "return (rewards.view(-1, 3) - rewards.view(-1, 3).mean(1, True)).view(-1)",
        "raised RuntimeError",
    ),
    "by token, no critic": ("batch, rewards, cfg", "return batch.values * 2", "raised TypeError"),
    "of answers, a list": ("rewards, groups", "return rewards.tolist()", "it returned"),
    "four": ("a, b, c, d", "return a", "raised TypeError"),
    "of answers, drawn": (
        "rewards, groups",
        "import torch; return rewards * torch.rand(len(rewards))",
        "not draw random numbers",
    ),
}


@pytest.mark.parametrize("name", WRONG_ESTIMATORS)
def test_a_wrong_estimator_is_told_at_the_start(file, name):
    parameters, body, message = WRONG_ESTIMATORS[name]
    is_declared = name.startswith("by token,") and "not declared" not in name
    declared = f"@estimator(by_token={is_declared})\n"
    importing = "from minirl.algo.advantages import estimator\n"
    path = file(f"{importing}{declared}def wrong({parameters}): {body}")
    with pytest.raises(UserError, match=rf"algo.advantage = .*mine.py:wrong(:| must).*{message}"):
        # Of 3 answers to a prompt, one more than to the prompt with equal rewards.
        user_algorithms.check_methods(config(f"{path}:wrong", samples=3), Oversight())


def test_an_estimator_that_compares_a_whole_step_is_refused_where_it_comes_in_parts(file):
    path = file(ESTIMATORS)
    for name, is_refused in {"as_it_is": 0, "centered": 1, "to_go": 1, "last": 0}.items():
        cfg = config(f"{path}:{name}")
        cfg.rollout.overlap = "stream"
        if is_refused:
            with pytest.raises(UserError, match=f"overlap = stream, algo.advantage = .*:{name}"):
                user_algorithms.check_methods(cfg, Oversight())
        else:
            user_algorithms.check_methods(cfg, Oversight())


# --------------------------------------------------------------------------------------------------
# losses

LOSSES = """
    import torch

    from minirl.algo.losses import old_logprobs, ppo_clip
    from minirl.algo.normalize import bounded_exp


    def again(batch, logprobs, entropy, cfg):
        ratio = bounded_exp(logprobs - old_logprobs(batch, logprobs))
        return ppo_clip(ratio, batch.advantages, cfg), {"ratio": ratio.detach()}


    def sapo(batch, logprobs, entropy, cfg):
        ratio = (logprobs - old_logprobs(batch, logprobs)).exp()
        gate = 4 * torch.sigmoid(ratio - 1)
        return -gate * batch.advantages, {}
"""


def test_a_loss_of_a_file_that_says_the_same_is_the_same(file):
    """With everything that goes with each method: correction, entropy, the reference."""
    path = file(LOSSES)
    extras = {"entropy_coef": 0.01, "kl_coef": 0.1, "dual_clip": 3.0}
    outcomes = []
    for loss in ("ppo", f"{path}:again"):
        batch = user_algorithms.make_batch(3, with_reference=True)
        logprobs = batch.engine_logprobs.clone().requires_grad_()
        made = losses.policy(AlgoConfig(loss=loss, **extras), 20)
        value, metrics = made.token_loss(batch, logprobs, batch.old_entropy)
        value.sum().backward()
        outcomes.append((value.detach(), logprobs.grad, metrics))
    (value, gradient, metrics), (own_value, own_gradient, own_metrics) = outcomes
    assert torch.equal(value, own_value) and torch.equal(gradient, own_gradient)
    assert own_metrics.keys() - metrics.keys() == {"ratio"}
    assert {"clip_fraction", "correction_weight", "ref_kl"} <= metrics.keys()


def test_good_losses_are_let_through(file):
    path = file(LOSSES)
    for name in ("again", "sapo"):
        cfg = config(loss=f"{path}:{name}", kl_coef=0.1)
        validate_rl(cfg, 1)
        user_algorithms.check_methods(cfg, Oversight())
    user_algorithms.check_methods(config(), Oversight())


def test_functions_of_a_file_take_arguments(file):
    """Of advantages and losses, to be swept by a flag."""
    path = file("""
        from minirl.algo.advantages import estimator

        @estimator(compares_nothing=True)
        def scaled(rewards, groups, *, by=1.0):
            return by * rewards

        def weighted(batch, logprobs, entropy, cfg, *, by=1.0):
            return -by * logprobs * batch.advantages, {}
    """)
    found = advantages.find(f"{path}:scaled?by=3")
    assert found.compares_nothing
    rewards = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert found(rewards, torch.tensor([0, 0])).tolist() == [3.0, 6.0]
    cfg = config(loss=f"{path}:weighted?by=2.5", advantage=f"{path}:scaled?by=3")
    user_algorithms.check_methods(cfg, Oversight())
    batch = user_algorithms.make_batch(3, with_reference=False)
    own = losses.find_own(cfg.algo.loss)
    value, _ = own(batch, batch.engine_logprobs, batch.old_entropy, cfg.algo)
    assert torch.equal(value, -2.5 * batch.engine_logprobs * batch.advantages)
    for query, message in (
        ("to=3", "unexpected keyword argument 'to'"),
        ("by", "write .name=value"),
    ):
        with pytest.raises(UserError, match=message):
            user_algorithms.check_methods(config(loss=f"{path}:weighted?{query}"), Oversight())


def test_a_loss_of_a_file_may_be_made_of_the_entropy(file):
    path = file("def sure(batch, logprobs, entropy, cfg): return entropy - logprobs * 0.1, {}")
    user_algorithms.check_methods(config(loss=f"{path}:sure"), Oversight())
    assert losses.policy(AlgoConfig(loss=f"{path}:sure"), 20).entropy_gradient
    assert not losses.policy(AlgoConfig(), 20).entropy_gradient


def test_a_loss_of_a_file_finds_the_old_log_probs_in_its_batch(file):
    """Those of now, where the step has one update."""
    path = file("""
        def plain(batch, logprobs, entropy, cfg):
            ratio = (logprobs - batch.old_logprobs).exp()
            return -ratio * batch.advantages, {"ratio": ratio}
    """)
    batch = user_algorithms.make_batch(3, with_reference=False)
    batch.old_logprobs = None
    made = losses.policy(AlgoConfig(loss=f"{path}:plain"), 20)
    _, metrics = made.token_loss(batch, batch.engine_logprobs, batch.old_entropy)
    assert (metrics["ratio"] == 1).all() and batch.old_logprobs is None


WRONG_LOSSES = {
    "one value": ("return -logprobs", "must return .*loss"),
    "an entropy that no step has": ("return batch.old_entropy * logprobs, {}", "TypeError"),
    "a mean": ("return (-logprobs * batch.advantages).mean(), {}", r"its loss must be a tensor"),
    "a text": ("return -logprobs, {'x': 'y'}", "x must be a tensor"),
    "a list": ("return -logprobs, [1]", "its metrics are"),
    "NaN": ("return logprobs * float('nan'), {}", "its loss is not finite"),
    "no gradient": ("return batch.advantages, {}", "the gradient of its loss by logprobs"),
    "detached": ("return -logprobs.detach(), {}", "the gradient of its loss by logprobs"),
    "gradient 0": ("return logprobs * 0, {}", "the gradient of its loss by logprobs is 0"),
    "raises": ("return cfg.clip, {}", "AttributeError"),
    "leaves": ("raise SystemExit(0)", "SystemExit"),
    "a name": ("return -logprobs, {'loss': logprobs}", "a step has metrics named loss already"),
    "a name of the run's": ("return -logprobs, {'reward': logprobs}", "metrics named reward"),
    "a name of the log's": ("return -logprobs, {'step': logprobs}", "metrics named step"),
    "a number as a name": (
        "return -logprobs, {3: logprobs}",
        r"names of metrics are texts, not .3",
    ),
    "a name now and then": (
        "return -logprobs, {'far': logprobs} if (logprobs - batch.old_logprobs).max() > 2 else {}",
        "the same names at each call, on all ranks, and are none or far",
    ),
    "changes": (
        "adv = batch.advantages; adv[adv < 0] *= 0.5; return -logprobs * adv, {}",
        "it changes advantages, which is read again after it; work on a .clone",
    ),
    "whitens": (
        "return -logprobs * (batch.advantages - batch.advantages.mean()), {}",
        "its loss of a token must not depend on other sequences of the batch",
    ),
    "0 / 0": (
        "return -logprobs * batch.advantages / entropy.detach(), {}",
        "its loss is not finite at tokens outside the loss",
    ),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_a_wrong_loss_is_told_at_the_start(file, name):
    body, message = WRONG_LOSSES[name]
    path = file(f"def wrong(batch, logprobs, entropy, cfg): {body}")
    with pytest.raises(UserError, match=rf"algo.loss = .*mine.py:wrong: .*{message}"):
        user_algorithms.check_methods(config(loss=f"{path}:wrong"), Oversight())


def test_a_loss_that_is_nowhere_is_told(file):
    with pytest.raises(
        UserError, match="algo.loss = 'poo' is neither registered .ppo, gspo, cispo"
    ):
        user_algorithms.check_methods(config(loss="poo"), Oversight())
    with pytest.raises(UserError, match="no file none.py"):
        user_algorithms.check_methods(config(loss="none.py:f"), Oversight())
    with pytest.raises(UserError, match="has no function other"):
        user_algorithms.check_methods(config(loss=f"{file(LOSSES)}:other"), Oversight())


# --------------------------------------------------------------------------------------------------
# the program


def run(tmp_path, *more):
    rows = [{"prompt": f"{n}+", "answer": "1"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "--output": tmp_path / "run",
        "--policy.model": "scratch",
        "--policy.dtype": "float32",
        "--num-steps": 2,
        "--algo.updates-per-step": 2,
        "--data.train": tmp_path / "rows.jsonl",
        "--data.held-out": 4,
        "--data.max-prompt-tokens": 32,
        "--rollout.max-tokens": 4,
        "--engine.max-num-seqs": 16,
        "--rollout.prompts-per-step": 4,
    }
    flags = [x for pair in settings.items() for x in pair] + list(more)
    return fork("minirl.rl", flags, tmp_path / "log")


def test_a_run_with_an_estimator_by_token_and_a_loss_of_a_file(file, tmp_path):
    """Of one answer to each prompt."""
    own = file(ESTIMATORS + LOSSES)
    letters = file("def letters(prompt, completion, row): return len(set(completion)) / 4", "r.py")
    ended = run(
        tmp_path,
        "--algo.advantage",
        f"{own}:to_go",
        "--algo.loss",
        f"{own}:again",
        "--rollout.samples-per-prompt",
        1,
        "--reward.function",
        f"{letters}:letters",
    )
    assert ended.code == 0, ended.err
    metrics = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if row["phase"] == "rl"]
    assert len(steps) == 2 and all(0.5 < row["ratio"] < 2 for row in steps)
    assert any(row["grad_norm"] > 0 for row in steps)
    for row in steps:  # Where all answers have earned the same there is nothing to learn.
        assert (row["grad_norm"] > 0) == (row["reward_deviation/all"] > 0)


def test_a_wrong_one_ends_the_program_before_it_writes(file, tmp_path):
    path = file("def wrong(batch, logprobs, entropy, cfg): return -logprobs.mean(), {}")
    ended = run(tmp_path, "--algo.loss", f"{path}:wrong")
    assert ended.code == 2 and len(ended.errors()) == 1, ended.err
    assert "its loss must be a tensor [T]" in ended.errors()[0]
    assert not (tmp_path / "run").exists()
