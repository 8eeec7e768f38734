"""The settings of a model that is trained, and of the mesh that it is trained on."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from minirl.config.values import (
    Decay,
    EvenSize,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    PositiveShare,
    Share,
    Size,
)

Checkpointing = Literal["auto", "off", "selective", "full"]
Dtype = Literal["auto", "float32", "bfloat16", "float64"]
Quantization = Literal["none", "nf4"]
LearningRateSchedule = Literal["constant", "linear", "cosine", "wsd"]
ADAPTERS_LEARN_FASTER = 10  # Times the learning rate of full training.
# Bytes of a chunk of float32 logits, by type of device. Each chunk adds to the gradient of the
# whole head, which is read and written for it; small chunks would spend their time on that.
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}
WHOLE_GRADIENT_BYTES = 4 * 2**30  # Up to which `accumulate` auto keeps whole gradients.


@dataclass(kw_only=True)
class ScratchConfig:
    """The model that is made for `policy.model` = scratch.

    It has the Qwen3 architecture, random weights and a character tokenizer.
    """

    hidden_size: Size = 128  # Of the vectors between layers.
    num_layers: Size = 3  # Each of attention and a gated MLP of four times the hidden size.
    num_heads: Size = 4  # Of the queries of attention.
    num_kv_heads: Size = 2  # Of keys and values; it divides num_heads.
    head_dim: EvenSize = 32  # Of a query, a key or a value.
    #: Fixed texts that become single tokens, so that a small model need not read them letter by
    #: letter.
    phrases: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters, which are trained in place of the weights that they are added to.

    Hu et al. 2021, LoRA (arXiv 2106.09685): y = W x + (alpha / rank) B A x, of which A and B are
    trained, in float32, and W stays as it is, in the dtype of forward and backward. B starts at 0.
    There is no dropout: it would make the policy another than the one that is sampled from.
    """

    #: Columns of B and rows of A. 0: no adapters, all weights are trained.
    rank: NonNegativeInt = 0
    alpha: Positive = 32.0  # What the adapters add is multiplied by alpha / rank.
    #: Divide alpha by the square root of the rank instead (Kalajdzievski 2023, arXiv 2312.03732).
    use_rslora: bool = False
    #: What gets an adapter. all-linear: every matrix of the language model's layers but routers and
    #: gates of few outputs; attention or mlp: those of these blocks; else names of modules
    #: (q_proj), or patterns of their whole names (model.visual.*).
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    #: Patterns of weights that are trained whole, next to the adapters, by their names in the
    #: model's folder, such as lm_head.*. A matrix among them gets no adapter.
    modules_to_save: list[str] = field(default_factory=list)
    adapter: str = ""  # Folder of an adapter in PEFT's format to start from; empty: B starts at 0.
    #: nf4: matrices of the language model's layers are held in 4 bits (Dettmers et al. 2023, QLoRA,
    #: arXiv 2305.14314), 0.52 bytes a weight, and dequantised one at a time when they are used.
    quantization: Quantization = "none"


@dataclass(kw_only=True)
class RouterConfig:
    """What keeps the experts of a mixture in balance. All is off by itself.

    The tokens are those in the loss of an optimizer step.
    """

    #: Weight of the load-balancing loss, the mean over layers of experts * sum_i f_i P_i: the share
    #: of tokens that expert i gets, times its mean probability (arXiv 2101.03961). It costs one
    #: more forward of all micro-batches but the first. Models come with 0.001 to 0.02
    #: (`router_aux_loss_coef` in config.json, which is not read).
    aux_loss_coef: NonNegative = 0.0
    #: Weight of the mean of squared logsumexps of the router's logits, which keeps these small
    #: (arXiv 2202.08906; there 0.001).
    z_loss_coef: NonNegative = 0.0
    #: By how much the bias of each expert moves after a step, up if it got less than its share of
    #: tokens, else down (arXiv 2408.15664; there 0.001). For families whose routers have a bias.
    bias_update_rate: NonNegative = 0.0


@dataclass(kw_only=True)
class PolicyConfig:
    """The trained model and its optimizer."""

    #: Folder or hub id of a Hugging Face model; `scratch` makes a small one with random weights.
    model: str = ""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    #: Dtype of forward and backward. Master weights, gradients and optimizer state are float32
    #: (with float64, which is for proofs, float64, but for norms and routers of the library, which
    #: round to float32). auto: bfloat16; float32 on CPUs that have no instructions for bfloat16
    #: (avx512_bf16, AMX) and are many times slower with it.
    dtype: Dtype = "auto"
    #: What is recomputed in backward instead of being kept since forward. full: all but the inputs
    #: of layers; least memory, about a third more time. selective: all but the results of matrix
    #: products and attention; about a third of the memory, little more time. auto: the first of
    #: off, selective and full that fits the GPU (`python -m minirl.plan`); off on CPU.
    activation_checkpointing: Checkpointing = "auto"
    #: What computes norms, activations and rotary positions. torch: the library's modules, an
    #: operator at a time. liger: a kernel each (package liger-kernel, GPU). compile: the same by
    #: torch.compile. auto: liger where it can be had, else torch.
    kernels: Literal["auto", "torch", "liger", "compile"] = "auto"
    #: Free gathered parameters between forward and backward (ZeRO-3). False keeps them (ZeRO-2),
    #: which is faster if they fit.
    reshard_after_forward: bool = True
    #: Keep shards, gradients and optimizer state in host memory; a layer is on the device only
    #: while it computes. For models that do not fit otherwise.
    cpu_offload: bool = False
    #: Gradients between the micro-batches of a step. whole: every rank keeps all of them, 4 bytes a
    #: parameter (shared by its tensor-parallel ranks), and they are reduced once a step. sharded:
    #: reduced after every micro-batch, so that a rank keeps its shard only. auto: whole up to
    #: 4 GiB.
    accumulate: Literal["auto", "sharded", "whole"] = "auto"
    #: muon: for the matrices of layers, with AdamW for the rest. Its steps are scaled to the size
    #: of AdamW's, so the same `lr` and `weight_decay` serve both.
    optimizer: Literal["adamw", "muon"] = "adamw"
    #: Where the optimizer's state rests between steps. offload: in host memory. 8bit: in one byte
    #: an element. Both are on the device in full precision for some parameters at a time.
    optimizer_state: Literal["device", "offload", "8bit"] = "device"
    #: Patterns of weights that are not trained, by their names in the model's folder: *visual.* is
    #: the tower for images of Qwen's models, *vision_tower.* that of Gemma's. They have no gradient
    #: and no optimizer state, and are exported as they were.
    freeze: list[str] = field(default_factory=list)
    lora: LoraConfig = field(default_factory=LoraConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    #: Decay of an exponential moving average of the weights, written to <output>/model_ema at the
    #: end. It rises to this value as (1 + n) / (10 + n) over n updates. 0: no average.
    ema_decay: Decay = 0.0
    #: Learning rate. Left out: 1e-6, and ten times that for adapters.
    lr: NonNegative | None = None
    #: What becomes of the learning rate after the warm-up. cosine and linear fall until the end,
    #: wsd only in the last `lr_decay_ratio` of all optimizer steps.
    lr_schedule: LearningRateSchedule = "constant"
    lr_warmup_steps: NonNegativeInt = 0  # Optimizer steps of linear warm-up from 0.
    lr_warmup_ratio: Share = 0.0  # The same as a share of all optimizer steps. Set one of the two.
    #: Of wsd: the share of all optimizer steps in which it falls.
    lr_decay_ratio: PositiveShare = 0.1
    lr_min_ratio: NonNegative = 0.1  # Share of `lr` where cosine, linear and wsd end.
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # Of AdamW.
    adam_eps: Positive = 1e-8  # Of AdamW: what is added to the divisor.
    #: Applied to matrices only; to those of a tower for images in steps without images, too, unless
    #: they are frozen.
    weight_decay: NonNegative = 0.0
    max_grad_norm: NonNegative = 1.0  # Gradients are scaled down to this norm; 0: never.

    default_lr: ClassVar[float] = 1e-6  # Of weights that are trained themselves.

    @property
    def learning_rate(self) -> float:
        """Return `lr`, or what it is where it is left out.

        Adapters learn best at about ten times the learning rate of full training, whatever their
        rank (Schulman et al. 2025, LoRA Without Regret, "Setting the LoRA hyperparameters").
        """
        if self.lr is not None:
            return self.lr
        return self.default_lr * (ADAPTERS_LEARN_FASTER if self.lora.rank else 1)


@dataclass(kw_only=True)
class ParallelConfig:
    """How the ranks divide the work: into trainers and generators, and the trainers the model.

    The number of trainers is replicate x shard x context x tensor; shard is what the others leave.
    """

    #: Of RL: the last so many ranks only generate, and the others only train, at the same time
    #: (rollout.overlap says how they meet). 0: every rank does both, in turn.
    generators: NonNegativeInt = 0

    #: Groups of ranks that each hold a whole model in shards (HSDP). Gradients cross groups once a
    #: step, parameters never.
    replicate: PositiveInt = 1
    context: PositiveInt = 1  # Ranks that split every sequence, for sequences too long for one.
    #: How attention gets the keys of the other context ranks: all at once for a layer (fastest), or
    #: one rank's after the other's.
    context_engine: Literal["all_gather", "ring"] = "all_gather"
    tensor: PositiveInt = 1  # Consecutive ranks that split every matrix, on the same data.
    #: Sequence parallelism: between the blocks each tensor-parallel rank keeps its part of the
    #: tokens. Less memory for the same traffic.
    sequence: bool = False
    #: Expert parallelism: consecutive ranks that divide the experts of a mixture. Tokens travel to
    #: the experts and back, where FSDP would gather all experts on every rank. The other weights
    #: are sharded as without it. 1: experts are sharded like the other weights.
    experts: PositiveInt = 1
    #: Let the ranks that divide experts be on several nodes, so that tokens travel between nodes.
    experts_across_nodes: bool = False
