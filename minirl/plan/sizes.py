"""Sizes of a model, counted from the numbers of its config.json, without torch.

No family is known by its name: where a model differs, a number of its config says so. Matrices are
counted, norms and biases are not: they are less than a thousandth of a model.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from minirl.base.errors import require
from minirl.base.reading import is_file, library_reads, read_json
from minirl.config.policy import PolicyConfig
from minirl.config.validate import check_model

# Without these nothing can be counted. A config.json may leave them out where they are the defaults
# of its class, which only transformers knows.
NEEDED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# What tensor parallelism divides, and intermediate_size. Key-value heads may be fewer than ranks,
# which then hold the same.
KV_HEADS = "num_key_value_heads"
DIVIDED = ("num_attention_heads", KV_HEADS, "linear_num_key_heads", *NUM_EXPERTS)
# Activations of an MLP that has no gate; configs have no other sign of it.
WITHOUT_GATE = ("relu2", "xielu")
# Bytes of a weight in four bits, with the 8-bit scale of its block of 64 (QLoRA, sec. 3).
PACKED_BYTES = 0.5 + 1 / 64
# Matrices of a layer that no group of `lora.targets` means: routers and gates of few outputs.
ROUTERS = ("gate", "shared_expert_gate", "in_proj_ba")


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix, or those of all experts of a layer."""

    name: str  # As in the model's folder, without its layer.
    inputs: int
    outputs: int
    experts: int = 0  # 0: every token passes it.
    trained: bool = True
    rank: int = 0  # Of its adapter; 0: it has none.
    packed: bool = False  # Held in four bits.

    @property
    def numel(self) -> int:
        """Return the number of its elements."""
        return self.inputs * self.outputs * max(1, self.experts)

    @property
    def adapter(self) -> int:
        """Return the number of elements of its adapter, A and B."""
        return self.rank * (self.inputs + self.outputs) * max(1, self.experts)


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """The widths of a gated delta net, which has a state in place of keys and values."""

    keys: int  # Of a token's keys, and of its queries.
    values: int
    heads: int  # Of values, each of which has a state [key_dim, value_dim].
    key_dim: int
    value_dim: int
    convolution: int  # Rows that are convolved.

    @property
    def mixed(self) -> int:
        """Return the width of what is convolved: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> int:
        """Return the elements of the states of all heads."""
        return self.values * self.key_dim


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Widths and matrices of a layer. Layers that are alike are equal."""

    matrices: tuple[Matrix, ...]
    queries: int = 0  # Width of a token's queries; 0: a delta net is in place of attention.
    keys: int = 0  # Width of a token's keys, and of its values.
    cached: int = 0  # Elements that an engine caches for a token; of one head, if they are split.
    kv_heads: int = 1  # Heads that tensor-parallel engines split; 1: none.
    gates_output: bool = False  # What attention returns is multiplied by a gate.
    feed_forward: int = 0  # Width of the product that every token passes.
    experts: int = 0
    experts_of_token: int = 0
    expert: int = 0  # Width of the product of an expert.
    delta_net: DeltaNet | None = None

    @property
    def numel(self) -> int:
        """Return the number of its weights."""
        return sum(m.numel for m in self.matrices)

    @property
    def active(self) -> float:
        """Return the number of its weights that a token passes."""
        share = self.experts_of_token / max(1, self.experts)
        return sum(m.numel * (share if m.experts else 1) for m in self.matrices)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model."""

    hidden: int
    vocabulary: int
    layers: dict[Layer, int]  # And how many of each kind there are.
    root: tuple[Matrix, ...]  # Embedding, head, and the tower of a model that reads images.
    heads: int
    kv_heads: int
    divided: dict[str, int]  # What tensor parallelism divides, by the names in the config.
    state_bytes: int  # Of an element of an engine's recurrent states; 0: as its dtype.

    def all_matrices(self) -> Iterable[tuple[Matrix, int]]:
        """Yield each matrix, and how many layers have such a one."""
        for matrix in self.root:
            yield matrix, 1
        for layer, num in self.layers.items():
            for matrix in layer.matrices:
                yield matrix, num

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return sum(self.layers.values())

    @property
    def parameters(self) -> int:
        """Return the number of weights, without adapters."""
        return sum(num * m.numel for m, num in self.all_matrices())

    @property
    def active_in_layers(self) -> float:
        """Return the number of weights of the layers that a token passes."""
        return sum(num * layer.active for layer, num in self.layers.items())

    @property
    def active_parameters(self) -> float:
        """Return the number of weights of the layers and the head that a token passes."""
        return self.active_in_layers + self.hidden * self.vocabulary

    @property
    def trained(self) -> int:
        """Return the number of weights that have gradients and optimizer state."""
        return sum(num * (m.numel * m.trained + m.adapter) for m, num in self.all_matrices())

    @property
    def is_adapted(self) -> bool:
        """Return whether adapters are trained."""
        return any(m.rank for m, _ in self.all_matrices())

    def undivided(self, tensor: int) -> str:
        """Return the first number of the config that tensor ranks cannot divide; empty: none."""
        for name, size in self.divided.items():
            if size % tensor and (name != KV_HEADS or tensor % size):
                return f"{name} = {size}"
        return ""

    def frozen_bytes(self, element: int, master: int) -> float:
        """Return the bytes of all that is not trained.

        Args:
            element: bytes of a weight that adapters are added to.
            master: bytes of another frozen weight.
        """
        of_weight = element if self.is_adapted else master
        total = 0.0
        for m, num in self.all_matrices():
            if not m.trained:
                total += num * m.numel * (PACKED_BYTES if m.packed else of_weight)
        return total


def read_config(model: str, setting: str) -> dict[str, Any]:
    """Return the values of a model's config.json, in a folder or by its id on the hub.

    Args:
        model: a folder or a hub id.
        setting: what names the model, for messages.

    Raises:
        UserError: there is no such config, or it lacks what has to be counted.
    """
    check_model(model, setting)
    path = Path(model) / "config.json"
    values: dict[str, Any] = {}
    if is_file(path):
        values = read_json(path, setting)
        require(isinstance(values, dict), f"{setting}: {path} holds no names and values")
    text = values.get("text_config") or values
    is_hybrid = "linear_num_value_heads" in text
    needed = [*NEEDED, "layer_types"] if is_hybrid else list(NEEDED)
    if any(name not in text and name not in values for name in needed):
        from transformers import AutoConfig  # here, because this takes seconds

        with library_reads(f"{model}/config.json"):
            values = AutoConfig.from_pretrained(model).to_dict()
        text = values.get("text_config") or values
    for name in NEEDED[:-1]:
        size = text.get(name)
        if isinstance(size, list):  # one for each layer
            size = size[0]
        require(
            isinstance(size, int) and size > 0,
            f"{setting} = {model}: {name} = {size!r} in its config.json must be a whole number "
            "above 0: the planner counts it",
        )
    return values


def read_sizes(
    values: Mapping[str, Any], *, score: bool = False, policy: PolicyConfig | None = None
) -> ModelSizes:
    """Return the sizes of a model.

    Args:
        values: of its config.
        score: it has a score head in place of the language model's.
        policy: what is set for it, if it is trained; None: nothing is frozen, nor adapted.
    """
    text = values.get("text_config") or values
    hidden = text["hidden_size"]
    vocabulary = text["vocab_size"]
    num_layers = text["num_hidden_layers"]
    named: list[tuple[str, Matrix]] = [
        ("model.", Matrix(name="embed_tokens", inputs=vocabulary, outputs=hidden))
    ]
    if score:
        named.append(("", Matrix(name="score", inputs=hidden, outputs=1)))
    elif not text.get("tie_word_embeddings", values.get("tie_word_embeddings", True)):
        named.append(("", Matrix(name="lm_head", inputs=hidden, outputs=vocabulary)))
    of_layer = text.get("hidden_size_per_layer_input") or 0  # Inputs that each layer has.
    if of_layer:
        rows = text["vocab_size_per_layer_input"]
        width = of_layer * num_layers
        table = Matrix(name="embed_tokens_per_layer", inputs=rows, outputs=width)
        projection = Matrix(name="per_layer_model_projection", inputs=hidden, outputs=width)
        named += [("model.", table), ("model.", projection)]
    if values.get("vision_config"):
        named.append(("model.", _tower(values["vision_config"])))

    layers = [_read_layer(text, number) for number in range(num_layers)]
    if policy:
        named = [(prefix, _set(m, prefix, policy, in_layers=False)) for prefix, m in named]
        for number, layer in enumerate(layers):
            prefix = f"model.layers.{number}."
            matrices = tuple(_set(m, prefix, policy, in_layers=True) for m in layer.matrices)
            layers[number] = Layer(**vars(layer) | {"matrices": matrices})
    divided = {name: text.get(name) for name in DIVIDED}
    if all(layer.feed_forward == text.get("intermediate_size") for layer in layers):
        divided["intermediate_size"] = layers[0].feed_forward
    state = text.get("mamba_ssm_dtype")  # Of Qwen3.5's configs, which vLLM follows.
    return ModelSizes(
        hidden=hidden,
        vocabulary=vocabulary,
        layers=dict(Counter(layers)),
        root=tuple(matrix for _, matrix in named),
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        divided={name: size for name, size in divided.items() if size},
        state_bytes={"float32": 4, "bfloat16": 2, "float16": 2}[state] if state else 0,
    )


def _read_layer(text: Mapping[str, Any], number: int) -> Layer:
    """Return a layer by its number from 0."""
    # The library keeps the sizes of layers that are not as the others here.
    for key, sizes in (text.get("per_layer_config") or {}).items():
        if int(key) == number:
            text = {**text, **sizes}
    hidden = text["hidden_size"]
    kind = (text.get("layer_types") or ["full_attention"] * (number + 1))[number]
    if kind == "linear_attention":
        widths, matrices = _delta_net(text)
    elif text.get("kv_lora_rank"):
        widths, matrices = _latent_attention(text)
    else:
        widths, matrices = _attention(text, number, kind)
    matrices = {f"self_attn.{name}": sizes for name, sizes in matrices.items()}
    all_matrices = [Matrix(name=n, inputs=i, outputs=o) for n, (i, o) in matrices.items()]

    num_experts = next((text[name] for name in NUM_EXPERTS if text.get(name)), 0)
    is_mixture = num_experts and _is_mixture(text, number)
    expert = text.get("moe_intermediate_size") or text["intermediate_size"]
    feed_forward = text.get("intermediate_size") or expert
    if isinstance(feed_forward, list):
        feed_forward = feed_forward[number]
    if is_mixture and not text.get("enable_moe_block"):  # which has both, side by side
        shared = text.get("shared_expert_intermediate_size") or 0
        feed_forward = shared + (text.get("n_shared_experts") or 0) * expert
    num_shared = text.get("num_kv_shared_layers") or 0
    if text.get("use_double_wide_mlp") and number >= text["num_hidden_layers"] - num_shared:
        feed_forward *= 2
    # Blocks as those of GPT-2, which end in a dropout, have no gate either.
    has_gate = text.get("hidden_act") not in WITHOUT_GATE and "residual_dropout" not in text
    parts = ["gate_proj", "up_proj"] if has_gate else ["up_proj"]
    if feed_forward:
        block = "mlp.shared_expert" if is_mixture else "mlp"
        for part in parts:
            matrix = Matrix(name=f"{block}.{part}", inputs=hidden, outputs=feed_forward)
            all_matrices.append(matrix)
        down = Matrix(name=f"{block}.down_proj", inputs=feed_forward, outputs=hidden)
        all_matrices.append(down)
    if is_mixture:
        together: dict[str, Any] = {"experts": num_experts}
        all_matrices += [
            Matrix(name="mlp.gate", inputs=hidden, outputs=num_experts),
            Matrix(name="mlp.experts.gate_up_proj", inputs=hidden, outputs=2 * expert, **together),
            Matrix(name="mlp.experts.down_proj", inputs=expert, outputs=hidden, **together),
        ]
        of_token = text.get("top_k_experts") or text["num_experts_per_tok"]
        num = of_token[number] if isinstance(of_token, list) else of_token
        widths |= {"experts": num_experts, "experts_of_token": num, "expert": expert}
    of_layer = text.get("hidden_size_per_layer_input") or 0
    if of_layer:
        all_matrices += [
            Matrix(name="per_layer_input_gate", inputs=hidden, outputs=of_layer),
            Matrix(name="per_layer_projection", inputs=of_layer, outputs=hidden),
        ]
    return Layer(matrices=tuple(all_matrices), feed_forward=feed_forward, **widths)


def _is_mixture(text: Mapping[str, Any], number: int) -> bool:
    """Return whether a layer of a model with experts has them."""
    kinds = text.get("mlp_layer_types")
    if kinds:
        return kinds[number] == "sparse"
    is_dense = number < (text.get("first_k_dense_replace") or 0)
    is_dense |= number in (text.get("mlp_only_layers") or [])
    return not is_dense and (number + 1) % (text.get("decoder_sparse_step") or 1) == 0


# Widths of a layer as `Layer` has them, and (inputs, outputs) of its matrices by name.
Block = tuple[dict[str, Any], dict[str, tuple[int, int]]]


def _attention(text: Mapping[str, Any], number: int, kind: str) -> Block:
    hidden = text["hidden_size"]
    heads = text["num_attention_heads"]
    kv_heads = text["num_key_value_heads"]
    is_global = kind == "full_attention"
    head_dim = text.get("head_dim") or hidden // heads
    if is_global and text.get("global_head_dim"):
        head_dim = text["global_head_dim"]
    one_for_both = is_global and bool(text.get("attention_k_eq_v"))  # Keys are the values, too.
    if one_for_both:
        kv_heads = text.get("num_global_key_value_heads") or kv_heads
    # The attention of models with gated delta nets has a gate of its own.
    gates = bool(text.get("attn_output_gate") or text.get("linear_num_value_heads"))
    queries = heads * head_dim
    keys = kv_heads * head_dim
    matrices = {"q_proj": (hidden, queries * (1 + gates)), "o_proj": (queries, hidden)}
    num_shared = text.get("num_kv_shared_layers") or 0
    if number < text["num_hidden_layers"] - num_shared:  # else these are another layer's
        matrices["k_proj"] = (hidden, keys)
        if not one_for_both:
            matrices["v_proj"] = (hidden, keys)
    widths = {
        "queries": queries,
        "keys": keys,
        "cached": 2 * head_dim if "k_proj" in matrices else 0,
        "kv_heads": kv_heads,
        "gates_output": gates,
    }
    return widths, matrices


def _latent_attention(text: Mapping[str, Any]) -> Block:
    """Return attention whose keys and values are made of one latent vector (DeepSeek-V2)."""
    hidden = text["hidden_size"]
    heads = text["num_attention_heads"]
    latent = text["kv_lora_rank"]
    rotary = text["qk_rope_head_dim"]
    plain = text["qk_nope_head_dim"]
    queries = heads * (plain + rotary)
    values = heads * text["v_head_dim"]
    matrices = {
        "kv_a_proj_with_mqa": (hidden, latent + rotary),
        "kv_b_proj": (latent, heads * plain + values),
        "o_proj": (values, hidden),
    }
    of_queries = text.get("q_lora_rank")
    if of_queries:
        matrices |= {"q_a_proj": (hidden, of_queries), "q_b_proj": (of_queries, queries)}
    else:
        matrices["q_proj"] = (hidden, queries)
    # The engine caches the latent vector, on every rank.
    return {"queries": queries, "keys": queries, "cached": latent + rotary}, matrices


def _delta_net(text: Mapping[str, Any]) -> Block:
    """Return a gated delta net (Yang et al. 2024)."""
    hidden = text["hidden_size"]
    heads = text["linear_num_value_heads"]
    net = DeltaNet(
        keys=text["linear_num_key_heads"] * text["linear_key_head_dim"],
        values=heads * text["linear_value_head_dim"],
        heads=heads,
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        convolution=text["linear_conv_kernel_dim"],
    )
    matrices = {
        "in_proj_qkvz": (hidden, net.mixed + net.values),
        "in_proj_ba": (hidden, 2 * heads),
        "out_proj": (net.values, hidden),
    }
    return {"delta_net": net}, matrices


def _tower(vision: dict[str, Any]) -> Matrix:
    """Return a tower for images as one matrix: four of attention and two of an MLP a layer."""
    hidden = vision.get("embed_dim") or vision.get("hidden_size") or 0
    depth = vision.get("depth") or vision.get("num_hidden_layers") or 0
    width = vision.get("intermediate_size") or int(hidden * (vision.get("mlp_ratio") or 4))
    outputs = depth * (4 * hidden + 2 * width)
    return Matrix(name="visual.vision_tower", inputs=hidden, outputs=outputs)


def _set(m: Matrix, prefix: str, policy: PolicyConfig, *, in_layers: bool) -> Matrix:
    """Return a matrix as `policy.freeze` and `policy.lora` have it."""
    lora = policy.lora
    weight = f"{prefix}{m.name}.weight"
    if not lora.rank:
        is_frozen = any(fnmatchcase(weight, pattern) for pattern in policy.freeze)
        return Matrix(**vars(m) | {"trained": not is_frozen})
    trained = any(fnmatchcase(weight, pattern) for pattern in lora.modules_to_save)
    trained |= m.name == "score"
    last = m.name.rpartition(".")[2]
    is_linear = in_layers and last not in ROUTERS
    adapted = not trained and any(
        _is_target(m, prefix, last, target, is_linear=is_linear) for target in lora.targets
    )
    packed = lora.quantization != "none" and is_linear and not trained
    return Matrix(**vars(m) | {"trained": trained, "rank": lora.rank * adapted, "packed": packed})


def _is_target(m: Matrix, prefix: str, last: str, target: str, *, is_linear: bool) -> bool:
    """Return whether a matrix is meant by a target, as `LoraConfig.targets` says it."""
    blocks = {"all-linear": ("self_attn", "mlp"), "attention": ("self_attn",), "mlp": ("mlp",)}
    if target in blocks:
        return is_linear and m.name.startswith(blocks[target])
    if "." in target or "*" in target:
        return fnmatchcase(prefix + m.name, target)
    return last == target
