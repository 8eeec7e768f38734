"""The README tells the truth where that can be checked."""

import re

import composition
from minirl.envs.base import State
from minirl.envs.registry import make_env


def test_table_of_what_composes_is_that_of_the_tests():
    assert composition.inside(composition.README.read_text()) == composition.table(), (
        "run `python tests/composition.py --write`"
    )


def test_every_axis_composes_with_every_other():
    """Shards, replicas, tensor, sequence and context parallelism: no pair without a test, but the
    two engines of one axis."""
    together = [set(case) for case in composition.cases()]
    axes = composition.FEATURES[:6]
    missing = [
        (a, b)
        for i, a in enumerate(axes)
        for b in axes[i + 1 :]
        if not any({a, b} <= case for case in together)
    ]
    assert missing == [("context", "context ring")]


def test_the_printed_environment_plays(tmp_path):
    """As a new user copies it."""
    (code,) = re.findall(
        r"```python\n(# my_env\.py\n.*?)```", composition.README.read_text(), re.DOTALL
    )
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_env.py").write_text(code)
    make = make_env(f"{tmp_path}/my_env.py:Guess")

    def hear(env, answer, turn=0):
        result = env.step(State(row={}, answer=answer, stopped=True, turn=turn, messages=[]))
        return result.observation, result.reward, result.done

    env = make()
    assert env.reset({"answer": 42}).startswith("I think of a number")
    assert [hear(env, "7"), hear(env, " 90\n", 1), hear(env, "42", 2)] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        (None, 1.0, True),
    ]
    assert hear(make(), "what?") == (None, 0.0, True)
