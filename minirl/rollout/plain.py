"""Plain values of an environment as JSON, for a checkpoint that runs no code when it is read.

A pickle may name any function, which is called when it is read. Here the file has values only.
What is no value (functions, patterns, objects) is taken from a new environment, which the run's own
settings make, and the values are put into it:

    saved = PlainWriter({}).write(vars(env))
    vars(new_env).update(PlainReader({}).read(saved, vars(new_env)))
"""

import base64
import collections
import functools
import random
import re
import types
from typing import Any

import numpy as np

SCALARS = (type(None), bool, int, float, str)
# Without a state of their own: a new environment has the same ones.
STATELESS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    functools.partial,
    re.Pattern,
    type,
)
SEQUENCES: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
NAME_OF = {cls: name for name, cls in SEQUENCES.items()}
BIT_GENERATORS = {
    cls.__name__: cls for cls in (np.random.PCG64, np.random.MT19937, np.random.Philox)
}


class NotPlain(Exception):
    """A value that cannot be saved, or not be put back."""


class PlainWriter:
    """Makes JSON of values. What is there twice is written once, so that it stays one object.

    Args:
        known: objects that the reader will have, by name.
    """

    def __init__(self, known: dict[str, Any]):
        self._names = {
            id(value): name for name, value in known.items() if type(value) not in SCALARS
        }
        self._known = known  # Held, so that no other object gets their ids.
        self._numbers: dict[int, int] = {}
        self._seen: list[Any] = []

    def write(self, value: Any) -> Any:
        """Return what `PlainReader.read` takes. Raises NotPlain."""
        cls = type(value)
        if cls in SCALARS:
            return value
        if id(value) in self._names:
            return {"known": self._names[id(value)]}
        if isinstance(value, STATELESS):
            return {"new": None}
        if id(value) in self._numbers:
            return {"same": self._numbers[id(value)]}
        self._numbers[id(value)] = len(self._seen)
        self._seen.append(value)
        if cls is dict:
            return {"dict": [[self.write(k), self.write(v)] for k, v in value.items()]}
        if cls is collections.deque and value.maxlen is not None:
            raise NotPlain("a deque with a maximum length")
        if cls in NAME_OF:
            return {NAME_OF[cls]: [self.write(item) for item in value]}
        if cls in (bytes, bytearray):
            return {cls.__name__: base64.b64encode(value).decode()}
        if isinstance(value, np.ndarray | np.generic):
            return self._write_array(value)
        if cls is random.Random:
            version, state, gauss = value.getstate()
            return {"random": [version, list(state), gauss]}
        if cls is np.random.Generator:
            return {"generator": self.write(value.bit_generator.state)}
        return self._write_object(value)

    def _write_array(self, value: np.ndarray | np.generic) -> dict:
        if value.dtype.hasobject or type(value) is not np.ndarray and value.ndim:
            raise NotPlain("an array of objects")
        kind = "array" if isinstance(value, np.ndarray) else "number"
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {kind: [value.dtype.str, list(value.shape), data]}

    def _write_object(self, value: Any) -> dict:
        """Return the attributes of an object whose class does nothing of its own with them."""
        cls = type(value)
        is_plain = (
            hasattr(value, "__dict__")
            and cls.__new__ is object.__new__
            and cls.__reduce_ex__ is object.__reduce_ex__
            and cls.__getstate__ is object.__getstate__
            and "__setstate__" not in dir(cls)
            and all("__slots__" not in vars(base) for base in cls.__mro__)
            and cls.__module__ != "builtins"
        )
        if not is_plain:
            raise NotPlain(f"a {cls.__qualname__}")
        fields = [[name, self.write(attribute)] for name, attribute in vars(value).items()]
        return {"object": [cls.__qualname__, fields]}


class PlainReader:
    """Makes values of JSON again.

    Args:
        known: as the writer had it.
        classes: those of which a value may be a new object, by their qualified names.
    """

    def __init__(self, known: dict[str, Any], classes: dict[str, type] | None = None):
        self.known = known
        self.classes = classes or {}
        self._seen: list[Any] = []

    def read(self, saved: Any, new: Any = None) -> Any:
        """Return the value that was written.

        Args:
            saved: what `PlainWriter.write` returned.
            new: what stands in its place in a new environment.

        Raises:
            NotPlain: the new environment lacks what is to be taken from it.
            KeyError, TypeError, ValueError, IndexError: it is not what was written.
        """
        if type(saved) in SCALARS:
            return saved
        ((kind, content),) = saved.items()
        if kind == "known":
            return self.known[content]
        if kind == "new":
            if not isinstance(new, STATELESS):
                raise NotPlain("something that a new environment has not")
            return new
        if kind == "same":
            return self._seen[content]
        number = len(self._seen)
        self._seen.append(None)
        if kind == "object":
            name, fields = content
            return self._read_object(number, name, fields, new)
        if kind == "dict":
            return self._read_dict(number, content, new)
        if kind in ("list", "deque"):
            return self._read_list(number, kind, content, new)
        value = self._read_leaf(kind, content)
        self._seen[number] = value
        return value

    def _read_dict(self, number: int, pairs: list, new: Any) -> dict:
        value: dict = {}
        self._seen[number] = value
        of_new = new if type(new) is dict else {}
        for saved_key, saved_item in pairs:
            key = self.read(saved_key)
            value[key] = self.read(saved_item, of_new.get(key))
        return value

    def _read_list(self, number: int, kind: str, items: list, new: Any) -> Any:
        value = SEQUENCES[kind]()
        self._seen[number] = value
        of_new = list(new) if isinstance(new, list | collections.deque) else []
        for place, item in enumerate(items):
            value.append(self.read(item, of_new[place] if place < len(of_new) else None))
        return value

    def _read_object(self, number: int, name: str, fields: list, new: Any) -> Any:
        if type(new).__qualname__ == name:
            value = new
        elif name in self.classes:
            value = object.__new__(self.classes[name])
        else:
            raise NotPlain(f"a {name}")
        self._seen[number] = value
        attributes = {}
        for attribute, saved in fields:
            attributes[attribute] = self.read(saved, vars(value).get(attribute))
        vars(value).clear()
        vars(value).update(attributes)
        return value

    def _read_leaf(self, kind: str, content: Any) -> Any:
        if kind in SEQUENCES:  # those that do not change once they are made
            return SEQUENCES[kind](self.read(item) for item in content)
        if kind == "bytes":
            return base64.b64decode(content)
        if kind == "bytearray":
            return bytearray(base64.b64decode(content))
        if kind in ("array", "number"):
            dtype, shape, data = content
            array = np.frombuffer(bytearray(base64.b64decode(data)), np.dtype(dtype)).reshape(shape)
            return array if kind == "array" else array[()]
        if kind == "random":
            version, state, gauss = content
            generator = random.Random()
            generator.setstate((version, tuple(state), gauss))
            return generator
        if kind == "generator":
            state = self.read(content)
            bits = BIT_GENERATORS[state["bit_generator"]]()
            bits.state = state
            return np.random.Generator(bits)
        raise ValueError(f"{kind!r} is no kind of value")
