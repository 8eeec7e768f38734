"""How a program starts and how it ends.

For what the user can correct there is one message, and for each kind of end one exit code.
"""

import dataclasses
import faulthandler
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from minirl.config.parse import flatten, parse_flags
from minirl.config.shared import TrainingConfig
from minirl.errors import UserError
from minirl.faults import explain
from minirl.parallel.launch import end_with_agent
from minirl.parallel.machines import check_same, errors_of_machines
from minirl.parallel.mesh import Mesh, arrange, open_world
from minirl.parallel.watch import BAD_INPUT, CRASH, DONE, Watch, leave

JOIN_MINUTES = 5.0  # To wait for the other ranks without a config that says it.
# What may differ between machines: where a rank is found.
OWN_SETTINGS = ("endpoint.host",)


def run(config: type, program: Callable[[Any, Mesh], None]) -> None:
    """Parse flags, join the other ranks, run the program and leave.

    Exit code 0: done, or stopped by a signal with a checkpoint to go on from. 2: a mistake that the
    user can correct, said in one message. 1: a crash. 128 and more: ended at once by a signal.
    """
    faulthandler.enable()
    end_with_agent()
    watch = Watch()
    watch.goes_on = issubclass(config, TrainingConfig)
    # Ranks with a mistake join the others, too, which may see none and would wait.
    cfg, mistake = _parse(config)
    minutes = cfg.timeout_minutes if cfg else JOIN_MINUTES
    try:
        watch.listen()
        world = open_world(minutes, watch)
        with errors_of_machines(world):
            if mistake:
                raise mistake
        check_same(settings(cfg), world)
        parallel = cfg.parallel if isinstance(cfg, TrainingConfig) else None
        program(cfg, arrange(world, parallel, timedelta(minutes=minutes)))
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
