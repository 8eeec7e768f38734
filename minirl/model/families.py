"""The allow-list: model families whose packed forward was shown to equal their plain one. Anything else is refused by name,
because a family that reads its arguments differently (linear attention, attention sinks) would train on silently wrong numbers.

To add one: a row here; `tests/test_model.py` runs it packed against unpacked, `tests/test_rollout.py` through the engine.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from minirl.types import UserError


@dataclass(frozen=True)
class Family:
    tiny: dict
    """Config values beyond the common ones that make a small instance for tests."""


FAMILIES: dict[str, Family] = {
    "llama": Family({}),
    "mistral": Family({"sliding_window": 12, "head_dim": 32}),
    "qwen2": Family({}),
    "qwen3": Family({"head_dim": 32}),
    "smollm3": Family({"no_rope_layer_interval": 2}),
}


def check(config: PretrainedConfig, where: str, tensor_parallel: int = 1) -> None:
    """Refuse a model that would not work. Raises UserError."""
    if config.model_type not in FAMILIES:
        raise UserError(f"{where}: family {config.model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    if "quantization_config" in config.to_dict():
        raise UserError(f"{where} is quantised; train the unquantised checkpoint")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    # vLLM gives each rank whole heads; key-value heads are split or, when there are fewer than ranks, replicated.
    kv_ok = kv_heads % tensor_parallel == 0 or tensor_parallel % kv_heads == 0
    if heads % tensor_parallel or not kv_ok:
        works = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise UserError(f"engine.tensor_parallel_size = {tensor_parallel} does not divide num_attention_heads = {heads} and "
                        f"num_key_value_heads = {kv_heads} of {where}; use one of {', '.join(map(str, works))}")


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Dropout makes the trainer's log-probs differ from the engine's, and a resumed run from an uninterrupted one."""
    for name in vars(config):
        if "dropout" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    return config


def windowed(config: PretrainedConfig) -> bool:
    """Some layer sees a sliding window only."""
    return bool(config.to_dict().get("sliding_window"))
