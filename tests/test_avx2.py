"""What goes another way on a CPU with AVX2 and nothing newer, as laptops have it.

vLLM loads another build of its kernels there, and torch and oneDNN take others. A newer CPU
pretends to be such a one (tests/avx2), for the tests that have once failed on one.
"""

import os
import subprocess
import sys

import pytest
import torch

from programs import AVX2, ROOT

TESTS = [
    "test_families.py::test_forward_and_gradients_are_hugging_faces[apertus-one rank]",
    "test_families.py::test_forward_and_gradients_are_hugging_faces[gemma4-one rank]",
    "test_program.py::test_killed_ranks_of_one_engine_leave_no_shared_memory",
    "test_rollout.py::test_ranks_that_are_more_than_cores_do_not_spin",
    "test_rollout.py::test_refit_equals_full_gather_and_a_fresh_engine"
    "[1-1-qwen3_5_moe_text-False-bfloat16-None]",
]


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="this CPU runs them as they are")
@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="refuses some of them")
def test_what_once_failed_on_a_laptop():
    command = [sys.executable, "-m", "pytest", "-n", "0", *(f"tests/{test}" for test in TESTS)]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **AVX2}, capture_output=True, text=True, timeout=590
    )
    assert ended.returncode == 0 and f"{len(TESTS)} passed" in ended.stdout, ended.stdout
