"""Refits models that vLLM's CUDA platform builds, whose layouts differ from those of its CPU build.

    python tests/cuda_models.py FOLDER FAMILY ...

No GPU is needed: the models are laid in host memory, and nothing of them is computed. Every element
is compared with a full gather. Prints a line for each family: its name and the number of elements.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from benchmarks.dryrun.pretend import compiler

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
NVML = "vllm.third_party.pynvml"
# What vLLM asks the driver for, as one H100 would answer.
ANSWERS = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": 0,
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=85e9, free=84e9, used=1e9),
    "nvmlDeviceGetUUID": "GPU-0",
    "nvmlSystemGetDriverVersion": "580.0",
}


class PretendedDriver(importlib.abc.MetaPathFinder):
    """Finds vLLM's door to the driver, and puts answers in its place."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if name != NVML:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec and spec.loader
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            for function, answer in ANSWERS.items():
                setattr(module, function, lambda *args, answer=answer: answer)

        spec.loader.exec_module = exec_module
        return spec


def stand_in_for_libcuda() -> None:
    """Let vLLM's libraries load where there is no driver: none of the driver's functions is called.

    A library of that name is there then, and the linker does not ask for what it should have.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "libcuda.so.1"
            command = [compiler(), "-shared", "-x", "c++", "/dev/null", "-o", str(library)]
            subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
            ctypes.CDLL(str(library))
    sys.setdlopenflags(os.RTLD_LAZY)


stand_in_for_libcuda()
sys.meta_path.insert(0, PretendedDriver())

import torch  # noqa: E402
import vllm  # noqa: E402
import vllm.config  # noqa: E402
from vllm import distributed  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import utils  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

import tiny  # noqa: E402
from minirl.config.policy import PolicyConfig  # noqa: E402
from minirl.config.rl import RefitConfig  # noqa: E402
from minirl.config.shared import EngineConfig  # noqa: E402
from minirl.engine import patches, start  # noqa: E402
from minirl.engine.engine import RolloutEngine  # noqa: E402
from minirl.parallel.machines import join_world  # noqa: E402
from minirl.parallel.mesh import Mesh  # noqa: E402
from minirl.refit.refit import Refit  # noqa: E402
from minirl.train.policy import Policy  # noqa: E402


class Engine(RolloutEngine):
    """As much of an engine as a refit needs."""

    def __init__(self, folder: Path, mesh: Mesh):
        self.cfg = EngineConfig(max_model_len=128, max_num_seqs=16)
        self.mesh = mesh
        self.vision = self.masses = None
        self.on_cuda = True
        self.sleeps = "all"
        arguments = start.arguments(self, folder, "bfloat16", load_weights=False)
        config = EngineArgs(**arguments).create_engine_config()
        with vllm.config.set_current_vllm_config(config):
            distributed.init_distributed_environment(1, 0, "env://", 0, backend="gloo")
            distributed.destroy_model_parallel()  # The groups of a mixture are other ones.
            distributed.initialize_model_parallel(1, 1, backend="gloo")
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("cpu"):
                self.model = utils.initialize_model(vllm_config=config)
            torch.set_default_dtype(torch.float32)
            loaded = {name: p.data_ptr() for name, p in self.model.named_parameters()}
            utils.process_weights_after_loading(
                self.model, config.model_config, torch.device("cpu")
            )
        kept = {name: p.data_ptr() for name, p in self.model.named_parameters()}
        assert kept == loaded, "vLLM has replaced parameters, which a refit would not reach"
        self.model_class = type(self.model).__name__
        self.vllm = vllm
        self.llm = types.SimpleNamespace(llm_engine=types.SimpleNamespace(vllm_config=config))
        self.latent = patches.latent_layers(self.model)


def main(root: Path, families: list[str]) -> None:
    assert current_platform.is_cuda(), current_platform
    mesh = join_world()
    for family in families:
        folder = tiny.make(root / family, family)
        policy = Policy(PolicyConfig(dtype="bfloat16"), folder, mesh)
        engine = Engine(folder, mesh)
        Refit(RefitConfig(), policy.shards(), policy.parts(), engine, check=True)()
        print(family, sum(p.numel() for p in engine.model.parameters()), flush=True)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own end asks for a device.


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
