"""How a program with a config joins the other ranks and how it ends.

For what the user can correct there is one message, and for each kind of end one exit code. What is
wrong with the flags alone has been answered before (cli.py), because the imports of this file take
seconds.
"""

import dataclasses
import faulthandler
import os
import shutil
import traceback
from collections.abc import Callable
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any, NoReturn

import torch

from minirl.base.errors import BAD_INPUT, CRASH, DONE, UserError
from minirl.base.imports import no_collections
from minirl.base.log import say
from minirl.config.parse import flatten
from minirl.config.shared import TrainingConfig
from minirl.parallel.machines import check_same, errors_of_machines
from minirl.parallel.mesh import Mesh, arrange, check_gpus, open_world
from minirl.supervise.faults import explain
from minirl.supervise.launch import end_with_agent, open_attempt_store
from minirl.supervise.watch import Watch, leave

JOIN_MINUTES = 5.0  # To wait for the other ranks without a config that says it.
# What may differ between machines: where a rank is found.
OWN_SETTINGS = ("endpoint.host",)

Program = Callable[[Any, Mesh], None]


def run(config: type, cfg: Any, mistake: UserError | None, program: str | Program) -> NoReturn:
    """Join the other ranks, run the program and leave.

    Args:
        config: the class of the config.
        cfg: the config; None: something is wrong with it.
        mistake: what is wrong with it on this machine. Ranks with a mistake join the others, too,
            which may see none and would wait.
        program: what is called with the config and the mesh, or the name of that.
    """
    faulthandler.enable()
    end_with_agent()
    watch = Watch()
    watch.goes_on = issubclass(config, TrainingConfig)
    minutes = cfg.timeout_minutes if cfg else JOIN_MINUTES
    try:
        watch.listen()
        warning = describe_idle_gpu()
        if warning and watch.rank == 0:
            say(warning)
        with no_collections():
            called: Program = resolve_name(program) if isinstance(program, str) else program
        store = open_attempt_store(timedelta(minutes=minutes))
        world = open_world(minutes, watch, store)
        watch.join(world.store, world.rank, world.gather(watch.this_process(world.rank)))
        with errors_of_machines(world):
            if mistake:
                raise mistake
            check_gpus()
        check_same(settings(cfg), world)
        parallel = cfg.parallel if isinstance(cfg, TrainingConfig) else None
        called(cfg, arrange(world, parallel, timedelta(minutes=minutes)))
        watch.end()
    except UserError as error:
        # All ranks usually find the same mistake, and one message is enough.
        notes = vars(error).get("__notes__", [])
        watch.end_all("\n".join([f"error: {error}", *notes]), BAD_INPUT)
    except BaseException as error:  # the last handler of the program: this rank ends now
        output = str(settings(cfg).get("output", "")) if cfg else ""
        meaning = explain(error, watch, minutes, output)
        crashed = f"rank {watch.rank} crashed\n{traceback.format_exc()}"
        watch.end_all(f"error: {meaning}" if meaning else crashed, CRASH)
    leave(DONE)


def describe_idle_gpu() -> str:
    """Return what keeps this machine's GPU from being used; empty: nothing, or there is none."""
    if torch.cuda.is_available() or not has_gpu():
        return ""
    if torch.version.cuda is None:
        return (
            "this machine has an NVIDIA GPU, and .venv has the CPU build: all ranks run on the "
            "CPU; `bash launch/install.sh --cuda` installs the other"
        )
    return (
        f"this machine has an NVIDIA GPU, and torch {torch.__version__} cannot use it: all ranks "
        "run on the CPU; nvidia-smi shows the driver, which may be too old for CUDA "
        f"{torch.version.cuda}"
    )


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU that is not hidden from this process."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def settings(cfg: Any) -> dict[str, object]:
    """Return the settings that all machines must have alike, by `section.name`."""
    settings = flatten(dataclasses.asdict(cfg))
    return {name: value for name, value in settings.items() if name not in OWN_SETTINGS}
