"""Selective checkpointing: the same gradients bit by bit, and no product or attention twice."""

import contextlib
import functools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import tiny
from harness import ranks
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.model import selective
from minirl.parallel import fsdp
from minirl.train.policy import Policy
from test_families import batch_of

aten = torch.ops.aten
SLOW = [
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.num = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num[func] += 1
        return func(*args, **(kwargs or {}))


def torchs_own():
    return create_selective_checkpoint_contexts(SLOW)


def gradients(mesh, folder, checkpointing, settings, by_torch=False):
    """Every gradient of this rank, and how many slow operators backward runs."""
    if by_torch:
        selective.contexts = torchs_own
        selective.install = lambda layers: None
    cfg = PolicyConfig(dtype="float64", activation_checkpointing=checkpointing, **settings)
    policy = Policy(cfg, folder, mesh)
    torch.manual_seed(0)
    for name, p in policy.parameters().items():
        if "lora_B" in name:  # else A would have no gradient
            torch.nn.init.normal_(fsdp.local(p).detach(), std=0.1)
    batch, weights, _ = batch_of(policy)
    logprobs, entropy = policy.model(batch, True)
    value = (logprobs * weights[0] + entropy * weights[1]).sum()
    calls = Calls()
    # torch's own recomputation has a mode, and another one around it sees what it skips.
    with contextlib.nullcontext() if by_torch else calls:
        value.backward()
    grads = {n: fsdp.local(p.grad) for n, p in policy.parameters().items() if p.grad is not None}
    return grads, sum(calls.num[name] for name in SLOW)


LORA = {"lora": LoraConfig(rank=4, targets=["all-linear"])}
CASES = {
    "qwen3": ("qwen3", {}, 1, None),
    "biases": ("qwen2", {}, 1, None),
    "softcaps, formula": ("gemma2", {}, 1, None),
    "mixture": ("qwen3_moe", {}, 1, None),
    "sinks, experts with biases": ("gpt_oss", {}, 1, None),
    "delta net": ("qwen3_next", {}, 1, None),
    "adapters": ("qwen3", LORA, 1, None),
    "adapters of experts": ("qwen3_moe", LORA, 1, None),
    "frozen": ("llama", {"freeze": ["*.layers.0.*"]}, 1, None),
    "tensor": ("qwen3", {}, 2, ParallelConfig(tensor=2)),
    "context": ("llama", {}, 2, ParallelConfig(context=2)),
    "ring": ("llama", {}, 2, ParallelConfig(context=2, context_engine="ring")),
}
# Small products that are computed again: of routers, of their experts' biases.
AGAIN = {"mixture": 2, "adapters of experts": 2, "delta net": 2, "sinks, experts with biases": 6}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_same_bit_by_bit(tmp_path, case):
    family, settings, world, parallel = CASES[case]
    folder = tiny.make(tmp_path / "model", family)
    run = functools.partial(ranks, world, gradients, folder, parallel=parallel)
    off = run("off", settings)
    for got, wanted in zip(run("selective", settings), off, strict=True):
        assert got[0].keys() == wanted[0].keys() and len(got[0]) > 4
        for name, gradient in wanted[0].items():
            torch.testing.assert_close(got[0][name], gradient, rtol=0, atol=0, msg=name)
        assert got[1] - wanted[1] == AGAIN.get(case, 0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_gradients_are_those_of_torchs_own(tmp_path, family):
    folder = tiny.make(tmp_path / "model", family)
    ((got, _),) = ranks(1, gradients, folder, "selective", {})
    ((wanted, _),) = ranks(1, gradients, folder, "selective", {}, True)
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=0, msg=name)
