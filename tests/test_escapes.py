"""More than a hundred ways out of the sandbox, none of which works.

Those that a call of the kernel has to refuse are tried one after the other by one program, which
says how each ended. Those that use something up are programs of their own."""

import math
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from minirl.sandbox import runner
from minirl.sandbox.runner import ProgramLimits, run

COLUMN = ("x86_64", "aarch64").index(platform.machine())

# What the attempts below can use. `call` raises OSError as the functions of `os` do.
TOOLS = """
import ctypes, errno, fcntl, mmap, os, platform, resource, signal, socket, struct, sys, tempfile
OUTSIDE, SECRET, VICTIM = {outside!r}, {secret!r}, {victim}
COLUMN = {column}
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(numbers, *args):
    number = numbers if isinstance(numbers, int) else numbers[COLUMN]
    if number is None:
        raise OSError(errno.ENOSYS, "no such call here")
    result = libc.syscall(ctypes.c_long(number), *args)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
# Runs the attempts and prints how each ended: the error, or DONE.
LOOP = """
for name, source in ATTEMPTS.items():
    try:
        exec(source, dict(globals()))
        how = "DONE"
    except BaseException as error:
        how = type(error).__name__ + " " + str(error)
    print(name, "->", how.replace(chr(10), " ")[:100], flush=True)
"""

# Each must end in an error.
REFUSED = {
    # Processes and programs.
    "fork": "os.fork()",
    "forkpty": "os.forkpty()",
    "vfork": "call((58, None))",
    "clone as a process": "call((56, 220), 17, 0, 0, 0, 0)",
    "clone with the memory shared": "call((56, 220), 0x4000 | 0x100 | 17, 0, 0, 0, 0)",
    "clone a thread in a user namespace": "call((56, 220), 0x3D0F00 | 0x10000000, 0, 0, 0, 0)",
    "clone a thread that is traced": "call((56, 220), 0x3D0F00 | 0x2000, 0, 0, 0, 0)",
    "clone3": "call(435, ctypes.create_string_buffer(88), 88)",
    "execve": "os.execv(sys.executable, ['python', '-c', '0'])",
    "execveat": "call((322, 281), -100, b'/bin/true', None, None, 0)",
    "execve of an own file": (
        "open('own', 'w').write('#!/bin/sh'); os.chmod('own', 0o755); os.execv('own', ['own'])"
    ),
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "subprocess": "__import__('subprocess').run(['true'])",
    "system": "print(1 / (os.system('true') == 0))",
    "popen": "os.popen('true').read()",
    "multiprocessing by fork": (
        "__import__('multiprocessing').get_context('fork').Process(target=print).start()"
    ),
    "multiprocessing by spawn": (
        "__import__('multiprocessing').get_context('spawn').Process(target=print).start()"
    ),
    # Signals to other processes.
    "kill the parent": "os.kill(os.getppid(), 9)",
    "kill another": "os.kill(VICTIM, 9)",
    "kill all": "os.kill(-1, 9)",
    "kill the own group": "os.kill(0, 9)",
    "killpg": "os.killpg(os.getpgid(VICTIM), 9)",
    "look whether another lives": "os.kill(VICTIM, 0)",
    "tkill": "call((200, 130), VICTIM, 9)",
    "tgkill": "call((234, 131), VICTIM, VICTIM, 9)",
    "rt_sigqueueinfo": "call((129, 138), VICTIM, 9, bytes(128))",
    "rt_tgsigqueueinfo": "call((297, 240), VICTIM, VICTIM, 9, bytes(128))",
    "pidfd_open": "os.pidfd_open(VICTIM)",
    "pidfd_send_signal": "call(424, 0, 9, None, 0)",
    "pidfd_getfd": "call(438, 0, 0, 0)",
    "F_SETOWN": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, VICTIM)",
    "F_SETOWN of a group": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, -VICTIM)",
    "F_SETOWN with high bits": "call((72, 25), os.pipe()[0], ctypes.c_long(8 | 1 << 32), VICTIM)",
    "F_SETOWN_EX": "fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, VICTIM))",
    "F_SETSIG": "fcntl.fcntl(os.pipe()[0], 10, 9)",
    "O_ASYNC": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, 0x2000)",
    "FIOSETOWN": "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', VICTIM))",
    "SIOCSPGRP": "fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', VICTIM))",
    "FIOASYNC": "fcntl.ioctl(os.pipe()[0], 0x5452, struct.pack('i', 1))",
    "a lease": "fcntl.fcntl(os.open('lease', os.O_CREAT), 1024, fcntl.F_WRLCK)",
    "a lease on Python": "fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 1024, fcntl.F_RDLCK)",
    "F_NOTIFY": "fcntl.fcntl(os.open('.', os.O_RDONLY), 1026, 1)",
    "timer_create": "call((222, 107), 0, None, ctypes.create_string_buffer(8))",
    "mq_notify": "call((244, 184), 0, None)",
    "push into a terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    # Other processes' memory, limits and time.
    "ptrace attach": "call((101, 117), 16, VICTIM, 0, 0)",
    "ptrace seize": "call((101, 117), 0x4206, VICTIM, 0, 0)",
    "process_vm_readv": "call((310, 270), VICTIM, None, 0, None, 0, 0)",
    "process_vm_writev": "call((311, 271), VICTIM, None, 0, None, 0, 0)",
    "process_madvise": "call(440, 0, None, 0, 0, 0)",
    "kcmp": "call((312, 272), os.getpid(), VICTIM, 0, 0, 0)",
    "/proc/pid/mem": "open(f'/proc/{VICTIM}/mem', 'r+b')",
    "/proc/pid/environ": "open(f'/proc/{VICTIM}/environ', 'rb')",
    "/proc/pid/root": "os.listdir(f'/proc/{VICTIM}/root')",
    "/proc/pid/fd": "os.readlink(f'/proc/{VICTIM}/fd/0')",
    "/proc/pid/cwd": "os.chdir(f'/proc/{VICTIM}/cwd')",
    "/proc/self/mem": "open('/proc/self/mem', 'r+b')",
    "/proc/self/oom_score_adj": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "prlimit of another": "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))",
    "prlimit of another, read": "resource.prlimit(VICTIM, resource.RLIMIT_CPU)",
    "more memory": "resource.setrlimit(resource.RLIMIT_AS, (2**44, 2**44))",
    "more CPU time": "resource.setrlimit(resource.RLIMIT_CPU, (999, 999))",
    "larger files": "resource.setrlimit(resource.RLIMIT_FSIZE, (2**44, 2**44))",
    "more open files": "resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999))",
    "setpriority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "setpriority of the user": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "nice": "os.nice(-5)",
    "sched_setaffinity": "os.sched_setaffinity(VICTIM, {0})",
    "sched_setscheduler": "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))",
    "sched_setscheduler of itself": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))",
    "sched_setparam": "os.sched_setparam(VICTIM, os.sched_param(0))",
    "sched_setattr": "call((314, 274), VICTIM, bytes(48), 0)",
    "ioprio_set": "call((251, 30), 1, VICTIM, 3 << 13)",
    "setpgid of another": "os.setpgid(VICTIM, 0)",
    "setsid": "os.setsid()",
    "migrate_pages": "call((256, 238), VICTIM, 64, bytes(8), bytes(8))",
    "move_pages": "call((279, 239), VICTIM, 0, None, None, None, 0)",
    # Attributes outside that Landlock does not look at.
    "chown": "os.chown(SECRET, 12345, 12345)",
    "lchown": "os.lchown(SECRET, 12345, 12345)",
    "fchownat": "call((260, 54), -100, SECRET.encode(), 12345, 12345, 0)",
    "chown of Python": "os.fchown(os.open(os.__file__, os.O_RDONLY), 12345, 12345)",
    "setxattr": "os.setxattr(SECRET, 'user.x', b'1')",
    "setxattr of an open file": "os.setxattr(os.open(os.__file__, os.O_RDONLY), 'user.x', b'1')",
    "lsetxattr": "os.setxattr(SECRET, 'user.x', b'1', follow_symlinks=False)",
    "setxattrat": "call(463, -100, SECRET.encode(), 0, b'user.x', None, 0)",
    "removexattr": "os.removexattr(SECRET, 'user.kept')",
    "getxattr": "os.getxattr(SECRET, 'user.kept')",
    "file_setattr": "call(469, -100, SECRET.encode(), None, 0, 0)",
    "immutable": "fcntl.ioctl(os.open('.', os.O_RDONLY), 0x40086602, struct.pack('l', 0x10))",
    "project quota": "fcntl.ioctl(os.open('.', os.O_RDONLY), 0x401C5820, bytes(28))",
    "freeze the file system": "fcntl.ioctl(os.open('.', os.O_RDONLY), 0xC0045877, 0)",
    # Contents outside.
    "read": "open(SECRET).read()",
    "read by O_PATH": "os.read(os.open(SECRET, os.O_PATH), 4)",
    "read by a link": "os.symlink(SECRET, 'link'); open('link').read()",
    "read by a hard link": "os.link(SECRET, 'hard'); open('hard').read()",
    "read by handle": "call((304, 265), -100, bytes(64), 0)",
    "read by dots": "open('../../' * 20 + SECRET[1:]).read()",
    "openat2": "call(437, -100, SECRET.encode(), bytes(24), 24)",
    "list": "os.listdir(OUTSIDE)",
    "list the parent folder": "os.listdir('..')",
    "list the root": "os.listdir('/')",
    "write in the parent folder": "open('../new', 'w')",
    "move itself up": "os.rename('.', '../up')",
    "move the own folder": "os.rename(os.getcwd(), os.getcwd() + '-moved')",
    "write": "open(SECRET, 'w')",
    "append": "open(SECRET, 'a')",
    "make": "open(OUTSIDE + '/new', 'w')",
    "make a folder": "os.mkdir(OUTSIDE + '/new')",
    "make a link": "os.symlink('x', OUTSIDE + '/new')",
    "make a pipe": "os.mkfifo(OUTSIDE + '/new')",
    "make an own pipe": "os.mkfifo('pipe')",
    "truncate": "os.truncate(SECRET, 0)",
    "remove": "os.remove(SECRET)",
    "remove the folder": "os.rmdir(OUTSIDE)",
    "rename": "os.rename(SECRET, 'mine')",
    "exchange": "open('own', 'w'); call((316, 276), -100, b'own', -100, SECRET.encode(), 2)",
    "write over Python": "open(os.__file__, 'a')",
    "write where bytecode is": "open(os.path.dirname(os.__file__) + '/__pycache__/x', 'w')",
    "write to another's output": "open(f'/proc/{VICTIM}/fd/1', 'w')",
    "write to the terminal": "open('/dev/tty', 'w')",
    "write to shared memory": "open('/dev/shm/minirl-escape', 'w')",
    "write to cgroups": "open('/sys/fs/cgroup/cgroup.procs', 'w')",
    "write to the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w')",
    "drop caches": "open('/proc/sys/vm/drop_caches', 'w')",
    "device node": "os.mknod('disk', 0o60600, os.makedev(8, 0))",
    "character device": "os.mknod('mem', 0o20600, os.makedev(1, 1))",
    # Sockets.
    "TCP": "socket.socket()",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "Unix": "socket.socket(socket.AF_UNIX)",
    "kernel crypto": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "virtual machine": "socket.socket(40, socket.SOCK_STREAM)",
    "pair of datagrams": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "pair of packets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "pair of datagrams, high bits": "call((53, 199), ctypes.c_long(1 | 1 << 32), 2, 0, bytes(8))",
    "sendto an address": "socket.socketpair()[0].sendto(b'x', '\\0name')",
    "sendto an address by its high half": (
        "call((44, 206), socket.socketpair()[0].fileno(), b'x', 1, 0, ctypes.c_void_p(1 << 32), 4)"
    ),
    "sendmsg": "socket.socketpair()[0].sendmsg([b'x'])",
    "send a file": "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
    "sendmmsg": "call((307, 269), 0, None, 0, 0)",
    "bind": "socket.socketpair()[0].bind('\\0name')",
    "connect": "socket.socketpair()[0].connect('\\0name')",
    "listen": "socket.socketpair()[0].listen()",
    # Objects that outlive the process, and memory that no limit counts.
    "memfd_create": "os.memfd_create('x')",
    "memfd_secret": "call(447, 0)",
    "shmget": "call((29, 194), 0, 4096, 0o1600)",
    "shmat": "call((30, 196), 0, None, 0)",
    "semget": "call((64, 190), 0, 1, 0o1600)",
    "msgget": "call((68, 186), 0, 0o1600)",
    "mq_open": "call((240, 180), b'minirl', 0o102, 0o600, None)",
    "POSIX shared memory": (
        "from multiprocessing.shared_memory import SharedMemory; SharedMemory(None, True, 9)"
    ),
    "POSIX semaphore": "__import__('multiprocessing').Lock()",
    "huge pages": "call((9, 222), None, 1 << 21, 3, 0x40022, -1, 0)",
    "locked memory": "call((149, 228), bytes(4096), 4096)",
    "all memory locked": "call((151, 230), 1)",
    "larger pipes": "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
    "splice": "call((275, 76), 0, None, 1, None, 1, 0)",
    "vmsplice": "call((278, 75), 1, None, 0, 0)",
    "tee": "call((276, 77), 0, 1, 1, 0)",
    "fallocate": "os.posix_fallocate(os.open('big', os.O_CREAT | os.O_RDWR), 0, 1 << 20)",
    "inotify": "call((294, 26), 0)",
    "fanotify": "call((300, 262), 0, 0)",
    "a key": "call((248, 217), b'user', b'minirl', b'x', 1, -3)",
    "keyctl": "call((250, 219), 0, -3, 1)",
    "io_uring": "call(425, 8, ctypes.create_string_buffer(120))",
    "io_setup": "call((206, 0), 1, ctypes.create_string_buffer(8))",
    "userfaultfd": "call((323, 282), 0)",
    "signalfd": "call((289, 74), -1, bytes(8), 8, 0)",
    "timerfd": "call((283, 85), 0, 0)",
    # The machine.
    "unshare": "call((272, 97), 0x10000000)",
    "setns": "call((308, 268), 0, 0)",
    "chroot": "os.chroot('.')",
    "pivot_root": "call((155, 41), b'.', b'.')",
    "mount": "call((165, 40), b'x', b'.', b'tmpfs', 0, None)",
    "umount": "call((166, 39), b'/tmp', 2)",
    "fsopen": "call(430, b'tmpfs', 0)",
    "open_tree": "call(428, -100, b'/', 1)",
    "move_mount": "call(429, -100, b'.', -100, b'/', 0)",
    "mount_setattr": "call(442, -100, b'/', 0, None, 0)",
    "swapoff": "call((168, 225), b'/swap')",
    "reboot": "call((169, 142), 0, 0, 0, None)",
    "kexec": "call((246, 104), 0, 0, None, 0)",
    "init_module": "call((175, 105), bytes(8), 8, b'')",
    "finit_module": "call((313, 273), 0, b'', 0)",
    "delete_module": "call((176, 106), b'minirl', 0)",
    "bpf": "call((321, 280), 0, None, 0)",
    "perf_event_open": "call((298, 241), None, 0, -1, -1, 0)",
    "kernel's log": "call((103, 116), 3, None, 0)",
    "sethostname": "socket.sethostname('minirl')",
    "settimeofday": "call((164, 170), None, None)",
    "clock_settime": "call((227, 112), 0, None)",
    "adjtimex": "call((159, 171), None)",
    "acct": "call((163, 89), None)",
    "quotactl": "call((179, 60), 0, None, 0, None)",
    "iopl": "call((172, None), 3)",
    "modify_ldt": "call((154, None), 0, None, 0)",
    "personality": "call((135, 92), 0x0040000)",
    "call of the x32 kind": "call(0x40000000 | 39)",
    "call of no kernel": "call(1000)",
    # Rights.
    "setuid": "os.setuid(os.getuid())",
    "setresuid": "os.setresuid(0, 0, 0)",
    "setgroups": "os.setgroups([])",
    "setfsuid": "call((122, 151), 0)",
    "capset": "call((126, 91), struct.pack('Ii', 0x20080522, 0), b'\\xff' * 24)",
    "another filter": "call((317, 277), 0, 0, None)",
    "another ruleset": "call(444, None, 0, 1)",
    "outlive the parent": "call((157, 167), 1, 0, 0, 0, 0)",
    "be traced": "call((157, 167), 0x59616D61, VICTIM, 0, 0, 0)",
    "adopt orphans": "call((157, 167), 36, 1, 0, 0, 0)",
    "secure bits": "call((157, 167), 28, 0, 0, 0, 0)",
    "keep capabilities": "call((157, 167), 8, 1, 0, 0, 0)",
    "dumpable": "call((157, 167), 4, 1, 0, 0, 0)",
    "SIGKILL deferred": "call((157, 167), 57, 1, 0, 0, 0)",
}
# Each may end as it likes, but nothing may come of it.
WITHOUT_EFFECT = {
    "chmod": "os.chmod(SECRET, 0o777)",
    "chmod of the folder": "os.chmod(OUTSIDE, 0)",
    "fchmod of Python": "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0)",
    "fchmodat2": "call(452, -100, SECRET.encode(), 0, 0)",
    "utime": "os.utime(SECRET, (1, 1))",
    "utime of Python": "os.utime(os.open(os.__file__, os.O_RDONLY), (1, 1))",
    "ask for SIGIO": """
read, write = os.pipe()
for command, value in ((8, VICTIM), (10, 9), (4, 0x2000 | 0x800)):
    try:
        fcntl.fcntl(read, command, value)
    except OSError:
        pass
os.write(write, b'x')
""",
}


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """How each attempt ended, and what they were to change: before and after."""
    outside = tmp_path_factory.mktemp("outside")
    secret = outside / "secret"
    secret.write_text("kept")
    secret.chmod(0o600)
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    before = state(outside, victim.pid)
    tools = TOOLS.format(outside=str(outside), secret=str(secret), victim=victim.pid, column=COLUMN)
    program = f"{tools}\nATTEMPTS = {REFUSED | WITHOUT_EFFECT!r}\n{LOOP}"
    result = run(program, ProgramLimits(seconds=120, output=100_000))
    after = state(outside, victim.pid)
    victim.kill()
    victim.wait()
    ends = dict(line.split(" -> ", 1) for line in result.output.splitlines() if " -> " in line)
    return result, ends, before, after


def state(outside, pid):
    """All that attempts try to change."""
    temporary = Path(tempfile.gettempdir())
    kept = {}
    for path in (outside, *outside.iterdir(), Path(os.__file__), temporary):
        status = path.stat()
        kept[str(path)] = (status.st_mode, status.st_uid, status.st_gid)
        if path != temporary:  # where other programs make folders meanwhile
            kept[f"{path}, its links"] = status.st_nlink
        if path.is_file():
            kept[f"{path} itself"] = (status.st_mtime, status.st_size, os.listxattr(path))
    victim = psutil.Process(pid)
    kept["victim"] = (
        victim.is_running() and victim.status() != "zombie",
        victim.nice(),
        victim.cpu_affinity(),
        os.sched_getscheduler(pid),
        victim.rlimit(psutil.RLIMIT_CPU),
        os.getpgid(pid),
    )
    for kind in ("shm", "sem", "msg"):
        kept[kind] = Path(f"/proc/sysvipc/{kind}").read_text()
    kept["/dev/shm"] = [name for name in os.listdir("/dev/shm") if "minirl-escape" in name]
    return kept


@pytest.mark.parametrize("name", REFUSED)
def test_an_attempt_is_refused(tried, name):
    result, ends, _, _ = tried
    assert name in ends, result
    assert not ends[name].startswith("DONE"), ends[name]
    # It is the kernel that says no, not a mistake of the attempt.
    mistakes = (
        "NameError",
        "TypeError",
        "AttributeError",
        "SyntaxError",
        "ArgumentError",
        "KeyErr",
    )
    assert not ends[name].startswith(mistakes), ends[name]
    assert "Invalid argument" not in ends[name], ends[name]


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_attempt_has_no_effect(tried, name):
    _, ends, before, after = tried
    assert name in ends
    assert after == before


def test_all_attempts_were_made_and_nothing_outside_has_changed(tried):
    result, ends, before, after = tried
    assert result.status == "ok", result
    assert ends.keys() == REFUSED.keys() | WITHOUT_EFFECT.keys()
    assert after == before
    assert len(REFUSED) + len(WITHOUT_EFFECT) + len(EXHAUSTING) >= 120


# --------------------------------------------------------------------------------------------------
# what no call of the kernel refuses: each a program of its own

FILL = "block = bytes(2**20)\n"
# name: (program, statuses that it may end with, what its output must say)
EXHAUSTING = {
    "unlinked files that are open": (
        FILL + "import os, time\nfiles = []\nfor n in range(100):\n"
        "    files.append(open(str(n), 'wb'))\n    os.remove(str(n))\n    files[-1].write(block)\n"
        "    files[-1].flush()\ntime.sleep(60)",
        {"disk"},
        "",
    ),
    "temporary files": (
        FILL + "import tempfile, time\nfiles = [tempfile.TemporaryFile() for _ in range(40)]\n"
        "for file in files:\n    file.write(block)\n    file.flush()\ntime.sleep(60)",
        {"disk"},
        "",
    ),
    "unlinked files that are only mapped": (
        FILL + "import ctypes, os, time\nlibc = ctypes.CDLL(None)\n"
        "libc.mmap.restype = ctypes.c_void_p\n"
        "for n in range(40):\n    fd = os.open(str(n), os.O_RDWR | os.O_CREAT)\n"
        "    os.write(fd, block)\n"
        "    libc.mmap(None, ctypes.c_size_t(4096), 3, 1, fd, ctypes.c_long(0))\n"
        "    os.close(fd)\n    os.remove(str(n))\ntime.sleep(60)",
        {"disk"},
        "",
    ),
    "empty files": (
        "import time\nfor n in range(5000):\n    open(str(n), 'w').close()\ntime.sleep(60)",
        {"disk"},
        "",
    ),
    "links": (
        "import os, time\nopen('a', 'w')\nfor n in range(5000):\n    os.link('a', str(n))\n"
        "time.sleep(60)",
        {"disk"},
        "",
    ),
    "nested folders": (
        "import os, time\nfor n in range(1500):\n    os.mkdir('x')\n    os.chdir('x')\n"
        "print('deep')",
        {"ok", "disk"},
        "",
    ),
    "nested folders with long names, for long": (
        "import os, time\nfor n in range(100):\n    os.mkdir('x' * 250)\n    os.chdir('x' * 250)\n"
        "time.sleep(60)",
        {"disk"},
        "",
    ),
    "a sparse file": (
        "import os, time\nwith open('a', 'wb') as file:\n    file.truncate(2**40)",
        {"error"},
        "File too large",
    ),
    "many sparse files": (
        "import time\nfor n in range(99):\n    open(str(n), 'wb').truncate(2**22)\ntime.sleep(60)",
        {"disk"},
        "",
    ),
    "shared memory without a name": (
        "import mmap\nmaps = [mmap.mmap(-1, 2**26) for _ in range(99)]",
        {"error"},
        "Cannot allocate memory",
    ),
    "threads with small stacks": (
        "import threading, time\nthreading.stack_size(32768)\nfor _ in range(2000):\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\ntime.sleep(60)",
        {"killed", "error"},
        "",
    ),
    "own folder locked": ("import os\nos.chmod(os.getcwd(), 0)\nprint('locked')", {"ok"}, "locked"),
    "own folder removed": (
        "import os\nos.rmdir(os.getcwd()) if not os.remove('main.py') else 0",
        {"error"},
        "PermissionError",
    ),
    "own folder in another place": (
        "import os\nos.mkdir('a')\nos.chdir('a')\nos.rmdir('../a')\nprint('gone')",
        {"ok"},
        "gone",
    ),
    "folders made without rights": (
        "import os\nos.umask(0o777)\nos.mkdir('a', 0)\nos.mkdir('b')\nopen('c', 'w')\n"
        "print('made')",
        {"ok"},
        "made",
    ),
    "names that are not UTF-8": (
        "import os\nopen(b'\\xff\\xfe', 'w')\nos.mkdir(b'\\x80')\nopen(b'\\x80/\\n \\x01', 'w')",
        {"ok"},
        "",
    ),
    "a link to a folder outside": (
        "import os\nos.symlink({outside!r}, 'link')\nos.symlink('/', 'root')\nprint('linked')",
        {"ok"},
        "linked",
    ),
    "a circle of links": ("import os\nos.symlink('b', 'a')\nos.symlink('a', 'b')", {"ok"}, ""),
    "output that is not UTF-8": (
        "import sys\nsys.stdout.buffer.write(bytes(range(256)))",
        {"ok"},
        "\N{REPLACEMENT CHARACTER}",
    ),
    "much output at the end": ("print('x' * 10**7)", {"ok"}, "(cut)"),
    "output closed, then more": (
        "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(0.2)\nos._exit(3)",
        {"error"},
        "",
    ),
    "every open file closed": ("import os\nos.closerange(0, 256)\nos._exit(0)", {"ok"}, ""),
    "standard output of another kind": (
        "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK)\nprint('said')",
        {"ok"},
        "said",
    ),
    "itself killed": ("import os\nos.kill(os.getpid(), 9)", {"killed"}, ""),
    "itself stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}, ""),
    "deep source": ("(" * 5000 + ")" * 5000, {"error"}, ""),
    "deep nesting of operators": ("-" * 100_000 + "1", {"error", "killed"}, ""),
    "zero bytes": ("print(1)\0", {"error"}, ""),
    "half of a character": ("print('\ud800')", {"error"}, ""),
    "no program": ("", {"ok"}, ""),
    "an exit code that is no number": ("raise SystemExit('told')", {"error"}, "told"),
    "an exit code of all bits": ("raise SystemExit(-1)", {"error"}, ""),
    "an error that cannot be shown": (
        "class E(Exception):\n    def __str__(self):\n        raise self\nraise E",
        {"error"},
        "",
    ),
    "an error of the judge's kind": ("raise GeneratorExit", {"error"}, "GeneratorExit"),
    "errors of many groups": (
        "e = ValueError('x')\nfor _ in range(3000):\n    e = ExceptionGroup('g', [e])\nraise e",
        {"error", "killed"},
        "",
    ),
    "itself imported again": ("import main\nprint('twice')", {"ok"}, "twice\ntwice"),
}


@pytest.mark.parametrize("name", EXHAUSTING)
def test_a_program_that_uses_things_up_has_a_result(name, tmp_path, monkeypatch):
    program, statuses, says = EXHAUSTING[name]
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    seconds = 0.5 if statuses == {"timeout"} else 50.0
    limits = ProgramLimits(seconds=seconds, memory_mb=512, disk_mb=16)
    began = time.monotonic()
    result = run(program.replace("{outside!r}", repr(str(tmp_path))), limits)
    assert time.monotonic() - began < 55
    assert result.status in statuses, result
    assert says in result.output, result
    assert list(folders.iterdir()) == []


def test_a_program_ends_with_its_trainer(tmp_path):
    """A trainer that is killed leaves no program behind."""
    code = (
        "from minirl.sandbox import runner\n"
        "runner.run('import os, time; print(os.getpid(), flush=True); time.sleep(1000)', "
        "runner.ProgramLimits(seconds=1000))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code])
    programs = []
    deadline = time.monotonic() + 60
    while not programs and time.monotonic() < deadline:
        time.sleep(0.05)
        children = psutil.Process(trainer.pid).children()
        # The first program is that of check_supported.
        programs = [p for p in children if p.cwd().startswith(tempfile.gettempdir())]
    trainer.kill()
    trainer.wait()
    assert programs
    gone, alive = psutil.wait_procs(programs, timeout=30)
    assert not alive


HONEST = {
    "copy of files": "import shutil\nshutil.copy2('main.py', 'b')\nprint(open('b').read()[:6])",
    "tree of files": (
        "import os, shutil\nos.makedirs('a/b')\nshutil.copytree('a', 'c')\nshutil.rmtree('a')\n"
        "print(os.listdir('c'))"
    ),
    "archive": (
        "import zipfile\nwith zipfile.ZipFile('a.zip', 'w') as z:\n    z.write('main.py')\n"
        "print(zipfile.ZipFile('a.zip').namelist())"
    ),
    "data base": (
        "import sqlite3\nc = sqlite3.connect('a.db')\nc.execute('create table t (x)')\n"
        "c.execute('insert into t values (1)')\nc.commit()\n"
        "print(c.execute('select * from t').fetchall())"
    ),
    "event loop": (
        "import asyncio\nasync def f(n):\n    await asyncio.sleep(0.01)\n    return n\n"
        "async def g():\n    return await asyncio.gather(*(f(n) for n in range(5)))\n"
        "print(asyncio.run(g()))"
    ),
    "pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(16) as pool:\n    print(list(pool.map(abs, range(-3, 3))))"
    ),
    "thread that calls the loop": (
        "import asyncio\nprint(asyncio.run(asyncio.to_thread(lambda: 7)))"
    ),
    "own signals": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('rang'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('raised'))\n"
        "signal.raise_signal(signal.SIGUSR1)"
    ),
    "mapped files": (
        "import mmap\nopen('a', 'wb').write(b'x' * 4096)\nwith open('a', 'r+b') as f:\n"
        "    m = mmap.mmap(f.fileno(), 0)\n    m[0:1] = b'y'\nprint(open('a').read(2))"
    ),
    "mapped temporary array": (
        "import numpy, tempfile, time\nf = tempfile.TemporaryFile()\n"
        "a = numpy.memmap(f, dtype='f8', mode='w+', shape=9)\na[:] = 1\ntime.sleep(0.2)\n"
        "print(a.sum())"
    ),
    "linear algebra": (
        "import numpy as np\nones = np.ones((200, 200))\n"
        "print(np.linalg.det(np.eye(50)), (ones @ ones)[0, 0])"
    ),
    "time and chance": (
        "import datetime, random, secrets, time, uuid\ntime.sleep(0.01)\nrandom.seed()\n"
        "print(len(secrets.token_hex(4)), len(str(uuid.uuid4())), datetime.date(2020, 1, 1))"
    ),
    "pipe": "import os\nr, w = os.pipe()\nos.write(w, b'through')\nprint(os.read(r, 9))",
    "time zone": "import zoneinfo\nprint(zoneinfo.ZoneInfo('UTC'))",
    "sockets in pairs": (
        "import socket\na, b = socket.socketpair()\na.sendall(b'hello')\nprint(b.recv(9))"
    ),
    "many kinds": (
        "import bisect, collections, csv, dataclasses, decimal, enum, fractions, functools, heapq, "
        "itertools, json, logging, math, pathlib, re, statistics, string, typing, unittest\n"
        "import platform, locale, getpass, selectors, queue, doctest\nprint('imported')"
    ),
    "unit tests": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_x(self):\n"
        "        self.assertEqual(1, 1)\nunittest.main()"
    ),
}


def test_a_file_that_is_mapped_while_files_are_looked_at_is_known(tmp_path, monkeypatch):
    """A program that was looked at in this moment would be ended, though it has used 9 bytes."""
    kept = []
    listdir = os.listdir

    def list_then_map(path: str) -> list[str]:
        found = listdir(path)
        if not kept:
            file = (tmp_path / "a").open("w+b")
            file.write(b"9" * 9)
            file.flush()
            kept.extend([file, mmap.mmap(file.fileno(), 0)])
            (tmp_path / "a").unlink()
        return found

    monkeypatch.setattr(os, "listdir", list_then_map)
    assert 9 <= runner.unnamed_bytes(str(tmp_path), os.getpid()) < math.inf
    for each in reversed(kept):
        each.close()


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_works(name):
    result = run(HONEST[name], ProgramLimits(seconds=60))
    assert result.status == "ok", result
