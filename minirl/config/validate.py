"""What is refused before anything is loaded: settings that cannot work, names of what is not there.

What a setting may be on its own, its type says. A rule that several settings break together is a
row of a table: their names, whether they are wrong, and what to do. The message begins with the
names and values. The functions `resolve_*` are the only ones that change a config.
"""

import dataclasses
import hashlib
import os
import re
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from minirl.base.errors import UserError, require
from minirl.base.reading import is_file, read_text
from minirl.config.parse import flatten
from minirl.config.policy import Dtype, LoraConfig, ParallelConfig, PolicyConfig, ScratchConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import EvaluateConfig, RowsConfig, TrainingConfig
from minirl.config.supervised import DPOConfig, KTOConfig, PairsConfig, SupervisedConfig

COLDEST = 0.01  # Temperature, of vLLM.
COMPARE_NOTHING = ("reinforce_pp", "gae", "on_policy_distill")  # Estimators, of those with a name.
COMPARE_ALL = ("reinforce_pp", "reinforce_pp_baseline", "gae")  # They whiten over the step.

# Settings that name models, and functions in files.
MODELS = ("policy.model", "reward.model", "ref.model", "critic.model", "reference", "model")
FUNCTIONS = ("reward.function", "env.name", "algo.advantage", "algo.loss")

GYM = "reasoning_gym:"
ROW_FILES = (".jsonl", ".json", ".parquet", ".csv", ".gz", ".zst")
HUB_ID = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
OWN_FOLDERS = ("runs", "models")  # Of this repository; a hub id could have the same form.
# A file with a function in it, perhaps for the adapter of another library.
FUNCTION_FILE = re.compile(r"(?:(?:openrlhf|trl|verl):)?(?P<file>.+\.py)(?::.*)?", re.DOTALL)

# "NAME, NAME: why, and what to do" -> what is true if the settings of these names are wrong.
Rules = dict[str, object]


def check_settings(cfg: object, world_size: int) -> None:
    """Refuse what cannot work in the program that this config is of. Lengths are resolved.

    Raises:
        UserError: for the first rule that is broken.
    """
    if isinstance(cfg, RLConfig):
        resolve_lengths(cfg)
        validate_rl(cfg, world_size)
    elif isinstance(cfg, EvaluateConfig):
        resolve_lengths(cfg)
        validate_sampling(cfg)
        rules = _engine_rule(cfg, world_size) | {
            "model: give a folder or a hub id with --model": not cfg.model,
            "data.eval: give a JSONL file or reasoning_gym:NAME": not cfg.data.eval,
        }
        _refuse(cfg, rules)
    elif isinstance(cfg, SupervisedConfig):
        validate_supervised(cfg, world_size)


def _refuse(cfg: object, rules: Rules, *, section: str = "") -> None:
    """Raise UserError for the first rule that is broken.

    Args:
        cfg: the config, or a section of it.
        rules: the rules.
        section: what comes before the rules' names in the message, such as `policy.`.
    """
    for rule, is_broken in rules.items():
        if is_broken:
            names, _, why = rule.partition(": ")
            values = [f"{section}{n} = {attrgetter(n)(cfg)!r}" for n in names.split(", ")]
            raise UserError(f"{', '.join(values)}: {why}")


def resolve_lengths(cfg: RLConfig | EvaluateConfig) -> None:
    """Replace env.max_tokens = 0 and engine.max_model_len = 0 by what they stand for."""
    if not cfg.env.max_tokens:
        cfg.env.max_tokens = cfg.env.max_turns * cfg.rollout.max_tokens
    if not cfg.engine.max_model_len:
        longest = max(cfg.env.max_tokens, cfg.rollout.max_tokens)
        cfg.engine.max_model_len = cfg.data.max_prompt_tokens + longest


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


# ---------------------------------------------------------------------------------------------- RL


def validate_rl(cfg: RLConfig, world_size: int) -> None:
    """Refuse what cannot work in minirl.rl. Lengths must be resolved.

    Raises:
        UserError: for the first rule that is broken.
    """
    validate_sampling(cfg)
    longest = cfg.engine.max_model_len
    scores = ("accuracy", "reward", f"pass@{cfg.eval.samples}")
    _training(cfg, world_size, "engine.max_model_len", longest, scores)
    if cfg.reward.model:
        setting = "engine.max_model_len + 1, for the end that reward.model reads,"
        validate_budget(cfg, setting, longest + cfg.eval_extra_tokens + 1)
    validate_model(cfg.critic, "critic", cfg.parallel.tensor)

    # What a step samples.
    rollout = cfg.rollout
    extra = rollout.extra_prompts
    # What one of a file compares is looked up where it is imported (run/inputs.py).
    compares = ":" not in cfg.algo.advantage and cfg.algo.advantage not in COMPARE_NOTHING
    is_cut = (rollout.top_p, max(0, rollout.top_k), rollout.min_p) != (1.0, 0, 0.0)
    by_engine = cfg.sft.num_steps or rollout.ahead or rollout.dump
    by_evaluation = cfg.checkpoint.best_metric or cfg.stop_at
    generators = cfg.parallel.generators
    rules = _engine_rule(cfg, generators or world_size) | {
        "num_steps, num_epochs: both say when the run ends; set one of them to 0": cfg.num_epochs
        and cfg.num_steps not in (0, RLConfig().num_steps),
        "num_epochs, rollout.replay: a replay draws no prompts; set num_steps instead": (
            cfg.num_epochs and rollout.replay
        ),
        "rollout.samples_per_prompt, algo.advantage: the method compares the samples of one "
        "prompt, so it needs at least 2": compares and rollout.samples_per_prompt < 2,
        "algo.updates_per_step, rollout.prompts_per_step: the first does not divide the second": (
            rollout.prompts_per_step % cfg.algo.updates_per_step
        ),
        "rollout.top_p, rollout.top_k, rollout.min_p: the trainer cannot reproduce log-probs of a "
        "truncated distribution; train with top_p 1.0, top_k -1, min_p 0.0": is_cut,
        f"rollout.temperature: vLLM samples at {COLDEST} instead of less, and the trainer would "
        f"not know; use {COLDEST} or more": rollout.temperature < COLDEST,
        "rollout.keep_inside: its first number must be below its second": (
            rollout.keep_inside[0] >= rollout.keep_inside[1]
        ),
        "rollout.keep_inside, rollout.extra_prompts: it says which prompts extra ones replace; set "
        "the second, too": rollout.keep_inside != (0.0, 1.0) and not extra,
        "rollout.extra_prompts, rollout.samples_per_prompt: prompts are replaced if their answers "
        "earn the same; take 2 samples or more": extra and rollout.samples_per_prompt < 2,
        "rollout.extra_prompts, reward.model: prompts are chosen by rewards during generation, and "
        "a reward model scores after it; serve it (python -m minirl.rm serve), or set "
        "extra_prompts to 0": extra and cfg.reward.model,
        "rollout.curriculum_floor, rollout.extra_prompts, rollout.ahead, rollout.replay: a "
        "curriculum learns from all prompts that it draws for a step; unset it or the others": (
            rollout.curriculum_floor and (extra or rollout.ahead or rollout.replay)
        ),
        "rollout.ahead, rollout.prompts_per_step, rollout.max_staleness: the first is more than "
        "the product of the others, so that some groups could not be trained on in time": (
            rollout.ahead > rollout.prompts_per_step * rollout.max_staleness
        ),
        "rollout.replay: no engine runs, so sft.num_steps, rollout.ahead, rollout.dump, "
        "checkpoint.best_metric and stop_at have no effect; unset them": (
            rollout.replay and (by_engine or by_evaluation)
        ),
        "debug.end_on_collapse, debug.collapse_steps: nothing is looked for; set the second": (
            cfg.debug.end_on_collapse and not cfg.debug.collapse_steps
        ),
        "reward.overlong_tokens, env.max_tokens: the first must not be more than the second": (
            cfg.reward.overlong_tokens > cfg.env.max_tokens
        ),
    }

    # Advantages, loss, critic and reference.
    algo = cfg.algo
    critic = cfg.critic
    ref = cfg.ref
    distills = algo.advantage == "on_policy_distill"
    correction = algo.correction
    is_dppo = correction.preset.startswith("dppo")
    is_off = (correction.level or correction.preset) == "off"
    bounds = (correction.low, correction.high, correction.divergence)
    has_bounds = any(bound is not None for bound in bounds)
    truncates = (correction.mode or correction.preset) in ("tis", "off", "truncate")
    by_ratio = not is_dppo and correction.gate in (None, "ratio")
    no_kl = "algo.kl_coef: no KL is computed and no reference is loaded; set algo.kl_coef above 0"
    has_kl = algo.kl_coef > 0
    rules |= {
        "algo.dual_clip: it must be 0 (off) or above 1": algo.dual_clip and algo.dual_clip <= 1,
        "algo.dual_clip, algo.loss: cispo has its bound; set dual_clip to 0": (
            algo.dual_clip and algo.loss == "cispo"
        ),
        "algo.correction.preset, algo.correction.level, algo.correction.low, algo.correction.high, "
        "algo.correction.divergence: nothing is corrected; unset the bounds, or set the level": (
            is_off and has_bounds
        ),
        "algo.correction.preset, algo.correction.mode, algo.correction.low: only high bounds the "
        "ratio where it is truncated; set mode clip, or unset low": truncates and correction.low,
        "algo.correction.preset, algo.correction.gate, algo.correction.divergence: the gate looks "
        "at the ratio; set gate binary_kl or tv, or unset divergence": (
            by_ratio and correction.divergence is not None
        ),
        "algo.correction.preset, algo.loss: dppo replaces the clip of ppo; set loss to ppo": (
            is_dppo and algo.loss != "ppo"
        ),
        "algo.correction.preset, algo.dual_clip: dppo clips nothing; set dual_clip to 0": (
            is_dppo and algo.dual_clip
        ),
        "algo.kl_estimator, algo.kl_in: unbiased is about the gradient, and a reward has none; "
        "take k1 (or auto)": algo.kl_estimator == "unbiased" and algo.kl_in == "reward",
        "algo.whiten_tokens, algo.advantage: it belongs to reinforce_pp_baseline; unset it": (
            algo.whiten_tokens and algo.advantage != "reinforce_pp_baseline"
        ),
        "critic.model, algo.advantage: only gae has a critic; set algo.advantage gae": (
            critic.model and algo.advantage != "gae"
        ),
        "critic.model: leave it empty, and the critic starts as the policy does": (
            critic.model == "scratch"
        ),
        "critic.scratch: a critic has the policy's model, or critic.model; leave it out": (
            critic.scratch != ScratchConfig()
        ),
        "critic.ema_decay: a critic is not exported, its average would be lost; set it to 0": (
            critic.ema_decay
        ),
        "algo.advantage, ref.model: the method learns from a teacher; name it with ref.model": (
            distills and not ref.model
        ),
        "algo.advantage, algo.kl_in, algo.kl_coef: the method takes no rewards; set kl_in loss": (
            distills and algo.kl_in == "reward" and has_kl
        ),
        f"algo.kl_target, {no_kl}": algo.kl_target and not has_kl,
        f"ref.every, {no_kl}": ref.every and not has_kl,
        f"ref.model, {no_kl}": ref.model and not (distills or has_kl),
        f"algo.kl_in, {no_kl}": algo.kl_in == "reward" and not has_kl,
        "ref.every, policy.lora.rank: with adapters the reference is the policy without them, "
        "which does not change; leave ref.every at 0": ref.every and cfg.policy.lora.rank,
        "ref.every, ref.model: the policy would replace this model; set one of them": (
            ref.every and ref.model
        ),
        "ref.reset_optimizer, ref.every: the state is forgotten when the reference is replaced; "
        "set ref.every": ref.reset_optimizer and not ref.every,
        "ref.reset_optimizer, policy.ema_decay: the moving average would be forgotten too; set one "
        "of them": ref.reset_optimizer and cfg.policy.ema_decay,
    }
    _refuse(cfg, rules)
    validate_shared_base(cfg)
    validate_sides(cfg)
    if not cfg.num_epochs:  # or else it depends on the number of rows
        validate_warmup(cfg, cfg.num_steps)


def validate_shared_base(cfg: RLConfig) -> None:
    """Refuse a critic that cannot share the policy's base.

    Raises:
        UserError: for the first rule that is broken.
    """
    policy = cfg.policy
    critic = cfg.critic
    if not critic.share_base:
        return
    no_rank = "lora.rank: nobody trains a shared base, and rank 0 trains all of it; 32 is usual"
    differs = "with critic.share_base both are of the same base; set both alike"
    rules: Rules = {
        f"critic.share_base, policy.{no_rank}": not policy.lora.rank,
        f"critic.share_base, critic.{no_rank}": not critic.lora.rank,
        "critic.share_base, critic.model: the base is the policy's; unset one": critic.model,
    }
    for name in ("dtype", "cpu_offload", "lora.quantization"):
        of_name = attrgetter(name)
        rules[f"policy.{name}, critic.{name}: {differs}"] = of_name(policy) != of_name(critic)
    _refuse(cfg, rules)


def validate_sides(cfg: RLConfig) -> None:
    """Refuse what cannot work where some ranks generate and the others train.

    Raises:
        UserError: for the first rule that is broken.
    """
    rollout = cfg.rollout
    algo = cfg.algo
    if not cfg.parallel.generators:
        without = "it is about ranks that only generate; set parallel.generators"
        rules: Rules = {
            f"rollout.overlap, parallel.generators: {without}": rollout.overlap != "lockstep",
            f"rollout.kv, parallel.generators: {without}": rollout.kv != "recompute",
        }
        _refuse(cfg, rules)
        return
    rules = {
        "parallel.generators, rollout.replay: a replay generates nothing; set generators to 0": (
            rollout.replay
        ),
        "parallel.generators, engine.sleep: the engine of a generator shares its device with "
        "nobody and never sleeps; set sleep to auto": cfg.engine.sleep not in ("auto", "none"),
        "parallel.generators, rollout.overlap, rollout.ahead: only inflight draws some groups of "
        "later steps; set ahead to 0, or take inflight": (
            rollout.ahead and rollout.overlap != "inflight"
        ),
        "rollout.kv, rollout.overlap: only with inflight do weights change under a running "
        "answer; set rollout.overlap inflight": (
            rollout.kv != "recompute" and rollout.overlap != "inflight"
        ),
        "rollout.curriculum_floor, rollout.overlap: a curriculum learns from all prompts that it "
        "draws for a step; take lockstep or stream": (
            rollout.curriculum_floor and rollout.overlap == "inflight"
        ),
    }
    if rollout.overlap == "stream":
        parts = "stream sums gradients before the step's last answer is there"
        router = cfg.policy.router
        rules |= {
            f"rollout.overlap, algo.updates_per_step, algo.num_epochs: {parts}, so a step has one "
            "update; set both to 1, or take lockstep": algo.updates_per_step * algo.num_epochs > 1,
            f"rollout.overlap, algo.advantage: {parts}, and the method compares all answers of a "
            "step; take lockstep": algo.advantage in COMPARE_ALL,
            f"rollout.overlap, algo.whiten_tokens: {parts}, and whitening needs them all; take "
            "lockstep": algo.whiten_tokens,
            f"rollout.overlap, algo.entropy_share: {parts}, and the share is of all its tokens; "
            "take lockstep": algo.entropy_share,
            f"rollout.overlap, reward.normalize: {parts}, and rewards are normalized by all of "
            "them; take lockstep": cfg.reward.normalize,
            "rollout.overlap, policy.router.aux_loss_coef, policy.router.z_loss_coef, "
            f"policy.router.bias_update_rate: {parts}, and routers are balanced over all its "
            "tokens; set these to 0, or take lockstep": (
                router.aux_loss_coef or router.z_loss_coef or router.bias_update_rate
            ),
        }
    _refuse(cfg, rules)


def validate_sampling(cfg: RLConfig | EvaluateConfig) -> None:
    """Refuse what cannot work in any program that samples. Lengths must be resolved.

    Raises:
        UserError: for the first rule that is broken.
    """
    validate_templates(cfg.data)
    names = "engine.max_model_len, data.max_prompt_tokens, rollout.max_tokens"
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_tokens
    is_less = cfg.engine.max_model_len < longest
    _refuse(cfg, {f"{names}: it is less than the sum, {longest}; set it to 0": is_less})


def _engine_rule(cfg: RLConfig | EvaluateConfig, num_ranks: int) -> Rules:
    """Return the rule about the ranks of an engine, where `num_ranks` generate."""
    names = "engine.tensor_parallel_size"
    is_broken = num_ranks % cfg.engine.tensor_parallel_size
    return {f"{names}: it does not divide the {num_ranks} ranks that generate": is_broken}


def validate_warmup(cfg: RLConfig, num_steps: int) -> None:
    """Refuse a warm-up of the critic that leaves the policy none of the run's steps."""
    why = f"it leaves the policy none of the run's {num_steps} steps; lower it"
    _refuse(cfg, {f"critic.warmup_steps: {why}": cfg.critic.warmup_steps >= max(1, num_steps)})


# ----------------------------------------------------------------------------------------- training


def validate_supervised(cfg: SupervisedConfig, world_size: int) -> None:
    """Refuse what cannot work in minirl.sft, minirl.rm, minirl.dpo and minirl.kto.

    Raises:
        UserError: for the first rule that is broken.
    """
    validate_templates(cfg.data)
    is_split = "only minirl.rl generates; set it to 0"
    _refuse(cfg, {f"parallel.generators: {is_split}": cfg.parallel.generators})
    longest = cfg.data.max_tokens
    scores: tuple[str, ...] = ("loss", "accuracy", "margin")
    if isinstance(cfg.data, PairsConfig):  # a micro-batch holds both sides of a pair
        _training(cfg, world_size, "2 * data.max_tokens", 2 * longest, scores)
    else:
        scores = scores if isinstance(cfg, KTOConfig) else ("loss", "perplexity")
        _training(cfg, world_size, "data.max_tokens", longest, scores)

    if isinstance(cfg, DPOConfig):
        is_wrong = cfg.algo.label_smoothing and cfg.algo.loss != "sigmoid"
        why = "it belongs to the loss sigmoid; set it to 0"
        _refuse(cfg, {f"algo.label_smoothing, algo.loss: {why}": is_wrong})
    if isinstance(cfg, KTOConfig):
        algo = cfg.algo
        rules: Rules = {
            "batch_size, algo.loss: kto estimates the KL by answers of other rows of the batch; "
            "set batch_size to 2 or more (64 and more are usual), or algo.loss apo_zero_unpaired": (
                cfg.batch_size < 2 and algo.loss == "kto"
            ),
            "algo.desirable_weight, algo.undesirable_weight: nothing is left to learn": not (
                algo.desirable_weight or algo.undesirable_weight
            ),
        }
        _refuse(cfg, rules)


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
    generators = cfg.parallel.generators
    of_ranks = f"of the {world_size} ranks some must be left to train"
    _refuse(cfg, {f"parallel.generators: {of_ranks}": generators >= world_size})
    validate_parallel(cfg.parallel, world_size - generators)
    validate_budget(cfg, setting, longest)
    validate_model(cfg.policy, "policy", cfg.parallel.tensor)
    metric = cfg.checkpoint.best_metric
    every = cfg.checkpoint.every
    is_scored = cfg.eval.every and every and every % cfg.eval.every == 0
    # Names with a slash are of sources, functions and environments, which are found later.
    unknown = [score for score in cfg.stop_at if score not in scores and "/" not in score]
    shares = [score for score in cfg.stop_at if score == "accuracy" or "pass@" in score]
    too_high = [score for score in shares if cfg.stop_at[score] > 1]
    known = f"no held-out score; use one of {', '.join(scores)}"
    rules: Rules = {
        "data.train: give a JSONL file or reasoning_gym:NAME": not cfg.data.train,
        "policy.model: name the folder or hub id of the model to train by --policy.model, or ask "
        "for a small one with random weights by --policy.model scratch": not cfg.policy.model,
        "data.held_out, data.eval: hold out at least 1 where data.eval names no file": (
            cfg.data.held_out == 0 and not cfg.data.eval
        ),
        f"checkpoint.best_metric: it is {known}": metric not in ("", *scores),
        f"stop_at: {unknown} is {known}, or source/NAME/accuracy": unknown,
        f"stop_at: {too_high} is a share, of 1 at most; write 90 % as 0.9": too_high,
        "stop_at, eval.every: it needs evaluations during training; set eval.every to 1 or more": (
            cfg.stop_at and not cfg.eval.every
        ),
        "checkpoint.best_metric, checkpoint.every, eval.every: every checkpoint needs an "
        "evaluation; raise eval.every from 0, or unset the first, and set checkpoint.every to a "
        "multiple of eval.every": metric and not is_scored,
        "checkpoint.save_hf, checkpoint.every: there are no checkpoints; set the second": (
            cfg.checkpoint.save_hf and not every
        ),
        "log.wandb: it needs the package; `pip install wandb`": (
            cfg.log.wandb and find_spec("wandb") is None
        ),
    }
    _refuse(cfg, rules)


def validate_budget(cfg: TrainingConfig, setting: str, longest: int) -> None:
    """Refuse a micro-batch that cannot hold a sequence of the `longest` tokens of a setting.

    Raises:
        UserError: tokens_per_rank is too small.
    """
    if not cfg.tokens_per_rank:
        return  # The planner takes enough.
    num_tokens = cfg.tokens_per_rank * cfg.parallel.context
    why = (
        f"the product, {num_tokens}, cannot hold one sequence of {setting} = {longest} tokens; "
        "raise tokens_per_rank or parallel.context, or lower the lengths"
    )
    _refuse(cfg, {f"tokens_per_rank, parallel.context: {why}": num_tokens < longest})


def validate_templates(data: RowsConfig) -> None:
    """Refuse templates that do not go together, and an input template without a place."""
    template = data.input_template
    rules: Rules = {}
    for name in ("input_template", "chat_template", "chat_template_kwargs", "system_prompt"):
        value = attrgetter(name)(data)
        why = "texts are encoded as they are; set one of them"
        rules[f"{name}, apply_chat_template: {why}"] = value and not data.apply_chat_template
        if name != "input_template":
            why = "an input template has no place for it; set one of them"
            rules[f"{name}, input_template: {why}"] = value and template
    has_place = template.count("{}") == 1
    rules["input_template: it must have {} once, for the prompt"] = template and not has_place
    _refuse(data, rules, section="data.")


def validate_parallel(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a mesh that does not divide the ranks, and options without their axis."""
    product = parallel.replicate * parallel.context * parallel.tensor
    num_ranks = world_size // parallel.replicate
    works = [str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    rules: Rules = {
        f"replicate, context, tensor: their product, {product}, does not divide the {world_size} "
        "ranks; over those that are left, parameters are sharded": world_size % product,
        "sequence, tensor: tokens are divided over tensor-parallel ranks; set parallel.tensor": (
            parallel.sequence and parallel.tensor == 1
        ),
        f"experts, replicate: the first does not divide the {num_ranks} ranks of a copy; use "
        f"{', '.join(works)}": num_ranks % parallel.experts,
        "experts_across_nodes, experts: it is about ranks that divide experts; set both": (
            parallel.experts_across_nodes and parallel.experts == 1
        ),
        "context_engine, context: it needs parallel.context above 1": (
            parallel.context_engine != "all_gather" and parallel.context == 1
        ),
    }
    _refuse(parallel, rules, section="parallel.")


def validate_model(cfg: PolicyConfig, section: str, num_tensor: int) -> None:
    """Refuse a schedule, offloading or adapters of a model that cannot work.

    Args:
        cfg: the settings of the model.
        section: their section, policy or critic.
        num_tensor: `parallel.tensor`.

    Raises:
        UserError: for the first rule that is broken.
    """
    lora = cfg.lora
    shares = cfg.lr_warmup_ratio + cfg.lr_decay_ratio
    rules: Rules = {
        "lr_warmup_steps, lr_warmup_ratio: both say how long the warm-up is; set one of them": (
            cfg.lr_warmup_steps and cfg.lr_warmup_ratio
        ),
        "lr_warmup_ratio, lr_decay_ratio: they are more than all steps together": (
            cfg.lr_schedule == "wsd" and shares > 1
        ),
        "cpu_offload, optimizer_state: the first moves the state to the host already; set one of "
        "them": cfg.cpu_offload and cfg.optimizer_state == "offload",
    }
    if lora.rank:
        in_four_bits = lora.quantization != "none"
        rules |= {
            "model, lora.rank: adapters would leave random weights as they are; train such a model "
            "whole first (rank 0), and then adapters of what it has become": cfg.model == "scratch",
            "freeze, lora.rank: all weights are frozen already; leave freeze empty, and say by "
            "lora.targets what is adapted": cfg.freeze,
            "router.bias_update_rate, lora.rank: the first moves weights of the base, which "
            "adapters leave as it is; set one of them to 0": cfg.router.bias_update_rate,
            "lora.targets: nothing gets an adapter; leave it out for all linear layers": (
                not lora.targets
            ),
            f"lora.quantization: matrices in four bits are not split over parallel.tensor = "
            f"{num_tensor} ranks; set one of them to its default": in_four_bits and num_tensor > 1,
            "lora.quantization, cpu_offload: both save the memory of the base; set one of them": (
                in_four_bits and cfg.cpu_offload
            ),
        }
    else:
        for name, value in vars(LoraConfig()).items():
            why = f"there are no adapters; set {section}.lora.rank (32 is usual)"
            rules[f"lora.{name}, lora.rank: {why}"] = value != vars(lora)[name]
    _refuse(cfg, rules, section=f"{section}.")


# ------------------------------------------------------------------------------- what settings name


def check_named(cfg: Any) -> None:
    """Refuse a config that names what is not there, by a look at the file system.

    Only what is wrong for sure is refused here, before anything is imported. Whoever opens a thing
    asks the same functions, so that each mistake has one message wherever it is found.

    Args:
        cfg: of any program.

    Raises:
        UserError: for the first thing that is missing.
    """
    settings = flatten(dataclasses.asdict(cfg))
    for setting in MODELS:
        for model in _texts(settings.get(setting)):
            check_model(model, setting)
    for setting in ("data.train", "data.eval"):
        for source in _texts(settings.get(setting)):
            check_source(source, setting)
    for setting, name, file in _function_files(settings):
        require(is_file(file), f"{setting} = {name}: no file {file}")
    for template in _texts(settings.get("data.chat_template")):
        read_text(template, "data.chat_template =")
    for replay in _texts(settings.get("rollout.replay")):
        why = "no such folder; give the folder `rollouts` of a run that had rollout.dump"
        require(os.path.isdir(replay), f"rollout.replay = {replay}: {why}")
    for run in _texts(settings.get("run")):
        check_run(run)
    for output in _texts(settings.get("output")):
        require(
            not output.startswith("~") and "$" not in output,
            f"output = {output}: only a shell replaces ~ and $NAME, and not in a file or in "
            "quotes; write the whole path",
        )


def digests_of_named(cfg: Any) -> dict[str, str]:
    """Return digests of the files of functions and of the template that a config names.

    Machines that have copies of them need the same. (Sizes of rows and models are compared by who
    opens them.)

    Args:
        cfg: of any program; `check_named` has found what it names.

    Returns:
        What the digest is of -> the digest.

    Raises:
        UserError: a file cannot be read.
    """
    settings = flatten(dataclasses.asdict(cfg))
    files = {f"{setting} = {file}": file for setting, _, file in _function_files(settings)}
    for template in _texts(settings.get("data.chat_template")):
        files[f"data.chat_template = {template}"] = template
    digests = {}
    for named, file in files.items():
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            raise UserError(f"{named} cannot be read: {error}; give another file") from error
        digests[f"the content (SHA-256) of {named}"] = hashlib.sha256(content).hexdigest()[:12]
    return digests


def _function_files(settings: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return setting, value and file of what names a function in a file.

    Who looks a registered name up refuses it if it is unknown.
    """
    found = []
    for setting in FUNCTIONS:
        for name in _texts(settings.get(setting)):
            in_file = FUNCTION_FILE.fullmatch(name.partition("?")[0])
            if in_file:
                found.append((setting, name, in_file["file"]))
    return found


def _texts(value: Any) -> list[str]:
    """Return the texts that a setting has: none, one or several."""
    texts = value if isinstance(value, list) else [value]
    return [text for text in texts if text]


def check_model(model: str, setting: str) -> None:
    """Refuse what is neither a folder nor of the form of a hub id.

    Args:
        model: the value of the setting.
        setting: what names the model, for the message.

    Raises:
        UserError: there is no such folder, and it cannot be on a hub.
    """
    owner, slash, _ = model.partition("/")
    is_path = slash and (owner in OWN_FOLDERS or os.path.isdir(owner))
    is_hub_id = re.fullmatch(HUB_ID, model) and not is_path
    require(
        is_hub_id or os.path.isdir(model),
        f"{setting} = {model!r} is neither a folder nor a hub id (NAME or OWNER/NAME); if a recipe "
        "asks for it, the comment at its top says how it is made",
    )


def check_run(run: str | Path) -> None:
    """Refuse a folder that is not that of a run. Raises UserError."""
    require(
        is_file(Path(run) / "config.yaml"),
        f"run = {run} is not the folder of a run: it has no config.yaml",
    )


def check_source(source: str, setting: str) -> None:
    """Refuse a source of rows that is no file, no folder, no hub id and no generator.

    Args:
        source: as data/sources.py describes it.
        setting: what names it, for the message.

    Raises:
        UserError: there is nothing of that name.
    """
    place = source.partition("?")[0]
    is_hub_id = re.fullmatch(HUB_ID, place) and not place.endswith(ROW_FILES)
    is_there = place and (is_file(place) or os.path.isdir(place))
    require(
        place.startswith(GYM) or is_hub_id or is_there,
        f"{setting} = {source!r}: no such file; give a JSONL, JSON, Parquet or CSV file, a "
        f"folder or hub id of datasets or {GYM}NAME (if a recipe asks for it, the comment at its "
        "top says how it is made)",
    )
