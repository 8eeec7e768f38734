"""The first code in the sandbox's process: python -I -B inside.py SETTINGS.

Before it runs the program it gives up rights that it cannot get back:

* Landlock (Linux 5.13): no file except those of Python and the own folder can be opened, linked,
  removed or looked into.
* seccomp (Linux 3.17): no other process can be made, signalled or traced, no other program run, no
  socket opened.
* limits: CPU seconds, address space, file size, no core dump.

It imports the standard library only, so that a run costs what Python's start costs. None of this
needs a privilege.
"""

import builtins
import ctypes
import json
import os
import platform
import resource
import struct
import sys
import traceback
from errno import ENOSYS, EPERM
from pathlib import Path

CLONE_THREAD = 0x10000

# Numbers of system calls: (x86_64, aarch64); None where there is no such call.
DENIED = (
    (57, None),  # fork
    (58, None),  # vfork
    (59, 221),  # execve
    (322, 281),  # execveat
    (41, 198),  # socket
    (101, 117),  # ptrace
    (129, 138),  # rt_sigqueueinfo
    (297, 240),  # rt_tgsigqueueinfo
    (434, 434),  # pidfd_open
    (424, 424),  # pidfd_send_signal
    (310, 270),  # process_vm_readv
    (311, 271),  # process_vm_writev
    (425, 425),  # io_uring_setup
    (272, 97),  # unshare
    (308, 268),  # setns
    (165, 40),  # mount
    (321, 280),  # bpf
    (250, 219),  # keyctl
    (248, 217),  # add_key
    (298, 241),  # perf_event_open
    (323, 282),  # userfaultfd
    (203, 122),  # sched_setaffinity
    (141, 140),  # setpriority
)
# Calls that are allowed with the own process only: abort() signals itself.
SELF_ONLY = (
    (62, 129),  # kill
    (200, 130),  # tkill
    (234, 131),  # tgkill
)
CLONE = (56, 220)
CLONE3 = (435, 435)
PRLIMIT = (302, 261)
PRCTL = (157, 167)
SECCOMP = (317, 277)
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
# Column of the tables above, and what the kernel calls the architecture.
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# Instructions of the kernel's filter machine: (operation, jump if true, jump if false, operand).
LOAD = 0x20
EQUAL = 0x15
ANY_BIT = 0x45
AT_LEAST = 0x35
RETURN = 0x06
ALLOW = (RETURN, 0, 0, 0x7FFF0000)
KILL = (RETURN, 0, 0, 0x80000000)
DENY = (RETURN, 0, 0, 0x00050000 | EPERM)
NO_SUCH_CALL = (RETURN, 0, 0, 0x00050000 | ENOSYS)
LOAD_NUMBER = (LOAD, 0, 0, 0)
LOAD_ARCHITECTURE = (LOAD, 0, 0, 4)
LOAD_FIRST_ARGUMENT = (LOAD, 0, 0, 16)


def _call(number: int, *args: object) -> int:
    """Make a system call by number. Raises OSError if it fails."""
    result = ctypes.CDLL(None, use_errno=True).syscall(number, *args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def landlock(readable: list[str], folder: str) -> None:
    """Refuse all file accesses that this kernel can refuse.

    Allowed are reading below `readable`, everything below `folder`, and /dev/null.
    """
    version = _call(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    rights = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    reading = 0b1101  # execute, read a file, list a folder
    for_files = rights & 0b100000000000111  # those that a single file can have
    handled = struct.pack("Q", rights)
    ruleset = _call(LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)

    allowed_below = {**dict.fromkeys(readable, reading), folder: rights, "/dev/null": 0b110}
    for path, allowed in allowed_below.items():
        if os.path.exists(path):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed &= rights if os.path.isdir(path) else for_files
            _call(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
            os.close(descriptor)
    _call(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _only_if(test: int, value: int) -> list[tuple[int, int, int, int]]:
    """Allow a call if its first argument passes a test."""
    return [LOAD_FIRST_ARGUMENT, (test, 1, 0, value), DENY, ALLOW]


def seccomp(column: int, architecture: int) -> None:
    """Install the filter, which looks at a call's number and, for some, at its first argument."""
    # What to do when a call is made, by its numbers.
    rules = dict.fromkeys(DENIED, [DENY])
    rules |= dict.fromkeys(SELF_ONLY, _only_if(EQUAL, os.getpid()))
    rules |= {
        CLONE3: [NO_SUCH_CALL],  # its flags are out of reach; libraries then use clone
        CLONE: _only_if(ANY_BIT, CLONE_THREAD),
        PRLIMIT: _only_if(EQUAL, 0),
    }

    program = [LOAD_ARCHITECTURE, (EQUAL, 1, 0, architecture), KILL, LOAD_NUMBER]
    program += [(AT_LEAST, 0, 1, 0x40000000), DENY]  # calls of the x32 kind
    for numbers, instructions in rules.items():
        number = numbers[column]
        if number is not None:
            program += [(EQUAL, 0, len(instructions), number), *instructions]
    program.append(ALLOW)

    packed = [struct.pack("=HBBI", *instruction) for instruction in program]
    code = ctypes.create_string_buffer(b"".join(packed))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    _call(SECCOMP[column], 1, 0, filters)  # SECCOMP_SET_MODE_FILTER


def main() -> None:
    """Give up rights, then run main.py of the current folder."""
    settings = json.loads(sys.argv[1])
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    folder = os.getcwd()
    source = Path("main.py").read_text()

    column, architecture = MACHINES[platform.machine()]
    _call(PRCTL[column], 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which both filters ask for
    landlock(settings["readable"], folder)
    seccomp(column, architecture)

    sys.argv = ["main.py"]
    sys.path.insert(0, folder)
    scope = {"__name__": "__main__", "__builtins__": builtins, "__file__": "main.py"}
    try:
        exec(compile(source, "main.py", "exec"), scope)
    except SystemExit:
        raise
    except BaseException as error:  # whatever it is, the traceback shows the program's frames only
        own_frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(own_frames))
        sys.exit(1)


if __name__ == "__main__":
    main()
