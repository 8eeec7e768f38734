"""What a training config asks of the GPUs: models, micro-batches, the engine."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from minirl.config.policy import PolicyConfig
from minirl.config.rl import AlgoConfig, CriticConfig, RLConfig
from minirl.config.shared import EngineConfig, TrainingConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SupervisedConfig
from minirl.config.validate import FUNCTION_FILE, resolve_dtypes
from minirl.plan.sizes import ModelSizes, read_sizes

# What is minimised. frozen: nothing; the model computes log-probs.
LossName = Literal["policy", "value", "sft", "reward", "dpo", "kto", "frozen"]


@dataclass(kw_only=True)
class Load:
    """What a rank trains on in an optimizer step.

    With context parallelism, it is what the ranks of a context share.
    """

    tokens: int  # Rows of a micro-batch, at most.
    num_micro: int = 2  # Micro-batches.
    sequence: int = 1024  # Tokens of a sequence, prompt and answer.
    prompt: int = 256  # Of these, tokens that are not in the loss.
    samples: int = 8  # Answers to a prompt, which share its rows.
    whole_groups: bool = False  # And are never in two micro-batches: pairs.

    @property
    def answer(self) -> int:
        """Return the tokens of a sequence that are in the loss."""
        return self.sequence - self.prompt

    @property
    def num_answers(self) -> int:
        """Return how many answers a micro-batch holds; one at least."""
        groups, rest = divmod(self.tokens, self.rows(self.samples))
        if self.whole_groups:
            return max(1, groups) * self.samples
        more = max(0, rest - self.rows(0)) // self.answer
        return max(1, groups * self.samples + more)

    def rows(self, num_answers: int) -> int:
        """Return the rows of so many answers: theirs, and those of prompts but their last."""
        num_prompts = max(1, -(-num_answers // self.samples))
        return num_answers * self.answer + num_prompts * (self.prompt - 1)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of an average sequence; 0: the limits of the config."""

    prompt: int = 0
    answer: int = 0


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model of a run."""

    name: str  # policy, critic, reference or reward model.
    model: Mapping[str, Any]  # The values of its config.json.
    policy: PolicyConfig  # What is set for it.
    loss: LossName

    @property
    def shares_base(self) -> bool:
        """Return whether its frozen weights are those of the policy."""
        return isinstance(self.policy, CriticConfig) and self.policy.share_base

    def sizes(self) -> ModelSizes:
        """Return the sizes of its model."""
        policy = None if self.loss == "frozen" else self.policy
        return read_sizes(self.model, score=self.loss in ("value", "reward"), policy=policy)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run does in a step."""

    cfg: TrainingConfig
    world_size: int
    # The policy comes first. A reference that is the policy's base is none of them.
    roles: list[Role]
    load: Load  # Of an optimizer step.
    num_updates: int = 1  # Optimizer steps.
    # How often the policy computes log-probs before its first update: its own, those of its base.
    num_annotations: int = 0
    num_sequences: int  # Of a step, on all ranks.
    engine: EngineConfig | None = None
    answer: int = 0  # Tokens that the engine samples for a sequence.
    bucket_bytes: int = 0  # On the wire at once in a refit.


def rl_workload(
    cfg: RLConfig,
    world_size: int,
    models: Mapping[str, Mapping[str, Any]],
    lengths: Lengths = Lengths(),
) -> Workload:
    """Return what a run of minirl.rl does. Lengths of the config must be resolved.

    Args:
        cfg: the config of the run.
        world_size: number of ranks.
        models: config values of `policy` and, where there are such models, of `critic`,
            `reference` and `reward model`. Without an entry, critic and reference are like the
            policy.
        lengths: of sequences.
    """
    resolve_dtypes(cfg, "bfloat16")  # As on every GPU; a program has resolved its own.
    algo = cfg.algo
    policy = models["policy"]
    roles = [Role(name="policy", model=policy, policy=cfg.policy, loss="policy")]
    if algo.advantage == "gae":
        critic = models.get("critic", policy)
        roles.append(Role(name="critic", model=critic, policy=cfg.critic, loss="value"))
    has_reference = bool(algo.kl_coef) or "reference" in models
    is_base = _is_base(cfg.policy, cfg.ref.model) and not cfg.sft.num_steps
    if has_reference and not is_base:
        roles.append(_frozen("reference", models, cfg.policy))
    if "reward model" in models:
        roles.append(_frozen("reward model", models, cfg.policy))
    num_samples = cfg.rollout.samples_per_prompt
    prompt = lengths.prompt or cfg.data.max_prompt_tokens
    answer = lengths.answer or cfg.env.max_tokens
    num_sequences = cfg.rollout.prompts_per_step * num_samples
    of_update = math.ceil(num_sequences / algo.updates_per_step)
    num_updates = algo.num_epochs * algo.updates_per_step
    needs_logprobs = num_updates > 1 or algo.entropy_share > 0 or _reads_old_logprobs(algo)
    engine = None
    if not cfg.rollout.replay:
        max_model_len = cfg.engine.max_model_len + cfg.eval_extra_tokens
        engine = dataclasses.replace(cfg.engine, max_model_len=max_model_len)
    return Workload(
        cfg=cfg,
        world_size=world_size,
        roles=roles,
        load=_load(cfg, world_size, of_update, prompt, answer, num_samples),
        num_updates=num_updates,
        num_annotations=needs_logprobs + (has_reference and is_base),
        num_sequences=num_sequences,
        engine=engine,
        answer=answer,
        bucket_bytes=cfg.refit.bucket_mb * 2**20,
    )


def supervised_workload(
    cfg: SupervisedConfig,
    world_size: int,
    models: Mapping[str, Mapping[str, Any]],
    lengths: Lengths = Lengths(),
) -> Workload:
    """Return what a run of minirl.sft, rm, dpo or kto does; arguments as `rl_workload`.

    Of KTO the reference's second pass, over answers of other rows, is not in it.
    """
    resolve_dtypes(cfg, "bfloat16")
    prompt = lengths.prompt or cfg.data.max_tokens // 4
    answer = lengths.answer or cfg.data.max_tokens - prompt
    loss: LossName = "sft"
    sides = 1  # Answers to a prompt, which share its rows.
    has_reference = is_base = False
    if isinstance(cfg, RMConfig):
        loss = "reward"
        sides = 2
    if isinstance(cfg, DPOConfig):
        loss = "dpo"
        sides = 2
        has_reference = not cfg.reference_cache
    if isinstance(cfg, KTOConfig):
        loss = "kto"
        has_reference = True
    if isinstance(cfg, DPOConfig | KTOConfig):
        is_base = has_reference and _is_base(cfg.policy, cfg.reference)
    roles = [Role(name="policy", model=models["policy"], policy=cfg.policy, loss=loss)]
    if has_reference and not is_base:
        roles.append(_frozen("reference", models, cfg.policy))
    estimates_kl = isinstance(cfg, KTOConfig) and cfg.algo.loss == "kto"
    return Workload(
        cfg=cfg,
        world_size=world_size,
        roles=roles,
        load=_load(cfg, world_size, cfg.batch_size * sides, prompt, answer, sides),
        num_annotations=estimates_kl + is_base,
        num_sequences=cfg.batch_size * sides,
    )


def _frozen(name: str, models: Mapping[str, Mapping[str, Any]], policy: PolicyConfig) -> Role:
    model = models.get(name, models["policy"])
    return Role(name=name, model=model, policy=policy, loss="frozen")


def _is_base(policy: PolicyConfig, reference: str) -> bool:
    """Return whether a reference is the policy without its adapters, as `frozen.is_base` does.

    Args:
        policy: what is set for the policy.
        reference: the model that is set for the reference; empty: as the policy's.
    """
    lora = policy.lora
    return bool(lora.rank) and not lora.modules_to_save and reference in ("", policy.model)


def _reads_old_logprobs(algo: AlgoConfig) -> bool:
    """Return whether advantages are made of the policy's log-probs before the step."""
    if not FUNCTION_FILE.fullmatch(algo.advantage):
        in_reward = bool(algo.kl_coef) and algo.kl_in == "reward"
        return in_reward or algo.advantage == "on_policy_distill"
    from minirl.algo import advantages  # here, because it imports torch

    return advantages.need_old_logprobs(algo, advantages.find(algo.advantage))


def _load(
    cfg: TrainingConfig, world_size: int, num_answers: int, prompt: int, answer: int, samples: int
) -> Load:
    """Return a rank's part of an optimizer step of so many answers."""
    context = cfg.parallel.context
    data_size = max(1, world_size // (context * cfg.parallel.tensor))
    num_on_rank = math.ceil(num_answers / data_size)
    full = Load(
        tokens=cfg.tokens_per_rank * context,
        sequence=prompt + answer,
        prompt=prompt,
        samples=samples,
        whole_groups=isinstance(cfg, RMConfig | DPOConfig),
    )
    num_micro = math.ceil(num_on_rank / full.num_answers)
    even = math.ceil(num_on_rank / num_micro)
    return dataclasses.replace(full, tokens=full.rows(even), num_micro=num_micro)


def with_settings(workload: Workload, cfg: TrainingConfig, lengths: Lengths) -> Workload:
    """Return the same models under another config of the same program."""
    models = {role.name: role.model for role in workload.roles}
    if isinstance(cfg, RLConfig):
        return rl_workload(cfg, workload.world_size, models, lengths)
    assert isinstance(cfg, SupervisedConfig)
    return supervised_workload(cfg, workload.world_size, models, lengths)
