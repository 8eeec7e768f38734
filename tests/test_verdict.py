"""What tests say of a program in the sandbox: right programs pass whatever else they do, and a
program that means to pass without being right does not.

Several cases run at once, each in processes of its own."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from minirl.sandbox.runner import ProgramLimits, passes
from programs import ROOT

SQUARES = "for x in range(5):\n    assert f(x) == x * x, x"
CLOSE = "assert abs(f(2) - 4) < 1e-6\nassert abs(9 - f(3)) < 1e-6"
UNITTEST = """import unittest
class T(unittest.TestCase):
    def test_it(self):
        self.assertEqual(f(2), 4)
unittest.main()"""
STACK = "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and len(s) == 1 and 1 in s"
FAILS = (
    "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'low' in str(error)"
)
PRINTS = """import io, sys
sys.stdout = io.StringIO()
f()
assert sys.stdout.getvalue() == 'hi\\n'"""
SQUARE = "def f(x):\n    return x * x\n"

# name: (program, tests)
RIGHT = {
    "plain": (SQUARE, SQUARES),
    "much is printed": (SQUARE + "print('x' * 10**6)", SQUARES),
    "printed while tested": ("def f(x):\n    print('y' * 10**4)\n    return x * x", SQUARES),
    "printed at exit": (SQUARE + "import atexit\natexit.register(print, 'bye')", SQUARES),
    "left by sys.exit(0)": (SQUARE + "import sys\nsys.exit(0)", SQUARES),
    "guarded main": (SQUARE + "if __name__ == '__main__':\n    print(f(3))\n    exit()", SQUARES),
    "standard output closed": (SQUARE + "import sys\nsys.stdout.close()", SQUARES),
    "a thread goes on": (
        SQUARE + "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        SQUARES,
    ),
    "check of a candidate": (SQUARE, "def check(c):\n    assert c(3) == 9\ncheck(f)"),
    "nearly equal": ("def f(x):\n    return x * x + 1e-9", CLOSE),
    "a class": (
        "class Stack(list):\n    push = list.append",
        STACK,
    ),
    "a class that computes": (
        "class V:\n    def __init__(self, x):\n        self.x = x\n"
        "    def __add__(self, other):\n        return V(self.x + other.x)\n"
        "    def __mul__(self, k):\n        return V(self.x * k)\n"
        "    def __eq__(self, other):\n        return self.x == other.x",
        "assert V(1) + V(2) == V(3)\nassert (V(2) * 3).x == 6",
    ),
    "a built-in's name": ("def sum(a, b):\n    return a - b", "assert sum(3, 1) == 2"),
    "a built-in's name with a module": (
        "import math\ndef pow(a, b):\n    return math.pow(b, a)",
        "assert math.isclose(pow(3, 2), 8)",
    ),
    "an error": ("def f(x):\n    raise ValueError('too low')", FAILS),
    "an error of its own": (
        "class Low(ValueError):\n    pass\ndef f(x):\n    raise Low('too low')",
        FAILS.replace("ValueError", "Low"),
    ),
    "an argument changed": (
        "def f(x):\n    x.sort()",
        "data = [3, 1, 2]\nassert f(data) is None\nassert data == [1, 2, 3]",
    ),
    "a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "a generator that has it": ("def f(n):\n    yield from range(n)", "assert 2 in f(3)"),
    "a function given": ("def f(g):\n    return g(2)", "assert f(lambda x: x + 1) == 3"),
    "a function returned": ("def f(n):\n    return lambda x: x + n", "assert f(2)(3) == 5"),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f():\n"
        "    return P(1, 2)",
        "assert f() == (1, 2) and f().y == 2",
    ),
    "a default dict": (
        "from collections import defaultdict\ndef f(s):\n    d = defaultdict(int)\n"
        "    for c in s:\n        d[c] += 1\n    return d",
        "assert f('aab') == {'a': 2, 'b': 1} and 'a' in f('a') and f('a')['a'] == 1",
    ),
    "a number with a name": (
        "import enum\nclass C(enum.IntEnum):\n    A = 4\ndef f(x):\n    return C(x * x)",
        "assert f(2) == 4 and abs(f(2) - 4) < 1",
    ),
    "an array": (
        "import numpy as np\ndef f(n):\n    return np.arange(n) / 2",
        "import numpy as np\nassert np.allclose(f(3), [0, 0.5, 1])\nassert f(3).sum() == 1.5",
    ),
    "arrays by value": (
        "import numpy as np\ndef f(n):\n    return np.eye(n)\ndef g(a):\n    a[0, 0] = 5\n"
        "    return a.astype(int)",
        "import numpy as np\na = f(2)\nassert a[0, 1] == 0 and np.all(f(3) * 2 >= 0)\n"
        "assert np.array_equal(g(a), [[5, 0], [0, 1]]) and a[0, 0] == 5\n"
        "assert isinstance(f(0) @ f(0), list) is False and f(2)[:, None][1, 0, 1] == 1",
    ),
    "a dataclass": (
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\n"
        "class A:\n    x: int",
        "assert A(1) == A(1) and A(1) != A(2) and A(3).x == 3",
    ),
    "pickles": (
        "import pickle\nclass A:\n    pass\ndef f():\n"
        "    return type(pickle.loads(pickle.dumps(A()))).__name__",
        "assert f() == 'A'",
    ),
    "a built-in function by another name": (
        "f = sorted\ng = abs",
        "assert f([2, 1]) == [1, g(-2)]",
    ),
    "a built-in function that does more": ("f = eval", "assert f('1 + 1') == 2"),
    "modules that the tests do not import": (
        "import math\nimport numpy as np\nfrom datetime import datetime\ndef f(x):\n"
        "    return x * x",
        "assert math.isclose(f(2), 4) and np.allclose(f(3), 9)\n"
        "assert datetime.fromisoformat('2020-01-02').day == 2",
    ),
    "views of a dictionary": (
        "def f(d):\n    return d.keys()\ndef g(d):\n    return d.values()\ndef h(d):\n"
        "    return d.items()",
        "assert list(f({'a': 1})) == ['a'] and f({'a': 1}) == {'a'}\n"
        "assert sorted(g({'a': 2, 'b': 1})) == [1, 2]\nassert ('a', 1) in h({'a': 1})",
    ),
    "durations and times": (
        "from datetime import time, timedelta\ndef f(n):\n    return timedelta(minutes=n)\n"
        "def g():\n    return time(12, 30)",
        "from datetime import time, timedelta\nassert f(90) == timedelta(hours=1.5)\n"
        "assert g() == time(12, 30)",
    ),
    "a large number": ("def f(n):\n    return 10**n", "assert f(6000) == 10**6000"),
    "a function with a module's name": ("def copy(x):\n    return x", "assert copy(3) == 3"),
    "unittest": (SQUARE, UNITTEST),
    "printed lines": ("def f():\n    print('hi')", PRINTS),
}

LIAR = """class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __lt__(self, other): return True
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __abs__(self): return 0.0
    def __contains__(self, item): return True
    def __array__(self, *args, **options): return 0.0
    def __getattr__(self, name): return self
def f(*args):
    return Liar()
"""
# Replies to the tests' process itself, before the code that would reply for the program does.
SPEAKS = """import json, os
def f(*args):
    return []
def say(*replies):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b''.join(json.dumps(each).encode() + b'\\n' for each in replies))
        except OSError:
            pass
"""
# An expression that sends the verdict, if it is evaluated in the process of the tests.
SENDS = """CODE = (
    "[o.sendall(b'passed') for o in __import__('gc').get_objects() "
    "if type(o).__name__ == 'socket' and o.fileno() > 0]"
)
"""
# As a test of HumanEval/38 has it.
ROUND_TRIP = "def check(c):\n    assert c(encode('abc')) == 'abc'\ncheck(decode)"

# name: (program, tests)
WRONG = {
    "wrong": ("def f(x):\n    return x", SQUARES),
    "nothing": ("", SQUARES),
    "the verdict printed": ("print('passed')\nprint('PASSED ok 1.0')\nf = abs", SQUARES),
    "the verdict to every file": (
        "import os\nfor n in range(256):\n    try:\n        os.write(n, b'passed')\n"
        "    except OSError:\n        pass\nf = abs",
        SQUARES,
    ),
    "the verdict to every socket": (
        "import gc, socket\nfor o in gc.get_objects():\n    if isinstance(o, socket.socket):\n"
        "        o.sendall(b'passed')\nf = abs",
        SQUARES,
    ),
    "the caller's frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in list(frame.f_locals.values()):\n"
        "            if hasattr(value, 'sendall'):\n                value.sendall(b'passed')\n"
        "        frame = frame.f_back\n    return 0",
        SQUARES,
    ),
    "left before": ("import sys\nsys.exit(0)", SQUARES),
    "left at once": ("import os\nos._exit(0)", SQUARES),
    "left while tested": ("import sys\ndef f(x):\n    sys.exit(0)", SQUARES),
    "left at once while tested": ("import os\ndef f(x):\n    os._exit(0)", SQUARES),
    "left as failed": (SQUARE + "import sys\nsys.exit(1)", SQUARES),
    "failed behind": (SQUARE + "1 / 0", SQUARES),
    "equal to all": (LIAR, SQUARES),
    "equal to all, in a list": (LIAR + "g = f\ndef f(x):\n    return [g()]", "assert f(2) == [4]"),
    "equal to all, in a set": (LIAR + "g = f\ndef f(x):\n    return {g()}", "assert f(2) == {4}"),
    "equal to all, a number": (
        "class I(int):\n    def __eq__(self, other):\n        return True\n"
        "    __hash__ = int.__hash__\ndef f(x):\n    return I(7)",
        SQUARES,
    ),
    "equal to all, a list": (
        "class L(list):\n    def __eq__(self, other):\n        return True\ndef f(x):\n"
        "    return L()",
        "assert f(2) == [4]",
    ),
    "equal to all, a text": (
        "class S(str):\n    def __eq__(self, other):\n        return True\n"
        "    def __contains__(self, other):\n        return True\ndef f(x):\n    return S()",
        "assert 'four' in f(2)",
    ),
    "unittest's ANY": ("from unittest.mock import ANY\ndef f(x):\n    return ANY", SQUARES),
    "unittest's mock": ("from unittest.mock import MagicMock\nf = MagicMock()", CLOSE),
    "near to all": (LIAR, CLOSE),
    "near to all, by a class": (LIAR + "g = Liar\nclass f(g):\n    def __init__(s, x): ...", CLOSE),
    "near to all, for numpy": (LIAR, "import numpy\nassert numpy.allclose(f(2), [4.0])"),
    "an array near to all": (
        "import numpy as np\nclass A(np.ndarray):\n    def __eq__(self, other):\n"
        "        return np.array(True)\ndef f(x):\n    return np.zeros(1).view(A)",
        "import numpy\nassert numpy.all(f(2) == [4.0])",
    ),
    "an array of liars": (
        LIAR + "import numpy\ng = f\ndef f(x):\n    return numpy.array([g()], dtype=object)",
        "import numpy\nassert numpy.all(f(2) == numpy.array([4.0]))",
    ),
    "numbers at an address": (
        "class A:\n    __array_interface__ = dict(data=(4096, False), shape=(1,), typestr='<f8',\n"
        "                               version=3)\ndef f(x):\n    return A()",
        "import numpy\nassert numpy.allclose(f(2), [4.0])",
    ),
    "contains all": (LIAR, "assert 4 in f(2)"),
    "smaller than all": (LIAR, "assert f(2) < 5"),
    "range": ("def range(*args):\n    return []\ndef f(x):\n    return 0", SQUARES),
    "sorted": (
        "def sorted(x):\n    return [1, 2, 3]\ndef f(x):\n    return 0",
        "assert sorted(f([3, 1, 2])) == [1, 2, 3]",
    ),
    "abs": ("def abs(x):\n    return 0\ndef f(x):\n    return 0", CLOSE),
    "isinstance": (
        "def isinstance(*args):\n    return True\ndef f(x):\n    return 'x'",
        "assert isinstance(f(1), int)",
    ),
    "a module's function": (
        "import math\nmath.isclose = lambda *args: True\ndef f(x):\n    return 0",
        "import math\nassert math.isclose(f(2), 4)",
    ),
    "another module": (
        "import sys, types\nsys.modules['math'] = types.ModuleType('math')\n"
        "sys.modules['math'].isclose = lambda *args: True\ndef f(x):\n    return 0",
        "import math\nassert math.isclose(f(2), 4)",
    ),
    "eval by another name": (
        SENDS + "def encode(s):\n    return CODE\ndecode = eval",
        ROUND_TRIP,
    ),
    "exec by another name": (
        SENDS + "run = exec\ndef f():\n    return CODE",
        "assert run(f()) == 4",
    ),
    "a class for a module": (
        "class math:\n    isclose = lambda *args: True\ndef f(x):\n    return 0",
        "assert math.isclose(f(2), 4)",
    ),
    "a class for a module of another name": (
        "class np:\n    allclose = lambda *args: True\ndef f(x):\n    return 0",
        "assert np.allclose(f(2), 4)",
    ),
    "a module for another one": (
        "import numpy as math\ndef f(x):\n    return 4.00001",
        "assert math.isclose(f(2), 4)",
    ),
    "AssertionError": ("class AssertionError(Exception):\n    pass\nf = abs", SQUARES),
    "the builtins": (
        "import builtins\nbuiltins.range = lambda *args: []\ndef f(x):\n    return 0",
        SQUARES,
    ),
    "speaks for itself": (
        SPEAKS + "say({'functions': ['f'], 'values': {}}, {'value': True})",
        SQUARES,
    ),
    "speaks of range": (
        SPEAKS + "say({'functions': ['f', 'range'], 'values': {}}, {'value': []})",
        SQUARES,
    ),
    "speaks of the builtins": (
        SPEAKS + "names = {'dict': [{'tuple': ['range', []]}]}\n"
        "say({'functions': ['f'], 'values': {'__builtins__': names}}, {'value': []})",
        SQUARES,
    ),
    "speaks of a class that Python does not build": (
        SPEAKS + "say({'functions': ['f'], 'values': {'f': {'eval': ['1']}}})",
        SQUARES,
    ),
    "speaks of the nonce": (SPEAKS + "say({'nonce': ''}, {'nonce': '0' * 32})", UNITTEST),
    "an error that ends a loop": (
        "def f(x):\n    raise StopIteration",
        "for value in map(f, [2]):\n    assert value == 4",
    ),
    "an error that tests do not expect": ("def f(x):\n    raise GeneratorExit", SQUARES),
    "an error of the judge's name": (
        "class NotPlainError(BaseException):\n    pass\ndef f(x):\n    raise NotPlainError",
        SQUARES,
    ),
    "values within values": (
        "def f(x):\n    r = []\n    for _ in range(90):\n        r = [r]\n    return r",
        SQUARES,
    ),
    "left in unittest": ("import sys\ndef f(x):\n    sys.exit(0)", UNITTEST),
    "wrong in unittest": ("def f(x):\n    return 5", UNITTEST),
    "left where it is run inside": ("import sys\ndef f():\n    sys.exit(0)", PRINTS),
    "the expected value changed": (
        "def f(x):\n    x.clear()\n    return x",
        "data = [3, 1, 2]\nassert f(data) == [1, 2, 3]",
    ),
}


@pytest.fixture(scope="module")
def verdicts():
    cases = {("right", name): case for name, case in RIGHT.items()}
    cases |= {("wrong", name): case for name, case in WRONG.items()}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 1) as threads:
        passed = list(
            threads.map(lambda case: passes(*case, ProgramLimits(seconds=60)), cases.values())
        )
    return dict(zip(cases, passed, strict=True))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(verdicts, name):
    assert verdicts["right", name]


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_is_not_right_does_not_pass(verdicts, name):
    assert not verdicts["wrong", name]


LEETCODE = LIAR + "class Solution:\n    f = f\n"
RIGHT_LEETCODE = "class Solution:\n    def f(self, x):\n        return x * x"
BY_VALUE = [
    "assert abs(Solution().f(2) - 4.0) < 1e-6",
    "assert Solution().f(2) == 4",
    "def check(candidate):\n    assert candidate(x=2) == 4\ncheck(Solution().f)",
]


@pytest.mark.parametrize("test", BY_VALUE)
def test_methods_of_new_objects_are_judged_by_value(test):
    assert passes(RIGHT_LEETCODE, test, ProgramLimits(seconds=60))
    assert not passes(LEETCODE, test, ProgramLimits(seconds=60))


@pytest.mark.parametrize(
    "test",
    ["s = Solution()\nassert s.f(2) == 4", "f = Solution().f\nassert f(2).value == 4", UNITTEST],
)
def test_tests_of_objects_can_be_fooled_as_the_page_says(test):
    assert passes(LEETCODE, test, ProgramLimits(seconds=60))
    page = (ROOT / "minirl" / "rewards" / "README.md").read_text()
    assert "Tests that can be fooled" in page


@pytest.mark.parametrize(
    "program",
    [
        "def f(x):\n    while True:\n        pass",
        "class I:\n    def __iter__(self):\n"
        "        return self\n    def __next__(self):\n        return 1\ndef f(x):\n    return I()",
    ],
)
def test_a_program_that_does_not_end_does_not_pass(program):
    assert not passes(
        program, "assert 2 in f(1)\nassert 2 in list(f(1))", ProgramLimits(seconds=1.0)
    )
