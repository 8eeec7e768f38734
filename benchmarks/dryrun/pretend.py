"""A CUDA device that is not there, for tensors that have shapes but no values.

The code that runs on GPUs then runs on any machine: every operator is called with the arguments it
would get, on the device it would be on. torch's FakeTensorMode does most of it. What a build of
torch without a device lacks is added here: a device guard and hooks for libtorch (pretend.cpp), and
the functions of `torch.cuda` that FSDP2 and minirl call.

Nothing is put back, so it is for a process that does nothing else.
"""

import contextlib
import ctypes
import importlib
import os
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

from minirl.base.errors import UserError

SOURCE = Path(__file__).with_name("pretend.cpp")
CAPABILITY = (9, 0)  # Of an H100 or H200.


class Stream:
    """The one stream of the pretended device, which is always done."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device = torch.device("cuda", 0)

    def __init__(self, *args: object, **kwargs: object): ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return the event."""
        return event or Event()

    def wait_event(self, event: "Event") -> None:
        """Do nothing."""

    def wait_stream(self, stream: "Stream") -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that everything is done."""
        return True

    def is_capturing(self) -> bool:
        """Return that no CUDA graph is recorded."""
        return False


class Event:
    """An event of the pretended device, which has always happened."""

    def __init__(self, *args: object, **kwargs: object): ...

    def record(self, stream: Stream | None = None) -> None:
        """Do nothing."""

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def elapsed_time(self, other: "Event") -> float:
        """Return that no time has passed."""
        return 0.0


def compiler() -> str | None:
    """Return the path of g++, None if there is none."""
    return shutil.which("g++")


def library() -> Path:
    """Compile pretend.cpp for this torch, once, and return the library.

    It is kept in the user's cache folder ($XDG_CACHE_HOME/minirl, or else ~/.cache/minirl).

    Raises:
        UserError: there is no g++, or it fails.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minirl"
    version = zlib.crc32(SOURCE.read_bytes())
    built = cache / f"pretend-{torch.__version__}-{version:08x}.so"
    if built.exists():
        return built

    found = compiler()
    if found is None:
        raise UserError("a dry run needs a C++ compiler once, and g++ is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        unfinished = Path(folder) / built.name
        command = [found, "-std=c++20", "-O1", "-fPIC", "-shared", str(SOURCE)]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{found} cannot compile {SOURCE}: {done.stderr.strip()[-500:]}")
        unfinished.rename(built)  # in one move: another process may do the same
    return built


def pretend_cuda(num_devices: int = 8) -> None:
    """Make this process believe that it has CUDA devices, and is on the first of them.

    Args:
        num_devices: how many there seem to be.

    Raises:
        UserError: the C++ part cannot be compiled.
    """
    # It reads the functions of torch.cuda once, and refuses to find two alike.
    importlib.import_module("torch._dynamo")
    from torch._subclasses import fake_tensor

    ctypes.CDLL(str(library())).pretend_cuda()
    fake: Any = fake_tensor
    fake.FakeTensorMode.avoid_device_init = True
    fake.init_gpu_context = lambda device: None
    # Autograd's engine has no thread for this device.
    torch._C._set_multithreading_enabled(False)

    stream = Stream()
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cuda")
    accelerator.current_stream = lambda *args, **kwargs: stream
    cuda.current_stream = lambda *args, **kwargs: stream
    cuda.default_stream = lambda *args, **kwargs: stream
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.stream = contextlib.nullcontext
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: num_devices
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.get_device_capability = lambda *args: CAPABILITY
    cuda.is_current_stream_capturing = lambda: False
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **kwargs: None)
