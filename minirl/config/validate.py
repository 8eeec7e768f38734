"""Settings that cannot work together are refused before anything is loaded or written.

What a setting may be on its own, its type says. Each rule here is a paragraph, and its message
gives the setting, its value and what to do. `resolve_lengths` and `resolve_learning_rates` are the
only functions that change a config.
"""

import copy

from minirl.base.errors import require
from minirl.config.named import check_installed
from minirl.config.policy import Dtype, LoraConfig, ParallelConfig, PolicyConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import DataConfig, EvaluateConfig, TrainingConfig
from minirl.config.supervised import (
    ChatsConfig,
    DPOConfig,
    KTOConfig,
    PairsConfig,
    SupervisedConfig,
)

COLDEST = 0.01  # Temperature, of vLLM.

# ------------------------------------------------------------------------------------- entry points


def check_settings(cfg: object, world_size: int) -> None:
    """Refuse what cannot work in the program that this config is of. The config stays as it is.

    Raises:
        UserError: for the first rule that is broken.
    """
    if isinstance(cfg, RLConfig):
        resolved = copy.deepcopy(cfg)
        resolve_lengths(resolved)
        validate_rl(resolved, world_size)
    elif isinstance(cfg, EvaluateConfig):
        require(cfg.model, "model is empty: give a folder or a hub id with --model")
        require(cfg.data.eval, "data.eval is empty: give a JSONL file or reasoning_gym:NAME")
        sampled = copy.deepcopy(cfg)
        resolve_lengths(sampled)
        validate_sampling(sampled)
    elif isinstance(cfg, SupervisedConfig):
        validate_supervised(cfg, world_size)


def resolve_lengths(cfg: RLConfig | EvaluateConfig) -> None:
    """Replace env.max_tokens = 0 and engine.max_model_len = 0 by what they stand for."""
    if not cfg.env.max_tokens:
        cfg.env.max_tokens = cfg.env.max_turns * cfg.rollout.max_tokens
    if not cfg.engine.max_model_len:
        cfg.engine.max_model_len = cfg.data.max_prompt_tokens + cfg.env.max_tokens


def resolve_learning_rates(cfg: TrainingConfig) -> None:
    """Replace learning rates that are left out by what they stand for."""
    cfg.policy.lr = cfg.policy.learning_rate
    if isinstance(cfg, RLConfig):
        cfg.critic.lr = cfg.critic.learning_rate


def resolve_dtypes(cfg: TrainingConfig, dtype: Dtype) -> None:
    """Replace dtypes that are auto by what they stand for."""
    if cfg.policy.dtype == "auto":
        cfg.policy.dtype = dtype
    if isinstance(cfg, RLConfig) and cfg.critic.dtype == "auto":
        cfg.critic.dtype = dtype


def validate_rl(cfg: RLConfig, world_size: int) -> None:
    """Refuse what cannot work in minirl.rl. Lengths must be resolved.

    Raises:
        UserError: for the first rule that is broken.
    """
    longest = cfg.engine.max_model_len
    scores = ("accuracy", "reward", f"pass@{cfg.eval.samples}")
    validate_sampling(cfg)
    _training(cfg, world_size, "engine.max_model_len", longest, scores)
    validate_length(cfg)
    _rollout(cfg)
    _reward(cfg)
    validate_algorithm(cfg)
    validate_critic(cfg)
    validate_reference(cfg)

    num_ranks = cfg.engine.tensor_parallel_size
    require(
        world_size % num_ranks == 0,
        f"engine.tensor_parallel_size = {num_ranks} does not divide the {world_size} ranks",
    )


def validate_supervised(cfg: SupervisedConfig, world_size: int) -> None:
    """Refuse what cannot work in minirl.sft, minirl.rm, minirl.dpo and minirl.kto.

    Raises:
        UserError: for the first rule that is broken.
    """
    validate_templates(cfg.data)
    longest = cfg.data.max_tokens
    if isinstance(cfg.data, PairsConfig):  # a micro-batch holds both sides of a pair
        scores = ("loss", "accuracy", "margin")
        _training(cfg, world_size, "2 * data.max_tokens", 2 * longest, scores)
    elif isinstance(cfg, KTOConfig):
        scores = ("loss", "accuracy", "margin")
        _training(cfg, world_size, "data.max_tokens", longest, scores)
        _single_answers(cfg)
    else:
        _training(cfg, world_size, "data.max_tokens", longest, ("loss", "perplexity"))

    if isinstance(cfg, DPOConfig):
        require(
            cfg.algo.label_smoothing == 0 or cfg.algo.loss == "sigmoid",
            f"algo.label_smoothing = {cfg.algo.label_smoothing} belongs to algo.loss = sigmoid, "
            f"not {cfg.algo.loss}; set it to 0",
        )


def _single_answers(cfg: KTOConfig) -> None:
    require(
        cfg.batch_size > 1 or cfg.algo.loss != "kto",
        f"batch_size = {cfg.batch_size}: algo.loss = kto estimates the KL by answers of other rows "
        "of the batch; set it to 2 or more (64 and more are usual), or algo.loss apo_zero_unpaired",
    )

    desirable = cfg.algo.desirable_weight
    undesirable = cfg.algo.undesirable_weight
    require(
        desirable > 0 or undesirable > 0,
        f"algo.desirable_weight = {desirable} and algo.undesirable_weight = {undesirable} leave "
        "nothing to learn; set one of them above 0",
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
    """Refuse templates that do not go together, and an input template without a place."""
    template = data.input_template
    for name, value in (
        ("input_template", template),
        ("chat_template", data.chat_template),
        ("chat_template_kwargs", data.chat_template_kwargs),
        ("system_prompt", data.system_prompt),
    ):
        require(
            data.apply_chat_template or not value,
            f"data.{name} = {value!r} has no place where data.apply_chat_template = False encodes "
            "texts as they are; set one of them",
        )
    if not template:
        return

    require(
        template.count("{}") == 1,
        f"data.input_template = {template!r} must have {{}} once, for the prompt",
    )

    for name, value in (
        ("chat_template", data.chat_template),
        ("chat_template_kwargs", data.chat_template_kwargs),
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

    experts = parallel.experts
    num_ranks = world_size // replicate
    works = [str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    require(
        num_ranks % experts == 0,
        f"parallel.experts = {experts} does not divide ranks / parallel.replicate = {world_size} / "
        f"{replicate} = {num_ranks}; use {', '.join(works)}",
    )

    require(
        not parallel.experts_across_nodes or experts > 1,
        "parallel.experts_across_nodes is about the ranks of parallel.experts, and that is 1; set "
        "parallel.experts",
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
    validate_schedule(cfg.policy, "policy")
    validate_lora(cfg.policy, "policy", cfg.parallel.tensor)

    require(
        not cfg.policy.cpu_offload or cfg.policy.optimizer_state != "offload",
        "policy.optimizer_state = offload moves to the host what policy.cpu_offload keeps there "
        "already; set one of them",
    )

    require(cfg.data.train, "data.train is empty: give a JSONL file or reasoning_gym:NAME")

    require(
        cfg.policy.model,
        "policy.model is empty: name the folder or hub id of the model to train by --policy.model, "
        "or ask for a small one with random weights by --policy.model scratch",
    )

    require(
        cfg.data.eval or cfg.data.held_out != 0,
        f"data.held_out = {cfg.data.held_out} must be at least 1 where data.eval names no file",
    )

    metric = cfg.checkpoint.best_metric
    require(
        metric in ("", *scores),
        f"checkpoint.best_metric = {metric!r} is no held-out score; use one of {', '.join(scores)}",
    )

    for score in cfg.stop_at:
        # Names with a slash are of sources, functions and environments, which are found later.
        require(
            score in scores or "/" in score,
            f"stop_at = {cfg.stop_at}: {score!r} is no held-out score; use one of "
            f"{', '.join(scores)}, or source/NAME/accuracy",
        )
    require(
        not cfg.stop_at or cfg.eval.every > 0,
        f"stop_at = {cfg.stop_at} needs evaluations during training, and eval.every = 0; set it to "
        "1 or more",
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
            cfg.engine.max_model_len + cfg.eval_extra_tokens + 1,
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

    # What one of a file compares is looked up where it is imported (user_algorithms.py).
    is_own = ":" in advantage
    compares = not is_own and advantage not in ("reinforce_pp", "gae", "on_policy_distill")
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

    require(
        rollout.temperature >= COLDEST,
        f"rollout.temperature = {rollout.temperature}: vLLM samples at {COLDEST} instead of less, "
        f"and the trainer would not know; use {COLDEST} or more",
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
        f"rollout.extra_prompts = {extra} replaces prompts if their answers earn the same, and "
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

    most_ahead = rollout.prompts_per_step * rollout.max_staleness
    require(
        rollout.ahead <= most_ahead,
        f"rollout.ahead = {rollout.ahead} is more than prompts_per_step = "
        f"{rollout.prompts_per_step} times max_staleness = {rollout.max_staleness}, so that some "
        f"groups could not be trained on in time; lower it to {most_ahead} or less, or raise "
        "max_staleness",
    )

    by_engine = (cfg.sft.num_steps, rollout.ahead, rollout.dump)
    by_evaluation = (cfg.checkpoint.best_metric, cfg.stop_at)
    require(
        not rollout.replay or not any(by_engine + by_evaluation),
        f"rollout.replay = {rollout.replay} runs no engine, so sft.num_steps, rollout.ahead, "
        "rollout.dump, checkpoint.best_metric and stop_at have no effect; unset them",
    )


# ----------------------------------------------------------------------------- algo, critic and ref


def validate_algorithm(cfg: RLConfig) -> None:
    """Refuse what cannot work in the section `algo`. Raises UserError."""
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


# ----------------------------------------------------------------------------------------- adapters


def validate_lora(cfg: PolicyConfig, section: str, num_tensor: int) -> None:
    """Refuse what cannot work with adapters.

    Args:
        cfg: the settings of a model.
        section: that they are, such as policy.
        num_tensor: `parallel.tensor`.

    Raises:
        UserError: adapters are asked for with a setting that has no meaning with them, or
            settings of adapters are given without a rank.
    """
    lora = cfg.lora
    if not lora.rank:
        changed = [name for name, value in vars(LoraConfig()).items() if value != vars(lora)[name]]
        require(
            not changed,
            f"{section}.lora.{(changed or [''])[0]} is set, but {section}.lora.rank is 0, so that "
            f"there are no adapters; set {section}.lora.rank (32 is usual)",
        )
        return

    require(
        cfg.model != "scratch",
        f"{section}.model = scratch makes random weights, and {section}.lora.rank = {lora.rank} "
        f"would leave them as they are; train such a model whole first ({section}.lora.rank 0), "
        "and then adapters of what it has become",
    )

    require(
        not cfg.freeze,
        f"{section}.freeze = {cfg.freeze}: with {section}.lora.rank = {lora.rank} all weights are "
        f"frozen already; leave {section}.freeze empty, and say by {section}.lora.targets what is "
        "adapted",
    )

    require(
        not cfg.router.bias_update_rate,
        f"{section}.router.bias_update_rate = {cfg.router.bias_update_rate} moves weights of the "
        f"base, which {section}.lora.rank = {lora.rank} leaves as it is; set one of them to 0",
    )

    require(
        lora.targets,
        f"{section}.lora.targets is empty, so that nothing would get an adapter; leave it out for "
        "all linear layers",
    )

    require(
        lora.quantization == "none" or num_tensor == 1,
        f"{section}.lora.quantization = {lora.quantization} and parallel.tensor = {num_tensor}: "
        "matrices in four bits are sharded over the ranks as bytes, and not split for tensor "
        "parallelism; set parallel.tensor 1, or the quantization none",
    )

    require(
        lora.quantization == "none" or not cfg.cpu_offload,
        f"{section}.lora.quantization = {lora.quantization} and {section}.cpu_offload both save "
        "the memory of the base; set one of them",
    )


def validate_shared_base(cfg: RLConfig) -> None:
    """Refuse a critic on a base that is not the policy's, or is trained. Raises UserError."""
    policy = cfg.policy
    critic = cfg.critic
    if not critic.share_base:
        return

    for section, rank in (("policy", policy.lora.rank), ("critic", critic.lora.rank)):
        require(
            rank,
            f"critic.share_base needs a base that nobody trains, but {section}.lora.rank = 0 "
            f"trains all weights; set {section}.lora.rank (32 is usual), or unset "
            "critic.share_base",
        )

    require(
        not critic.model,
        f"critic.model = {critic.model} is a base of its own, and critic.share_base takes the "
        "policy's; set one of them",
    )

    for name, of_policy, of_critic in (
        ("dtype", policy.dtype, critic.dtype),
        ("cpu_offload", policy.cpu_offload, critic.cpu_offload),
        ("lora.quantization", policy.lora.quantization, critic.lora.quantization),
    ):
        require(
            of_policy == of_critic,
            f"critic.share_base: policy.{name} = {of_policy} and critic.{name} = {of_critic} are "
            "of the same base; set both alike",
        )


# ------------------------------------------------------------------------------------------ lengths


def validate_schedule(cfg: PolicyConfig, section: str) -> None:
    """Refuse a schedule of the learning rate that is given twice, or has parts that overlap."""
    steps = cfg.lr_warmup_steps
    ratio = cfg.lr_warmup_ratio
    require(
        not (steps and ratio),
        f"{section}.lr_warmup_steps = {steps} and {section}.lr_warmup_ratio = {ratio} both say how "
        "long the warm-up is; set one of them to 0",
    )

    decay = cfg.lr_decay_ratio
    require(
        cfg.lr_schedule != "wsd" or ratio + decay <= 1,
        f"{section}.lr_warmup_ratio = {ratio} and {section}.lr_decay_ratio = {decay} are more than "
        "all steps together; lower one of them",
    )


def validate_length(cfg: RLConfig) -> None:
    """Refuse a run with two lengths, or in passes over prompts that it does not draw."""
    default = RLConfig().num_steps
    require(
        not cfg.num_epochs or cfg.num_steps in (0, default),
        f"num_steps = {cfg.num_steps} and num_epochs = {cfg.num_epochs} both say when the run "
        "ends; set one of them to 0",
    )

    require(
        not (cfg.num_epochs and cfg.rollout.replay),
        f"num_epochs = {cfg.num_epochs} is passes over prompts, and rollout.replay = "
        f"{cfg.rollout.replay} draws none; set num_steps instead",
    )


def validate_warmup(cfg: RLConfig, num_steps: int) -> None:
    """Refuse a warm-up of the critic that leaves the policy no step.

    Args:
        cfg: the settings.
        num_steps: of the run.

    Raises:
        UserError: the warm-up is as long as the run.
    """
    warmup_steps = cfg.critic.warmup_steps
    length = f"num_steps = {num_steps}"
    if cfg.num_epochs:
        length = f"the {num_steps} steps of num_epochs = {cfg.num_epochs}"
    require(
        warmup_steps < max(1, num_steps),
        f"critic.warmup_steps = {warmup_steps} leaves the policy none of {length}; lower it",
    )
