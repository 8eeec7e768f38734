"""The knobs that programs share: keyword-only dataclasses, filled by `flags.parse` from a YAML file
and then from flags. Those of RL alone are in `config_rl.py`, of SFT, reward models and DPO in
`config_supervised.py`.

    python -m minirl.rl --config configs/quickstart_rl.yaml --policy.lr 1e-4

What stands behind a knob, or beneath it where it is longer, is what `--help` says of it. A type
says which values a knob may have on its own, in a file, a flag or a program; `checks.py` refuses
what cannot work together, before anything is loaded or written.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(kw_only=True)
class ScratchConfig:
    """The model made when `policy.model` is `scratch`: Qwen3 architecture, random weights,
    character tokenizer.
    """

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 3
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    phrases: list[str] = field(default_factory=list)
    """Fixed texts that become single tokens, so that a small model need not read them letter by
    letter."""


@dataclass(kw_only=True)
class PolicyConfig:
    """The trained model and its optimizer."""

    model: str = "scratch"  # Folder or hub id of a Hugging Face model, or `scratch`.
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Of forward and backward. Masters, gradients and optimizer state are float32 (float64, for
    proofs: all of it)."""
    activation_checkpointing: bool = False
    """Keep only layer inputs and recompute the rest in backward: less memory, about a third more
    time."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward (ZeRO-3); False keeps them (ZeRO-2),
    faster if they fit."""
    cpu_offload: bool = False
    """Shards, gradients and optimizer live in host memory, and a layer visits the device while it
    computes: for models that do not fit."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the layers' matrices, with AdamW for the rest; its steps are scaled to AdamW's
    size, so the same `lr` and `weight_decay` serve both."""
    optimizer_state: Literal["device", "offload", "8bit"] = "device"
    """Between steps. offload: in host memory; 8bit: in one byte an element; both are on the device
    in full for some parameters at a time."""
    ema_decay: Decay = 0.0
    """Of a mean of the weights, written to <output>/model_ema at the end; rises to it as (1 + n) /
    (10 + n) over n updates. 0: none."""
    lr: NonNegativeFloat = 1e-6
    lr_schedule: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: NonNegativeInt = 0  # Optimizer steps of linear warm-up from 0.
    lr_min_ratio: NonNegativeFloat = 0.1  # Share of `lr` that the cosine ends at.
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0  # On matrices only.
    max_grad_norm: NonNegativeFloat = 1.0  # Gradients are scaled down to this norm; 0 leaves them.


@dataclass(kw_only=True)
class ParallelConfig:
    """How the trainer's ranks divide the model and its data: replicate x shard x context x tensor,
    whose product is the number of ranks (shard is what the others leave).
    """

    replicate: PositiveInt = 1
    """Groups that each hold a whole model in shards (HSDP): gradients cross groups once a step,
    parameters never."""
    context: PositiveInt = 1  # Ranks that split every sequence, for those too long for one.
    context_engine: Literal["all_gather", "ring"] = "all_gather"
    """How attention gets the other ranks' keys: all at once for a layer (fastest), or one rank's
    after the other's."""
    tensor: PositiveInt = 1  # Consecutive ranks that split every matrix and work on the same data.
    sequence: bool = False
    """Between the blocks each of them keeps its part of the tokens: less memory, for the same
    traffic."""


@dataclass(kw_only=True)
class EngineConfig:
    """The vLLM engine in every rank."""

    tensor_parallel_size: PositiveInt = 1  # Consecutive ranks that share one engine.
    dtype: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # `auto`: the dtype of the policy's forward.
    )
    max_model_len: NonNegativeInt = 0
    """Tokens of prompt and answer together; 0 takes data.max_prompt_tokens + rollout.max_tokens."""
    max_num_seqs: PositiveInt = 256  # Sequences generated at once by an engine.
    kv_cache_gb: NonNegativeFloat = 0.0
    """Memory of the KV cache per rank; 0: on CUDA what gpu_memory_utilization leaves, on CPU 1 GB.
    """
    gpu_memory_utilization: PositiveShare = 0.6
    max_images: PositiveInt = (
        4  # In a context, of a model that reads them; an episode that shows more is truncated.
    )
    enforce_eager: bool = False  # CUDA: run without CUDA graphs. The CPU build always does.
    sleep_level: Annotated[int, Field(ge=0, le=2)] = 2
    """CUDA, while training: 2 drops weights and KV cache, 1 keeps the weights in host memory, 0
    keeps all."""


@dataclass(kw_only=True)
class RowsConfig:
    """Where rows come from, whatever is trained on them.

    A source is a JSONL, JSON, Parquet or CSV file, a folder or hub id of `datasets`
    (`org/name?subset=main&split=train`), or `reasoning_gym:NAME?option=value&...`.
    """

    train: str | list[str] = (
        ""  # A source, or several (mixed by size, or by their `?weight=`): see data/sources.py.
    )
    eval: str | list[str] = ""
    """The same for held-out rows. Empty: `held_out` distinct rows (of RL: prompts) of `train`,
    which training then never sees."""
    held_out: int = 128
    max_samples: NonNegativeInt = 0  # At most this many rows of each source, its first; 0: all.
    images_key: str = "images"
    """Of prompts: paths, bytes or PIL images (or a single one under `image`), for the parts
    {"type": "image"} of its messages, or before its text."""
    prompt_key: str = "prompt"
    """A text, or a list of chat messages. Where a row has no `prompt`: `instruction`, `input`,
    `context_messages` or `messages`."""
    system_prompt: str = ""  # Put before chats that have none.
    chat_template: str = ""  # File with a Jinja template to use instead of the tokenizer's.
    input_template: str = ""
    """A text in which {} is the prompt, to use for prompts (and what follows them) instead of a
    chat template."""


@dataclass(kw_only=True)
class DataConfig(RowsConfig):
    """Prompts for RL."""

    answer_key: str = "answer"  # Where a row has no `answer`: `solution` or `label`.
    source_key: str = "data_source"
    """Scores are also logged by the value of this column (or `datasource`); without it, by source
    where there are several."""
    max_prompt_tokens: PositiveInt = 256
    too_long: Literal["error", "drop"] = (
        "error"  # What a longer prompt is: an error that names it, or left out and counted.
    )


@dataclass(kw_only=True)
class RolloutConfig:
    """What a step generates.

    Dynamic sampling fills up what is still missing after its extra prompts with those that it would
    replace, so that a step always has prompts_per_step. The curriculum draws by p(1 - p) of a
    prompt's past success rate p (a score of eval.threshold counts), those never tried as the most
    uncertain, and its floor leaves none out for good; without it every epoch is a new permutation
    (data/curriculum.py). Of partial rollouts a step ends when it has enough groups; the unfinished
    answers go on in the next step, under its weights, and `algo.correction` compares each token
    with the weights it was sampled with. With tickets `pull` an engine with room takes the next
    prompt and never waits for an environment: best balance, but results depend on timing. With
    `round_robin` prompts go by number, and an engine waits until the environments of its live
    episodes have replied: bitwise repeatable.
    """

    prompts_per_step: PositiveInt = 16
    samples_per_prompt: PositiveInt = 8
    max_tokens: PositiveInt = 256  # Longest answer.
    temperature: Positive = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    extra_prompts: NonNegativeInt = 0
    """Dynamic sampling (DAPO): at most so many more prompts a step, in place of those whose mean
    reward is not inside `keep_inside`. 0: off."""
    keep_inside: tuple[float, float] = (0.0, 1.0)
    curriculum_floor: Share = 0.0
    """Draw prompts by what is known of their success; the least weight of one, as a share of an
    untried one's (0.1 is usual; 1: all alike). 0: off."""
    ahead: NonNegativeInt = 0
    """Partial rollouts: so many more prompts than a step needs are begun. 0: a step waits for all
    its answers."""
    max_staleness: PositiveInt = 2  # Steps that a group may go on for; then it begins anew.
    tickets: Literal["auto", "pull", "round_robin"] = (
        "auto"  # Who generates which prompt; auto: round_robin on CPU, pull on CUDA.
    )
    dump: bool = False
    """Write every trajectory of a step to <output>/rollouts/ (rollout/records.py; `python -m
    minirl.rollout.show FILE` prints them)."""
    replay: str = ""
    """Folder of dumped rollouts to train on, step by step, without an engine and without
    evaluation."""


@dataclass(kw_only=True)
class EnvConfig:
    """What the policy's answers meet (rollout/env.py)."""

    name: str = "single_turn"
    """A shipped environment or `file.py:Class`, with its arguments as `?key=value&...`.
    single_turn: an answer to the prompt, scored by `reward`."""
    max_turns: PositiveInt = (
        1  # Answers of an episode; it is truncated where the environment wants another.
    )
    max_tokens: NonNegativeInt = 0
    """Sampled tokens of an episode; 0: max_turns * rollout.max_tokens. The context
    (engine.max_model_len) also holds what the environment says."""
    threads: PositiveInt = (
        64  # So many calls of environments that are not `async` run at once on a rank.
    )
    timeout_seconds: Positive = 60.0
    """For a `reset` or `step` (of an agent: the whole `run`). Then, and if it raises, the episode
    has failed."""
    on_error: Literal["reward", "drop", "raise"] = "reward"
    """A failed episode ends with `error_reward` for its last answer, is left out of its group, or
    ends the run."""
    error_reward: FiniteFloat = 0.0


@dataclass(kw_only=True)
class EndpointConfig:
    """Where environments that are agents find the policy (rollout/server.py)."""

    host: str = "127.0.0.1"
    port: NonNegativeInt = 0  # 0: a free one. Every rank with an engine has an endpoint of its own.


@dataclass(kw_only=True)
class RewardConfig:
    """How answers are scored.

    A function is a registered name (exact, final_answer, math_verify, reasoning_gym, python_tests),
    `file.py:function`, called as f(prompt, completion, row) -> float, `openrlhf:file.py` or
    `trl:file.py:function`, called as theirs are, one answer at a time, or `http://host:port/path`
    (several, separated by commas, take turns; the protocol is in rollout/remote.py). A reward model
    scores each prompt and answer, with the token that ends one behind a cut answer; it runs on the
    trainer's mesh, in the policy's dtype, after generation, and sleeps otherwise. Dumped rollouts
    have its scores in their rewards.
    """

    function: str | list[str] = (
        # What scores an answer; several are summed. Empty: none, where `model` alone is to judge.
        "exact"
    )
    weights: list[float] = field(
        default_factory=list
    )  # Of the functions in the sum; empty: 1 each.
    model: str = ""
    """Folder or hub id of a trained reward model (what minirl.rm leaves) with the policy's
    vocabulary; its score is added to the sum."""
    model_weight: FiniteFloat = (
        1.0  # Of its score in the sum; `reward/model` in the metrics is the score alone.
    )
    threads: PositiveInt = 4
    """Rewards are computed beside generation in this many threads; so many answers at most are in a
    request to an endpoint."""
    timeout_seconds: Positive = 60.0  # How long an endpoint may take for a request.
    retries: NonNegativeInt = 4
    """Further tries, each at the next endpoint, when one cannot be reached, is too slow or fails
    (status 408, 429, 5xx)."""
    backoff_seconds: NonNegativeFloat = 1.0  # Pause before the second try; it doubles with each.
    unstopped: Literal["keep", "scale", "set"] = "keep"
    """An answer cut at rollout.max_tokens has its reward multiplied by `unstopped_value`, or set to
    it."""
    unstopped_value: FiniteFloat = 0.0
    overlong_tokens: NonNegativeInt = 0
    """The last so many of rollout.max_tokens generated tokens cost `overlong_penalty`, in even
    parts (DAPO); 0: off."""
    overlong_penalty: FiniteFloat = 1.0
    normalize: bool = False
    """Subtract the running mean of all rewards of the run and divide by their running deviation."""
    clip: NonNegativeFloat = (
        0.0  # Rewards are brought into [-clip, clip], after all of the above; 0: off.
    )


@dataclass(kw_only=True)
class EvalConfig:
    every: NonNegativeInt = (
        10  # RL steps between evaluations on held-out prompts; 0: only before and after.
    )
    samples: PositiveInt = 1  # Answers per prompt; pass@k is reported for k = 1 and k = samples.
    temperature: NonNegativeFloat = 1.0
    threshold: float = 1.0  # A reward of at least this counts as correct.


@dataclass(kw_only=True)
class CheckpointConfig:
    """What stays of a run while it runs.

    The best metric is, of RL, accuracy, reward or pass@k; of SFT loss or perplexity (less is
    better); of pairs loss, accuracy or margin. The evaluation of step N, which is of the weights
    after N steps, belongs to checkpoint N, so `every` must be a multiple of eval.every; a later
    equal score does not replace an earlier one.
    """

    every: NonNegativeInt = (
        0  # Steps between checkpoints; 0: none. Checkpoint N holds the weights after N steps.
    )
    keep: PositiveInt = 2  # Newest ones that stay.
    best_metric: str = ""
    """A held-out score: the checkpoint with the best one stays too, and is named in
    checkpoints/best.json."""
    background: bool = True  # Go on training while a copy of the state, in host memory, is written.


@dataclass(kw_only=True)
class ProgramConfig:
    output: str = ""
    # as a text, which the programs' own defaults inherit
    """Folder of a run: config, metrics, checkpoints, model. Of evaluate: file for the figures as
    JSON; empty: only printed."""
    seed: NonNegativeInt = 0
    timeout_minutes: Positive = 30.0
    """A collective that waits longer ends the run; must exceed the difference in rollout time
    between ranks."""


@dataclass(kw_only=True)
class TrainingConfig(ProgramConfig):
    """Of every program that trains."""

    resume: bool = False
    """Go on from the newest checkpoint in `output` (from the beginning, if none was finished)."""
    num_steps: NonNegativeInt = 0
    tokens_per_rank: PositiveInt = 16384  # Token budget of a micro-batch on a rank.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass(kw_only=True)
class SamplingConfig:
    """Of every program that samples answers."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


@dataclass(kw_only=True)
class EvaluateConfig(SamplingConfig, ProgramConfig):
    """`torchrun --nproc-per-node N -m minirl.evaluate --model FOLDER --data.eval FILE`

    `engine.dtype` auto is bfloat16 here.
    """

    model: str = ""  # Folder or hub id.


@dataclass(kw_only=True)
class ExportConfig:
    """`python -m minirl.checkpoint export RUN [--step N | --best] [--output FOLDER]`: a checkpoint
    as a Hugging Face folder.

    Under torchrun the ranks share the work.
    """

    command: Literal["export"]
    run: str  # Folder of a run of minirl.rl or minirl.sft.
    step: int | None = None  # Which checkpoint; the newest if neither this nor `best` is given.
    best: bool = False  # The one that checkpoint.best_metric found best.
    output: str = ""  # Folder to write; empty: model-step-N in the run's.
    timeout_minutes: Positive = 30.0
