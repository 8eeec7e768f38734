"""How a program starts and how it ends: one message for what the user can mend, one exit code for each kind of end."""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from minirl.config import parse
from minirl.parallel.mesh import Mesh, join_world
from minirl.types import UserError

BAD_INPUT, CRASH = 2, 1


def run(config: type, program: Callable[[Any, Mesh], None]) -> None:
    """Parse flags, join the other ranks, run, leave. Exit code 0: done; 2: something to mend, told in one message; 1: a crash."""
    faulthandler.enable()
    mesh = None
    try:
        cfg = parse(config)
        mesh = join_world(cfg.timeout_minutes)
        program(cfg, mesh)
        if dist.is_initialized():  # vLLM's executor takes the default group down with it in some versions
            dist.destroy_process_group()
    except UserError as error:
        if _first_to_tell(mesh):
            print(f"\nminirl: error: {error}", file=sys.stderr)
        _leave(BAD_INPUT)
    except Exception:  # the last handler of the program: whatever it is, this rank ends now
        print(f"\nminirl: rank {os.environ.get('RANK', 0)} crashed\n{traceback.format_exc()}", file=sys.stderr)
        _leave(CRASH)


def _first_to_tell(mesh: Mesh | None) -> bool:
    """All ranks usually find the same mistake, and one message is enough; but only one rank may find it."""
    if mesh is None:
        return os.environ.get("RANK", "0") == "0"
    return mesh.store.add("minirl/errors", 1) == 1


def _leave(code: int) -> NoReturn:
    """At once, without destructors: they would wait for ranks that still wait for this one. torchrun then ends the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
