"""Packed attention against padding and against one dense block-diagonal mask: forward and backward
of one call.

    python benchmarks/attention.py --lengths 512 512 512 512 512 512 512 512
    python benchmarks/attention.py --lengths 31 64 700 1500 90 1200 300 211

float32 on the CPU, bfloat16 (and the flash kernel) on CUDA. CPU-milliseconds there, wall
milliseconds on CUDA; medians.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn

from minirl.data.packing import pack
from minirl.model.attention import packed_attention
from minirl.types import Packed, Trajectory


@dataclass(kw_only=True)
class Load:
    lengths: tuple[int, ...] = (512,) * 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    repeats: int = 5


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Packed) -> torch.Tensor:
    return packed_attention(nn.Identity(), q, k, v, None, pack=batch)[0]


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Packed) -> torch.Tensor:
    """Every sequence as long as the longest."""
    rows = [r.transpose(1, 0) for r in (x[0] for x in (q, k, v))]
    q, k, v = (
        nn.utils.rnn.pad_sequence(r.split(batch.lengths), batch_first=True).transpose(1, 2)
        for r in rows
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Packed) -> torch.Tensor:
    """One T x T mask."""
    sequence = torch.repeat_interleave(
        torch.arange(len(batch.lengths)), torch.tensor(batch.lengths)
    ).to(q.device)
    mask = (sequence[:, None] == sequence[None]).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def main(load: Load) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = pack(
        [
            Trajectory(
                tokens=np.zeros(n + 1, np.int32),
                sampled=np.zeros(n + 1, bool),
                logprobs=np.zeros(n + 1, np.float32),
            )
            for n in load.lengths
        ],
        device,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(
            1,
            heads,
            sum(load.lengths),
            load.head_dim,
            device=device,
            dtype=dtype,
            requires_grad=True,
        )
        for heads in (load.num_heads, load.num_kv_heads, load.num_kv_heads)
    )
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    medians = {}
    for function in (packed, padded, dense):
        times = []
        for _ in range(load.repeats + 1):
            start = clock()
            function(q, k, v, batch).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (clock() - start))
        medians[function.__name__] = statistics.median(times[1:])
    print(
        f"{len(load.lengths)} sequences, {sum(load.lengths)} tokens, {load.num_heads} heads of {load.head_dim}, {device.type}"
    )
    for name, ms in medians.items():
        print(f"{name:8} {ms:9.1f} ms   {ms / medians['packed']:5.2f} x packed")


if __name__ == "__main__":
    main(tyro.cli(Load, description=__doc__))
