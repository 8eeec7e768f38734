"""Eighty programs that mean harm, several at once: each gets a clear result within its
limit, and nothing outside changes."""

import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import psutil
import pytest

from minirl.base.errors import UserError
from minirl.rewards import functions, scoring
from minirl.sandbox import runner
from minirl.sandbox.runner import ProgramLimits, run

OUTSIDE = "{outside}"
DENIED = "PermissionError"

# name: (program, statuses it may end with, what its output must say); {n} makes each copy another
# program.
HARM = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()  # {n}", {"error"}, DENIED),
    "fork bomb by processes": (
        "import multiprocessing\nfor _ in range({n} + 10):\n    "
        "multiprocessing.get_context('fork').Process(target=print).start()",
        {"error"},
        DENIED,
    ),
    "shell": ("import subprocess\nsubprocess.run('ls {n}', shell=True)", {"error"}, DENIED),
    "another program": (
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo {n}'])",
        {"error"},
        DENIED,
    ),
    "threads": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60 + "
        "{n},)).start()",
        {"timeout", "error", "killed"},
        "",
    ),
    "memory": (
        "x = []\nwhile True:\n    x.append(bytearray(10**6 + {n}))",
        {"error", "timeout", "killed"},
        "",
    ),
    "memory at once": ("x = bytearray(10**12 + {n})", {"error"}, "MemoryError"),
    "loop": ("while {n} >= 0:\n    pass", {"timeout"}, ""),
    "sleep": ("import time\ntime.sleep(1000 + {n})", {"timeout"}, ""),
    "loop that catches": (
        "while True:\n    try:\n        while True:\n            pass\n    except "
        "BaseException:\n        x = {n}",
        {"timeout"},
        "",
    ),
    "deaf to signals": (
        "import signal\nfor s in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU):\n    "
        "signal.signal(s, signal.SIG_IGN)\nwhile True:\n    x = {n}",
        {"timeout"},
        "",
    ),
    "streams closed": (
        "import os, time\nfor fd in range(3):\n    os.close(fd)\ntime.sleep(1000 + {n})",
        {"timeout"},
        "",
    ),
    "flood": ("while True:\n    print('{n}' * 10000)", {"timeout"}, "(cut)"),
    "big file": (
        "with open('big', 'wb') as f:\n    while True:\n        f.write(b'{n}' * 10**6)",
        {"error", "disk"},
        "",
    ),
    "many files": (
        "i = 0\nwhile True:\n    open('f%d' % i, 'wb').write(b'{n}' * 10**6)\n    i += 1",
        {"disk", "error"},
        "",
    ),
    "read a secret": ("print(open('{outside}/secret').read())  # {n}", {"error"}, DENIED),
    "read by a link": (
        "import os\nos.symlink('{outside}/secret', 'link{n}')\nprint(open('link{n}').read())",
        {"error"},
        DENIED,
    ),
    "hard link": ("import os\nos.link('{outside}/secret', 'link{n}')", {"error"}, "Error"),
    "list": ("import os\nprint(os.listdir('{outside}'))  # {n}", {"error"}, DENIED),
    "write": ("open('{outside}/secret', 'w').write('{n}')", {"error"}, DENIED),
    "make": ("open('{outside}/new{n}', 'w')", {"error"}, DENIED),
    "remove": ("import os\nos.remove('{outside}/secret')  # {n}", {"error"}, DENIED),
    "truncate": ("import os\nos.truncate('{outside}/secret', {n})", {"error"}, DENIED),
    "rename": ("import os\nos.rename('{outside}/secret', 'mine{n}')", {"error"}, "Error"),
    "another's environment": (
        "print(open('/proc/%d/environ' % {parent}).read())  # {n}",
        {"error"},
        DENIED,
    ),
    "another's memory": ("open('/proc/%d/mem' % {parent}, 'r+b')  # {n}", {"error"}, DENIED),
    "network": (
        "import socket\nsocket.create_connection(('127.0.0.1', 1000 + {n}))",
        {"error"},
        DENIED,
    ),
    "datagrams": (
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'{n}', "
        "('127.0.0.1', 53))",
        {"error"},
        DENIED,
    ),
    "web": (
        "import urllib.request\nprint(urllib.request.urlopen('http://127.0.0.1:{n}/').read())",
        {"error"},
        "not permitted",
    ),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)  # {n}", {"error"}, DENIED),
    "kill all": ("import os\nos.kill(-1, 9 + 0 * {n})", {"error"}, DENIED),
    "kill the group": (
        "import os\nos.killpg(os.getpgid(os.getppid()), 15)  # {n}",
        {"error"},
        DENIED,
    ),
    "signal a thread": (
        "import ctypes, os\nprint(ctypes.CDLL(None, use_errno=True).syscall(200, {parent}, 9), "
        "ctypes.get_errno() or 'none', {n})",
        {"ok", "error"},
        "-1",
    ),
    "trace": (
        "import ctypes\nprint(ctypes.CDLL(None).ptrace(16, {parent}, 0, 0), {n})",
        {"ok"},
        "-1",
    ),
    "raise limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40 + {n}, 2**40 + {n}))",
        {"error"},
        "maximum limit",
    ),
    "limits of the parent": (
        "import resource\nresource.prlimit({parent}, resource.RLIMIT_CPU, (1, 1))  # {n}",
        {"error"},
        DENIED,
    ),
    "crash": ("import ctypes\nctypes.string_at({n})", {"killed"}, ""),
    "abort": ("import os\nos.abort()  # {n}", {"killed"}, ""),
    "locked folders": (
        "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w')\nos.chmod('a/b', 0)\nos.chmod('a', 0) "
        " # {n}",
        {"ok"},
        "",
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x + 1)\nf({n})",
        {"error", "killed", "timeout"},
        "",
    ),
    "own frames": (
        "import sys\nprint('inside.py OSError')\nsys.exit({n} + 1)",
        {"error"},
        "inside.py OSError",
    ),
}
COPIES = 2


def seconds_of(name: str) -> float:
    """The time limit of a program: short for one that does not end, if it has nothing to say."""
    _, statuses, says = HARM[name]
    if "timeout" in statuses:
        return 3.0 if says else 1.0
    return 20.0


@pytest.fixture(scope="module")
def harmed(tmp_path_factory):
    """Name, result, seconds of all copies, and what of the outside was there before and after."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("kept")
    limits = ProgramLimits(memory_mb=512, output=2000, disk_mb=16)
    folders = tmp_path_factory.mktemp("folders")

    def one(name, n):
        program = (
            HARM[name][0]
            .replace("{outside}", str(outside))
            .replace("{parent}", str(os.getpid()))
            .replace("{n}", str(n))
        )
        start = time.monotonic()
        result = run(program, dataclasses.replace(limits, seconds=seconds_of(name)))
        return name, result, time.monotonic() - start

    runner.check_supported()
    threads = threading.active_count()
    with mock.patch.object(tempfile, "tempdir", str(folders)), ThreadPoolExecutor(4) as pool:
        results = [
            f.result() for f in [pool.submit(one, name, n) for n in range(COPIES) for name in HARM]
        ]
    return results, outside, list(folders.iterdir()), threads


@pytest.mark.parametrize("name", HARM)
def test_each_has_a_clear_result_within_its_limit(harmed, name):
    _, statuses, says = HARM[name]
    mine = [(r, seconds) for n, r, seconds in harmed[0] if n == name]
    assert len(mine) == COPIES
    for r, seconds in mine:
        assert r.status in statuses, r
        assert says in r.output, r
        # A program for which no core was free has as long again.
        assert seconds < 2 * seconds_of(name) + 4.0, r
        assert len(r.output) <= 2000 + len("\n... (cut)")


def test_time_without_a_core_does_not_count(monkeypatch):
    limits = ProgramLimits(seconds=1.0)
    assert run("import time\ntime.sleep(1.3)", limits).status == "timeout"
    monkeypatch.setattr(runner, "seconds_without_core", lambda pid: 9.0)
    assert run("import time\ntime.sleep(1.3)", limits).status == "ok"
    assert run("import time\ntime.sleep(2.3)", limits).status == "timeout"


WORK = "while time.process_time() < 0.4: pass\nprint('done', flush=True)\ntime.sleep(3)"


@pytest.mark.parametrize("is_in_child", [False, True])
def test_a_process_that_waits_for_a_core_is_noticed(is_in_child):
    """It shares one core with another, alone or, as a process of tests does, in its child."""
    program = f"import os, time\nif {is_in_child} and os.fork(): time.sleep(60)\n{WORK}"
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline() == b"done\n"
        assert runner.seconds_without_core(process.pid) > 0.1
    finally:
        os.sched_setaffinity(0, cores)
        for started in (other, process):
            started.kill()
            started.wait()
        process.stdout.close()


def test_what_a_killed_run_has_left_is_removed_a_day_later(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("minirl-program-old", "minirl-program-new", "minirl-mine"):
        (tmp_path / name / "program/deep").mkdir(parents=True)
        (tmp_path / name / "program/main.py").write_text("x = 1")
    (tmp_path / "minirl-program-link").symlink_to(outside)
    yesterday = time.time() - 25 * 3600
    for name in ("minirl-program-old", "minirl-mine", "outside"):
        os.utime(tmp_path / name, (yesterday, yesterday))
    runner.remove_left()
    left = ["minirl-mine", "minirl-program-link", "minirl-program-new", "outside"]
    assert sorted(os.listdir(tmp_path)) == left


def test_nothing_outside_has_changed(harmed):
    results, outside, left, threads = harmed
    assert [p.name for p in outside.iterdir()] == ["secret"] and (
        outside / "secret"
    ).read_text() == "kept"
    assert not any("kept" in r.output for _, r, _ in results)
    assert left == []
    assert threading.active_count() == threads
    assert [p for p in psutil.Process().children() if "inside.py" in " ".join(p.cmdline())] == []
    assert set(Counter(r.status for _, r, _ in results)) <= {
        "ok",
        "error",
        "timeout",
        "disk",
        "killed",
    }


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("print(6 * 7)", "42\n"),
        ("import sys\nprint(len(sys.stdin.read()))", "0\n"),
        ("open('notes.txt', 'w').write('own')\nprint(open('notes.txt').read())", "own\n"),
        (
            "import numpy, sympy\nprint(numpy.arange(4).sum(), sympy.factorint(91))",
            "6 {7: 1, 13: 1}\n",
        ),
        (
            "import threading\nt = threading.Thread(target=print, args=('thread',))\nt.start()\n"
            "t.join()",
            "thread\n",
        ),
        (
            "import tempfile\nwith tempfile.TemporaryFile() as f:\n    f.write(b'x')\n"
            "print('temporary')",
            "temporary\n",
        ),
        (
            "class A:\n    def f(self):\n        return sum(i for i in range(5))\nif __name__ == "
            "'__main__':\n    print(A().f())",
            "10\n",
        ),
        ("print('ü日本')", "ü日本\n"),
    ],
)
def test_honest_programs_work(program, output):
    result = run(program, ProgramLimits(seconds=20))
    assert (result.status, result.output) == ("ok", output)


def test_an_error_shows_the_program_s_own_frames():
    result = run("def f():\n    return 1 / 0\nf()", ProgramLimits())
    assert result.status == "error"
    assert result.output.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "inside.py" not in result.output and 'File "main.py", line 2, in f' in result.output
    assert run("def (", ProgramLimits()).output.splitlines()[-1].startswith("SyntaxError")


TESTS = "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", 1.0),
        ("def add(a, b):\n    return a + b", 1.0),
        (
            "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n"
            "    print(add(int(input()), 2))",
            1.0,
        ),
        (
            "```python\ndef add(a, b):\n    return 3\n```\nNo:\n```py\ndef add(a, b):\n    "
            "return a + b\n```",
            1.0,
        ),
        ("```python\ndef add(a, b):\n    return 3\n```", 0.0),
        ("I cannot.", 0.0),
        ("import sys\nsys.exit(0)", 0.0),  # leaves before the tests
        ("import os\nos._exit(0)", 0.0),
        ("def add(a, b):\n    import os\n    os._exit(0)", 0.0),
        ("while True: pass", 0.0),
    ],
)
def test_a_program_earns_its_reward_by_passing_the_row_s_tests(monkeypatch, completion, reward):
    monkeypatch.setattr(
        runner,
        "ProgramLimits",
        lambda seconds: ProgramLimits(seconds=1.0 if "while" in completion else 20.0),
    )
    assert functions.REWARDS["python_tests"]("write add", completion, {"tests": TESTS}) == reward


@pytest.mark.parametrize(
    "completion",
    [
        "```bash\npip install x\n```\nthen\n```python\nRIGHT\n```",
        "```text\nf(2) is 4\n```\n```python\nRIGHT\n```\nIt prints\n```\n4\n```",
        '```python title="a.py"\nRIGHT\n```',
        "1. This:\n   ```python\n   RIGHT\n   ```",
        "```Python\r\nRIGHT\r\n```",
        "```\nwrong\n```\n```\nRIGHT\n```\n```json\n{}\n```",
        "```python\nRIGHT```",
        "RIGHT",
    ],
)
def test_the_program_of_a_completion_is_its_last_block_of_python(completion):
    assert runner.program_in(completion).strip() == "RIGHT"


@pytest.mark.parametrize(
    "tests",
    [
        "",
        '[{"input": "1 2", "output": "3", "testtype": "stdin"}]',
        '{"inputs": ["1"], "outputs": ["2"]}',
        "def check(candidate):\n    assert candidate(1) == 2",
        "import unittest\nclass Test(unittest.TestCase):\n    def test(self): assert f(1) == 2",
        "x = 1",
    ],
)
def test_tests_that_check_nothing_are_refused(tests):
    assert "checks nothing" in functions.why_not("python_tests", {"tests": tests})
    assert not functions.why_not("python_tests", {"tests": f"{tests}\ncheck(f)"})
    assert "is none" in functions.why_not("python_tests", {"tests": f"{tests}\nassert f(1 =="})


CASES = """
import unittest
class TestAdd(unittest.TestCase):
    def test(self):
        self.assertEqual(add(1, 2), 3)
"""
LOAD = "suite = unittest.defaultTestLoader.loadTestsFromTestCase(TestAdd)"


@pytest.mark.parametrize(
    "end",
    [
        "unittest.main()",
        "unittest.main(argv=['x'], exit=False)",
        "result = unittest.main(exit=False)",
        "assert unittest.main(exit=False).result.wasSuccessful()",
        f"{LOAD}\nrunner = unittest.TextTestRunner()\nrunner.run(suite)",
        f"{LOAD}\nsuite.run(unittest.TestResult())",
        "def f():\n    '>>> add(1, 2)\\n3'\nfrom doctest import testmod\ntestmod()",
        "assert add(1, 2) == 3\nif __name__ == '__main__':\n    import doctest; doctest.testmod()",
    ],
)
def test_tests_that_only_print_what_has_failed_count(end):
    tests = f"{CASES}{end}"
    assert functions.why_not("python_tests", {"tests": tests}) == ""
    own = "\nimport unittest\nclass Mine(unittest.TestCase):\n    def test(self): 1 / 0"
    for program, reward in (
        ("def add(a, b):\n    return a + b", 1.0),
        (f"def add(a, b):\n    return a + b{own}", 1.0),
        ("def add(a, b):\n    return 0", 0.0),
        ("def add(a, b):\n    return 0\ndef load_tests(*_):\n    return _[2]", 0.0),
    ):
        assert functions.python_tests("", program, {"tests": tests}) == reward, program


@pytest.mark.parametrize("guard", ["", "if __name__ == '__main__':\n    "])
def test_pytest_in_tests_checks_nothing(guard):
    """It looks for files."""
    tests = f"import pytest\ndef test_add():\n    assert add(1, 2) == 3\n{guard}pytest.main()"
    assert "checks nothing" in functions.why_not("python_tests", {"tests": tests})


UNITTEST = """
import unittest

class TestAdd(unittest.TestCase):
    def test(self):
        self.assertEqual(add(1, 2), 3)

if __name__ == "__main__":
    unittest.main()
"""
GUARDED = """
import random

def main():
    assert add(1, 2) == 3

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("tests", [UNITTEST, GUARDED])
def test_tests_behind_a_guard_run_and_the_program_s_own_does_not(tests):
    guard = "\nif __name__ == '__main__':\n    raise SystemExit(1)"
    for program, reward in (
        (f"def add(a, b):\n    return a + b{guard}", 1.0),
        ("def add(a, b):\n    return 0", 0.0),
        ("x = 1", 0.0),
        ("", 0.0),
    ):
        assert functions.python_tests("", program, {"tests": tests}) == reward


def test_the_order_of_sets_is_that_of_every_run():
    program = "print(set('the cat sat on the mat'.split()))"
    assert len({run(program, ProgramLimits(seconds=20)).output for _ in range(4)}) == 1


def test_rows_without_tests_are_refused():
    scoring.Rewards((1.0, None, "python_tests")).check_row({"prompt": "x", "tests": TESTS})
    with pytest.raises(UserError, match="python_tests runs the text in the column `tests`"):
        scoring.Rewards((1.0, None, "python_tests")).check_row({"prompt": "x", "answer": "y"})
