"""What cannot work together in the algorithm of RL: its sections `algo`, `critic` and `ref`."""

from minirl.base.errors import require
from minirl.config.adapters import validate_lora, validate_shared_base
from minirl.config.lengths import validate_schedule, validate_warmup
from minirl.config.rl import RLConfig


def validate_algorithm(cfg: RLConfig) -> None:
    """Refuse what cannot work in the section `algo`. Raises UserError."""
    algo = cfg.algo
    require(
        ":" in algo.loss or algo.loss in ("ppo", "gspo", "cispo"),
        f"algo.loss = {algo.loss!r} is neither ppo, gspo or cispo nor of the form file.py:function",
    )

    require(
        algo.dual_clip == 0 or algo.dual_clip > 1,
        f"algo.dual_clip = {algo.dual_clip} must be 0 (off) or above 1",
    )

    require(
        algo.loss != "cispo" or not algo.dual_clip,
        f"algo.dual_clip = {algo.dual_clip} bounds what algo.loss = cispo bounds already; set it "
        "to 0",
    )

    require(
        algo.kl_in == "loss" or algo.kl_estimator != "unbiased",
        "algo.kl_estimator = unbiased is about the gradient, and a reward has none; take k1 (or "
        "auto)",
    )

    require(
        not algo.whiten_tokens or algo.advantage == "reinforce_pp_baseline",
        f"algo.whiten_tokens belongs to algo.advantage = reinforce_pp_baseline, not "
        f"{algo.advantage}; unset it",
    )


def validate_critic(cfg: RLConfig) -> None:
    """Refuse what cannot work in the section `critic`. Raises UserError."""
    critic = cfg.critic
    require(
        cfg.algo.advantage == "gae" or not critic.model,
        f"critic.model = {critic.model} has no effect while algo.advantage = "
        f"{cfg.algo.advantage}; set algo.advantage gae",
    )

    require(
        critic.model != "scratch",
        "critic.model = scratch: leave it empty, and the critic starts as the policy does",
    )

    if not cfg.num_epochs:  # or else it depends on the number of rows
        validate_warmup(cfg, cfg.num_steps)
    validate_schedule(critic, "critic")
    validate_lora(critic, "critic", cfg.parallel.tensor)
    validate_shared_base(cfg)

    require(
        critic.ema_decay == 0,
        f"critic.ema_decay = {critic.ema_decay}: the critic is not exported, so its average would "
        "be lost; set it to 0",
    )


def validate_reference(cfg: RLConfig) -> None:
    """Refuse a penalty for the distance to a reference that is not there. Raises UserError."""
    algo = cfg.algo
    ref = cfg.ref
    distills = algo.advantage == "on_policy_distill"

    require(
        not distills or ref.model,
        "algo.advantage = on_policy_distill learns from a teacher; name it with ref.model",
    )

    require(
        not distills or algo.kl_in == "loss" or not algo.kl_coef,
        "algo.kl_in = reward: on_policy_distill takes no rewards; set algo.kl_in loss or "
        "algo.kl_coef 0",
    )

    for is_set, setting in (
        (algo.kl_target, f"algo.kl_target = {algo.kl_target}"),
        (ref.every, f"ref.every = {ref.every}"),
        (ref.model and not distills, f"ref.model = {ref.model}"),
        (algo.kl_in == "reward", "algo.kl_in = reward"),
    ):
        require(
            not is_set or algo.kl_coef > 0,
            f"{setting} has no effect while algo.kl_coef = {algo.kl_coef}: no KL is computed and "
            "no reference is loaded; set algo.kl_coef above 0",
        )

    rank = cfg.policy.lora.rank
    require(
        not (ref.every and rank),
        f"ref.every = {ref.every} would make the adapted policy the reference, and with "
        f"policy.lora.rank = {rank} that is the policy without its adapters; leave ref.every at 0",
    )

    require(
        not (ref.every and ref.model),
        f"ref.every = {ref.every} would replace ref.model = {ref.model} by the policy; set one of "
        "them",
    )

    require(
        not ref.reset_optimizer or ref.every,
        "ref.reset_optimizer: the optimizer's state is forgotten when the reference is replaced; "
        "set ref.every",
    )

    require(
        not ref.reset_optimizer or not cfg.policy.ema_decay,
        f"ref.reset_optimizer would forget the moving average of policy.ema_decay = "
        f"{cfg.policy.ema_decay} too; set one of them",
    )
