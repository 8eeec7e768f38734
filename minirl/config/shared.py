"""The settings that programs share, as keyword-only dataclasses.

`parse.parse_flags` fills them from a YAML file and then from flags:

    python -m minirl.rl --config configs/quickstart_rl.yaml --policy.lr 1e-4

Settings of RL alone are in `rl.py`, those of SFT, reward models and DPO in `supervised.py`, of a
trained model in `policy.py`. The
comment after a setting (or, starting with `#:`, above it) is what `--help` says about it. A type
says which values a setting may have on its own; `validate.py` refuses what cannot work together,
before anything is loaded or written.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.values import (
    Finite,
    Gigabytes,
    Minutes,
    NonNegative,
    NonNegativeInt,
    Pause,
    Port,
    Positive,
    PositiveInt,
    PositiveShare,
    Retries,
    Seconds,
    Seed,
    Share,
    TopK,
)

# Bounds of `engine.max_num_seqs` = 0.
FEWEST_SEQS = 256
MOST_SEQS = 1024
# What of a GPU sleeps in a step of RL: each includes those before it.
Sleep = Literal["auto", "none", "cache", "engine", "all"]


@dataclass(kw_only=True)
class EngineConfig:
    """The vLLM engine in every rank."""

    tensor_parallel_size: PositiveInt = 1  # Consecutive ranks that share one engine.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: the dtype of policy.dtype.
    #: Longest context in tokens, prompts and answers together. 0: data.max_prompt_tokens +
    #: env.max_tokens (or rollout.max_tokens, if that is more).
    max_model_len: NonNegativeInt = 0
    #: Sequences that an engine generates at once. 0: on CUDA its share of a step's answers, between
    #: 256 and 1024; on CPU 256. More fill a large GPU better, and cost CUDA graphs and logits. vLLM
    #: starts no more than its KV cache has room for.
    max_num_seqs: NonNegativeInt = 0
    #: Memory of the KV cache on each rank. 0: on CUDA what gpu_memory_utilization leaves, on CPU
    #: one GB.
    kv_cache_gb: Gigabytes = 0.0
    #: CUDA: share of the device for the engine, which has it while the trainer sleeps.
    gpu_memory_utilization: PositiveShare = 0.85
    #: Images in a context, for a model that reads them. An episode that shows more is truncated.
    max_images: PositiveInt = 4
    enforce_eager: bool = False  # CUDA: run without CUDA graphs. The CPU build always does.
    #: CUDA: what leaves the device while others work. none: nothing. cache: the KV cache, while the
    #: trainer works. engine: the engine's weights, too. all: also all that the trainer keeps, while
    #: the engine works. auto: what makes a step fastest, by the planner's formulas.
    sleep: Sleep = "auto"
    #: Where the engine's weights sleep. 2: nowhere; a refit writes them anew. 1: in host memory.
    sleep_level: Annotated[int, Field(ge=1, le=2)] = 2


@dataclass(kw_only=True)
class RowsConfig:
    """Where rows come from, for every kind of training.

    A source is a JSONL, JSON, Parquet or CSV file, a folder or hub id of `datasets`
    (`org/name?subset=main&split=train`), or `reasoning_gym:NAME?option=value&...`.
    """

    #: A source, or several (mixed by size, or by their `?weight=`); see data/sources.py.
    train: str | list[str] = ""
    #: Sources of held-out rows. Empty: `held_out` distinct rows of `train` (in RL: distinct
    #: prompts), which are then never trained on.
    eval: str | list[str] = ""
    #: Rows of `train` to hold out where `eval` is empty. None: 128, or an eighth of the distinct
    #: prompts if there are fewer than 256.
    held_out: NonNegativeInt | None = None
    max_samples: NonNegativeInt = 0  # Take the first rows of each source, so many; 0: all.
    #: Column of a prompt's images: paths, bytes or PIL images (or a single one in a column
    #: `image`), for the parts {"type": "image"} of its messages, or before its text.
    images_key: str = "images"
    #: Column of the prompt: a text, or a list of chat messages. Where a row has no `prompt`:
    #: instruction, input, context_messages, messages or conversations. Here and in the settings of
    #: other columns dots lead into nested values: reward_model.ground_truth.
    prompt_key: str = "prompt"
    system_prompt: str = ""  # Put before chats that have no system message.
    chat_template: str = ""  # File with a Jinja template to use instead of the tokenizer's.
    #: Further arguments of the chat template, such as enable_thinking false. Of a flag, values are
    #: JSON, true or false, or else texts. A row's column chat_template_kwargs counts before them.
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    #: False: prompts and answers are texts, encoded as they are, without any template (TRL's
    #: "standard" rows). True: a prompt that is a text is what the user says in a chat.
    apply_chat_template: bool = True
    #: Column of the tools that a chat may call, for the template: a list of JSON schemas or the
    #: JSON text of one. Empty: none.
    tools_key: str = "tools"
    #: Instead of a chat template: a text in which {} is replaced by the prompt.
    input_template: str = ""


@dataclass(kw_only=True)
class DataConfig(RowsConfig):
    """Prompts for RL."""

    answer_key: str = "answer"  # Column of the answer; else `solution` or `label`.
    #: Scores are also logged by the value of this column (or `datasource`). Without the column they
    #: are logged by source where there are several.
    source_key: str = "data_source"
    max_prompt_tokens: PositiveInt = 256  # Longest prompt, with its chat template.
    #: What to do with longer prompts. error: end with a message that names one. drop: leave them
    #: out and count them. truncate_left: keep their last max_prompt_tokens tokens; prompts with
    #: images end the program all the same.
    too_long: Literal["error", "drop", "truncate_left"] = "error"


@dataclass(kw_only=True)
class RolloutConfig:
    """What a step generates.

    Dynamic sampling: where the extra prompts do not suffice, the step is filled up with some of
    those that it would replace, so that it always has prompts_per_step. Curriculum: prompts are
    drawn by p(1 - p) of their past success rate p (a score of eval.threshold is a success); those
    never tried count as the most uncertain, and the floor leaves none out for good. Without a
    curriculum every epoch is a new permutation (data/order.py). Partial rollouts: a step ends
    when it has enough groups. The next step continues unfinished answers under its weights, and
    `algo.correction` compares each token with the weights it was sampled with. Tickets: with `pull`
    an engine with room takes the next prompt and never waits for an environment, which balances
    best, but results depend on timing. With `round_robin` prompts go to engines by number, and an
    engine waits until the environments of its running episodes have replied, which is bitwise
    repeatable.
    """

    prompts_per_step: PositiveInt = 16  # Prompts of a step, over all ranks.
    samples_per_prompt: PositiveInt = 8  # Answers to each prompt; their rewards are compared.
    max_tokens: PositiveInt = 256  # Longest answer.
    temperature: Positive = 1.0  # Logits are divided by it, in the engine and in the trainer.
    #: Sample among the likeliest tokens that have this probability together. RL needs 1: all.
    top_p: PositiveShare = 1.0
    top_k: TopK = -1  # Sample among so many of the likeliest tokens. RL needs -1: all.
    #: Sample among tokens with at least this share of the likeliest one's probability. RL needs 0.
    min_p: Share = 0.0
    #: Dynamic sampling (DAPO): at most so many more prompts a step, in place of those with a mean
    #: reward outside `keep_inside`; and those of `ahead`. 0: off.
    extra_prompts: NonNegativeInt = 0
    keep_inside: tuple[Finite, Finite] = (0.0, 1.0)  # Open interval of mean rewards to train on.
    #: Curriculum: draw prompts by their past success. The floor is the least weight of a prompt, as
    #: a share of an untried one's (0.1 is usual; with 1 all are alike). 0: off.
    curriculum_floor: Share = 0.0
    #: Partial rollouts: begin so many more prompts than a step needs, at most prompts_per_step *
    #: max_staleness. 0: a step waits for all its answers; with overlap inflight: as many.
    ahead: NonNegativeInt = 0
    #: A group is trained on within so many steps after the one in which it began: a step waits for
    #: those that would become older. Nothing that was sampled is thrown away for its age.
    max_staleness: PositiveInt = 2
    #: How generators (parallel.generators) and trainers overlap. lockstep: while the trainers take
    #: step k, the generators draw the whole of step k + 1 with the weights that step k began with.
    #: stream: on policy; groups go to the trainers as they finish, and their gradients are summed
    #: while others are still drawn. inflight: generators never wait, weights change while answers
    #: are drawn, and `ahead` groups are under way besides those of a step; with
    #: max_staleness above 1 take algo.correction.preset dppo-tv.
    overlap: Literal["lockstep", "stream", "inflight"] = "lockstep"
    #: With inflight: what happens to the keys and values of a running answer when weights change.
    #: recompute: the engine computes them again (exact: the next tokens are the new weights' own).
    #: keep: they stay as they are, which costs nothing.
    kv: Literal["recompute", "keep"] = "recompute"
    #: Which engine generates which prompt. auto: round_robin on CPU; on CUDA, or inflight, pull.
    tickets: Literal["auto", "pull", "round_robin"] = "auto"
    #: Write every trajectory of a step to <output>/rollouts/, with advantage and log-probs of each
    #: token (rollout/records.py and index.py have the format); python -m minirl.view shows them.
    dump: bool = False
    #: Folder of dumped rollouts to train on, step by step, without engine and evaluation.
    replay: str = ""

    @property
    def num_ahead(self) -> int:
        """Return how many groups may be under way besides those of a step."""
        if self.overlap == "inflight" and not self.ahead:
            return self.prompts_per_step * self.max_staleness
        return self.ahead


@dataclass(kw_only=True)
class EnvConfig:
    """The environment that the policy's answers go to (envs/__init__.py)."""

    #: A shipped environment or `file.py:Class`, with its arguments as ?key=value&... In single_turn
    #: an episode is one answer to the prompt, scored by the reward functions.
    name: str = "single_turn"
    #: Answers of an episode. It is truncated where the environment wants another. Agents are not
    #: held to this, nor to max_tokens.
    max_turns: PositiveInt = 1
    #: Sampled tokens of an episode. 0: max_turns * rollout.max_tokens. What the environment says
    #: counts in the context (engine.max_model_len), too.
    max_tokens: NonNegativeInt = 0
    #: Calls of environments that are not `async` and run at once on a rank; an evaluation has as
    #: many of its own.
    threads: PositiveInt = 64
    #: Time limit of a constructor, a `reset` or a `step` (of an agent: of the whole `run`). An
    #: episode fails if one takes longer or raises. What cannot be interrupted, because it is
    #: asynchronous and blocks or will not be cancelled, ends the run.
    timeout_seconds: Seconds = 60.0
    #: A failed episode ends with `error_reward` for its last answer (reward), is left out of its
    #: group (drop), or ends the run (raise).
    on_error: Literal["reward", "drop", "raise"] = "reward"
    error_reward: Finite = 0.0  # Of a failed episode, with on_error = reward.


@dataclass(kw_only=True)
class LimitsConfig:
    """What an HTTP server takes from its clients; it refuses what is beyond by an error."""

    connections: PositiveInt = 4096  # Open at once; requests of further ones get status 503.
    head_kb: PositiveInt = 64  # Request line and headers of a request.
    body_mb: Positive = 10.0  # The body of a request.
    prompts: PositiveInt = 128  # Prompts in a request for completions, queries in one for rewards.


@dataclass(kw_only=True)
class EndpointConfig:
    """The HTTP endpoint where agents find the policy (endpoint/server.py)."""

    host: str = "127.0.0.1"  # 0.0.0.0 lets other machines connect, too.
    port: Port = 0  # 0: a free one. Every rank with an engine has its own endpoint.
    #: vLLM's parser of the tool calls that the model writes (hermes, llama3_json, mistral, glm45,
    #: qwen3_coder, ...). auto: the one that reads back what the chat template writes.
    tool_parser: str = "auto"
    image_megapixels: Positive = 16.0  # Of an image. Larger ones are refused before decoding.
    limits: LimitsConfig = field(default_factory=LimitsConfig)


@dataclass(kw_only=True)
class RewardConfig:
    """How answers are scored.

    A function is a registered name (exact, final_answer, math_verify, reasoning_gym, python_tests),
    `file.py:function`, called as f(prompt, completion, row) -> float, `openrlhf:file.py`,
    `trl:file.py:function` or `verl:file.py:function`, called as theirs are, or
    `http://host:port/path` (several, separated by commas, take turns; rewards/http.py has the
    protocol). A reward model scores each prompt with its answer, followed by the token that ends
    one if the answer was cut. It runs on the trainer's mesh, in the policy's dtype, after
    generation, and sleeps otherwise. Dumped rollouts have its scores in their rewards.
    """

    #: What scores an answer. Several are summed. Empty: no function, if `model` alone is to score.
    function: str | list[str] = "exact"
    #: Weights of the functions in the sum. Empty: 1 each.
    weights: list[Finite] = field(default_factory=list)
    #: Folder or hub id of a trained reward model (such as minirl.rm leaves) with the policy's
    #: vocabulary. Its score is added to the sum.
    model: str = ""
    #: Weight of the reward model's score in the sum. `reward/model` in the metrics is the score.
    model_weight: Finite = 1.0
    #: Threads that compute rewards during generation; also the most answers in a request to an
    #: endpoint, and the most processes of a function that uses signals.
    threads: PositiveInt = 4
    #: Environment variable with the key that endpoints want, as a bearer token. Empty: no key.
    api_key_env: str = ""
    #: Time limit of a call of a function, which ends the run if it takes longer, and of a request
    #: to an endpoint, from its first byte to its last.
    timeout_seconds: Seconds = 60.0
    #: Further attempts, each at the next endpoint, when one cannot be reached, is too slow or fails
    #: with status 408, 429 or 5xx.
    retries: Retries = 4
    backoff_seconds: Pause = 1.0  # Pause before the second attempt; doubles each time.
    #: The reward of an answer that was cut at its limit is multiplied by `unstopped_value` (scale)
    #: or replaced by it (set).
    unstopped: Literal["keep", "scale", "set"] = "keep"
    unstopped_value: Finite = 0.0  # What `unstopped` scales or sets the reward with.
    #: The last so many of the env.max_tokens sampled tokens of an episode cost `overlong_penalty`
    #: in equal parts (DAPO). 0: off.
    overlong_tokens: NonNegativeInt = 0
    overlong_penalty: Finite = 1.0  # What the last of the overlong tokens costs, together.
    #: Subtract the running mean of all rewards of the run and divide by their running deviation.
    normalize: bool = False
    clip: NonNegative = 0.0  # After all of the above, clip to [-clip, clip]; 0: off.


@dataclass(kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    every: NonNegativeInt = 10  # RL steps between evaluations; 0: only before and after.
    samples: PositiveInt = 1  # Answers per prompt; pass@samples is reported; accuracy is pass@1.
    temperature: NonNegative = 1.0  # Of sampling; 0: the likeliest token.
    #: As rollout.top_p and rollout.top_k, which RL cannot train with, for evaluation alone. None:
    #: those of `rollout`.
    top_p: PositiveShare | None = None
    top_k: TopK | None = None  # As top_p.
    #: Longest answer in evaluation. Where it is above rollout.max_tokens, episodes (env.max_tokens)
    #: and contexts (engine.max_model_len) of evaluation are longer by as much for each turn. 0:
    #: rollout.max_tokens.
    max_tokens: NonNegativeInt = 0
    threshold: Finite = 1.0  # A reward of at least this counts as correct.


@dataclass(kw_only=True)
class CheckpointConfig:
    """Which checkpoints are written and kept.

    The best metric is one of: in RL accuracy, reward or pass@SAMPLES; in SFT loss or perplexity
    (less is better); for pairs and in KTO loss, accuracy or margin. The evaluation of step N scores
    the weights after N steps, so it belongs to checkpoint N, and `every` must be a multiple of
    eval.every. A later equal score does not replace an earlier one.
    """

    #: Steps between checkpoints. Checkpoint N holds the weights after N steps. 0: none.
    every: NonNegativeInt = 0
    keep: PositiveInt = 2  # Number of newest checkpoints to keep.
    #: A held-out score: the checkpoint with the best one is kept too, and named in
    #: checkpoints/best.json.
    best_metric: str = ""
    background: bool = True  # Train on while a copy of the state in host memory is written.
    #: Write a Hugging Face folder of the policy with each checkpoint, checkpoints/step-N/model. It
    #: is kept and deleted with its checkpoint.
    save_hf: bool = False


@dataclass(kw_only=True)
class LogConfig:
    """Where metrics go besides metrics.jsonl and TensorBoard (METRICS.md says what they are)."""

    wandb: str = ""  # Project of Weights & Biases; WANDB_MODE=offline keeps it here. Empty: off.
    run_name: str = ""  # Name of the run there. Empty: that of its folder.
    samples: NonNegativeInt = 3  # Answers to held-out prompts shown at each evaluation.


@dataclass(kw_only=True)
class ProgramConfig:
    """The settings of every program."""

    output: str = ""
    """Folder of the run: config, metrics, checkpoints, model. In evaluate: a file for the JSON."""
    seed: Seed = 0  # Of everything that is drawn at random: weights, order of rows, samples.
    #: A collective, or a step of the engine, that takes longer ends the run. It must exceed the
    #: difference in rollout time between ranks.
    timeout_minutes: Minutes = 30.0


@dataclass(kw_only=True)
class TrainingConfig(ProgramConfig):
    """The settings of every program that trains."""

    #: Continue from the newest checkpoint in `output`, or from the beginning if there is none.
    resume: bool = False
    num_steps: NonNegativeInt = 0
    """Steps of training."""
    #: Held-out scores and values: accuracy 0.9. An evaluation of training that reaches all of them
    #: (a loss or perplexity: from above) is the last, and the run ends as after its last step.
    stop_at: dict[str, Finite] = field(default_factory=dict)
    #: Token budget of a micro-batch on a rank. 0: on CUDA as many as fit by the planner's formulas,
    #: at most a step's; on CPU, where more are not faster, 16,384, or the longest sequence.
    tokens_per_rank: NonNegativeInt = 0
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(kw_only=True)
class SamplingConfig:
    """The settings of every program that samples answers."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def eval_extra_tokens(self) -> int:
        """Return how many tokens an episode of evaluation may have more than one of training."""
        return self.env.max_turns * max(0, self.eval.max_tokens - self.rollout.max_tokens)


@dataclass(kw_only=True)
class EvaluateConfig(SamplingConfig, ProgramConfig):
    """Score a model: `torchrun --nproc-per-node N -m minirl.evaluate --model M --data.eval FILE`.

    Here `engine.dtype` = auto is what `policy.dtype` = auto is in training.
    """

    model: str = ""  # Folder or hub id.


@dataclass(kw_only=True)
class ExportConfig:
    """Write a checkpoint as a Hugging Face folder: `python -m minirl.checkpoint export RUN`.

    Under torchrun the ranks share the work.
    """

    command: Literal["export"]  # What to do; there is nothing else.
    run: str  # Folder of a run.
    #: Which checkpoint; the newest if neither this nor `best` is given.
    step: NonNegativeInt | None = None
    best: bool = False  # The checkpoint that checkpoint.best_metric found best.
    #: Folder to write; empty: model-step-N in the run's folder, or adapter-step-N.
    output: str = ""
    #: Of a run with policy.lora: write the adapter in PEFT's format instead of the merged model.
    adapter: bool = False
    timeout_minutes: Minutes = 30.0  # A collective that takes longer ends the program.
