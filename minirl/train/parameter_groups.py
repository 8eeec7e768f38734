"""Which optimizer steps which parameters, and which of them decay."""

import torch
from torch import nn

from minirl.config.policy import PolicyConfig
from minirl.model import build
from minirl.model.causal import CausalModel
from minirl.parallel import fsdp
from minirl.parallel.mesh import Mesh
from minirl.parallel.muon import Muon
from minirl.parallel.optimizer import Optimizer, ShardAdamW


def make_optimizer(model: CausalModel, cfg: PolicyConfig, mesh: Mesh) -> Optimizer:
    """Return Muon for the layers' matrices, if configured, and AdamW for everything else."""
    fsdp.reshard(model)  # or the optimizer would get what is gathered
    layers = build.layers(model) if cfg.optimizer == "muon" else []
    in_layers = set(nn.ModuleList(layers).parameters())
    matrices, vectors, hidden = [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        # Biases of experts are [E, out], a convolution of features is [out, 1, taps].
        is_convolution = p.ndim == 3 and p.shape[1] == 1
        if p.ndim < 2 or name.endswith("bias") or is_convolution:
            vectors.append(p)
        elif p in in_layers:
            hidden.append(p)
        else:
            matrices.append(p)

    parts: list[torch.optim.Optimizer] = []
    groups = []
    lr = cfg.learning_rate
    if matrices:
        groups.append({"params": matrices, "weight_decay": cfg.weight_decay})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    if groups:
        parts.append(ShardAdamW(groups, lr=lr, betas=cfg.betas, eps=cfg.adam_eps, fused=True))
    if hidden:
        parts.append(Muon(hidden, mesh, lr=lr, weight_decay=cfg.weight_decay))
    return Optimizer(parts, cfg)
