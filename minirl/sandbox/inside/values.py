"""Values as JSON, between a program and the tests that judge it in another process.

Only values of the types below travel. Whoever reads them builds new ones, so that nothing of a
program's code comes with them: an object that is equal to everything arrives as a reference.
"""

import collections
import datetime
import decimal
import fractions
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

MAX_DEPTH = 100
# Kinds that are made of a list of their items.
SEQUENCES: dict[str, Callable] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
# Kinds that are made of a list of pairs.
MAPPINGS: dict[str, Callable] = {
    "dict": dict,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
}
# Kinds that are made of a text: type, its text, and what makes it of a text.
TEXTS: dict[str, tuple[type, Callable, Callable]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "float": (float, str, float),
    "complex": (complex, str, complex),
    "Fraction": (fractions.Fraction, str, fractions.Fraction),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "date": (datetime.date, str, datetime.date.fromisoformat),
    "datetime": (datetime.datetime, str, datetime.datetime.fromisoformat),
    "time": (datetime.time, str, datetime.time.fromisoformat),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
}
ARRAYS = "biufcU"  # Kinds of numbers and texts that an array or a scalar of numpy may have.

Refer = Callable[[object], object]


class NotPlainError(BaseException):
    """A value does not travel. Not an Exception, so that tests do not take it for the program's."""


def encode(value: Any, refer: Refer, depth: int = 0) -> object:
    """Return what json.dumps takes: {kind: content}, or a plain number, text, bool, None or list.

    Args:
        value: of any type.
        refer: returns what stands for a value of a type that does not travel, or raises.
        depth: of `value` in what is encoded.

    Raises:
        NotPlainError: it is nested too deep.
    """
    if depth > MAX_DEPTH:
        raise NotPlainError(f"a value is nested more than {MAX_DEPTH} times")

    def encode_all(items: Iterable) -> list[object]:
        return [encode(item, refer, depth + 1) for item in items]

    # Exact types: an object of a class below one of these has code of its own.
    kind = type(value).__name__
    if _is_json(value):
        return value
    if type(value) is list:
        return encode_all(value)
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    if type(value) is SEQUENCES.get(kind):
        return {kind: encode_all(value)}
    if type(value) is MAPPINGS.get(kind):
        return {kind: encode_all(list(pair) for pair in value.items())}
    if kind in TEXTS and type(value) is TEXTS[kind][0]:
        return {kind: TEXTS[kind][1](value)}
    return _encode_array(value) or refer(value)


def _is_json(value: Any) -> bool:
    """Whether JSON has such a value, and all who read JSON read it alike."""
    if type(value) is int:
        return abs(value) < 2**53
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, str)


def _encode_array(value: object) -> object:
    """Return an array or a number of numpy, encoded; None for anything else."""
    if "numpy" not in sys.modules:
        return None
    import numpy

    if type(value) is numpy.ndarray and value.dtype.kind in ARRAYS:
        items = value.ravel().tolist()
        shape = list(value.shape)
    elif type(value).__module__ == "numpy" and isinstance(value, numpy.generic):
        items = [value.item()]
        shape = None
    else:
        return None
    if value.dtype.kind not in ARRAYS:
        return None
    return {"array": [value.dtype.str, shape, encode(items, _refuse)]}


def _refuse(value: object) -> object:
    raise NotPlainError(f"an array holds {type(value).__name__}")


def decode(content: Any, resolve: Callable[[Any], object], depth: int = 0) -> Any:
    """Return a new value of what `encode` has returned.

    Args:
        content: of json.loads.
        resolve: returns the value that a reference stands for.
        depth: of `content` in what is decoded.

    Raises:
        ValueError, TypeError, KeyError: it is nothing that `encode` returns, or nested so deep that
            a value with it in it might not travel back.
    """
    if depth > MAX_DEPTH // 2:
        raise ValueError(f"a value is nested more than {MAX_DEPTH // 2} times")

    def decode_all(items: list) -> list:
        return [decode(item, resolve, depth + 1) for item in items]

    if isinstance(content, list):
        return decode_all(content)
    if not isinstance(content, dict):
        return content
    ((kind, inner),) = content.items()
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode_all(inner))
    if kind in MAPPINGS:
        return MAPPINGS[kind](dict(decode_all(inner)))
    if kind in TEXTS:
        return TEXTS[kind][2](inner)
    if kind == "range":
        return range(*inner)
    if kind == "array":
        return _decode_array(*inner)
    return resolve(content)


def _decode_array(dtype: str, shape: list[int] | None, items: list) -> Any:
    """Return an array or a number of numpy, which is imported where an answer has one only."""
    import numpy

    if numpy.dtype(dtype).kind not in ARRAYS:
        raise ValueError(f"an array of {dtype}")
    array = numpy.array(decode(items, _no_reference), dtype=dtype)
    return array[0] if shape is None else array.reshape(shape)


def _no_reference(content: Any) -> object:
    raise ValueError(f"an array holds {content}")
