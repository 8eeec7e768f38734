"""How a program starts and how it ends.

For what the user can correct there is one message, and for each kind of end one exit code.
"""

import contextlib
import dataclasses
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from minirl.config.parse import flatten, parse_flags
from minirl.config.shared import TrainingConfig
from minirl.errors import UserError
from minirl.parallel.launch import end_with_agent
from minirl.parallel.machines import check_same, errors_of_machines
from minirl.parallel.mesh import Mesh, arrange, open_world

BAD_INPUT = 2
CRASH = 1

JOIN_MINUTES = 5.0  # To wait for the other ranks without a config that says it.
# What may differ between machines: where a rank is found.
OWN_SETTINGS = ("endpoint.host",)


def run(config: type, program: Callable[[Any, Mesh], None]) -> None:
    """Parse flags, join the other ranks, run the program and leave.

    Exit code 0: done. 2: a mistake that the user can correct, said in one message. 1: a crash.
    """
    faulthandler.enable()
    end_with_agent()
    world = None
    try:
        # Ranks with a mistake join the others, too, which may see none and would wait.
        cfg, mistake = _parse(config)
        minutes = cfg.timeout_minutes if cfg else JOIN_MINUTES
        world = open_world(minutes)
        with errors_of_machines(world):
            if mistake:
                raise mistake
        check_same(settings(cfg), world)
        parallel = cfg.parallel if isinstance(cfg, TrainingConfig) else None
        program(cfg, arrange(world, parallel, timedelta(minutes=minutes)))
        if dist.is_initialized():  # some versions of vLLM's executor destroy the default group
            dist.destroy_process_group()
    except UserError as error:
        # All ranks usually find the same mistake, and one message is enough.
        if world is None or world.store.add("minirl/errors", 1) == 1:
            notes = vars(error).get("__notes__", [])
            print("\n".join([f"\nminirl: error: {error}", *notes]), file=sys.stderr)
        _leave(BAD_INPUT)
    except Exception:  # the last handler of the program: whatever it is, this rank ends now
        with contextlib.suppress(dist.DistError):  # the store is gone too
            if world is not None and world.store.add("minirl/errors", 0) > 0:
                _leave(CRASH)  # another rank has said what is wrong and left; this one misses it
        rank = os.environ.get("RANK", 0)
        print(f"\nminirl: rank {rank} crashed\n{traceback.format_exc()}", file=sys.stderr)
        _leave(CRASH)


def _parse(config: type) -> tuple[Any, UserError | None]:
    """Return the config of this process, or None and what is wrong with it."""
    try:
        return parse_flags(config), None
    except UserError as error:
        return None, error


def settings(cfg: Any) -> dict[str, object]:
    """Return the settings that all machines must have alike, by `section.name`."""
    settings = flatten(dataclasses.asdict(cfg))
    return {name: value for name, value in settings.items() if name not in OWN_SETTINGS}


def _leave(code: int) -> NoReturn:
    """End this process at once, without destructors.

    They would wait for ranks that still wait for this one. torchrun then ends the others.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
