"""Whole numbers that are known though tensors are pretended: lengths, grids, and what follows."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

MOST_ELEMENTS = 2**20  # Of a tensor whose values are followed.
# Operators that fill with a number, whatever their inputs hold.
_FILLED = {
    "aten::zeros": 0,
    "aten::zeros_like": 0,
    "aten::new_zeros": 0,
    "aten::ones": 1,
    "aten::ones_like": 1,
    "aten::new_ones": 1,
}
# Operators whose results are known without inputs.
_COUNTING = {"aten::arange"}
# Operators that exchange a tensor's storage or its size.
_REPLACING = {"aten::resize_", "aten::set_"}
# Operators whose results have as many elements as the values of an argument say. On a device, the
# host has to wait for them.
_SIZED_BY_VALUES = {"aten::nonzero", "aten::masked_select", "aten::unique_consecutive"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}


class KnownValues:
    """Copies in host memory of pretended tensors whose values the host has given.

    They decide sizes: how many patches an image has, how long sequences are. Only integers and
    booleans are followed through operators. Real tensors on the host are known, too.
    """

    def __init__(self):
        # By address of the pretended storage: all elements of the storage, [n].
        self._elements: dict[int, Tensor] = {}

    def of(self, t: Tensor) -> Tensor | None:
        """Return a real tensor with the values of `t`; None if nobody knows them."""
        if not isinstance(t, FakeTensor):
            return t if t.device.type == "cpu" else None
        elements = self._elements.get(t.untyped_storage()._cdata)
        if elements is None or elements.dtype != t.dtype:
            return None
        with _disable_current_modes():
            return elements.as_strided(t.shape, t.stride(), t.storage_offset())

    def array(self, t: Tensor) -> np.ndarray | None:
        """Return the values of `t`; None if nobody knows them."""
        real = self.of(t)
        if real is None:
            return None
        with _disable_current_modes():
            return real.numpy()

    def note(self, t: Tensor, real: Tensor) -> None:
        """Remember a copy of `real` as the values of `t`, which is as large."""
        if not _is_followed(t):
            return
        with _disable_current_modes():
            size = t.untyped_storage().nbytes() // t.itemsize
            elements = torch.zeros(size, dtype=t.dtype)
            elements.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(real)
        self._elements[t.untyped_storage()._cdata] = elements

    def forget(self, key: int) -> None:
        """Forget a storage, by its address."""
        self._elements.pop(key, None)

    def follow(self, func: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
        """Note what an operator that has been called made of known values."""
        name = func._schema.name
        if func._schema.is_mutable:
            self._follow_in_place(func, args, kwargs)
            return
        is_lifted = func is aten.lift_fresh.default  # An array of the host becomes a tensor.
        is_new = (not func.is_view or is_lifted) and name.startswith("aten::")
        if not outputs or not is_new or not all(map(_is_followed, outputs)):
            return
        if name in _FILLED:
            self.note(outputs[0], torch.tensor(_FILLED[name], device="cpu"))
            return
        results = self.compute(func, args, kwargs)
        if results is not None:
            for t, real in zip(outputs, results, strict=True):
                self.note(t, real)

    def _follow_in_place(self, func: Any, args: tuple, kwargs: dict) -> None:
        name = func._schema.name
        written = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                written += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        keys = [t.untyped_storage()._cdata for t in written]
        if not any(key in self._elements for key in keys):
            return
        in_place = name.startswith("aten::") and name not in _REPLACING
        if not in_place or self.compute(func, args, kwargs) is None:
            for key in keys:
                self.forget(key)

    def compute(self, func: Any, args: tuple, kwargs: dict) -> list[Tensor] | None:
        """Return the real results of an operator; None if it has an input that nobody knows."""
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not inputs and func._schema.name not in _COUNTING:
            return None
        if any(self.of(t) is None for t in inputs):
            return None

        def to_real(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self.of(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        real_args, real_kwargs = tree_map(to_real, (args, kwargs))
        with _disable_current_modes():
            results = tree_leaves(func(*real_args, **real_kwargs))
        return [t for t in results if isinstance(t, Tensor)]

    # ----------------------------------------------------------------------------------------------
    # sizes

    def call_sized(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Call an operator of which `size_depends_on_values`, for pretended tensors.

        Where values are not known, it is as if all of a mask were true.
        """
        if func._schema.name in _INDEXING:
            indices = [part for index in args[1] for part in self._as_integers(index)]
            return func(args[0], indices, *args[2:], **kwargs)
        device = args[0].device
        results = self.compute(func, args, kwargs)
        if results is not None:
            out = [torch.empty_like(t, device=device) for t in results]
            return tuple(out) if len(func._schema.returns) > 1 else out[0]
        if func is aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        if func is aten.masked_select.default:
            return args[0].new_empty(self._num_true(args[1]))
        return args[0].new_empty(args[0].shape)

    def _as_integers(self, index: Tensor | None) -> list[Tensor | None]:
        """Return the indices that stand for one; a mask is an index for each of its axes."""
        if index is None or index.dtype != torch.bool:
            return [index]
        num = self._num_true(index)
        return [index.new_empty(num, dtype=torch.int64) for _ in range(index.ndim)]

    def _num_true(self, mask: Tensor) -> int:
        real = self.of(mask)
        if real is None:
            return mask.numel()
        with _disable_current_modes():
            return int(real.count_nonzero())


def size_depends_on_values(func: Any, args: tuple, kwargs: dict) -> bool:
    """Return whether the host has to read values before it can call an operator on a device."""
    name = func._schema.name
    if name == "aten::repeat_interleave":
        return len(args) == 1 and kwargs.get("output_size") is None
    if name in _INDEXING:
        return any(t is not None and t.dtype == torch.bool for t in args[1])
    return name in _SIZED_BY_VALUES


def _is_followed(t: Tensor) -> bool:
    is_whole = not t.is_floating_point() and not t.is_complex()
    return is_whole and isinstance(t, FakeTensor) and t.numel() <= MOST_ELEMENTS
