"""The planner's formulas next to minirl's own code on pretended GPUs.

`python -m benchmarks.dryrun.compare` has all cases."""

import json
from unittest import mock

import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.dryrun import extrapolate
from benchmarks.dryrun.compare import CASES, compare
from benchmarks.dryrun.extrapolate import layer_counts
from benchmarks.dryrun.pretend import compiler
from programs import fork

SOME = (
    "tensor 4, sequence",
    "mixture, experts 4",
    "latent mixture",
    "four bits",
    "hybrid, full",
    "six trainers of 32B",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The differences of all cases, from one process: a fork, where torch has been imported."""
    if not compiler():
        pytest.skip("a dry run needs g++, which is not installed")
    log = tmp_path_factory.mktemp("log")

    def run_jobs(jobs):
        ended = fork("benchmarks.dryrun.jobs", [], log, 500, text=json.dumps(jobs))
        assert ended.code == 0, ended.err
        return json.loads(ended.out)

    with mock.patch.object(extrapolate, "run_jobs", run_jobs):
        return compare(list(SOME))


@pytest.mark.parametrize("name", SOME)
def test_formulas_are_the_dry_run_within_10_percent(found, name):
    assert set(SOME) <= set(CASES)
    for figure, share in found[name].items():
        assert abs(share) < 0.1, (figure, share)


SHORT = {"num_hidden_layers": 13}
LIKE_31B = {"num_hidden_layers": 18, "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize(
    ("config", "few_and_more"),
    [
        (Qwen3Config(**SHORT), (2, 4)),
        (Gemma2Config(**SHORT), (3, 5)),  # every second layer a window
        (Gemma3TextConfig(**SHORT), (7, 13)),  # every sixth layer none
        (Gemma4TextConfig(**SHORT, num_kv_shared_layers=6), (13, 13)),
        (Gemma4TextConfig(**LIKE_31B), (6, 12)),
        (Qwen3MoeConfig(**SHORT, decoder_sparse_step=2), (3, 5)),
        (Glm4MoeConfig(**SHORT, first_k_dense_replace=3), (5, 7)),
        (Qwen3_5TextConfig(**SHORT), (5, 9)),  # every fourth layer has attention
    ],
)
def test_a_dry_run_takes_whole_periods_of_layers(config, few_and_more):
    assert layer_counts(config) == few_and_more
