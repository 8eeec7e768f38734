"""Graders of other packages in workers with limits: the same grades as without, and whatever an
answer does to a grader, it earns 0 in time and hurts nobody."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import math_verify
import psutil
import pytest
import reasoning_gym

from minirl.base.errors import UserError
from minirl.config.shared import RewardConfig
from minirl.rewards import functions, graders, loading
from minirl.rewards.graders import GraderLimits, GraderPool, StoppedGrade
from minirl.run.metrics import breakdown, means_of_step
from minirl.types.packed import Trajectory


@pytest.fixture(scope="module")
def math():
    """Workers that may use half a second."""
    pool = GraderPool("math_verify", 2, GraderLimits(seconds=0.5, memory_mb=512))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gym():
    pool = GraderPool("reasoning_gym", 2, GraderLimits(seconds=0.5, memory_mb=512))
    yield pool
    pool.close()


# --------------------------------------------------------------------------------------------------
# the same grades as without workers

PAIRS = [
    ("$\\frac{1}{2}$", "so $x = 0.5$"),
    ("$\\frac{1}{2}$", "so $x = 0.6$"),
    ("$(1, 2)$", "\\boxed{(1, 2)}"),
    ("$\\{1, 2\\}$", "The set is $\\{2, 1\\}$."),
    ("$x^2 - 1$", "$(x - 1)(x + 1)$"),
    ("$2\\sqrt{2}$", "$\\sqrt{8}$"),
    ("$10\\%$", "10%"),
    ("$5$", "I do not know."),
    ("$5$", ""),
    ("$5$", "\ud800 $5$"),
]


@pytest.mark.parametrize(("answer", "completion"), PAIRS)
def test_math_verify_grades_as_it_does_here(math, answer, completion):
    gold = math_verify.parse(answer, parsing_timeout=None)
    given = math_verify.parse(completion, parsing_timeout=None)
    expected = float(math_verify.verify(gold, given, timeout_seconds=None))
    assert math.grade(answer, completion) == expected


# Those that evaluate answers, and some others.
DATA_SETS = (
    "binary_matrix",
    "chain_sum",
    "countdown",
    "count_primes",
    "intermediate_integration",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "propositional_logic",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)


@pytest.mark.parametrize("name", DATA_SETS)
def test_reasoning_gym_grades_as_it_does_here(name):
    """Also with answers as lists, which some graders evaluate."""
    score = reasoning_gym.get_score_answer_fn(name)
    seen = set()
    for entry in reasoning_gym.create_dataset(name, size=4, seed=3):
        right = str(entry["answer"])
        if "Integral" in right:
            continue  # sympy could not solve it; an answer may not leave it open
        as_list = str(right.split())
        as_rows = str([line.split() for line in right.splitlines()])
        for answer in (right, f"{right} + 1", right[:-1], as_list, as_rows, str(list(right)), "no"):
            row = {**entry, "prompt": entry["question"]}
            given = functions.score_reasoning_gym(row["prompt"], answer, row)
            assert given == pytest.approx(score(answer.strip(), entry)), answer
            seen.add(given)
    assert len(seen) > 1


def test_threads_get_each_its_own_grade(math):
    with ThreadPoolExecutor(8) as threads:
        grades = list(threads.map(lambda n: math.grade("$7$", f"${n % 10}$"), range(100)))
    assert grades == [float(n % 10 == 7) for n in range(100)]


# --------------------------------------------------------------------------------------------------
# what an answer can do

HOSTILE = {
    "a tower of powers": "$9^{9^{9^{9^{9}}}}$",
    "a factorial": "\\boxed{(10^{7})!}",
    "a factorial of factorials": "$((((9!)!)!)!)!$",
    "a large power": "\\boxed{3^{10000000}}",
    "a large power of a sum": "\\boxed{(1+10^{-9})^{10^{9}}}",
    "a long sum": "$\\sum_{n=1}^{10^9} n^{-2}$",
    "a long product": "$\\prod_{n=1}^{10^9} \\frac{n}{n+1}$",
    "parentheses": "$" + "(" * 3000 + "$",
    "braces": "$" + "{" * 3000 + "$",
    "nested fractions": "$" + "\\frac{1}{" * 1000 + "1" + "}" * 1000 + "$",
    "nested roots": "$" + "\\sqrt{" * 2000 + "2" + "}" * 2000 + "$",
    "many terms": "$" + "+".join(f"x_{{{n}}}" for n in range(3000)) + "$",
    "a binomial coefficient": "\\boxed{\\binom{10^9}{5 \\cdot 10^8}}",
    "an integral": "$\\int_0^1 x^{x^{x^{x}}} \\sin(e^x) dx$",
    "a limit": "$\\lim_{x \\to 0} \\frac{\\sin(\\tan(x)) - \\tan(\\sin(x))}{x^{70}}$",
    "many digits": "$" + "9" * 1_000_000 + "$",
    "many decimals": "$0." + "3" * 1_000_000 + "$",
    "many expressions": " ".join(f"$x = {n}$" for n in range(3000)),
    "many boxes": "\\boxed{" * 5000,
    "a large exponent": "$1e1000000000$",
    "a matrix": "$\\begin{pmatrix}" + " & ".join(["1"] * 2000) + "\\end{pmatrix}^{1000}$",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_earns_nothing_in_time(math, name):
    began = time.monotonic()
    grade = math.grade("$\\frac{1}{2}$", HOSTILE[name])
    assert grade == 0.0
    assert time.monotonic() - began < 45  # of a busy machine; the limit is half a second of CPU
    assert math.grade("$2$", "$\\frac{4}{2}$") == 1.0


CODE = [
    "__import__('os').system('touch {file}')",
    "[__import__('os').system('touch {file}')]",
    "open('{file}', 'w')",
    "eval(chr(49))",
    "exec(chr(49))",
    "().__class__.__base__.__subclasses__()",
    "(lambda: 1)()",
    "sympify(1)",
    "S(1).func",
    "x.diff",
    "x . diff",
    "print(1)",
    "exit(1)",
    "quit(1)",
    "input(1)",
    "lambdify(x, x)",
    "[x for x in (1, 2)]",
    "'a' * 10**9",
    "__builtins__",
    "globals(1)",
    "breakpoint(1)",
    "\uff45val(1)",
]


@pytest.mark.parametrize("name", ["countdown", "puzzle24", "string_insertion", "n_queens"])
def test_code_in_an_answer_is_not_run(gym, tmp_path, name):
    entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
    for code in CODE:
        answer = code.replace("{file}", str(tmp_path / "made"))
        assert gym.grade(answer, entry) <= 0.05, code
    assert list(tmp_path.iterdir()) == []


def test_expressions_that_are_none_are_refused_before_they_are_evaluated():
    import builtins

    import sympy

    from minirl.sandbox.inside.grading import check_expression

    known = frozenset(dir(sympy)) | frozenset(dir(builtins))
    for plain in ("3 + 4*(x - 1)", "sin(x)**2 + C", "x1 + 5!", "2.5*exp(x)", "log(Abs(x))/2", ""):
        check_expression(plain, known)
    for code in (c.replace("{file}", "x") for c in CODE):
        with pytest.raises(ValueError, match="no function of an expression|not an expression"):
            check_expression(code, known)


@pytest.mark.parametrize("answer", ["9**9**9**9", "factorial(10**8)", "5!!!!!!", "2**" * 99 + "2"])
def test_a_hostile_expression_earns_nothing(gym, answer):
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=1)[0]
    assert gym.grade(answer, entry) <= 0.05


def test_a_grader_that_needs_too_much_memory_is_stopped():
    pool = GraderPool("math_verify", 1, GraderLimits(seconds=20, memory_mb=8))
    grade = pool.grade("$1$", "$" + "9" * 30_000_000 + "$")
    pool.close()
    assert isinstance(grade, StoppedGrade) and grade == 0.0


# --------------------------------------------------------------------------------------------------
# processes


def wait_until_zombie(process):
    end = time.monotonic() + 60
    while process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_that_ends_is_replaced():
    math = GraderPool("math_verify", 2, GraderLimits())
    assert math.grade("$1$", "$1$") == 1.0
    template = psutil.Process(math.process.pid)
    for worker in template.children():
        worker.kill()
        wait_until_zombie(worker)  # which its template is told to bury later
    # A worker that is gone cannot say whether it was the answer that ended it.
    grades = [math.grade("$1$", "$1$") for _ in range(3)]
    assert set(grades) <= {0.0, 1.0} and grades[-1] == 1.0
    template.kill()  # The one that forks them reads no answer: the machine has killed it.
    wait_until_zombie(template)
    with pytest.raises(UserError, match="the process of its graders was killed; is the memory"):
        [math.grade("$1$", "$1$") for _ in range(3)]
    math.close()


def test_a_worker_has_nothing_of_the_run(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SECRET_TOKEN", "kept")
    pool = GraderPool("math_verify", 1, GraderLimits())
    pool.grade("$1$", "$1$")
    template = psutil.Process(pool.process.pid)
    (worker,) = template.children()
    for process in (template, worker):
        assert not {"RANK", "SECRET_TOKEN"} & process.environ().keys()
        assert process.environ()["PYTHONHASHSEED"] == "0"
        folder = Path(f"/proc/{process.pid}/fd")
        targets = sorted(os.readlink(folder / name).split(":")[0] for name in os.listdir(folder))
        assert targets == ["/dev/null"] * 3 + ["socket"]
        modules = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in modules and "cuda" not in modules
    status = Path(f"/proc/{worker.pid}/status").read_text()
    assert "Seccomp:\t2" in status and "NoNewPrivs:\t1" in status
    assert "CapEff:\t0000000000000000" in status
    if os.geteuid() == 0:  # Only root may give up the bound; NoNewPrivs keeps others below it.
        assert "CapBnd:\t0000000000000000" in status
    pool.close()
    assert not psutil.wait_procs([template, worker], timeout=30)[1]


def keep_a_grader_busy(connection):
    pool = graders.pool("math_verify")
    hostile = ("$1$", "$9^{9^{9^{9}}}$")
    threading.Thread(target=pool.grade, args=hostile, daemon=True).start()
    while len(psutil.Process().children(recursive=True)) < 2:
        time.sleep(0.01)
    time.sleep(0.2)
    connection.send("ready")
    connection.recv()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_they_end_with_their_rank(how):
    own, others = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    rank = context.Process(target=keep_a_grader_busy, args=(others,))
    rank.start()
    assert own.recv() == "ready"
    processes = psutil.Process(rank.pid).children(recursive=True)
    assert len(processes) == 2
    if how is None:
        own.send("leave")
    else:
        os.kill(rank.pid, how)
    rank.join(120)
    assert rank.exitcode == -(how or 0)
    assert not psutil.wait_procs(processes, timeout=120)[1]


def grade_in_fork(connection):
    connection.send((graders.pool("math_verify").grade("$1$", "$1$"), os.getpid()))


def test_a_forked_process_has_workers_of_its_own():
    own = graders.pool("math_verify")
    assert own.grade("$1$", "$1$") == 1.0
    receiver, sender = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=grade_in_fork, args=(sender,))
    child.start()
    assert receiver.recv()[0] == 1.0
    child.join(60)
    assert own.grade("$2$", "$1$") == 0.0
    assert graders.pool("math_verify") is own


# --------------------------------------------------------------------------------------------------
# what a run sees of it


def test_a_stopped_grade_is_counted_and_said(monkeypatch, math, capfd):
    monkeypatch.setattr(graders, "pool", lambda package: math)
    rewards = loading.make_rewards(RewardConfig(function=["math_verify", "exact"]))
    row = {"prompt": "p", "answer": "1/2"}
    infos = []
    for completion in ("$9^{9^{9^{9}}}$", "$0.5$", "1/2", "$9^{9^{9^{8}}}$", "$9^{9^{9^{7}}}$"):
        info = {"source": None}
        rewards(row, completion, info)
        infos.append(info)
    assert [info["graders"]["stopped"] for info in infos] == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert infos[0]["rewards"] == {"math_verify": 0.0, "exact": 0.0}
    said = [line for line in capfd.readouterr().err.splitlines() if "could not grade" in line]
    assert len(said) == 2  # the first and the second of three
    assert "0.5 seconds of CPU time" in said[0] and "$9^{9^{9^{9}}}$" in said[0]

    class Alone:
        def gather_named(self, values):
            by_name = {}
            for name, value in values:
                by_name.setdefault(name, []).append(value)
            return [by_name]

    episodes = [
        Trajectory(tokens=None, sampled=None, logprobs=None, reward=0.0, info=info)
        for info in infos
    ]
    assert breakdown(episodes, 1.0, Alone())["graders/stopped"] == 3 / 5


def test_a_reward_that_became_nan_ends_the_run():
    """By a Trainer.shape of the user, say: no update would follow, and nothing say why."""

    def mesh_of(values):
        return [{name: [v for n, v in values if n == name] for name, _ in values}]

    info = {"source": None, "answer_tokens": 3, "stopped": True, "staleness": 0, "score": 1.0}
    answer = partial(Trajectory, tokens=None, sampled=None, logprobs=None, info=info)
    alone = SimpleNamespace(gather_named=mesh_of)
    assert means_of_step([answer(reward=0.5)], 1.0, alone)["shaped_reward"] == 0.5
    with pytest.raises(UserError, match="Trainer.shape made a reward not finite"):
        means_of_step([answer(reward=0.5), answer(reward=float("nan"))], 1.0, alone)


def test_rows_that_no_grader_knows_are_refused(gym):
    entry = {"question": "", "answer": "", "metadata": {"source_dataset": "no_such"}}
    with pytest.raises(UserError, match="reward.function = reasoning_gym: .*'no_such'"):
        gym.grade("1", entry)


def test_a_package_that_is_not_there_is_named(monkeypatch):
    with pytest.raises(UserError, match="package no_such_package is not installed"):
        GraderPool("no_such_package", 1, GraderLimits())
    monkeypatch.setattr(graders, "START", "raise ImportError('broken')")
    with pytest.raises(UserError, match="(?s)math_verify: its grader did not start: .*broken"):
        GraderPool("math_verify", 1, GraderLimits())
