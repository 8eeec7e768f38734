"""How a program starts: its flags are read, and what is wrong with them is said, in a second.

That comes before torch, vLLM and the program itself are imported, which takes many seconds on every
rank. So this file imports nothing but settings; lifecycle.py does the rest.
"""

import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from minirl.base.errors import BAD_INPUT, DONE, UserError
from minirl.config.parse import parse_flags
from minirl.config.shared import TrainingConfig
from minirl.config.validate import check_named, check_settings
from minirl.supervise import write_error_file

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh


# Names of this machine for its own programs; 0.0.0.0 is how a server's own address may be written.
THIS_MACHINE = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def run(config: type, program: "str | Callable[[Any, Mesh], object]", split: str = "") -> NoReturn:
    """Read the flags, join the other ranks, run the program and leave.

    Exit code 0: done, or stopped by a signal, to be resumed. 2: a mistake that the user can
    correct, said in one message. 1: a crash. 128 and more: ended at once by a signal.

    Args:
        config: the class of the program's config.
        program: what is called with the config and the mesh. By its name (`module:function`) it is
            imported only when the flags are right.
        split: the name of what is called in its place with parallel.generators; empty: these are
            refused.
    """
    open_streams()
    reach_this_machine()
    cfg = None
    mistake = None
    # All ranks of one machine have the same flags and files, find the same mistakes, and need not
    # ask each other. A mistake on one of several machines has to reach the ranks of the others,
    # which would wait.
    world_size = os.environ.get("WORLD_SIZE", "1")
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE", "1") == world_size
    try:
        cfg = parse_flags(config)
        if is_one_machine:
            check_settings(cfg, int(world_size))
            check_named(cfg)
    except UserError as error:
        mistake = error
        if is_one_machine:
            # Every rank has found it. Rank 0 says it and has the exit code; the others leave
            # without failing, so that torchrun's report shows the message alone.
            if os.environ.get("RANK", "0") != "0":
                sys.exit(DONE)
            message = f"minirl: error: {error}"
            print(f"\n{message}", file=sys.stderr, flush=True)
            write_error_file(message)
            sys.exit(BAD_INPUT)

    if os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
        print("minirl: the settings are right; torch and vLLM are imported next", file=sys.stderr)
    # Of what the imports make, next to nothing is garbage, but Python would look through all of it
    # whenever it has grown by a quarter: a fifth of the time. `lifecycle.run` ends this.
    gc.disable()
    from minirl.supervise import lifecycle

    if isinstance(cfg, TrainingConfig) and cfg.parallel.generators:
        program = split or program
        if not split:
            mistake = UserError(
                f"parallel.generators = {cfg.parallel.generators}: only `-m minirl.rl` has ranks "
                "that only generate; set it to 0"
            )
    lifecycle.run(config, cfg, mistake, program)


def open_streams() -> None:
    """Open the null device in place of streams that this process was started without (`>&-`).

    Each gets the lowest free number, which is its own. Otherwise the next files that the process
    opens would get them, and what libraries print would go there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if vars(sys)[name] is None:
            null = open(os.devnull, mode, errors="backslashreplace")  # noqa: SIM115  # it stays
            vars(sys)[name] = null


def reach_this_machine() -> None:
    """Let this process and its children reach servers of this machine past a proxy (HTTP_PROXY).

    They are the endpoint that agents call, and reward functions that are served here. Some
    libraries read NO_PROXY first and some no_proxy.
    """
    given = [os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")]
    if "*" in given:  # no host by a proxy
        return
    hosts = ",".join([*filter(None, given), *THIS_MACHINE])
    os.environ.update(NO_PROXY=hosts, no_proxy=hosts)
