"""What a model keeps in host memory while it does not work."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from minirl.parallel.fsdp import local, reshard

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
        place = self._places.get(name, [])
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


class _Part:
    """Some tensors of a model, on the device or in host memory."""

    def __init__(self):
        self.memory = HostMemory()
        self.asleep: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # In `asleep`, by storage.

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
            self._numbers[storage] = len(self.asleep)
            self.asleep.append(t)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for t in by_storage.values():
            t.untyped_storage().resize_(0)
        torch.cuda.empty_cache()  # which does nothing without CUDA

    def wake(self) -> None:
        """Bring back what is asleep."""
        for i, t in enumerate(self.asleep):
            self.memory.bring_back(i, t)
        if self.asleep and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.asleep.clear()
        self._numbers.clear()

    def values(self, t: Tensor) -> Tensor:
        """Return a tensor, or if it is asleep, a copy of it on its device."""
        number = self._numbers.get(t.untyped_storage()._cdata)
        return t if number is None else self.memory.copy_of(number, t)


class Sleeper:
    """Offloads storages to host memory and reloads them.

    No tensor object changes, so FSDP, optimizer and views stay valid.
    """

    def __init__(
        self,
        model: nn.Module,
        shared: set[str],
        optimizer_state: Callable[[], list[Tensor]],
        base: frozenset[str] = frozenset(),
    ):
        """Remember what to offload.

        Args:
            model: the sharded model.
            shared: names of its parameters that another model holds, and offloads.
            optimizer_state: returns the local tensors of the optimizer's state.
            base: names of the parameters that may sleep while a refit reads the model, because it
                reads their `values`.
        """
        self.model = model
        self.shared = shared
        self.optimizer_state = optimizer_state
        # Without CUDA there is no other memory to move to, and nothing is offloaded.
        self.active = torch.cuda.is_available()
        self._state = _Part()
        self._parameters = _Part()
        self._base = _Part()
        self.base = base

    def sleep_optimizer(self) -> None:
        """Offload the optimizer's state."""
        if self.active:
            self._state.sleep(self.optimizer_state())

    def sleep_base(self) -> None:
        """Offload the parameters of the base; `values` has copies of them."""
        if self.active:
            reshard(self.model)
            self._base.sleep([local(p) for name, p in self._own() if name in self.base])

    def sleep_parameters(self) -> None:
        """Offload the parameters."""
        if not self.active:
            return
        self.sleep_base()
        self._parameters.sleep([local(p) for name, p in self._own() if name not in self.base])

    def _own(self) -> list[tuple[str, nn.Parameter]]:
        return [item for item in self.model.named_parameters() if item[0] not in self.shared]

    def values(self, t: Tensor) -> Tensor:
        """Return this rank's part of a parameter, or if `sleep_base` has offloaded it, a copy."""
        return self._base.values(t)

    def sleep(self) -> None:
        """Offload the optimizer's state and the parameters."""
        self.sleep_optimizer()
        self.sleep_parameters()

    def wake_optimizer(self) -> None:
        """Reload the optimizer's state, if it is offloaded."""
        self._state.wake()

    def wake_parameters(self) -> None:
        """Reload the parameters, if they are offloaded."""
        self._parameters.wake()
        self._base.wake()

    @property
    def host_bytes(self) -> int:
        """Return how much host memory it has made."""
        parts = (self._state, self._parameters, self._base)
        return sum(part.memory.num_bytes for part in parts)
