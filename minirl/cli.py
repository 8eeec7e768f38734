"""How a program starts and how it ends: one message for what the user can mend, one exit code for
each kind of end.
"""

import contextlib
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from minirl.config.parse import parse_flags
from minirl.errors import UserError
from minirl.parallel.mesh import Mesh, join_world

BAD_INPUT, CRASH = 2, 1


def run(config: type, program: Callable[[Any, Mesh], None]) -> None:
    """Parse flags, join the other ranks, run, leave. Exit code 0: done; 2: something to mend, told
    in one message; 1: a crash.
    """
    faulthandler.enable()
    mesh = None
    try:
        cfg = parse_flags(config)
        mesh = join_world(cfg.timeout_minutes, vars(cfg).get("parallel"))
        program(cfg, mesh)
        if (
            dist.is_initialized()
        ):  # vLLM's executor takes the default group down with it in some versions
            dist.destroy_process_group()
    except UserError as error:
        if mesh is None:
            _let_rank_0_tell()
        if (
            mesh is None or mesh.store.add("minirl/errors", 1) == 1
        ):  # all ranks usually find the same mistake, and one message is enough
            print(
                "\n".join([f"\nminirl: error: {error}", *vars(error).get("__notes__", [])]),
                file=sys.stderr,
            )
        _leave(BAD_INPUT)
    except SystemExit as stop:  # tyro's, who told what is wrong with the flags on rank 0
        if stop.code:
            _let_rank_0_tell()
        raise
    except Exception:  # the last handler of the program: whatever it is, this rank ends now
        with contextlib.suppress(dist.DistError):  # the store is gone too
            if mesh is not None and mesh.store.add("minirl/errors", 0) > 0:
                _leave(CRASH)  # a rank that told what to mend has left, and this one only misses it
        print(
            f"\nminirl: rank {os.environ.get('RANK', 0)} crashed\n{traceback.format_exc()}",
            file=sys.stderr,
        )
        _leave(CRASH)


def _let_rank_0_tell() -> None:
    """Before the ranks have met: torchrun ends all ranks when the first one leaves, so another
    would cut rank 0 short. Returns on rank 0, and elsewhere if rank 0 did not find the mistake in
    all that time.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(30)


def _leave(code: int) -> NoReturn:
    """At once, without destructors: they would wait for ranks that still wait for this one.
    torchrun then ends the others.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
