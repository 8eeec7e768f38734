"""Packed attention against padding and against one dense block-diagonal mask.

    python benchmarks/attention.py --lengths 512 512 512 512 512 512 512 512
    python benchmarks/attention.py --lengths 31 64 700 1500 90 1200 300 211

Prints the median milliseconds of forward and backward of one call for each of the three: CPU time
in float32 on the CPU, wall time in bfloat16 (with the flash kernel) on CUDA.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from minirl.batch.packing import pack
from minirl.model.attention import packed_attention
from minirl.types.packed import Packed, Trajectory


@dataclass(kw_only=True)
class Load:
    lengths: tuple[int, ...] = (512,) * 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    repeats: int = 5


def packed(q: Tensor, k: Tensor, v: Tensor, batch: Packed) -> Tensor:
    """Attend as the trainer does, block by block."""
    return packed_attention(nn.Identity(), q, k, v, None, pack=batch)[0]


def padded(q: Tensor, k: Tensor, v: Tensor, batch: Packed) -> Tensor:
    """Attend with every sequence as long as the longest."""

    def pad(x: Tensor) -> Tensor:
        """[1, heads, T, head size] -> [sequences, heads, longest, head size]."""
        sequences = x[0].transpose(1, 0).split(batch.sequences.lengths)
        return nn.utils.rnn.pad_sequence(sequences, batch_first=True).transpose(1, 2)

    return F.scaled_dot_product_attention(pad(q), pad(k), pad(v), is_causal=True, enable_gqa=True)


def dense(q: Tensor, k: Tensor, v: Tensor, batch: Packed) -> Tensor:
    """Attend under one T x T mask."""
    numbers = torch.arange(len(batch.sequences.lengths))
    sequence = numbers.repeat_interleave(torch.tensor(batch.sequences.lengths)).to(q.device)
    mask = (sequence[:, None] == sequence[None]).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def make_batch(lengths: tuple[int, ...], device: torch.device) -> Packed:
    """Return a packed batch of sequences with so many rows."""
    trajectories = []
    for n in lengths:
        trajectory = Trajectory(
            tokens=np.zeros(n + 1, np.int32),
            sampled=np.zeros(n + 1, bool),
            logprobs=np.zeros(n + 1, np.float32),
        )
        trajectories.append(trajectory)
    return pack(trajectories, device)


def main(load: Load) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    batch = make_batch(load.lengths, device)
    num_tokens = sum(load.lengths)

    def random(num_heads: int) -> Tensor:
        shape = (1, num_heads, num_tokens, load.head_dim)
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    q = random(load.num_heads)
    k = random(load.num_kv_heads)
    v = random(load.num_kv_heads)
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
    shape = f"{num_tokens} tokens, {load.num_heads} heads of {load.head_dim}"
    print(f"{len(load.lengths)} sequences, {shape}, {device.type}")
    for name, ms in medians.items():
        print(f"{name:8} {ms:9.1f} ms   {ms / medians['packed']:5.2f} x packed")


if __name__ == "__main__":
    main(tyro.cli(Load, description=__doc__))
