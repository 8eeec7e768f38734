"""How a program starts and how it ends.

For what the user can correct there is one message, and for each kind of end one exit code.
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
from minirl.config.shared import TrainingConfig
from minirl.errors import UserError
from minirl.parallel.mesh import Mesh, join_world

BAD_INPUT = 2
CRASH = 1


def run(config: type, program: Callable[[Any, Mesh], None]) -> None:
    """Parse flags, join the other ranks, run the program and leave.

    Exit code 0: done. 2: a mistake that the user can correct, said in one message. 1: a crash.
    """
    faulthandler.enable()
    mesh = None
    try:
        cfg = parse_flags(config)
        parallel = cfg.parallel if isinstance(cfg, TrainingConfig) else None
        mesh = join_world(cfg.timeout_minutes, parallel)
        program(cfg, mesh)
        if dist.is_initialized():  # some versions of vLLM's executor destroy the default group
            dist.destroy_process_group()
    except UserError as error:
        if mesh is None:
            _let_rank_0_speak()
        # All ranks usually find the same mistake, and one message is enough.
        if mesh is None or mesh.store.add("minirl/errors", 1) == 1:
            notes = vars(error).get("__notes__", [])
            print("\n".join([f"\nminirl: error: {error}", *notes]), file=sys.stderr)
        _leave(BAD_INPUT)
    except SystemExit as stop:  # tyro has said on rank 0 what is wrong with the flags
        if stop.code:
            _let_rank_0_speak()
        raise
    except Exception:  # the last handler of the program: whatever it is, this rank ends now
        with contextlib.suppress(dist.DistError):  # the store is gone too
            if mesh is not None and mesh.store.add("minirl/errors", 0) > 0:
                _leave(CRASH)  # another rank has said what is wrong and left; this one misses it
        rank = os.environ.get("RANK", 0)
        print(f"\nminirl: rank {rank} crashed\n{traceback.format_exc()}", file=sys.stderr)
        _leave(CRASH)


def _let_rank_0_speak() -> None:
    """Wait, before the ranks have met, until rank 0 has printed its message.

    torchrun ends all ranks when the first one leaves, so another would cut rank 0 short. Returns at
    once on rank 0, and elsewhere if rank 0 has not found the mistake after half a minute.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(30)


def _leave(code: int) -> NoReturn:
    """End this process at once, without destructors.

    They would wait for ranks that still wait for this one. torchrun then ends the others.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
