"""The README tells the truth where that can be checked."""

import composition


def test_table_of_what_composes_is_that_of_the_tests():
    assert composition.inside(composition.README.read_text()) == composition.table(), "run `python tests/composition.py --write`"


def test_every_axis_composes_with_every_other():
    """Shards, replicas, tensor, sequence and context parallelism: no pair without a test, but the two engines of one axis."""
    together = [set(case) for case in composition.cases()]
    axes = composition.FEATURES[:6]
    missing = [(a, b) for i, a in enumerate(axes) for b in axes[i + 1 :] if not any({a, b} <= case for case in together)]
    assert missing == [("context", "context ring")]
