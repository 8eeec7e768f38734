"""Correction for the engine sampling from slightly other probabilities than the trainer computes."""

from torch import Tensor


def truncated_importance(old_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_trainer / pi_engine, cap) per token, without gradient; float32 [T].

    Tokens come from the engine's kernels, gradients from the trainer's, and the two differ (most in bf16), which biases the
    policy gradient; the truncated ratio corrects it at bounded variance. Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"; Ionides 2008 for the truncation.
    """
    return (old_logprobs - engine_logprobs).detach().exp().clamp(max=cap)
