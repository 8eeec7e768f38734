"""The k-th largest of numbers that are spread over the ranks, without gathering them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BITS = 16  # That a round looks at; 4 rounds make a float64.
NUM_BINS = 2**BITS


def kth_largest(values: np.ndarray, k: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> float:
    """Return the k-th largest value of all ranks; 1 is the largest. Collective.

    It is a radix select: bits are found from the highest to the lowest, 16 in a round, by counting
    how many values with the bits found so far have which bits next. A round adds 65,536 counts over
    the ranks (512 kB), however many values there are.

    Args:
        values: float64 [N] of this rank, not NaN; N may differ from rank to rank.
        k: 1 .. number of values on all ranks.
        sum_over_ranks: adds an int64 CPU tensor over the ranks.
    """
    keys = _sortable(values)
    found = 0  # The key's bits so far.
    for shift in range(64 - BITS, -1, -BITS):
        bins = (keys >> np.uint64(shift)).astype(np.int64) & (NUM_BINS - 1)
        counts = sum_over_ranks(torch.from_numpy(np.bincount(bins, minlength=NUM_BINS))).numpy()
        num_above = counts[::-1].cumsum()  # Values in the highest bin, in the two highest, ...
        steps_down = int(np.searchsorted(num_above, k))
        if steps_down:
            k -= int(num_above[steps_down - 1])
        highest = NUM_BINS - 1 - steps_down
        found |= highest << shift
        keys = keys[bins == highest]
    return _value(found)


def _sortable(values: np.ndarray) -> np.ndarray:
    """Return uint64 [N] in the order of float64 [N].

    Bits of positive numbers are ordered as the numbers are, and those of negative ones the other
    way round. A negative zero counts as zero.
    """
    bits = (values + 0.0).view(np.uint64)
    sign = np.uint64(1 << 63)
    return np.where(bits & sign, ~bits, bits | sign)


def _value(key: int) -> float:
    """Return the number whose `_sortable` key this is."""
    sign = 1 << 63
    bits = key ^ sign if key & sign else key ^ (2**64 - 1)
    return np.array([bits], np.uint64).view(np.float64)[0].item()
