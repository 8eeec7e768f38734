"""Ratios of probabilities from differences of log-probs, in bounds that keep float32 finite.

Only a policy that has gone wrong meets the bounds: a token must have become e^20 times as likely.
"""

from torch import Tensor

MAX_LOG_RATIO = 20.0  # Of a token, or of a sequence in the correction: OpenRLHF's and verl's.
MAX_MEAN_LOG_RATIO = 10.0  # Of the geometric mean of a sequence, in GSPO: verl's.


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return log-ratios brought into [-20, 20]; beyond these bounds the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return e^x with x clamped to [-20, 20].

    In float32 e^89 is infinite, and one such token would make the whole gradient NaN.
    """
    return clamp_log_ratio(log_ratio).exp()
