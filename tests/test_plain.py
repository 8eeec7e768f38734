"""What an environment holds comes back as plain values, and nothing else is called or made."""

import collections
import functools
import json
import random
import re
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from minirl.rollout.plain import NotPlain, PlainReader, PlainWriter


@dataclass
class Card:
    number: int
    marks: list


class Game:
    """Stands for an environment."""

    def __init__(self):
        self.pattern = re.compile("a")
        self.tools = {"length": len}
        self.call = functools.partial(len)
        self.first = Card(0, [])


def restored(game, row, classes=None):
    saved = json.loads(json.dumps(PlainWriter(row).write(vars(game))))
    new = Game()
    vars(new).update(PlainReader(row, classes).read(saved, vars(new)))
    return new


def test_values_come_back_as_they_were():
    row = {"image": object(), "number": 1}
    game = Game()
    shared = [1, 2.5, None, True, "ä"]
    game.one, game.other = shared, shared
    game.first.marks = shared
    game.cards = [Card(2, [float("inf")])]
    game.deque = collections.deque([(1, 2), {3, 4}, frozenset({5})])
    game.by_number = {1: b"\x00\xff", (2, 3): bytearray(b"x")}
    game.array = np.arange(6, dtype=np.float32).reshape(2, 3)
    game.third = np.float64(1 / 3)
    game.image = row["image"]
    game.loop = [game.by_number]
    game.loop.append(game.loop)
    game.random, game.generator = random.Random(3), np.random.default_rng(4)

    new = restored(game, row, {"Card": Card})
    assert new.one == shared and new.one is new.other is new.first.marks
    assert new.cards == game.cards and new.deque == game.deque
    assert new.by_number == game.by_number and new.loop[0] is new.by_number
    assert new.loop[1] is new.loop and new.image is row["image"]
    assert new.array.dtype == np.float32 and (new.array == game.array).all()
    new.array[0, 0] = 7  # it may be written to
    assert new.third == game.third and type(new.third) is np.float64
    assert new.random.random() == game.random.random()
    assert new.generator.random() == game.generator.random()
    assert new.tools == {"length": len} and new.call.func is len and new.pattern.match("a")


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        (n for n in range(3)),
        object(),
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=2),
        np.array([object()]),
        ValueError("x"),
        Card.__init__.__get__(Card(1, [])),
    ],
)
def test_what_is_no_value_is_refused(value):
    with pytest.raises(NotPlain):
        PlainWriter({}).write({"it": [value]})


@pytest.mark.parametrize(
    "saved",
    [
        {"object": ["Popen", [["args", "id"]]]},
        {"object": ["Card", []]},
        {"new": None},
        {"generator": {"dict": [["bit_generator", "system"]]}},
        {"known": "nothing"},
        {"same": 3},
        {"code": "1 + 1"},
        {},
        {"list": [], "tuple": []},
        ["bare"],
    ],
)
def test_what_was_not_written_is_refused(saved):
    with pytest.raises((NotPlain, KeyError, ValueError, IndexError, AttributeError)):
        PlainReader({}).read(saved)
