"""What minirl has to know of a model family: the fields of a row of model/families.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PretrainedConfig

HEADS = ("num_attention_heads", "num_key_value_heads")
# Norms of all heads at once split the features, and attention itself is whole on every rank.
FEATURES = ("num_attention_heads * head_dim", "num_key_value_heads * head_dim")
DENSE = (*HEADS, "intermediate_size")


class ExpertNames(NamedTuple):
    """How checkpoint files name experts: `{block}.experts.{number}.{gate, up or down}.weight`."""

    block: str  # Stands for the model's `mlp`.
    gate: str
    up: str
    down: str


class FusedExperts(NamedTuple):
    """Checkpoint files have the two fused tensors of a layer's experts, by the model's names."""

    transposed: bool  # As [experts, columns, rows].


class Fused(NamedTuple):
    """What model/fused.py may take the place of; see `install` there."""

    # Of RMSNorm: what is added to the weight, and whether the product is rounded, not its factor.
    norm_offset: float = 0.0
    norm_wide: bool = False
    rotary: bool = True  # `apply_rotary_pos_emb` turns halves, and all of them.


class Family(NamedTuple):
    """What minirl has to know of a model family beyond its config."""

    # Config values, or products of them, that parallel.tensor splits.
    divided: tuple[str, ...] = DENSE
    # Tensor-parallel styles that the library's own plan lacks.
    plan: dict[str, str] = {}
    # Config -> (factor of the head's logits besides 1 / temperature, c where logits are
    # c * tanh(logits / c) or else None).
    head: Callable[[PretrainedConfig], tuple[float, float | None]] = lambda config: (1.0, None)
    # How files hold experts, which the model keeps as two fused tensors; None: there are none.
    experts: ExpertNames | FusedExperts | None = None
    # Of its routers: they score by sigmoid, and a bias moves their choice; else by softmax.
    sigmoid_router: bool = False
    # Config -> the value, by its name, up to which many tokens vLLM's class computes the library's
    # model; None or 0: any number.
    engine_agrees_to: Callable[[PretrainedConfig], dict[str, int | None]] = lambda config: {}
    # Config -> the values without which vLLM's class computes another model than the library's.
    engine_values: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}
    # Why a config with a sliding window is refused, and what to do; empty: it is not.
    refuses_windows: str = ""
    # Parts of the model's names -> what the files have instead; and parts of the files' names ->
    # what is in their place in files that the library's newer versions write.
    files: dict[str, str] = {}
    newer_files: dict[str, str] = {}
    fused: Fused = Fused()
