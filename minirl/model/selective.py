"""Selective checkpointing: backward computes a layer again, all but its products and attention.

In forward a layer keeps its input and the results of what takes time, in the order in which they
are computed. In backward its second forward takes those instead of computing them, and computes
norms, gates and rotary positions: Korthikanti et al. 2022 (arXiv 2205.05198), sec. 5, with another
choice of what is kept.

torch's own (`create_selective_checkpoint_contexts`) does the same for any operator. It sees each of
them through a mode that costs the host 4 ms a layer; here, the functions whose results are kept say
so.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

Tensors = tuple[Tensor, ...]


class _Results:
    """What a layer has kept, first in, first out."""

    def __init__(self) -> None:
        self.kept: deque[Tensors] = deque()
        self.is_second = False  # The layer is computed again.


_current: _Results | None = None  # Of the layer that is being computed.


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds the two forwards of a layer: `context_fn` of torch's `checkpoint`."""
    results = _Results()
    return _surround(results, is_second=False), _surround(results, is_second=True)


@contextmanager
def _surround(results: _Results, *, is_second: bool) -> Iterator[None]:
    global _current
    before = _current
    _current = results
    results.is_second = is_second
    try:
        yield
    finally:
        _current = before


def is_on() -> bool:
    """Return whether the layer that is being computed keeps results."""
    return _current is not None


def keep(compute: Callable[[], Tensors]) -> Tensors:
    """Return what a function computes, or has computed in the layer's first forward.

    To be called in the forward of an autograd function. Nothing may write into the results of the
    first forward, and what the function itself keeps is not kept twice.
    """
    global _current
    results = _current
    if results is None:
        return compute()
    if results.is_second:
        return results.kept.popleft()
    _current = None
    try:
        tensors = compute()
    finally:
        _current = results
    results.kept.append(tuple(t.detach() for t in tensors))
    return tensors
