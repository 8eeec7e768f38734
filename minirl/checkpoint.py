"""Resumable state (torch.distributed.checkpoint) and Hugging Face export.

A checkpoint is written beside its final name and renamed when all ranks are done, so what `find` returns is always whole.
"""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from minirl.parallel.mesh import Mesh
from minirl.policy import Policy
from minirl.types import UserError


def find(folder: Path) -> Path | None:
    """The newest finished checkpoint of a run folder."""
    finished = [p for p in folder.glob("checkpoints/step-*") if not p.name.endswith(".partial")]
    return max(finished, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def save(folder: Path, step: int, policy: Policy, progress: dict, mesh: Mesh, *, keep: int) -> Path:
    """State after `step` finished RL steps. `progress` is what else the program needs to go on (JSON)."""
    final = folder / "checkpoints" / f"step-{step}"
    partial = final.with_name(final.name + ".partial")
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "progress.json").write_text(json.dumps({"progress": progress, "step": step, "num_updates": policy.num_updates, "model": _shape_of(policy)}))
    mesh.barrier()
    torch.save(_random_state(), partial / f"random-{mesh.rank}.pt")
    dcp.save(_state(policy), checkpoint_id=partial / "state")
    mesh.barrier()
    if mesh.rank == 0:
        partial.rename(final)
        others = sorted(folder.glob("checkpoints/step-*"), key=lambda p: int(p.name.removeprefix("step-").removesuffix(".partial")))
        for old in others[:-keep]:
            shutil.rmtree(old)
    mesh.barrier()
    return final


def load(checkpoint: Path, policy: Policy, mesh: Mesh) -> dict:
    """Restore policy, optimizer and random state; returns what `save` was given as `progress`, and `step`. Raises UserError for a checkpoint of another model."""
    saved = json.loads((checkpoint / "progress.json").read_text())
    if saved["model"] != _shape_of(policy):
        raise UserError(f"resume: {checkpoint} is of another model ({saved['model']}) than policy.model = {policy.folder} "
                        f"({_shape_of(policy)}); start in another output folder")
    state = _state(policy)
    dcp.load(state, checkpoint_id=checkpoint / "state")
    set_model_state_dict(policy.model, state["model"])
    set_optimizer_state_dict(policy.model, policy.optimizer, state["optimizer"])
    policy.num_updates = saved["num_updates"]
    own = checkpoint / f"random-{mesh.rank}.pt"
    if own.exists():  # a run resumed on more ranks than it was saved on starts the new ones from their seed
        _set_random_state(torch.load(own, weights_only=False))
    return saved


def _state(policy: Policy) -> dict:
    return {"model": get_model_state_dict(policy.model), "optimizer": get_optimizer_state_dict(policy.model, policy.optimizer)}


def _shape_of(policy: Policy) -> str:
    config = policy.model.config
    return f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size}"


def _random_state() -> dict:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def export(policy: Policy, folder: Path, mesh: Mesh, *, max_file_gb: float = 4.0) -> None:
    """Write a Hugging Face folder that `transformers` and vLLM load, in the dtype of the forward.

    One weight is whole at a time, and on one rank only: files are owned by ranks in turn. Written beside and renamed.
    """
    dtype = getattr(torch, policy.cfg.dtype)
    shards, files, size = policy.shards(), [[]], 0
    for name, p in shards.items():
        n = p.numel() * dtype.itemsize
        if files[-1] and size + n > max_file_gb * 2**30:
            files.append([])
            size = 0
        files[-1].append(name)
        size += n
    partial = folder.with_name(folder.name + ".partial")
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    mesh.barrier()
    names = ["model.safetensors"] if len(files) == 1 else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    parts = policy.parts()
    for i, (file, members) in enumerate(zip(names, files, strict=True)):
        owner, tensors = i % mesh.world_size, {}
        for name in members:
            p = shards[name].detach()
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            if mesh.rank == owner:  # buffers are few and keep their dtype, which routing depends on
                whole = whole.to("cpu", dtype if isinstance(shards[name], nn.Parameter) else p.dtype)
                tensors |= {part.name: part.of(whole).clone(memory_format=torch.contiguous_format) for part in parts[name]}
        if mesh.rank == owner:
            save_file(tensors, partial / file, metadata={"format": "pt"})
    if mesh.rank == 0:
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(p.numel() for p in shards.values()) * dtype.itemsize},
                     "weight_map": {part.name: file for file, members in zip(names, files, strict=True) for name in members for part in parts[name]}}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        _write_companions(policy, partial, dtype)
    mesh.barrier()
    if mesh.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    mesh.barrier()


def _write_companions(policy: Policy, folder: Path, dtype: torch.dtype) -> None:
    config = AutoConfig.from_pretrained(policy.folder)
    config.dtype = dtype
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy.folder).save_pretrained(folder)
    if (policy.folder / "generation_config.json").exists():
        GenerationConfig.from_pretrained(policy.folder).save_pretrained(folder)
