"""What a pretended device would allocate, compute and make the host wait for."""

import os
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minirl
from benchmarks.dryrun import head_kernels, liger_kernels
from benchmarks.dryrun.delta_kernels import KERNEL
from benchmarks.dryrun.kinds import START, kind_of_new
from benchmarks.dryrun.values import KnownValues, size_depends_on_values
from minirl.plan.cards import Card
from minirl.plan.costs import REACHED

aten = torch.ops.aten
PACKAGE = str(Path(minirl.__file__).parent) + os.sep
SHORTEST_KERNEL = 2e-6  # Seconds from one kernel to the next, however little there is to do.
SHORTEST_COLLECTIVE = 2e-5

# Operators that launch no kernel, beside views.
_FREE = {
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
    "aten::set_",
    "aten::_unsafe_view",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
}
# Matrix products, and which argument is the first of the two matrices.
_MATMULS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::_grouped_mm": 0,
}
# Operators that touch only some rows of the largest tensor: those that read them, and those that
# change them in place.
_READ_ROWS = {"aten::embedding", "aten::gather", "aten::index_select"}
_CHANGE_ROWS = {"aten::index_add_", "aten::index_copy_", "aten::scatter_", "aten::scatter_add_"}
# Operators that change a tensor without reading it.
_OVERWRITE = {"aten::_foreach_copy_", "aten::copy_", "aten::fill_", "aten::zero_"}
_OVERWRITE |= {KERNEL, liger_kernels.KERNEL, head_kernels.KERNEL}
# Operators whose tensors may be on two devices on CUDA, beside those that work element by element.
_ON_TWO_DEVICES = {"aten::_foreach_copy_", "aten::copy_"}
# How often operators that are several passes read or write their largest tensor.
_PASSES = {
    "aten::_softmax": 4,  # The largest, the sum, and p.
    "aten::logsumexp": 6,  # The largest; the differences, their exponentials and the sum of these.
}
ROWS = "copies of rows"
WIRE = "NCCL"
HOST = "PCIe"


@dataclass
class Work:
    """What some kernels do."""

    kernels: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


@dataclass
class Peak:
    """The most memory that is in use at once."""

    peak: int = 0  # Bytes.
    at_peak: Counter[str] = field(default_factory=Counter)  # Bytes by what they are, about.
    kinds: dict[str, int] = field(default_factory=dict)  # Bytes at the peak, by what they are for.


@dataclass
class Phase:
    """What happens in a phase."""

    # Its parts have peaks of their own, for those who add layers: which of the parts has the
    # largest one depends on their number.
    parts: dict[str, Peak] = field(default_factory=lambda: defaultdict(Peak))
    host_peak: int = 0  # Bytes of the host's memory.
    work: dict[str, Work] = field(default_factory=lambda: defaultdict(Work))  # By kind of kernel.

    def as_dict(self) -> dict[str, Any]:
        """Return the same as dicts and numbers, with the largest of the peaks."""
        parts = {name: vars(peak) for name, peak in self.parts.items()}
        largest = max(parts.values(), key=lambda peak: peak["peak"], default=vars(Peak()))
        return {
            **largest,
            "parts": parts,
            "host_peak": self.host_peak,
            "work": {kind: vars(work) for kind, work in self.work.items()},
        }


class Meter(TorchDispatchMode):
    """Counts while it is entered inside a FakeTensorMode; `phase` names what is being done.

    Bytes are of live storages: no fragmentation, no context, no buffers of NCCL. Seconds are a
    roofline: the longest of what the multiplications, the bytes and the launch of a kernel take.
    """

    def __init__(self, card: Card, gpus_per_node: int):
        super().__init__()
        self.card = card
        self.gpus_per_node = gpus_per_node
        self.phase = "build"
        self.part = START  # of the phase
        self.phases: dict[str, Phase] = defaultdict(Phase)
        # (why, where) -> how often the host waits for the device there.
        self.waits: Counter[tuple[str, str]] = Counter()
        self.allocated = {"cuda": 0, "cpu": 0}  # Bytes.
        self._sizes: dict[int, int] = {}  # By address of the storage, as the next three.
        self._device: dict[int, str] = {}
        self._what: dict[int, str] = {}
        self._kind: dict[int, str] = {}
        self._kinds: Counter[str] = Counter()  # Bytes on the device by what they are for.
        self.values = KnownValues()
        self._ignoring = False
        self._plain: dict[str, Any] = {}

    def __enter__(self) -> "Meter":
        """Begin to count; storages that are resized are seen, too."""
        storage: Any = torch.UntypedStorage
        self._plain["resize_"] = storage.resize_
        storage.resize_ = lambda s, size: self._resize(s, size)
        fake: Any = FakeTensor
        self._plain["tolist"] = fake.tolist
        fake.tolist = lambda t: self._list(t)  # Its own would ask for the elements one by one.
        # It computes with shapes of whole tensors, which are nowhere.
        propagator: Any = ShardingPropagator
        for name in [n for n in vars(propagator) if n.startswith("_propagate_tensor_meta")]:
            self._plain[name] = vars(propagator)[name]
            setattr(propagator, name, self._ignored(self._plain[name]))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)
        storage: Any = torch.UntypedStorage
        storage.resize_ = self._plain.pop("resize_")
        fake: Any = FakeTensor
        fake.tolist = self._plain.pop("tolist")
        for name, plain in self._plain.items():
            setattr(ShardingPropagator, name, plain)

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what the memory of some tensors is for."""
        for t in tensors:
            key = t.untyped_storage()._cdata
            if key in self._sizes:
                self._what[key] = kind
                size = self._sizes[key] if self._device[key] == "cuda" else 0
                self._kinds[self._kind[key]] -= size
                self._kinds[kind] += size
                self._kind[key] = kind

    # ----------------------------------------------------------------------------------------------
    # memory

    def _add(self, num: int, key: int) -> None:
        device = self._device[key]
        self.allocated[device] += num
        phase = self.phases[self.phase]
        if device == "cpu":
            phase.host_peak = max(phase.host_peak, self.allocated["cpu"])
            return
        self._kinds[self._kind[key]] += num
        part = phase.parts[self.part]
        if self.allocated["cuda"] <= part.peak:
            return
        if self.allocated["cuda"] > 1.02 * sum(part.at_peak.values()):  # counted now and then
            part.at_peak = Counter()
            for other, size in self._sizes.items():
                if self._device[other] == "cuda":
                    part.at_peak[self._what[other]] += size
        part.peak = self.allocated["cuda"]
        part.kinds = {kind: size for kind, size in self._kinds.items() if size}

    def _freed(self, key: int) -> None:
        self.values.forget(key)
        self._add(-self._sizes.pop(key), key)
        for known in (self._what, self._kind, self._device):
            del known[key]

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        self._plain["resize_"](storage, size)
        if key in self._sizes:
            change = size - self._sizes[key]
            self._sizes[key] = size
            self._add(change, key)

    def _see(self, t: Tensor, func: Any) -> None:
        """Count the memory of an operator's result, if it is new."""
        device = _device_type(t)
        if not isinstance(t, FakeTensor) or device not in self.allocated:
            return
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            if func.is_view and storage.nbytes() != self._sizes[key]:
                # FakeTensorMode's cache gives an empty storage memory when it is viewed.
                self._plain["resize_"](storage, self._sizes[key])
            return
        self._sizes[key] = storage.nbytes()
        self._device[key] = device
        dtype = str(t.dtype).removeprefix("torch.")
        self._what[key] = f"{func._schema.name.partition('::')[2]} {list(t.shape)} {dtype}"
        self._kind[key] = kind_of_new(self.phase)
        weakref.finalize(storage, self._freed, key)
        self._add(storage.nbytes(), key)

    # ----------------------------------------------------------------------------------------------
    # operators

    def _ignored(self, function: Any) -> Any:
        def call(*args: object, **kwargs: object) -> Any:
            self._ignoring = True
            try:
                return function(*args, **kwargs)
            finally:
                self._ignoring = False

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operator, and count what it does."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls: what FakeTensorMode says, sooner
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its operators on local tensors come by
        if self._ignoring or func.namespace == "prim":
            return func(*args, **kwargs)
        if func is aten._pin_memory.default:
            return args[0]  # which FakeTensors do not know
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = any(_device_type(t) == "cuda" for t in inputs)
        _check_devices(func, inputs)
        if func is aten._local_scalar_dense.default:
            return self._value(args[0])
        if size_depends_on_values(func, args, kwargs):
            if on_device:
                self._wait("a size that depends on values")
            out = self.values.call_sized(func, args, kwargs)
        elif func is aten.addmm.dtype_out:
            out = kwargs["out"]  # FakeTensors of torch 2.11 would take the dtype for a factor.
        else:
            out = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for t in outputs:
            self._see(t, func)
        self.values.follow(func, args, kwargs, outputs)

        devices = {_device_type(t) for t in (*inputs, *outputs)}
        is_copy = func in (aten._to_copy.default, aten.copy_.default)
        if is_copy and {"cpu", "cuda"} <= devices:
            self._copy_between(func, args, kwargs, out)
        elif "cuda" in devices and not func.is_view:
            self._kernel(func, args, kwargs, out, inputs, outputs)
        return out

    def _value(self, t: Tensor) -> float | int | bool:
        """Return the only element of a tensor."""
        if _device_type(t) == "cuda":
            self._wait("a number")
        return self._array(t).item()

    def _list(self, t: Tensor) -> Any:
        """Return the elements of a tensor, which come from the device in one copy."""
        if _device_type(t) == "cuda":
            self._wait("numbers")
        return self._array(t).tolist()

    def _array(self, t: Tensor) -> np.ndarray:
        """Return the values of a tensor: 1 where nobody knows them."""
        known = self.values.array(t)
        if known is not None:
            return known
        dtype = float if t.is_floating_point() else bool if t.dtype == torch.bool else int
        return np.ones(tuple(t.shape), dtype)

    def _wait(self, why: str) -> None:
        self.waits[why, _caller()] += 1

    def _copy_between(self, func: Any, args: tuple, kwargs: dict, out: Tensor) -> None:
        """Count a copy between the host and the device."""
        does_not_wait = kwargs.get("non_blocking") or args[2:3] == (True,)
        if not does_not_wait:
            self._wait("a copy " + ("to" if out.is_cuda else "from") + " the device")
        self._book(HOST, Work(1, out.nbytes / (self.card.host_gb * 1e9), 0, out.nbytes))

    def _kernel(
        self,
        func: Any,
        args: tuple,
        kwargs: dict,
        out: object,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        """Count a kernel."""
        name = func._schema.name
        if name in _FREE:
            return
        if name.startswith("c10d::"):
            self._collective(name, args, [*inputs, *outputs])
            return
        kind = "memory"
        flops = 0.0
        num_bytes = _bytes_moved(func, args, kwargs, inputs, outputs)
        if "flash_attention" in name:
            kind = "attention backward" if name.endswith("backward") else "attention forward"
            flops = self._attention_flops(name, args, kwargs)
        elif name in _MATMULS:
            kind = "matmul"
            a, b = args[_MATMULS[name] : _MATMULS[name] + 2]
            flops = 2.0 * a.numel() * b.shape[-1]
        elif name == KERNEL:
            kind = "gated delta net"
            flops = args[-1]
        compute = flops / (self.card.tflops * 1e12 * REACHED.get(kind, 1))
        memory = num_bytes / (self.card.bandwidth_gb * 1e9 * REACHED["memory"])
        seconds = max(compute, memory, SHORTEST_KERNEL)
        if kind == "memory":
            kind = ROWS if name in _READ_ROWS | _CHANGE_ROWS else name.partition("::")[2]
        self._book(kind, Work(1, seconds, flops, num_bytes))

    def _attention_flops(self, name: str, args: tuple, kwargs: dict) -> float:
        """Return the multiplications and additions of attention over running lengths."""
        is_backward = name.endswith("backward")
        first = 6 if is_backward else 3  # Of the two running lengths among the arguments.
        causal = args[11 if is_backward else 8]
        num_queries, num_keys = map(self._lengths, args[first : first + 2])
        pairs = num_queries * num_keys
        if causal:
            pairs -= num_queries * (num_queries - 1) / 2
        window = kwargs["window_size_left"]
        if window >= 0:
            pairs = np.minimum(pairs, num_queries * (window + 1))
        query = args[1 if is_backward else 0]
        return float(pairs.sum()) * query.shape[1] * query.shape[2] * (10 if is_backward else 4)

    def _lengths(self, ends: Tensor) -> np.ndarray:
        """Return the lengths of sequences whose ends are known."""
        known = self.values.array(ends)
        assert known is not None, "lengths of sequences come from the host"
        return np.diff(known).astype(float)

    def _collective(self, name: str, args: tuple, tensors: list[Tensor]) -> None:
        """Count a collective: all bytes but this rank's own pass its link, for a sum twice."""
        groups = [a for a in args if isinstance(a, torch.ScriptObject)]
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0]))
        if len(ranks) == 1:
            return
        num_nodes = len({rank // self.gpus_per_node for rank in ranks})
        num_bytes = max(t.nbytes for t in tensors) * (len(ranks) - 1) / len(ranks)
        if name == "c10d::allreduce_":
            num_bytes *= 2
        seconds = self.card.gathering(num_bytes, len(ranks), len(ranks) // num_nodes)
        self._book(WIRE, Work(1, seconds + SHORTEST_COLLECTIVE, 0, num_bytes))

    def _book(self, kind: str, work: Work) -> None:
        total = self.phases[self.phase].work[kind]
        total.kernels += work.kernels
        total.seconds += work.seconds
        total.flops += work.flops
        total.bytes += work.bytes


def _device_type(t: Tensor) -> str:
    """Return "cuda" or "cpu"; of a FakeTensor without a call of an operator."""
    return (t.fake_device if isinstance(t, FakeTensor) else t.device).type


def _check_devices(func: Any, inputs: list[Tensor]) -> None:
    """Refuse what CUDA refuses, and FakeTensors let pass: a scalar on the host in any operator.

    On CUDA only those that work element by element take one (`torch.Tag.pointwise`).

    Raises:
        RuntimeError: tensors are on two devices.
    """
    if torch.Tag.pointwise in func.tags or func._schema.name in _ON_TWO_DEVICES:
        return
    devices = {_device_type(t) for t in inputs}
    if {"cpu", "cuda"} <= devices:
        shapes = ", ".join(f"{_device_type(t)} {list(t.shape)}" for t in inputs)
        raise RuntimeError(
            f"{func} expects all tensors to be on the same device, and got {shapes} in {_caller()}"
        )


def _bytes_moved(
    func: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor]
) -> float:
    """Return the bytes that a kernel reads and those that it writes."""
    name = func._schema.name
    if name in _READ_ROWS:
        return 2.0 * outputs[0].nbytes
    if name in _CHANGE_ROWS:
        return 3.0 * inputs[-1].nbytes
    if name in _PASSES:
        return float(_PASSES[name] * inputs[0].nbytes)
    if name == "fsdp::all_gather_copy_in":  # into this rank's part of what is to be gathered
        return 2.0 * _size([t for t in inputs if t is not args[1]])

    is_read: list[Tensor] = []
    changed: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        is_changed = argument.alias_info is not None and argument.alias_info.is_write
        if is_changed:
            changed += tensors
        if not is_changed or not (argument.is_out or name in _OVERWRITE):
            is_read += tensors
    not_new = set(map(id, inputs))
    is_new = [t for t in outputs if id(t) not in not_new]
    return _size(is_read) + _size([*changed, *is_new])


def _size(tensors: list[Tensor]) -> float:
    """Return the bytes of tensors, of which several may be parts of one storage."""
    sizes: dict[int, int] = {}
    for t in tensors:
        storage = t.untyped_storage()
        size = sizes.get(storage._cdata, 0) + t.nbytes
        sizes[storage._cdata] = min(size, storage.nbytes())
    return float(sum(sizes.values()))


def _caller() -> str:
    """Return which two functions of minirl, the innermost first, are being called."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 2:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            name = frame.f_code.co_name
            found.append(f"{file.removeprefix(PACKAGE)}:{frame.f_lineno} {name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
