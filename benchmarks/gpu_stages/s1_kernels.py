"""The trainer's kernels against formulas in a wider dtype, at real shapes, and their times."""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import gpu_bench
from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import DEVICE, DTYPE, ON_GPU, SMALL, check, near, part, value
from minirl.batch import attention_plan
from minirl.batch.packing import pack
from minirl.model import experts, fused, logprob, logprob_kernels, selective
from minirl.model.attention import packed_attention
from minirl.model.build import head_kernels
from minirl.model.logprob import logprob_entropy
from minirl.plan.costs import Load
from minirl.types.packed import Packed, Trajectory

# Of what kernels are compared with.
WIDE = torch.float32 if ON_GPU else torch.float64
# Answers to prompts.
LOAD = Load(tokens=8192, sequence=1024, prompt=256)
SHORT_LOAD = Load(tokens=32768, sequence=320, prompt=64)
if SMALL:
    LOAD = SHORT_LOAD = Load(tokens=96, sequence=32, prompt=8, samples=2)
LIMIT = 0.02 if ON_GPU else 1e-4
LOGPROB_LIMIT = 2e-3
ENTROPY_LIMIT = 5e-3


class Heads(NamedTuple):
    """Of an attention."""

    queries: int
    keys: int
    width: int


class Experts(nn.Module):
    """Experts as the library has them, with random weights.

    Args:
        num_experts: E.
        hidden: width of what they read.
        inner: width between their two matrices.
    """

    is_transposed = False
    has_bias = False

    def __init__(self, num_experts: int, hidden: int, inner: int):
        super().__init__()
        self.num_experts = num_experts
        up = torch.randn(num_experts, 2 * inner, hidden, device=DEVICE) * hidden**-0.5
        down = torch.randn(num_experts, hidden, inner, device=DEVICE) * inner**-0.5
        self.gate_up_proj = nn.Parameter(up.to(DTYPE))
        self.down_proj = nn.Parameter(down.to(DTYPE))

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Return a leaf in the dtype of training."""
    return (torch.randn(shape, device=DEVICE) * scale).to(DTYPE).requires_grad_()


def widened(leaves: list[Tensor]) -> list[Tensor]:
    """Return the same values as leaves in the wider dtype."""
    return [leaf.detach().to(WIDE).requires_grad_() for leaf in leaves]


# --------------------------------------------------------------------------------------------------
# attention


def check_attention(heads: Heads) -> None:
    """Compare attention over packed sequences with the formula that wider dtypes take."""
    load = Load(tokens=4096, num_micro=1, sequence=1024, prompt=256, samples=4)
    if SMALL:
        load = Load(tokens=96, num_micro=1, sequence=32, prompt=8, samples=2)
    batch = gpu_bench.make_batch(load, DEVICE)
    num_rows = len(batch.inputs)
    leaves = []
    for count in (heads.queries, heads.keys, heads.keys):
        leaves.append(random(1, count, num_rows, heads.width))
    grad = torch.randn(1, num_rows, heads.queries, heads.width, device=DEVICE)

    def run(inputs: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = attend(inputs, batch)
        return out, torch.autograd.grad(out, inputs, grad.to(out.dtype))

    out, grads = run(leaves)
    exact, exact_grads = run(widened(leaves))
    near("attention forward", out, exact, LIMIT)
    for name, got, wanted in zip("qkv", grads, exact_grads, strict=True):
        near(f"attention d{name}", got, wanted, LIMIT)
    milliseconds = 1e3 * lib.seconds(lambda: run(leaves))
    value("attention forward and backward", milliseconds, f"ms, {num_rows} rows")


def time_attention(heads: Heads, load: Load, repeated_per_row: int) -> None:
    """Report the times of attention to prompts that are repeated, or that are a block of their own.

    Args:
        heads: of a model.
        load: sequences and their prompts.
        repeated_per_row: prompts of at most so many keys for each row of an answer are repeated.
    """
    before = attention_plan.SHORT_PROMPT, attention_plan.REPEATED_PER_ROW
    attention_plan.SHORT_PROMPT, attention_plan.REPEATED_PER_ROW = 0, repeated_per_row
    batch = gpu_bench.make_batch(load, DEVICE)
    attention_plan.SHORT_PROMPT, attention_plan.REPEATED_PER_ROW = before
    leaves = []
    for count in (heads.queries, heads.keys, heads.keys):
        leaves.append(random(1, count, len(batch.inputs), heads.width))
    out = attend(leaves, batch)
    grad = torch.randn_like(out)
    flops = 4.0 * gpu_bench.count_pairs(batch) * heads.queries * heads.width
    name = f"{load.sequence} tokens, prompts {'repeated' if repeated_per_row else 'merged'}"
    calls = {
        "forward": (flops, lambda: attend(leaves, batch)),
        "backward": (2.5 * flops, lambda: grads_of(out, leaves, grad)),
    }
    for which, (operations, call) in calls.items():
        seconds = lib.seconds(call)
        value(f"{name}: {which}", 1e3 * seconds, f"ms, {operations / seconds / 1e12:.1f} TFLOP/s")


def time_flash_forward(heads: Heads, load: Load) -> None:
    """Report the times of torch's FlashAttention-2 and of the engine's FlashAttention-3, alone."""
    batch = gpu_bench.make_batch(load, DEVICE)
    block = batch.attention.blocks[0]
    num_queries, num_keys = int(block.cu_queries[-1]), int(block.cu_keys[-1])
    q = random(num_queries, heads.queries, heads.width).detach()
    k = random(num_keys, heads.keys, heads.width).detach()
    flops = 4.0 * gpu_bench.count_pairs(batch) * heads.queries * heads.width
    vllms = importlib.import_module("vllm.vllm_flash_attn")

    def of_torch() -> Tensor:
        sums = block.cu_queries, block.cu_keys, *block.longest
        return torch.ops.aten._flash_attention_forward(q, k, k, *sums, 0.0, True, False)[0]

    def of_vllm() -> Tensor:
        return vllms.flash_attn_varlen_func(
            *(q, k, k),
            max_seqlen_q=block.longest[0],
            cu_seqlens_q=block.cu_queries,
            max_seqlen_k=block.longest[1],
            cu_seqlens_k=block.cu_keys,
            causal=True,
            fa_version=3,
        )

    calls = {"torch's FlashAttention-2": of_torch}
    if vllms.is_fa_version_supported(3):
        calls["vLLM's FlashAttention-3"] = of_vllm
        near("vLLM's FlashAttention-3 is torch's FlashAttention-2", of_vllm(), of_torch(), LIMIT)
    for name, call in calls.items():
        seconds = lib.seconds(call)
        rate = f"ms, {flops / seconds / 1e12:.1f} TFLOP/s"
        value(f"{load.sequence} tokens: forward of {name}", 1e3 * seconds, rate)


def grads_of(out: Tensor, leaves: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of leaves, as often as one likes."""
    return torch.autograd.grad(out, leaves, grad, retain_graph=True)


def attend(inputs: list[Tensor], batch: Packed) -> Tensor:
    q, k, v = inputs
    return packed_attention(nn.Identity(), q, k, v, None, pack=batch)[0]


def check_attention_of_torch(heads: Heads) -> None:
    """Compare attention of one sequence with torch's own, an oracle that is not minirl's."""
    length = 40 if SMALL else 1025
    trajectory = Trajectory(
        tokens=np.arange(5, 5 + length).astype(np.int32),
        sampled=np.arange(length) >= 8,
        logprobs=np.zeros(length, np.float32),
        group=0,
    )
    batch = pack([trajectory], DEVICE)
    num_rows = len(batch.inputs)
    q = random(1, heads.queries, num_rows, heads.width)
    k = random(1, heads.keys, num_rows, heads.width)
    v = random(1, heads.keys, num_rows, heads.width)
    shared = heads.queries // heads.keys
    wanted = F.scaled_dot_product_attention(
        q.to(WIDE),
        k.to(WIDE).repeat_interleave(shared, 1),
        v.to(WIDE).repeat_interleave(shared, 1),
        is_causal=True,
    )
    near("packed attention equals SDPA", attend([q, k, v], batch), wanted.transpose(1, 2), LIMIT)


# --------------------------------------------------------------------------------------------------
# the head


def check_head() -> None:
    num_rows, width, vocabulary = (40, 32, 300) if SMALL else (1500, 1024, 151936)
    hidden = random(num_rows, width)
    weight = random(vocabulary, width, scale=0.05)
    targets = torch.randint(vocabulary, (num_rows,), device=DEVICE)
    grad = torch.randn(num_rows, device=DEVICE)
    kernels = head_kernels(hidden.device, hidden.dtype)
    logprobs, entropies = logprob_entropy(hidden, weight, targets, kernels=kernels)
    grads = torch.autograd.grad(logprobs, (hidden, weight), grad)

    wide_hidden, wide_weight = widened([hidden, weight])
    all_logprobs = (wide_hidden @ wide_weight.t()).log_softmax(-1)
    exact = all_logprobs.gather(1, targets[:, None])[:, 0]
    exact_entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    exact_grads = torch.autograd.grad(exact, (wide_hidden, wide_weight), grad)
    worst = (logprobs - exact).abs().max().item()
    check("log-probs", worst < LOGPROB_LIMIT, f"worst {worst:.3g}")
    worst = (entropies - exact_entropies).abs().max().item()
    check("entropies", worst < ENTROPY_LIMIT, f"worst {worst:.3g}")
    near("gradient of hidden states", grads[0], exact_grads[0], LIMIT)
    near("gradient of the head", grads[1], exact_grads[1], LIMIT)


def check_chunks_of_the_head() -> None:
    """Compare a gradient that is summed over several chunks of rows, in place."""
    num_rows, width, vocabulary = (70, 32, 300) if SMALL else (1500, 512, 1000)
    before = dict(logprob.CHUNK_BYTES)
    logprob.CHUNK_BYTES.update(cuda=256 * 4 * vocabulary, cpu=16 * 4 * vocabulary)
    hidden = random(num_rows, width)
    weight = random(vocabulary, width, scale=0.05)
    targets = torch.randint(vocabulary, (num_rows,), device=DEVICE)
    grad = torch.randn(num_rows, device=DEVICE)
    temperature = 0.7
    kernels = head_kernels(hidden.device, hidden.dtype)
    logprobs, _ = logprob_entropy(hidden, weight, targets, temperature, kernels=kernels)
    got = torch.autograd.grad(logprobs, weight, grad)[0]
    logprob.CHUNK_BYTES.update(before)

    wide_hidden, wide_weight = widened([hidden, weight])
    logits = wide_hidden @ wide_weight.t() / temperature
    exact = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad(exact, wide_weight, grad)[0]
    near("gradient of the head, chunk by chunk", got, wanted, LIMIT)


class Head(NamedTuple):
    """A head, and what is asked of it."""

    rows: int
    width: int
    vocabulary: int
    softcap: float | None = None
    entropy_gradient: bool = False


HEADS = (
    Head(32768, 1024, 151936),  # Qwen3-0.6B
    Head(8192, 2048, 151936),  # Qwen3-1.7B
    Head(4096, 2304, 256000, 30.0, True),  # Gemma 2 2B
)
SMALL_HEADS = (Head(40, 32, 300), Head(40, 32, 1500, 2.0, True))


def compare_ways_of_the_head(head: Head) -> None:
    """Compare the head's kernels with its formulas in the same dtype, and time both."""
    hidden = random(head.rows, head.width)
    weight = random(head.vocabulary, head.width, scale=0.05)
    targets = torch.randint(head.vocabulary, (head.rows,), device=DEVICE)
    grads = list(torch.randn(2, head.rows, device=DEVICE))

    def forward(function: Any) -> tuple[Tensor, ...]:
        return function.apply(
            hidden, weight, targets, 0.9, head.softcap, head.entropy_gradient, None
        )

    def both(function: Any) -> list[Tensor]:
        results = forward(function)
        outputs = results if head.entropy_gradient else results[:1]
        gradients = torch.autograd.grad(outputs, (hidden, weight), grads[: len(outputs)])
        return [*results, *gradients]

    found = both(logprob_kernels.OnePass)
    repeat = all(map(torch.equal, found, both(logprob_kernels.OnePass)))
    check("the head's kernels repeat", repeat)
    wanted = both(logprob.LogprobEntropy)
    for name, x, y in zip(("log-probs", "entropies"), found, wanted, strict=False):
        worst = (x - y).abs().max().item()
        check(f"{name} by kernels and by formulas", worst < 1e-4, f"worst {worst:.3g}")
    near("gradient of hidden states by both", found[2], wanted[2], LIMIT)
    near("gradient of the head by both", found[3], wanted[3], LIMIT)
    del found, wanted
    before = dict(logprob.CHUNK_BYTES)
    for name, function, chunk_bytes in (
        ("kernels", logprob_kernels.OnePass, before["cuda"]),
        ("kernels in chunks twice as large", logprob_kernels.OnePass, 2 * before["cuda"]),
        ("formulas", logprob.LogprobEntropy, before["cuda"]),
    ):
        logprob.CHUNK_BYTES["cuda"] = chunk_bytes
        alone = 1e3 * lib.seconds(functools.partial(forward, function), 3)
        total = 1e3 * lib.seconds(functools.partial(both, function), 3)
        label = f"head of {head.rows} x {head.vocabulary} x {head.width} by {name}"
        value(f"{label}: forward", alone, "ms")
        value(f"{label}: backward", total - alone, "ms")
    logprob.CHUNK_BYTES.update(before)


# --------------------------------------------------------------------------------------------------
# experts


def check_experts() -> None:
    """Compare the experts of a mixture with a loop over them."""
    num_experts, num_chosen, hidden, inner, num_tokens = 64, 8, 2048, 768, 1024
    if SMALL:
        num_experts, num_chosen, hidden, inner, num_tokens = 4, 2, 16, 24, 12
    module = Experts(num_experts, hidden, inner)
    x = random(num_tokens, hidden)
    order = torch.rand(num_tokens, num_experts, device=DEVICE).argsort(1)
    chosen = order[:, :num_chosen].contiguous()
    chosen[0] = num_experts  # A token of no expert.
    weights = torch.rand(num_tokens, num_chosen, device=DEVICE).to(DTYPE)
    leaves = [x, module.gate_up_proj, module.down_proj]

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        y = experts.mixture(module, x, chosen, weights)
        return y, torch.autograd.grad(y, leaves, torch.ones_like(y))

    y, grads = run()
    wide = widened(leaves)
    wanted = one_at_a_time(module, wide, chosen, weights.to(WIDE))
    exact_grads = torch.autograd.grad(wanted, wide, torch.ones_like(wanted))
    near("mixture forward", y, wanted, LIMIT)
    for name, got, exact in zip(("x", "gate_up", "down"), grads, exact_grads, strict=True):
        near(f"mixture d{name}", got, exact, 1.5 * LIMIT)
    kept = checkpoint(
        lambda x: experts.mixture(module, x, chosen, weights),
        x,
        use_reentrant=False,
        context_fn=selective.contexts,
    )
    kept_grads = torch.autograd.grad(kept, leaves, torch.ones_like(kept))
    for name, got, wanted in zip(("x", "gate_up", "down"), kept_grads, grads, strict=True):
        # Half a unit of bfloat16: products of the same numbers, summed up in another order.
        near(f"mixture d{name} with selective checkpointing", got, wanted, 0.004)
    value("mixture forward and backward", 1e3 * lib.seconds(run), "ms")


def one_at_a_time(module: Experts, leaves: list[Tensor], chosen: Tensor, weights: Tensor) -> Tensor:
    """Return what a mixture computes, by a loop over its experts.

    Args:
        module: for its gate.
        leaves: x [T, H], gate_up_proj [E, 2 I, H] and down_proj [E, H, I].
        chosen: int64 [T, k]: the experts of each token.
        weights: [T, k].
    """
    x, gate_up, down = leaves
    out = torch.zeros_like(x)
    for expert in range(module.num_experts):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        y = module._apply_gate(x[tokens] @ gate_up[expert].t()) @ down[expert].t()
        out = out.index_add(0, tokens, y * weights[tokens, places][:, None])
    return out


# --------------------------------------------------------------------------------------------------
# fused kernels: liger's, and minirl's for RMSNorm


class Fused(NamedTuple):
    """A fused kernel to compare."""

    name: str
    shapes: list[tuple[int, ...]]  # Of its tensors.
    # Calls it with such tensors.
    call: Callable[[fused.Kernels, list[Tensor]], Tensor]


def rms_norm(eps: float, offset: float, wide: bool) -> Callable[..., Tensor]:
    def call(kernels: fused.Kernels, leaves: list[Tensor]) -> Tensor:
        x, weight = leaves
        return kernels.rms_norm(x, weight, eps, offset, wide)

    return call


def gated(activation: str) -> Callable[..., Tensor]:
    def call(kernels: fused.Kernels, leaves: list[Tensor]) -> Tensor:
        gate, up = leaves
        return kernels.gated(gate, up, activation)

    return call


FUSED = (
    Fused("rms_norm", [(4096, 4096), (4096,)], rms_norm(1e-6, 0.0, False)),
    Fused("rms_norm of few columns", [(32768, 1024), (1024,)], rms_norm(1e-6, 0.0, False)),
    Fused("rms_norm of heads", [(1, 4096, 32, 128), (128,)], rms_norm(1e-6, 0.0, False)),
    Fused("rms_norm of Gemma", [(4096, 2304), (2304,)], rms_norm(1e-6, 1.0, True)),
    Fused("gated silu", [(4096, 12288), (4096, 12288)], gated("silu")),
    Fused("gated gelu", [(4096, 9216), (4096, 9216)], gated("gelu")),
)


def check_fused(kernel: Fused) -> None:
    leaves = [random(*shape) for shape in kernel.shapes]
    wide = widened(leaves)
    # Products with 1, because a kernel may write into what is no leaf.
    out = kernel.call(fused.liger(), [leaf * 1 for leaf in leaves])
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    wanted = kernel.call(fused.FORMULAS, wide)
    exact_grads = torch.autograd.grad(wanted, wide, torch.ones_like(wanted))
    near(f"fused {kernel.name}", out, wanted, LIMIT)
    for number, (got, exact) in enumerate(zip(grads, exact_grads, strict=True)):
        near(f"fused {kernel.name}, gradient {number}", got, exact, 1.5 * LIMIT)
    for label, kernels in (("fused", fused.liger()), ("torch", fused.FORMULAS)):
        time_kernel(
            f"{label} {kernel.name}", functools.partial(kernel.call, kernels, leaves), leaves
        )
    if kernel.name.startswith("rms_norm"):
        time_kernel(f"liger's own {kernel.name}", lambda: ligers_norm(leaves), leaves)


def ligers_norm(leaves: list[Tensor]) -> Tensor:
    """Return what liger-kernel's RMSNorm does, which minirl's kernels stand in for."""
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return function.apply(*leaves, 1e-6, 0.0, "llama", False)


def time_kernel(name: str, call: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    value(f"{name} forward", 1e6 * lib.seconds(call), "us")
    out = call()
    backward = functools.partial(grads_of, out, leaves, torch.ones_like(out))
    value(f"{name} backward", 1e6 * lib.seconds(backward), "us")


def check_rotation() -> None:
    angles = torch.randn(1, 2048, 64, device=DEVICE).repeat(1, 1, 2)
    cos = angles.cos().to(DTYPE)
    sin = angles.sin().to(DTYPE)
    q = random(1, 2048, 32, 128).detach().transpose(1, 2)
    k = random(1, 2048, 8, 128).detach().transpose(1, 2)
    got = fused.liger().rotate(q.clone(), k.clone(), cos, sin)  # it turns them in place
    wanted = fused.FORMULAS.rotate(q.to(WIDE), k.to(WIDE), cos.to(WIDE), sin.to(WIDE))
    near("liger rotary, queries", got[0], wanted[0], LIMIT)
    near("liger rotary, keys", got[1], wanted[1], LIMIT)


def main() -> None:
    torch.manual_seed(0)
    heads = Heads(4, 2, 32) if SMALL else Heads(32, 8, 128)
    with part("packed attention"):
        check_attention(heads)
    for load in (LOAD, SHORT_LOAD):
        for repeated_per_row in (0, 8):
            with part("times of attention"):
                time_attention(heads, load, repeated_per_row)
        if ON_GPU and not SMALL:
            with part("forward of FlashAttention"):
                time_flash_forward(heads, load)
    with part("attention of one sequence"):
        check_attention_of_torch(heads)
    with part("log-probs and entropies"):
        check_head()
    if ON_GPU:
        torch.cuda.empty_cache()
    with part("several chunks of the head"):
        check_chunks_of_the_head()
    if ON_GPU or "TRITON_INTERPRET" in os.environ:
        for head in SMALL_HEADS if SMALL else HEADS:
            with part(f"the head's kernels, {head}"):
                compare_ways_of_the_head(head)
    with part("grouped experts"):
        check_experts()
    if ON_GPU and fused.has_liger():
        for kernel in FUSED:
            with part(f"fused {kernel.name}"):
                check_fused(kernel)
        with part("liger rotary"):
            check_rotation()
    lib.leave()


if __name__ == "__main__":
    main()
