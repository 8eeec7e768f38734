"""How many requests an engine runs at once where the config leaves it open."""

import dataclasses
import math

from minirl.config.shared import EngineConfig
from minirl.parallel.mesh import Mesh

# Bounds of `engine.max_num_seqs` = 0.
FEWEST_SEQS = 256
MOST_SEQS = 1024


def resolve_num_seqs(cfg: EngineConfig, mesh: Mesh, num_answers: int) -> EngineConfig:
    """Replace max_num_seqs = 0 by what it stands for.

    Args:
        cfg: of the engine.
        mesh: of all ranks.
        num_answers: answers that all engines together are asked for at once.
    """
    if cfg.max_num_seqs:
        return cfg
    share = 0
    if mesh.device.type == "cuda":
        num_engines = mesh.world_size // cfg.tensor_parallel_size
        share = math.ceil(num_answers / num_engines)
    num_seqs = min(max(share, FEWEST_SEQS), MOST_SEQS)
    return dataclasses.replace(cfg, max_num_seqs=num_seqs)
