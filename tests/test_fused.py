"""Fused norms, activations and rotary positions: where they are put, and which are chosen.

That every family is the same with their formulas is shown in test_families.py (under sequence
parallelism), that liger's kernels compute the formulas in test_gpu.py, on a GPU.
"""

import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import tiny
from harness import ranks
from minirl.base.errors import UserError
from minirl.config.policy import PolicyConfig
from minirl.model import fused
from minirl.train.policy import Policy
from test_families import batch_of

CPU = torch.device("cpu")


# Of each of liger's kernels: its name in `Kernels`, shapes of its inputs, other arguments.
CASES = {
    "llama's norm": ("rms_norm", [(2, 5, 8), (8,)], (1e-6, 0.0, False)),
    "gemma's norm": ("rms_norm", [(2, 5, 8), (8,)], (1e-6, 1.0, True)),
    "silu": ("gated", [(7, 6), (7, 6)], ("silu",)),
    "gelu": ("gated", [(7, 6), (7, 6)], ("gelu",)),
}


def count_calls(mesh, folder):
    calls = dict.fromkeys(fused.Kernels._fields, 0)

    def counted(name):
        def call(*args):
            calls[name] += 1
            return getattr(fused.FORMULAS, name)(*args)

        return call

    kernels = fused.Kernels(*map(counted, fused.Kernels._fields))
    fused.choose = lambda *_: kernels
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh)
    policy.model(batch_of(policy)[0])
    return calls


@pytest.mark.parametrize(
    ("family", "norms", "gated", "rotations"),
    [
        ("llama", 5, 2, 2),
        ("qwen3", 9, 2, 2),  # each layer has two more, of queries and keys
        ("gemma2", 9, 2, 2),
        ("cohere", 0, 2, 0),  # its norms take the mean away, its rotations turn pairs
        ("glm4", 9, 0, 0),  # a single matrix for gate and up
        ("qwen3_moe", 9, 0, 2),
        ("glm4_moe", 9, 2, 0),  # one dense layer, and a shared expert in the other
    ],
)
def test_what_is_replaced(tmp_path, family, norms, gated, rotations):
    tiny.make(tmp_path, family)
    (calls,) = ranks(1, count_calls, tmp_path)
    assert calls == {"rms_norm": norms, "gated": gated, "rotate": rotations}


def test_liger_is_refused_without_a_gpu_and_auto_does_without_it():
    assert fused.choose("auto", CPU) is fused.choose("torch", CPU) is None
    with pytest.raises(UserError, match="policy.kernels = liger needs a GPU and the package liger"):
        fused.choose("liger", CPU)


def test_compiled_formulas_are_the_formulas():
    x = torch.randn(3, 8)
    compiled = fused.choose("compile", CPU)
    weight = torch.randn(8)
    torch.testing.assert_close(
        compiled.rms_norm(x, weight, 1e-6, 0.0, False),
        fused.rms_norm_formula(x, weight, 1e-6, 0.0, False),
    )
    torch.testing.assert_close(
        compiled.gated(x, x + 1, "silu"), fused.gated_formula(x, x + 1, "silu")
    )


def test_every_variant_of_a_formula_is_compiled():
    """Of a model with norms of layers and of heads, in training, annotation and recomputation."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        compiled = fused.choose("compile", CPU)
    with torch.compiler.config.patch(fail_on_recompile_limit_hit=True):
        for shape in ((4, 8), (2, 4, 8), (2, 3, 4, 8)):
            for x_learns, weight_learns in itertools.product((False, True), repeat=2):
                x = torch.randn(shape, requires_grad=x_learns)
                weight = torch.randn(8, requires_grad=weight_learns)
                for is_on in (False, True):
                    with torch.set_grad_enabled(is_on):
                        found = compiled.rms_norm(x, weight, 1e-6, 0.0, False)
                    assert found.requires_grad == (is_on and (x_learns or weight_learns))


def test_norm_kernels_are_the_formula():
    """In Triton's interpreter; on CUDA in test_gpu.py."""
    folder = Path(__file__).parent
    program = subprocess.run(
        [sys.executable, str(folder / "norm_kernels.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(folder.parent)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=200,
    )
    results = json.loads(program.stdout)
    assert len(results) > 8
    for name, distances in results.items():
        limit = 0.01 if "bfloat16" in name else 1e-6
        assert max(distances) < limit, (name, distances)
