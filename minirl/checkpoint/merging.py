"""Models with an adapter merged into them, a file at a time, without a model in memory."""

from pathlib import Path

import torch
from torch import Tensor

from minirl.checkpoint.exporting import Exporter
from minirl.checkpoint.folder import plan_folder
from minirl.config.lora import LoraConfig
from minirl.model import build, families, loading
from minirl.model.adapters import lora, nf4
from minirl.model.adapters.merge import merge
from minirl.model.build import CausalModel
from minirl.model.weight_files import open_weights
from minirl.parallel.mesh import Mesh
from minirl.parallel.tensor import LORA_A, LORA_B


class Base:
    """The files of a model that an adapter adapts, and what it is made of.

    Attributes:
        model: on the meta device, with its adapters.
        trained: whole, of the shapes and in the dtype of what is trained; not filled.
        shapes: of all that the merged model's files hold, by the model's names.
    """

    def __init__(
        self, folder: Path, cfg: LoraConfig, dtype: torch.dtype, setting: str, new: frozenset[str]
    ):
        """Read what files there are.

        Args:
            folder: of the base.
            cfg: the settings of the adapters.
            dtype: of the base in computation, and of the merged files.
            setting: what holds the settings, for messages.
            new: names of parameters that are trained whole, beside `cfg.modules_to_save`.

        Raises:
            UserError: the model cannot have these adapters.
        """
        self.dtype = dtype
        config = build.read_config(folder)
        self.model: CausalModel = build.make_meta_model(config, dtype, score=loading.SCORE in new)
        wide = torch.promote_types(dtype, torch.float32)
        self.adapters = lora.attach(self.model, cfg, wide, setting, new=new)
        self.model.adapters = self.adapters
        self.weights = open_weights(folder)
        self.trained: dict[str, Tensor] = {}
        for name, p in lora.trained(self.model).items():
            self.trained[name] = torch.empty(p.shape, dtype=wide)
        self.shapes: dict[str, torch.Size] = {}
        for name, t in loading.tensors(self.model).items():
            self.shapes[name] = t.shape
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}  # By weight: B and A.
        for name, b in self.trained.items():
            if name.endswith(LORA_B):
                a = self.trained[name.removesuffix(LORA_B) + LORA_A]
                self.factors[lora.weight_of(name)] = (b, a)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Return tensors of the merged model, when `trained` has been filled."""
        return {name: self._merged(name) for name in names}

    def _merged(self, name: str) -> Tensor:
        if name in self.trained:
            return self.trained[name]
        slices = families.checkpoint_slices(self.model.config, name, self.shapes[name])
        buffers = loading.buffers(self.model)
        dtype = buffers[name].dtype if name in buffers else self.dtype
        whole = torch.empty(self.shapes[name], dtype=dtype)
        loading.fill_shard(whole, slices, self.weights)
        if name in self.adapters.packed:
            whole = nf4.rounded(whole)
        if name in self.factors:
            whole = merge(whole, *self.factors[name], self.adapters.scale)
        return whole


def write_merged(base: Base, source: Path, output: Path, mesh: Mesh) -> None:
    """Write a merged model. Collective.

    Args:
        base: with `trained` filled.
        source: the base's folder.
        output: where to; it does not exist.
        mesh: the ranks, which share the files.
    """
    exporter = Exporter(mesh)
    plan = plan_folder(source, base.shapes, base.dtype, mesh.world_size)
    exporter.write(plan, output, base.read)
    exporter.wait()
