"""What a process can do to itself so that the kernel keeps it in: rights that never come back.

* capabilities: none, also where the user is root.
* Landlock (Linux 5.13): no file except those of Python and the own folder can be opened, linked,
  removed or listed. From Linux 6.12 on also: no signal to, and no abstract socket of, a process
  outside.
* seccomp (Linux 3.17): a list of the system calls that are allowed (calls.txt), some of them with
  certain arguments only. Every other call fails with EPERM, those of future kernels too.
* limits: CPU seconds, address space, file size, open files, locked memory, no core dump.

It imports the standard library only, and nothing of minirl, so that a sandbox starts as fast as
Python does. None of this needs a privilege.
"""

import ctypes
import os
import resource
import signal
import struct
from errno import EINVAL, ENOSYS, EOPNOTSUPP, EPERM

# The system calls that a program may make, and what the others get.
CALLS = os.path.join(os.path.dirname(__file__), "calls.txt")
# Calls that only this file makes.
CAPSET = (126, 91)
PRCTL = (157, 167)
SECCOMP = (317, 277)
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
# Column of the numbers in CALLS and above, and what the kernel calls the architecture.
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# Arguments, from Linux's headers.
# The flags with which C libraries start a thread: glibc's, and musl's with CLONE_DETACHED.
CLONE_OF_A_THREAD = (0x3D0F00, 0x7D0F00)
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
PRCTL_OPTIONS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA: names only
F_SETFL, O_ASYNC = 4, 0x2000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_SETLK, F_SETLKW, those of open file descriptions,
# F_DUPFD_CLOEXEC. Not the owner and the signal of a file, leases, and the size of a pipe.
FCNTL_COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030)
# FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; is it a terminal, and how wide.
IOCTL_REQUESTS = (0x541B, 0x5421, 0x5450, 0x5451, 0x5401, 0x802C542A, 0x5413)
MAP_HUGETLB = 0x40000  # Pages of a pool that all processes of the machine share.
AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF

# Instructions of the kernel's filter machine: (operation, jump if true, jump if false, operand).
Instruction = tuple[int, int, int, int]
LOAD = 0x20
EQUAL = 0x15
ANY_BIT = 0x45
AND = 0x54
RETURN = 0x06
ALLOW = (RETURN, 0, 0, 0x7FFF0000)
KILL = (RETURN, 0, 0, 0x80000000)
ERRNO = 0x00050000
DENY = (RETURN, 0, 0, ERRNO | EPERM)
# Answers of CALLS to a call with any arguments.
ANSWERS = {
    "allow": ALLOW,
    "do nothing": (RETURN, 0, 0, ERRNO | 0),
    "no such call": (RETURN, 0, 0, ERRNO | ENOSYS),
    "not supported": (RETURN, 0, 0, ERRNO | EOPNOTSUPP),
}
LOAD_NUMBER = (LOAD, 0, 0, 0)
LOAD_ARCHITECTURE = (LOAD, 0, 0, 4)

# Landlock's rights by version of its interface: so many of its bits are known.
LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
LANDLOCK_RIGHTS_NEWEST = 16
READING = 0b1101  # Execute, read a file, list a folder.
READ_AND_WRITE = 0b110
RIGHTS_OF_FILES = 0b1100000000000111  # Those that a single file can have.
TCP = 0b11  # Bind and connect.
SCOPES = 0b11  # Abstract sockets and signals.


def confine(readable: list[str], folder: str | None, limits: dict[int, tuple[int, int]]) -> None:
    """Give up all other rights of this process, which must have one thread, for good.

    Args:
        readable: paths below which it may read.
        folder: below it everything is allowed; None: there is no such folder.
        limits: by resource (RLIMIT_...): soft and hard limit, besides those that are always 0.

    Raises:
        OSError: the kernel lacks Landlock or seccomp.
        KeyError: the tables know no such machine.
    """
    column, architecture = MACHINES[os.uname().machine]
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        resource.setrlimit(kind, (0, 0))
    for kind, soft_and_hard in limits.items():
        resource.setrlimit(kind, soft_and_hard)
    program = filter_program(column, architecture)  # Reads a file, which is out of reach later.
    _call(PRCTL[column], PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # Which both filters ask for.
    _drop_capabilities(column)
    _restrict_files(readable, folder)
    packed = [struct.pack("=HBBI", *instruction) for instruction in program]
    code = ctypes.create_string_buffer(b"".join(packed))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    _call(SECCOMP[column], 1, 0, filters)  # SECCOMP_SET_MODE_FILTER


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it has ended."""
    column, _ = MACHINES[os.uname().machine]
    _call(PRCTL[column], PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _call(number: int, *args: object) -> int:
    """Make a system call by number. Raises OSError if it fails."""
    result = ctypes.CDLL(None, use_errno=True).syscall(number, *args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def _drop_capabilities(column: int) -> None:
    """Give up all capabilities, which a container's root has, and the way back to them."""
    for capability in range(64):
        try:
            _call(PRCTL[column], PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError as error:
            # EINVAL: this was the last. EPERM: not root. Then no program can be run that gives any.
            if error.errno not in (EINVAL, EPERM):
                raise
            break
    _call(PRCTL[column], PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    version_3, this_process = 0x20080522, 0
    header = struct.pack("Ii", version_3, this_process)
    none = bytes(24)  # Effective, permitted and inheritable ones, in two halves.
    _call(CAPSET[column], header, none)


def _restrict_files(readable: list[str], folder: str | None) -> None:
    """Refuse all file accesses that this kernel can refuse.

    Allowed are reading below `readable`, everything below `folder`, and /dev/null.
    """
    version = _call(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    rights = (1 << LANDLOCK_RIGHTS.get(version, LANDLOCK_RIGHTS_NEWEST)) - 1
    handled = struct.pack("Q", rights)
    if version >= 4:
        handled += struct.pack("Q", TCP)
    if version >= 6:
        handled += struct.pack("Q", SCOPES)
    ruleset = _call(LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)

    allowed_below = {**dict.fromkeys(readable, READING), "/dev/null": READ_AND_WRITE}
    if folder is not None:
        allowed_below[folder] = rights
    for path, allowed in allowed_below.items():
        if os.path.exists(path):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed &= rights if os.path.isdir(path) else RIGHTS_OF_FILES
            _call(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
            os.close(descriptor)
    _call(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _load(argument: int, high: bool = False) -> Instruction:
    """Return the instruction that loads the low or the high 32 bits of an argument."""
    return (LOAD, 0, 0, 16 + 8 * argument + 4 * high)


def _only_if(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow a call if the low half of an argument is one of the values."""
    instructions = [_load(argument)]
    for value in values:
        instructions += [(EQUAL, 0, 1, value), ALLOW]
    return [*instructions, DENY]


def filter_program(column: int, architecture: int) -> list[Instruction]:
    """Return the filter's program. It returns at the first call that has the number asked for."""
    # What to do when a call is made that some arguments allow. All look at 32 bits, as the kernel.
    own = os.getpid()
    by_argument: dict[str, list[Instruction]] = {
        "clone": _only_if(0, CLONE_OF_A_THREAD),
        # abort() signals itself.
        "kill": _only_if(0, (own,)),
        "tkill": _only_if(0, (own,)),
        "tgkill": _only_if(0, (own,)),
        "prlimit64": _only_if(0, (0, own)),
        "prctl": _only_if(0, PRCTL_OPTIONS),
        "fcntl": [
            _load(1),
            (EQUAL, 0, 4, F_SETFL),
            _load(2),
            (ANY_BIT, 0, 1, O_ASYNC),
            DENY,
            ALLOW,
            *_only_if(1, FCNTL_COMMANDS),
        ],
        "ioctl": _only_if(1, IOCTL_REQUESTS),
        "mmap": [_load(3), (ANY_BIT, 0, 1, MAP_HUGETLB), DENY, ALLOW],
        # Datagrams can be sent to any socket of the machine; a pair of streams stays one.
        "socketpair": [
            _load(0),
            (EQUAL, 1, 0, AF_UNIX),
            DENY,
            _load(1),
            (AND, 0, 0, SOCK_TYPE_MASK),
            (EQUAL, 0, 1, SOCK_STREAM),
            ALLOW,
            DENY,
        ],
        # To the other end only: without an address, all 64 bits of which are looked at.
        "sendto": [
            _load(4),
            (EQUAL, 1, 0, 0),
            DENY,
            _load(4, high=True),
            (EQUAL, 1, 0, 0),
            DENY,
            ALLOW,
        ],
    }
    program = [LOAD_ARCHITECTURE, (EQUAL, 1, 0, architecture), KILL, LOAD_NUMBER]
    answer = ""
    with open(CALLS) as file:
        lines = file.read().splitlines()
    for line in lines:
        if line.startswith("["):
            answer = line.strip("[]")
        elif line and not line.startswith("#"):
            *numbers, name = line.split()
            instructions = by_argument[name] if name in by_argument else [ANSWERS[answer]]
            if numbers[column] != "-":
                number = int(numbers[column])
                program += [(EQUAL, 0, len(instructions), number), *instructions]
    return [*program, DENY]
