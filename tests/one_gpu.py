"""Runs a program of minirl on a machine that seems to have one GPU: `python -m one_gpu PROGRAM`.

For what a program says before it uses the GPU."""

import runpy
import sys

import torch
import torch.distributed as dist

_join = dist.init_process_group


def _join_by_gloo(backend, **options):
    """NCCL is not in torch's CPU build."""
    _join("gloo", **options)


dist.init_process_group = _join_by_gloo
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda device: None
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__")
