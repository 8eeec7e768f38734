"""What runs in the sandbox's process, before the program: python -I -B inside.py SETTINGS. It takes
rights from itself that it cannot get back.

* Landlock (Linux 5.13): no file but those of Python and the own folder can be opened, linked,
removed or looked into.
* seccomp (Linux 3.17): no other process can be made, signalled or traced, no other program run, no
socket opened.
* limits: CPU seconds, address space, file size, no core dump.

Imports the standard library only, so that a run costs what Python's start costs. Neither needs a
privilege.
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
from pathlib import Path

EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x10000

# Numbers of system calls: (x86_64, aarch64); None where there is no such call.
DENIED = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "ptrace": (101, 117),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
}
OF_ONESELF = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
}  # abort() signals its own process
CLONE, CLONE3, PRLIMIT = (56, 220), (435, 435), (302, 261)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _call(number: int, *args: object) -> int:
    """A system call by number. Raises OSError."""
    result = ctypes.CDLL(None, use_errno=True).syscall(number, *args)
    if result < 0:
        raise OSError(
            ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}"
        )
    return result


def landlock(readable: list[str], folder: str) -> None:
    """All file accesses that this kernel can refuse are, but reading below `readable` and anything
    below `folder`.
    """
    version = _call(444, None, ctypes.c_size_t(0), 1)
    rights = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    reading = 0b1101  # execute, read a file, list a folder
    for_files = rights & 0b100000000000111  # of these, what a single file can have
    handled = struct.pack("Q", rights)
    ruleset = _call(444, handled, ctypes.c_size_t(len(handled)), 0)
    for path, allowed in [
        *((p, reading) for p in readable),
        (folder, rights),
        ("/dev/null", 0b110),
    ]:
        if os.path.exists(path):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed &= rights if os.path.isdir(path) else for_files
            _call(445, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
            os.close(descriptor)
    _call(446, ruleset, 0)
    os.close(ruleset)


def seccomp() -> None:
    """A program for the kernel's filter machine: look at each system call's number, and at the
    first argument of some.
    """
    column, architecture = MACHINES[platform.machine()]
    load, equal, any_bit, least, answer = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, deny = 0x7FFF0000, 0x00050000
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (answer, 0, 0, 0x80000000),
        (load, 0, 0, 0),
    ]
    program += [(least, 0, 1, 0x40000000), (answer, 0, 0, deny | EPERM)]  # calls of the x32 kind
    no = (answer, 0, 0, deny | EPERM)

    def unless(test: int, value: int) -> tuple[tuple[int, int, int, int], ...]:
        return (
            (load, 0, 0, 16),
            (test, 1, 0, value),
            no,
            (answer, 0, 0, allow),
        )  # of the first argument

    rules = [
        *((numbers, [no]) for numbers in DENIED.values()),
        (
            CLONE3,
            [(answer, 0, 0, deny | ENOSYS)],
        ),  # its flags are out of reach; libraries then use clone
        (CLONE, unless(any_bit, CLONE_THREAD)),
        *((numbers, unless(equal, os.getpid())) for numbers in OF_ONESELF.values()),
        (PRLIMIT, unless(equal, 0)),
    ]
    for numbers, then in rules:
        if numbers[column] is not None:
            program += [(equal, 0, len(then), numbers[column]), *then]
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    )
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    _call((317, 277)[column], 1, 0, filters)  # seccomp(SECCOMP_SET_MODE_FILTER)


def main() -> None:
    settings = json.loads(sys.argv[1])
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    folder = os.getcwd()
    source = Path("main.py").read_text()
    _call(
        (157, 167)[MACHINES[platform.machine()][0]], 38, 1, 0, 0, 0
    )  # prctl(PR_SET_NO_NEW_PRIVS), which both filters ask for
    landlock(settings["readable"], folder)
    seccomp()
    sys.argv = ["main.py"]
    sys.path.insert(0, folder)
    try:
        exec(
            compile(source, "main.py", "exec"),
            {"__name__": "__main__", "__builtins__": builtins, "__file__": "main.py"},
        )
    except SystemExit:
        raise
    except BaseException as error:  # whatever it is, the program is told about its own frames only
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
        sys.exit(1)


if __name__ == "__main__":
    main()
