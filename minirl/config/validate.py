"""Settings that cannot work together are refused before anything is loaded or written.

What a setting may be on its own, its type says. Each rule here is a paragraph, and its message
gives the setting, its value and what to do. `resolve_lengths` is the only function that changes a
config.
"""

from minirl.config.rl import RLConfig
from minirl.config.shared import DataConfig, EvaluateConfig, ParallelConfig
from minirl.config.supervised import ChatsConfig, DPOConfig, PairsConfig, SupervisedConfig
from minirl.errors import require
from minirl.trackers import check_installed

COLDEST = 0.01  # Temperature, of vLLM.

# ------------------------------------------------------------------------------------- entry points


def resolve_lengths(cfg: RLConfig | EvaluateConfig) -> None:
    """Replace env.max_tokens = 0 and engine.max_model_len = 0 by what they stand for."""
    if not cfg.env.max_tokens:
        cfg.env.max_tokens = cfg.env.max_turns * cfg.rollout.max_tokens
    if not cfg.engine.max_model_len:
        cfg.engine.max_model_len = cfg.data.max_prompt_tokens + cfg.env.max_tokens


def validate_rl(cfg: RLConfig, world_size: int) -> None:
    """Refuse what cannot work in minirl.rl. Lengths must be resolved.

    Raises:
        UserError: for the first rule that is broken.
    """
    longest = cfg.engine.max_model_len
    scores = ("accuracy", "reward", f"pass@{cfg.eval.samples}")
    validate_sampling(cfg)
    _training(cfg, world_size, "engine.max_model_len", longest, scores)
    _rollout(cfg)
    _temperature(cfg)
    _partial_rollouts(cfg)
    _reward(cfg)
    _algorithm(cfg)
    _critic(cfg)
    _reference(cfg)

    num_ranks = cfg.engine.tensor_parallel_size
    require(
        world_size % num_ranks == 0,
        f"engine.tensor_parallel_size = {num_ranks} does not divide the {world_size} ranks",
    )


def validate_supervised(cfg: SupervisedConfig, world_size: int) -> None:
    """Refuse what cannot work in minirl.sft, minirl.rm and minirl.dpo.

    Raises:
        UserError: for the first rule that is broken.
    """
    validate_templates(cfg.data)
    longest = cfg.data.max_tokens
    if isinstance(cfg.data, PairsConfig):  # a micro-batch holds both sides of a pair
        scores = ("loss", "accuracy", "margin")
        _training(cfg, world_size, "2 * data.max_tokens", 2 * longest, scores)
    else:
        _training(cfg, world_size, "data.max_tokens", longest, ("loss", "perplexity"))

    if isinstance(cfg, DPOConfig):
        require(
            cfg.algo.label_smoothing == 0 or cfg.algo.loss == "sigmoid",
            f"algo.label_smoothing = {cfg.algo.label_smoothing} belongs to algo.loss = sigmoid, "
            f"not {cfg.algo.loss}; set it to 0",
        )


def validate_sampling(cfg: RLConfig | EvaluateConfig) -> None:
    """Refuse what cannot work in any program that samples. Lengths must be resolved.

    Raises:
        UserError: for the first rule that is broken.
    """
    validate_templates(cfg.data)

    max_prompt = cfg.data.max_prompt_tokens
    longest = max_prompt + cfg.rollout.max_tokens
    require(
        cfg.engine.max_model_len >= longest,
        f"engine.max_model_len = {cfg.engine.max_model_len} is less than data.max_prompt_tokens + "
        f"rollout.max_tokens = {max_prompt} + {cfg.rollout.max_tokens} = {longest}; raise it or "
        "set it to 0",
    )


# ------------------------------------------------------------------------------------- shared rules


def validate_templates(data: DataConfig | ChatsConfig | PairsConfig) -> None:
    """Refuse an input template without a place for the prompt, or with a chat's settings."""
    template = data.input_template
    if not template:
        return

    require(
        template.count("{}") == 1,
        f"data.input_template = {template!r} must have {{}} once, for the prompt",
    )

    for name, value in (
        ("chat_template", data.chat_template),
        ("system_prompt", data.system_prompt),
    ):
        require(
            not value,
            f"data.{name} = {value!r} has no place in data.input_template; set one of them",
        )


def validate_parallel(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a mesh that does not divide the ranks, and options without their axis."""
    replicate = parallel.replicate
    context = parallel.context
    tensor = parallel.tensor

    product = replicate * context * tensor
    require(
        world_size % product == 0,
        f"parallel.replicate * parallel.context * parallel.tensor = {replicate} * {context} * "
        f"{tensor} = {product} does not divide the {world_size} ranks; the ranks that are left "
        "over must be whole copies, over which parameters are sharded",
    )

    require(
        not parallel.sequence or tensor > 1,
        "parallel.sequence divides tokens over parallel.tensor ranks, and that is 1; set "
        "parallel.tensor",
    )

    require(
        parallel.context_engine == "all_gather" or context > 1,
        f"parallel.context_engine = {parallel.context_engine} needs parallel.context above 1",
    )


def _budget(cfg: RLConfig | SupervisedConfig, setting: str, longest: int) -> None:
    """Refuse a micro-batch that cannot hold a sequence of the `longest` tokens of a setting."""
    context = cfg.parallel.context
    num_tokens = cfg.tokens_per_rank * context
    budget = f"tokens_per_rank = {num_tokens}"
    if context > 1:
        budget = (
            f"tokens_per_rank * parallel.context = {cfg.tokens_per_rank} * {context} = {num_tokens}"
        )
    require(
        num_tokens >= longest,
        f"{budget} cannot hold one sequence of {setting} = {longest} tokens; raise "
        "tokens_per_rank or parallel.context, or lower the lengths",
    )


def _training(
    cfg: RLConfig | SupervisedConfig,
    world_size: int,
    setting: str,
    longest: int,
    scores: tuple[str, ...],
) -> None:
    """Refuse what cannot work in any program that trains.

    Args:
        cfg: the settings.
        world_size: number of ranks.
        setting: what says how long a sequence may be.
        longest: its value, in tokens.
        scores: names of the held-out scores.
    """
    check_installed(cfg.log)
    validate_parallel(cfg.parallel, world_size)
    _budget(cfg, setting, longest)

    require(
        not cfg.policy.cpu_offload or cfg.policy.optimizer_state != "offload",
        "policy.optimizer_state = offload moves to the host what policy.cpu_offload keeps there "
        "already; set one of them",
    )

    require(cfg.data.train, "data.train is empty: give a JSONL file or reasoning_gym:NAME")

    require(
        cfg.data.eval or cfg.data.held_out >= 1,
        f"data.held_out = {cfg.data.held_out} must be at least 1 where data.eval names no file",
    )

    metric = cfg.checkpoint.best_metric
    require(
        metric in ("", *scores),
        f"checkpoint.best_metric = {metric!r} is no held-out score; use one of {', '.join(scores)}",
    )

    every = cfg.checkpoint.every
    eval_every = cfg.eval.every
    require(
        not metric or (every > 0 and eval_every > 0 and every % eval_every == 0),
        f"checkpoint.best_metric = {metric} needs an evaluation of every checkpoint, but "
        f"checkpoint.every = {every} is no multiple of eval.every = {eval_every}",
    )


# -------------------------------------------------------------------------------------- rules of RL


def _reward(cfg: RLConfig) -> None:
    if cfg.reward.model:
        _budget(
            cfg,
            "engine.max_model_len + 1, for the end that reward.model reads,",
            cfg.engine.max_model_len + 1,
        )

    overlong = cfg.reward.overlong_tokens
    require(
        overlong <= cfg.env.max_tokens,
        f"reward.overlong_tokens = {overlong} must be between 0 (off) and env.max_tokens = "
        f"{cfg.env.max_tokens}",
    )


def _rollout(cfg: RLConfig) -> None:
    rollout = cfg.rollout
    advantage = cfg.algo.advantage

    compares = advantage not in ("reinforce_pp", "gae", "on_policy_distill")
    require(
        rollout.samples_per_prompt > 1 or not compares,
        f"rollout.samples_per_prompt = {rollout.samples_per_prompt}: algo.advantage = {advantage} "
        "compares the samples of one prompt, so it needs at least 2",
    )

    updates = cfg.algo.updates_per_step
    require(
        rollout.prompts_per_step % updates == 0,
        f"algo.updates_per_step = {updates} does not divide rollout.prompts_per_step = "
        f"{rollout.prompts_per_step}",
    )

    require(
        (rollout.top_p, rollout.top_k, rollout.min_p) == (1.0, -1, 0.0),
        f"rollout.top_p = {rollout.top_p}, top_k = {rollout.top_k}, min_p = {rollout.min_p}: the "
        "trainer cannot reproduce log-probs of a truncated distribution; train with top_p 1.0, "
        "top_k -1, min_p 0.0",
    )

    low, high = rollout.keep_inside
    require(
        low < high,
        f"rollout.keep_inside = {rollout.keep_inside} is empty: its first number must be below its "
        "second",
    )

    extra = rollout.extra_prompts
    require(
        not extra or rollout.samples_per_prompt > 1,
        f"rollout.extra_prompts = {extra} replaces prompts whose answers earn the same, and "
        "rollout.samples_per_prompt = 1 compares none; set it to 2 or more, or extra_prompts to 0",
    )

    require(
        not extra or not cfg.reward.model,
        f"rollout.extra_prompts = {extra} chooses prompts by their rewards during generation, and "
        f"reward.model = {cfg.reward.model} scores after it; serve it (python -m minirl.rm serve) "
        "or set extra_prompts to 0",
    )

    require(
        not rollout.curriculum_floor or not (extra or rollout.ahead or rollout.replay),
        f"rollout.curriculum_floor = {rollout.curriculum_floor} draws the prompts of a step and "
        f"learns from all of them, which rollout.extra_prompts = {extra}, ahead = {rollout.ahead} "
        f"and replay = {rollout.replay!r} do not allow; unset one or the other",
    )

    needs_engine = cfg.sft.num_steps or rollout.ahead or rollout.dump or cfg.checkpoint.best_metric
    require(
        not rollout.replay or not needs_engine,
        f"rollout.replay = {rollout.replay} runs no engine, so sft.num_steps, rollout.ahead, "
        "rollout.dump and checkpoint.best_metric have no effect; unset them",
    )


def _temperature(cfg: RLConfig) -> None:
    require(
        cfg.rollout.temperature >= COLDEST,
        f"rollout.temperature = {cfg.rollout.temperature}: vLLM samples at {COLDEST} instead of "
        f"less, and the trainer would not know; use {COLDEST} or more",
    )


def _partial_rollouts(cfg: RLConfig) -> None:
    rollout = cfg.rollout
    most_ahead = rollout.prompts_per_step * rollout.max_staleness
    require(
        rollout.ahead <= most_ahead,
        f"rollout.ahead = {rollout.ahead} is more than prompts_per_step = "
        f"{rollout.prompts_per_step} times max_staleness = {rollout.max_staleness}, so that some "
        f"groups could not be trained on in time; lower it to {most_ahead} or less, or raise "
        "max_staleness",
    )


def _algorithm(cfg: RLConfig) -> None:
    algo = cfg.algo
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


def _critic(cfg: RLConfig) -> None:
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

    require(
        critic.warmup_steps < max(1, cfg.num_steps),
        f"critic.warmup_steps = {critic.warmup_steps} leaves the policy none of num_steps = "
        f"{cfg.num_steps}; lower it",
    )

    require(
        critic.ema_decay == 0,
        f"critic.ema_decay = {critic.ema_decay}: the critic is not exported, so its average would "
        "be lost; set it to 0",
    )


def _reference(cfg: RLConfig) -> None:
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
