"""Settings that cannot work together, refused with the arithmetic before anything is loaded or
written; `config.py` says which work alone.
"""

from minirl.config.rl import RLConfig
from minirl.config.shared import DataConfig, EvaluateConfig, ParallelConfig
from minirl.config.supervised import ChatsConfig, DPOConfig, PairsConfig, RMConfig, SFTConfig
from minirl.errors import require


def check_rollout(cfg: RLConfig | EvaluateConfig) -> None:
    """Of every program that samples. Resolves engine.max_model_len = 0 and env.max_tokens = 0.
    Raises UserError.
    """
    check_data(cfg.data)
    r, e = cfg.rollout, cfg.engine
    cfg.env.max_tokens = cfg.env.max_tokens or cfg.env.max_turns * r.max_tokens
    longest = cfg.data.max_prompt_tokens + r.max_tokens
    e.max_model_len = e.max_model_len or cfg.data.max_prompt_tokens + cfg.env.max_tokens
    require(
        e.max_model_len >= longest,
        f"engine.max_model_len = {e.max_model_len} is less than data.max_prompt_tokens + "
        f"rollout.max_tokens = {cfg.data.max_prompt_tokens} + {r.max_tokens} = {longest}; raise it or set it to 0",
    )


def check_data(d: DataConfig | ChatsConfig | PairsConfig) -> None:
    require(
        not d.input_template or d.input_template.count("{}") == 1,
        f"data.input_template = {d.input_template!r} must have {{}} once, for the prompt",
    )
    for name in ("chat_template", "system_prompt"):
        require(
            not d.input_template or not vars(d)[name],
            f"data.{name} = {vars(d)[name]!r} has no place in data.input_template; set one of them",
        )


def check_parallel(p: ParallelConfig, world_size: int) -> None:
    product = p.replicate * p.context * p.tensor
    require(
        world_size % product == 0,
        f"parallel.replicate * parallel.context * parallel.tensor = {p.replicate} * {p.context} * {p.tensor} = {product} does not "
        f"divide the {world_size} ranks; the ranks that are left over must be whole copies, over which parameters are sharded",
    )
    require(
        not p.sequence or p.tensor > 1,
        "parallel.sequence divides tokens over parallel.tensor ranks, and that is 1; set parallel.tensor",
    )
    require(
        p.context_engine == "all_gather" or p.context > 1,
        f"parallel.context_engine = {p.context_engine} needs parallel.context above 1",
    )


def check_budget(tokens_per_rank: int, context: int, setting: str, longest: int) -> None:
    """`setting` says that a sequence may have `longest` tokens."""
    times, product = (
        (f" * parallel.context = {tokens_per_rank} * {context}", tokens_per_rank * context)
        if context > 1
        else ("", tokens_per_rank)
    )
    require(
        product >= longest,
        f"tokens_per_rank{times} = {product} cannot hold one sequence of {setting} = {longest} tokens; "
        "raise tokens_per_rank or parallel.context, or lower the lengths",
    )


def _check_training(
    cfg: RLConfig | SFTConfig, world_size: int, longest: int, what: str, scores: tuple[str, ...]
) -> None:
    """What every program that trains refuses. `longest`: tokens of a sequence, `what`: the setting
    that says so; `scores`: names of held-out scores.
    """
    p, c = cfg.policy, cfg.checkpoint
    check_parallel(cfg.parallel, world_size)
    check_budget(cfg.tokens_per_rank, cfg.parallel.context, what, longest)
    require(
        not p.cpu_offload or p.optimizer_state != "offload",
        "policy.optimizer_state = offload moves to the host what policy.cpu_offload "
        "has there already; set one of them",
    )
    require(bool(cfg.data.train), "data.train is empty: give a JSONL file or reasoning_gym:NAME")
    require(
        bool(cfg.data.eval) or cfg.data.held_out >= 1,
        f"data.held_out = {cfg.data.held_out} must be at least 1 where data.eval names no file",
    )
    require(
        c.best_metric in ("", *scores),
        f"checkpoint.best_metric = {c.best_metric!r} is no held-out score; those are {', '.join(scores)}",
    )
    require(
        not c.best_metric or c.every > 0 and cfg.eval.every > 0 and c.every % cfg.eval.every == 0,
        f"checkpoint.best_metric = {c.best_metric} needs an evaluation of every checkpoint, but checkpoint.every = {c.every} is no multiple of "
        f"eval.every = {cfg.eval.every}",
    )


def check_sft(
    cfg: SFTConfig,
    world_size: int,
    longest: int = 1,
    scores: tuple[str, ...] = ("loss", "perplexity"),
) -> None:
    """Refuse what cannot work, with the arithmetic. `longest`: rows of data.max_tokens that a
    micro-batch must hold. Raises UserError.
    """
    check_data(cfg.data)
    _check_training(
        cfg,
        world_size,
        longest * cfg.data.max_tokens,
        "data.max_tokens" if longest == 1 else f"{longest} * data.max_tokens",
        scores,
    )


def check_pairs(cfg: RMConfig | DPOConfig, world_size: int) -> None:
    """Refuse what cannot work, with the arithmetic. Raises UserError."""
    check_sft(cfg, world_size, 2, ("loss", "accuracy", "margin"))
    if isinstance(cfg, DPOConfig):
        require(
            cfg.algo.label_smoothing == 0 or cfg.algo.loss == "sigmoid",
            f"algo.label_smoothing = {cfg.algo.label_smoothing} is of algo.loss sigmoid, not {cfg.algo.loss}; set it to 0",
        )


def check_rl(cfg: RLConfig, world_size: int) -> None:
    """Refuse what cannot work, with the arithmetic. Resolves engine.max_model_len = 0 and
    env.max_tokens = 0. Raises UserError.
    """
    check_rollout(cfg)
    _check_training(
        cfg,
        world_size,
        cfg.engine.max_model_len,
        "engine.max_model_len",
        ("accuracy", "reward", f"pass@{cfg.eval.samples}"),
    )
    r, a, tp = cfg.rollout, cfg.algo, cfg.engine.tensor_parallel_size
    if cfg.reward.model:
        check_budget(
            cfg.tokens_per_rank,
            cfg.parallel.context,
            "engine.max_model_len + 1, for the end that reward.model reads,",
            cfg.engine.max_model_len + 1,
        )
    require(
        world_size % tp == 0,
        f"engine.tensor_parallel_size = {tp} does not divide the {world_size} ranks",
    )
    compares = a.advantage not in ("reinforce_pp", "gae", "on_policy_distill")
    require(
        r.samples_per_prompt >= 1 + compares,
        f"rollout.samples_per_prompt = {r.samples_per_prompt}: algo.advantage = {a.advantage} "
        "compares the samples of one prompt, so it needs at least 2",
    )
    require(
        r.prompts_per_step % a.updates_per_step == 0,
        f"algo.updates_per_step = {a.updates_per_step} does not divide rollout.prompts_per_step = {r.prompts_per_step}",
    )
    require(
        (r.top_p, r.top_k, r.min_p) == (1.0, -1, 0.0),
        f"rollout.top_p = {r.top_p}, top_k = {r.top_k}, min_p = {r.min_p}: the trainer cannot reproduce log-probs of a "
        "truncated distribution; train with top_p 1.0, top_k -1, min_p 0.0",
    )
    require(
        a.dual_clip == 0 or a.dual_clip > 1,
        f"algo.dual_clip = {a.dual_clip} must be 0 (off) or above 1",
    )
    _check_algo(cfg)


def _check_algo(cfg: RLConfig) -> None:
    a, c, ref, r = cfg.algo, cfg.critic, cfg.ref, cfg.rollout
    require(
        a.advantage == "gae" or not c.model,
        f"critic.model = {c.model} has no effect while algo.advantage = {a.advantage}; set algo.advantage gae",
    )
    require(
        c.model != "scratch",
        "critic.model = scratch: leave it empty, and the critic begins as the policy does",
    )
    require(
        c.warmup_steps < max(1, cfg.num_steps),
        f"critic.warmup_steps = {c.warmup_steps} leaves the policy none of num_steps = {cfg.num_steps}; lower it",
    )
    require(
        c.ema_decay == 0,
        f"critic.ema_decay = {c.ema_decay}: the critic is not exported, so nobody would see its average; set it to 0",
    )
    distill = a.advantage == "on_policy_distill"
    require(
        not distill or bool(ref.model),
        "algo.advantage = on_policy_distill learns from a teacher; name it with ref.model",
    )
    require(
        not (distill and a.kl_in == "reward" and a.kl_coef),
        "algo.kl_in = reward: on_policy_distill takes no rewards; set algo.kl_in loss or algo.kl_coef 0",
    )
    for name, value in (
        ("algo.kl_target", a.kl_target),
        ("ref.every", ref.every),
        ("ref.model", ref.model),
        ("algo.kl_in = reward", a.kl_in == "reward"),
    ):
        require(
            not value or a.kl_coef > 0 or distill and name == "ref.model",
            f"{name}{'' if value is True else f' = {value}'} has no effect while "
            f"algo.kl_coef = {a.kl_coef}, for then no KL is taken and no reference loaded; set algo.kl_coef above 0",
        )
    require(
        not (ref.every and ref.model),
        f"ref.every = {ref.every} would replace ref.model = {ref.model} by the policy; set one of them",
    )
    require(
        not ref.reset_optimizer or ref.every > 0,
        "ref.reset_optimizer: the optimizer's state is forgotten when the reference is refreshed; set ref.every",
    )
    require(
        not (ref.reset_optimizer and cfg.policy.ema_decay),
        f"ref.reset_optimizer would forget the moving average of policy.ema_decay = "
        f"{cfg.policy.ema_decay} too; set one of them",
    )
    require(
        a.kl_in == "loss" or a.kl_estimator != "unbiased",
        "algo.kl_estimator = unbiased is about the gradient, and a reward has none; take k1, k2 or k3",
    )
    require(
        a.loss != "cispo" or not a.dual_clip,
        f"algo.dual_clip = {a.dual_clip} bounds what algo.loss = cispo bounds already; set it to 0",
    )
    require(
        r.keep_inside[0] < r.keep_inside[1],
        f"rollout.keep_inside = {r.keep_inside} is empty: its first number must be below its second",
    )
    require(
        not r.extra_prompts or r.samples_per_prompt > 1,
        f"rollout.extra_prompts = {r.extra_prompts} replaces prompts whose answers earn the same, and "
        "rollout.samples_per_prompt = 1 compares none; set it to 2 or more, or extra_prompts to 0",
    )
    require(
        not r.extra_prompts or not cfg.reward.model,
        f"rollout.extra_prompts = {r.extra_prompts} chooses prompts by their rewards during generation, and "
        f"reward.model = {cfg.reward.model} scores after it; serve it (python -m minirl.rm serve) or set extra_prompts to 0",
    )
    require(
        not r.curriculum_floor or not (r.extra_prompts or r.ahead or r.replay),
        f"rollout.curriculum_floor = {r.curriculum_floor} draws the prompts of a step and "
        f"learns from all of them, which rollout.extra_prompts = {r.extra_prompts}, ahead = {r.ahead} and replay = {r.replay!r} do not allow; unset one or the other",
    )
    require(
        cfg.reward.overlong_tokens <= cfg.env.max_tokens,
        f"reward.overlong_tokens = {cfg.reward.overlong_tokens} must be 0 (off) to env.max_tokens = {cfg.env.max_tokens}",
    )
    require(
        not r.replay or not (cfg.sft.num_steps or r.ahead or r.dump or cfg.checkpoint.best_metric),
        f"rollout.replay = {r.replay} runs no engine, so sft.num_steps, "
        "rollout.ahead, rollout.dump and checkpoint.best_metric have no effect; unset them",
    )
