"""What a training config asks of the GPUs: models, batches, the engine."""

import dataclasses
import math
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from minirl.algo import advantages
from minirl.config.policy import PolicyConfig
from minirl.config.rl import CriticConfig, RLConfig
from minirl.config.shared import EngineConfig, TrainingConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SupervisedConfig
from minirl.config.validate import resolve_dtypes
from minirl.plan.load import Load, LossName


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of an average sequence; 0: the limits of the config."""

    prompt: int = 0
    answer: int = 0


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model of a run."""

    name: str
    model: PretrainedConfig
    policy: PolicyConfig  # What is set for it.
    loss: LossName

    @property
    def shares_base(self) -> bool:
        """Return whether its frozen weights are those of the policy."""
        return isinstance(self.policy, CriticConfig) and self.policy.share_base


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run does in a step."""

    cfg: TrainingConfig
    world_size: int
    policy: Role
    # Critic, reference, reward model. The reference that is the policy's base is none of them.
    others: list[Role] = field(default_factory=list)
    load: Load  # Of an optimizer step.
    num_updates: int = 1  # Optimizer steps.
    # How often the policy computes log-probs before its first update: its own, those of its base.
    num_annotations: int = 0
    num_sequences: int  # Of a step, on all ranks.
    engine: EngineConfig | None = None
    answer: int = 0  # Tokens that the engine samples for a sequence.
    bucket_bytes: int = 0  # On the wire at once in a refit.

    @property
    def copies(self) -> int:
        """Return the number of ranks that work on the same sequences."""
        return self.cfg.parallel.context * self.cfg.parallel.tensor

    @property
    def roles(self) -> list[Role]:
        """Return all models."""
        return [self.policy, *self.others]


def rl_workload(
    cfg: RLConfig,
    world_size: int,
    models: dict[str, PretrainedConfig],
    lengths: Lengths = Lengths(),
) -> Workload:
    """Return what a run of minirl.rl does. Lengths of the config must be resolved.

    Args:
        cfg: the config of the run.
        world_size: number of ranks.
        models: configs of `policy` and, where there are such models, of `critic`, `reference` and
            `reward model`. Without an entry, critic and reference are like the policy.
        lengths: of sequences.
    """
    resolve_dtypes(cfg, "bfloat16")  # As on every GPU; a program has resolved its own.
    algo = cfg.algo
    others = []
    if algo.advantage == "gae":
        model = models.get("critic", models["policy"])
        others.append(Role(name="critic", model=model, policy=cfg.critic, loss="value"))
    has_reference = bool(algo.kl_coef) or "reference" in models
    is_base = _is_base(cfg.policy, cfg.ref.model) and not cfg.sft.num_steps
    if has_reference and not is_base:
        model = models.get("reference", models["policy"])
        others.append(Role(name="reference", model=model, policy=cfg.policy, loss="frozen"))
    if "reward model" in models:
        others.append(
            Role(
                name="reward model",
                model=models["reward model"],
                policy=cfg.policy,
                loss="frozen",
            )
        )
    num_samples = cfg.rollout.samples_per_prompt
    prompt = lengths.prompt or cfg.data.max_prompt_tokens
    answer = lengths.answer or cfg.env.max_tokens
    num_sequences = cfg.rollout.prompts_per_step * num_samples
    own_logprobs = (
        algo.num_updates > 1
        or algo.entropy_share > 0
        or advantages.need_old_logprobs(algo, advantages.find(algo.advantage))
    )
    of_update = math.ceil(num_sequences / algo.updates_per_step)
    engine = None
    if not cfg.rollout.replay:
        max_model_len = cfg.engine.max_model_len + cfg.eval_extra_tokens
        engine = dataclasses.replace(cfg.engine, max_model_len=max_model_len)
    return Workload(
        cfg=cfg,
        world_size=world_size,
        policy=Role(name="policy", model=models["policy"], policy=cfg.policy, loss="policy"),
        others=others,
        load=_load(cfg, world_size, of_update, prompt, answer, num_samples),
        num_updates=algo.num_updates,
        num_annotations=own_logprobs + (has_reference and is_base),
        num_sequences=num_sequences,
        engine=engine,
        answer=answer,
        bucket_bytes=cfg.refit.bucket_mb * 2**20,
    )


def supervised_workload(
    cfg: SupervisedConfig,
    world_size: int,
    models: dict[str, PretrainedConfig],
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
    others = []
    if isinstance(cfg, RMConfig):
        loss = "reward"
        sides = 2
    if isinstance(cfg, DPOConfig):
        loss = "dpo"
        sides = 2
    if isinstance(cfg, KTOConfig):
        loss = "kto"
    has_reference = isinstance(cfg, KTOConfig)
    is_base = False
    if isinstance(cfg, DPOConfig):
        has_reference = not cfg.reference_cache
    if isinstance(cfg, DPOConfig | KTOConfig):
        is_base = has_reference and _is_base(cfg.policy, cfg.reference)
    if has_reference and not is_base:
        model = models.get("reference", models["policy"])
        others.append(Role(name="reference", model=model, policy=cfg.policy, loss="frozen"))
    estimates_kl = isinstance(cfg, KTOConfig) and cfg.algo.loss == "kto"
    return Workload(
        cfg=cfg,
        world_size=world_size,
        policy=Role(name="policy", model=models["policy"], policy=cfg.policy, loss=loss),
        others=others,
        load=_load(cfg, world_size, cfg.batch_size * sides, prompt, answer, sides),
        num_annotations=estimates_kl + is_base,
        num_sequences=cfg.batch_size * sides,
    )


def _is_base(policy: PolicyConfig, reference: str) -> bool:
    """Return whether a reference is the policy without its adapters, as `policy.is_base` does.

    Args:
        policy: what is set for the policy.
        reference: the model that is set for the reference; empty: as the policy's.
    """
    lora = policy.lora
    return bool(lora.rank) and not lora.modules_to_save and reference in ("", policy.model)


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
