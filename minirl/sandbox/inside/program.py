"""The first code in a sandbox's process: it gives up its rights and runs main.py.

It is started by `minirl.sandbox.runner`. A program that is to be judged by tests starts a second
process before it knows anything (trial.py).
"""

import builtins
import functools
import json
import os
import resource
import sys
import traceback
import types

from minirl.sandbox.inside.kernel import confine, end_with_parent


def main() -> None:
    """Give up all rights, then run main.py of the current folder. Settings are in sys.argv[1]."""
    del sys.path[0]  # Where this file is; the program has no need of it.
    settings = json.loads(sys.argv[1])
    sys.argv = ["main.py"]
    folder = os.getcwd()
    end_with_parent()
    if os.getppid() != settings["parent"]:
        sys.exit(1)  # It ended before the line above.
    give_up_rights = functools.partial(confine, settings["readable"], folder, limits(settings))
    # The names of main.py are those of the module `__main__` from now on: pickle, unittest and
    # typing look for them there. Tests import it, so that what it does as a script is not run.
    module = types.ModuleType("__main__" if settings["verdict"] is None else "main")
    sys.modules["__main__"] = module
    sys.modules[module.__name__] = module
    scope = vars(module)
    scope |= {"__builtins__": builtins, "__file__": "main.py"}
    tests = None
    if settings["verdict"] is not None:
        # Imported here: most programs have no tests, and start in half the time without these.
        from minirl.sandbox.inside.trial import serve, start_tests

        tests = start_tests(settings["verdict"], give_up_rights)
    give_up_rights()
    sys.path.insert(0, folder)
    try:
        with open("main.py", encoding="utf-8") as stream:
            source = stream.read()
        exec(compile(source, "main.py", "exec"), scope)
    except SystemExit as left:
        if tests is None or left.code not in (None, 0):
            raise
    except BaseException as error:  # whatever it is, the traceback shows the program's frames only
        own_frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(own_frames))
        sys.exit(1)
    if tests is not None:
        serve(scope, tests)


def limits(settings: dict) -> dict[int, tuple[int, int]]:
    """Return the limits of `confine`, by resource."""
    seconds, memory, disk = settings["seconds"], settings["memory"], settings["disk"]
    return {
        # The first makes a signal that says why, the second cannot be caught.
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (disk, disk),
        resource.RLIMIT_NOFILE: (256, 256),
    }
