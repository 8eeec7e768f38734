"""Settings of adapters: which are refused, and what is filled in where they are left out."""

import importlib.util

import pytest

from minirl.base.errors import UserError
from minirl.config.policy import PolicyConfig
from minirl.config.rl import CriticConfig, RLConfig
from minirl.config.validate import validate_model
from minirl.model.adapters import nf4
from test_config import changed, check_rl

ADAPTED = {"policy__model": "m", "policy__lora__rank": 8}
SHARED = {
    **ADAPTED,
    "algo__advantage": "gae",
    "critic__share_base": True,
    "critic__lora__rank": 4,
    "policy__dtype": "bfloat16",
    "critic__dtype": "bfloat16",
}
IMPOSSIBLE = [
    (
        {"policy__lora__alpha": 9.0},
        "policy.lora.alpha = 9.0, policy.lora.rank = 0: there are no adapters",
    ),
    (
        {"policy__lora__quantization": "nf4"},
        r"policy.lora.quantization = 'nf4', .* set policy.lora.rank \(32 is usual\)",
    ),
    (
        {"policy__model": "scratch", "policy__lora__rank": 8},
        "policy.model = 'scratch', policy.lora.rank = 8: adapters would leave random weights",
    ),
    ({**ADAPTED, "policy__freeze": ["*"]}, "policy.freeze = .* all weights are frozen already"),
    (
        {**ADAPTED, "policy__lora__targets": []},
        r"policy.lora.targets = \[\]: nothing gets an adapter",
    ),
    (
        {**ADAPTED, "policy__lora__quantization": "nf4", "parallel__tensor": 2},
        "policy.lora.quantization = 'nf4': .* not split over parallel.tensor = 2",
    ),
    (
        {**ADAPTED, "policy__lora__quantization": "nf4", "policy__cpu_offload": True},
        "policy.lora.quantization = 'nf4', policy.cpu_offload = True: both save the memory",
    ),
    (
        {**ADAPTED, "ref__every": 5, "algo__kl_coef": 0.1},
        "ref.every = 5, policy.lora.rank = 8: with adapters the reference is",
    ),
    (
        {**SHARED, "critic__lora__rank": 0},
        "critic.share_base = True, critic.lora.rank = 0: nobody trains a shared base",
    ),
    (
        {**SHARED, "policy__lora__rank": 0},
        "critic.share_base = True, policy.lora.rank = 0: nobody trains a shared base",
    ),
    ({**SHARED, "critic__model": "other"}, "critic.model = 'other': the base is the policy's"),
    (
        {**SHARED, "critic__dtype": "float32"},
        "policy.dtype = 'bfloat16', critic.dtype = 'float32': .*set both alike",
    ),
]


@pytest.mark.parametrize("settings, says", IMPOSSIBLE)
def test_settings_that_cannot_work_are_refused(settings, says):
    with pytest.raises(UserError, match=says):
        check_rl(changed(RLConfig, **settings), world_size=2)


@pytest.mark.parametrize("settings", [ADAPTED, SHARED])
def test_settings_that_work_are_accepted(settings):
    check_rl(changed(RLConfig, **settings), world_size=2)


def test_a_learning_rate_that_is_left_out_is_ten_times_as_high_for_adapters():
    for cls, lr in ((PolicyConfig, 1e-6), (CriticConfig, 5e-6)):
        cfg = cls()
        assert cfg.learning_rate == lr
        cfg.lora.rank = 8
        validate_model(cfg, "policy", 1)
        assert cfg.learning_rate == pytest.approx(10 * lr, rel=1e-12)
        cfg.lr = 0.0
        assert cfg.learning_rate == 0.0


def test_a_missing_package_of_four_bits_is_told(monkeypatch):
    nf4._library.cache_clear()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    with pytest.raises(UserError, match=r"needs the package bitsandbytes: pip install 'bits"):
        nf4._library()
    nf4._library.cache_clear()
