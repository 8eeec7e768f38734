"""How the cost of loading a model's files grows with layers and ranks.

A part of `benchmarks/growth.py`. The model is a mixture with the 128 experts of Qwen3-30B-A3B, in a
file for each layer. Its matrices are tiny: as many weights, of hardly any bytes, so that what
remains is the host's work. Files, model, shards and reading are real; the rank is the first of
torch's fake world.
"""

import json
import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks import fits
from benchmarks.dryrun.jobs import LoneMesh
from benchmarks.growth_law import Bound, Part, Point, least_seconds
from minirl.config.policy import PolicyConfig
from minirl.model import build, families

WIDTH = 16  # Of all matrices.
HEADS = 4
LOAD = "load"


def write_model(folder: Path, config: PretrainedConfig) -> None:
    """Write the folder of a model: a file for each layer, one for all else, and an index."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, p in whole.named_parameters():
        layer = re.search(r"layers\.(\d+)\.", name)
        file = f"model-{layer[1] if layer else 'ends'}.safetensors"
        for part in families.checkpoint_slices(config, name, p.shape):
            weight = torch.zeros(part.to_file(part.region).size)
            files.setdefault(file, {})[part.name] = weight
    for file, weights in files.items():
        save_file(weights, folder / file)
    index = {"weight_map": {name: file for file, weights in files.items() for name in weights}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)


def load(folder: Path, world: int) -> None:
    """Make the model of a folder as the first of so many ranks, and read its shards."""
    axes = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp_shard_cp", "tp"))
    mesh = LoneMesh(
        rank=0,
        world_size=world,
        device=torch.device("cpu"),
        fsdp=axes["dp_shard_cp"],
        context=None,
        tensor=axes["tp"],
        device_group=dist.distributed_c10d._get_default_group(),
        host_group=dist.distributed_c10d._get_default_group(),
        store=dist.distributed_c10d._get_default_store(),
    )
    cfg = PolicyConfig(model=str(folder), dtype="bfloat16")
    build.build_model(cfg, folder, mesh, trainable=True, score=False, sequence_parallel=False)


def measure(layers: int, world: int) -> list[Point]:
    """Measure a model with so many layers. A rank's share of the experts shrinks with the ranks."""
    config = fits.mixture(WIDTH, WIDTH, layers, HEADS)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), config)
            seconds = least_seconds(lambda: load(Path(folder), world))
    finally:  # Who comes later is not this rank.
        dist.destroy_process_group()
    return [Point(LOAD, world, layers, seconds, 0)]


PART = Part(
    unit="layers (30B-A3B has 48, 235B-A22B 94)",
    sizes=[12, 48, 94],
    worlds=[8, 64, 1024],
    # FSDP cuts each weight into as many pieces as there are ranks: torch's own way.
    bounds={LOAD: Bound(size=1, ranks=1)},
    measure=measure,
)
