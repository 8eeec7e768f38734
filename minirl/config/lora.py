"""The settings of low-rank adapters."""

from dataclasses import dataclass, field
from typing import Literal

from minirl.config.bounds import NonNegativeInt, Positive

Quantization = Literal["none", "nf4"]


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
    #: Patterns of weights that are trained whole beside the adapters, by their names in the model's
    #: folder, such as lm_head.*. A matrix among them gets no adapter.
    modules_to_save: list[str] = field(default_factory=list)
    adapter: str = ""  # Folder of an adapter in PEFT's format to start from; empty: B starts at 0.
    #: nf4: matrices of the language model's layers are held in 4 bits (Dettmers et al. 2023, QLoRA,
    #: arXiv 2305.14314), 0.52 bytes a weight, and dequantised one at a time when they are used.
    quantization: Quantization = "none"

    @property
    def scale(self) -> float:
        """Return the factor of what adapters add."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)
