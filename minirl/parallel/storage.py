"""Where tensors are kept that nobody computes with: in host memory, or in one byte an element."""

from collections.abc import Hashable
from functools import cache

import torch
from torch import Tensor, nn

SMALLEST_CHUNK = 2**20  # Bytes.
LARGEST_CHUNK = 2**28


class HostMemory:
    """Host memory for copies of tensors, made once and used again.

    It is pinned for tensors on CUDA. torch rounds every pinned block up to a power of two, which
    for one block a tensor would be up to twice the memory. So copies lie end to end in chunks with
    sizes that are powers of two, and continue in the next chunk where one is full.
    """

    def __init__(self):
        self._chunks: list[Tensor] = []  # uint8.
        self._num_free = 0  # Bytes at the end of the last chunk.
        self._places: dict[Hashable, list[Tensor]] = {}  # Parts of the chunks.

    @property
    def num_bytes(self) -> int:
        """Return how much memory it is."""
        return sum(map(len, self._chunks))

    @torch.no_grad()
    def keep(self, name: Hashable, t: Tensor) -> None:
        """Begin to copy a tensor's storage; the tensor of a name must always have the same size."""
        source = _bytes_of(t)
        place = self._places.setdefault(name, [])
        if sum(map(len, place)) != len(source):
            place = self._places[name] = self._take(len(source), pin_memory=t.is_cuda)
        for part, piece in zip(place, source.split([len(part) for part in place]), strict=True):
            part.copy_(piece, non_blocking=True)

    @torch.no_grad()
    def bring_back(self, name: Hashable, t: Tensor) -> None:
        """Give a tensor's empty storage its size, and begin to copy back what was kept."""
        t.untyped_storage().resize_(sum(map(len, self._places[name])))
        self._copy_to(_bytes_of(t), name)

    @torch.no_grad()
    def copy_of(self, name: Hashable, t: Tensor) -> Tensor:
        """Return a new tensor on the device of `t` with the values that were kept of it."""
        num_bytes = sum(map(len, self._places[name]))
        copied = torch.empty(num_bytes, dtype=torch.uint8, device=t.device)
        self._copy_to(copied, name)
        return copied.view(t.dtype).as_strided(t.size(), t.stride(), int(t.storage_offset()))

    def _copy_to(self, target: Tensor, name: Hashable) -> None:
        place = self._places[name]
        for part, piece in zip(place, target.split([len(part) for part in place]), strict=True):
            piece.copy_(part, non_blocking=True)

    def _take(self, num_bytes: int, *, pin_memory: bool) -> list[Tensor]:
        """Return parts of chunks that nothing else is in."""
        parts = []
        while num_bytes:
            if not self._num_free:
                size = min(max(self.num_bytes, SMALLEST_CHUNK), LARGEST_CHUNK)
                self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory))
                self._num_free = size
            size = min(num_bytes, self._num_free)
            chunk = self._chunks[-1]
            parts.append(chunk.narrow(0, len(chunk) - self._num_free, size))
            self._num_free -= size
            num_bytes -= size
        return parts


def _bytes_of(t: Tensor) -> Tensor:
    """Return a tensor's whole storage, uint8 [bytes]."""
    num_elements = t.untyped_storage().nbytes() // t.itemsize
    return t.detach().as_strided((num_elements,), (1,), 0).view(torch.uint8)


class SleepingTensors:
    """Tensors whose storages are in host memory until they wake."""

    def __init__(self):
        self.memory = HostMemory()
        self.asleep: dict[int, tuple[int, Tensor]] = {}  # By storage; numbers name the copies.

    def sleep(self, tensors: list[Tensor]) -> None:
        """Copy tensors to the host and free their storages, each once; views share theirs."""
        by_storage = {}
        for t in tensors:
            storage = t.untyped_storage()
            # With CPU offload the shards are on the host already.
            if storage.nbytes() and (t.is_cuda or not torch.cuda.is_available()):
                by_storage[storage._cdata] = t
        for storage, t in by_storage.items():
            self.memory.keep(len(self.asleep), t)
            self.asleep[storage] = len(self.asleep), t
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for t in by_storage.values():
            t.untyped_storage().resize_(0)
        torch.cuda.empty_cache()  # which does nothing without CUDA

    def wake(self) -> None:
        """Bring back what is asleep."""
        for number, t in self.asleep.values():
            self.memory.bring_back(number, t)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.asleep.clear()

    def values(self, t: Tensor) -> Tensor:
        """Return a tensor, or if it is asleep, a copy of it on its device."""
        found = self.asleep.get(t.untyped_storage()._cdata)
        return self.memory.copy_of(found[0], t) if found else t


# --------------------------------------------------------------------------------------------------
# in one byte an element

BLOCK = 256  # Elements that share a scale.


@cache
def dynamic_code(signed: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return 255 levels in [-1, 1] or [0, 1], ascending.

    Seven decades, each with twice the levels of the one below, which are the middles of equal
    parts. Dynamic quantization of Dettmers et al. 2022, "8-bit Optimizers via Block-wise
    Quantization", arXiv 2110.02861, scaled so that the extremes are exactly 1: a block's largest
    element then keeps its value, and quantizing twice is quantizing once.
    """
    decades = []
    for i in range(7):
        num_levels = 2 ** (i if signed else i + 1)
        edges = torch.linspace(0.1, 1, num_levels + 1, dtype=torch.float64)
        decades.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6))
    levels = torch.cat(decades) / decades[-1][-1]
    negative = -levels.flip(0) if signed else levels[:0]
    return torch.cat([negative, levels.new_zeros(1), levels]).to(device, dtype)


def quantize(t: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Round a tensor to the levels of `dynamic_code`, block by block.

    Args:
        t: floats, any shape.
        signed: False: all are at least 0, and their square roots are rounded.

    Returns:
        The nearest levels, uint8 [blocks, 256], and the largest absolute values [blocks] in t's
        dtype.
    """
    flat = t.flatten() if signed else t.flatten().sqrt()
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    levels = dynamic_code(signed, t.device, t.dtype)
    scaled = blocks / scales.clamp(min=torch.finfo(t.dtype).tiny)[:, None]
    nearest = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return nearest.to(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor, like: Tensor, *, signed: bool) -> Tensor:
    """Return the values of `quantize`'s results, with shape, dtype and device of `like`."""
    levels = dynamic_code(signed, like.device, like.dtype)
    blocks = levels[codes.int()] * scales[:, None]
    t = blocks.flatten()[: like.numel()].view(like.shape)
    return t if signed else t.square()
