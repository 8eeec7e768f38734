"""What a setting that is a number may be, and how values are written.

No number is infinite or not a number, no count is larger than a library can hold; `parse.py` makes
the error message of a value that its type refuses. Values are written in YAML files, as words of
flags, and in `NAME?option=value`.
"""

import datetime
import json
import re
from pathlib import PurePath
from typing import Annotated, Any
from urllib.parse import parse_qsl

import yaml
from pydantic import Field

from minirl.base.errors import UserError, require

LARGEST = 2**31 - 1  # Of what is counted: libraries keep such numbers in 32 bits.

NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Port = Annotated[int, Field(ge=0, le=65535)]
MaxTokens = Annotated[int, Field(ge=2, le=LARGEST)]  # A token and the next one.
TopK = Annotated[int, Field(ge=-1, le=LARGEST)]  # -1 and 0: all tokens.
Size = Annotated[int, Field(gt=0, le=2**16)]  # Of a model that is made from nothing.
EvenSize = Annotated[int, Field(gt=0, le=2**16, multiple_of=2)]  # Rotary positions turn pairs.
Retries = Annotated[int, Field(ge=0, le=20)]  # The pause doubles with each.

Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Epochs = Annotated[float, Field(gt=0, le=1e6)]
OptionalEpochs = Annotated[float, Field(ge=0, le=1e6)]  # 0: something else says how long.
# What timers of the operating system can hold; a limit of no time at all would end everything.
Seconds = Annotated[float, Field(ge=1e-3, le=1e7)]
Pause = Annotated[float, Field(ge=0, le=3600)]  # Seconds.
Minutes = Annotated[float, Field(ge=0.01, le=1e6)]
Gigabytes = Annotated[float, Field(ge=0, le=1e6)]

# The words for true and false, of YAML and of flags.
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, which YAML 1.1 takes for a text, and refuses a key that comes twice.

    The plain loader would take the last of such keys.
    """

    # The library's types say that an anchor is a dict; it is a name.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the mapping that begins here, if its keys differ."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"the key {key.value!r} is there twice; remove one", key.start_mark
                )
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Writes the text 1e-4 with quotes, because the loader would read a number."""


yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d[\d.]*[eE][-+]?\d+$"),
    list("-+0123456789"),
    Loader=_Loader,
    Dumper=_Dumper,
)
# Of settings of a user's own config.
yaml.add_multi_representer(
    PurePath, lambda dumper, path: dumper.represent_str(str(path)), Dumper=_Dumper
)

# What the library raises for a text, and for values that their tags do not allow (a 13th month, a
# number of 5,000 digits, !!bool maybe).
_BAD_TEXT = (yaml.YAMLError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
MOST_VALUES = 10_000  # Aliases can make more of a few lines than a memory holds.


def parse_yaml(text: str, where: str) -> Any:
    """Return the values of a YAML text; {} of an empty one.

    Args:
        text: one document.
        where: begins an error message.

    Raises:
        UserError: it is not valid, or a mapping has a key twice or one that is no plain word; or
            it stands for more than MOST_VALUES values.
    """
    try:
        values = yaml.load(text, _Loader)
    except _BAD_TEXT as error:
        kind = "" if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: "
        problem = f"not valid YAML: {kind}{str(error)[:1000]}"
        raise UserError(f"{where}: {problem}; correct it there") from error
    # An alias inside of what it names makes values without an end.
    waiting = [values]
    num_values = 0
    while waiting:
        value = waiting.pop()
        num_values += 1
        require(
            num_values <= MOST_VALUES,
            f"{where}: more than {MOST_VALUES} values; write the settings out, without aliases "
            "(*name) that repeat one another",
        )
        if isinstance(value, dict):
            for key in value:
                require(not isinstance(key, datetime.date), f"{where}: unknown setting {key}")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return {} if values is None else values


def to_yaml(values: dict) -> str:
    """Return a YAML text that `parse_yaml` reads back equal."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def read_word(word: str) -> Any:
    """Return what a word stands for: a boolean, JSON (a number, a list, ...), or itself."""
    if word.lower() in BOOLEANS:
        return BOOLEANS[word.lower()]
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def read_options(query: str) -> dict[str, Any]:
    """Return the values of `name=value&name=value`. Raises ValueError if it is not of this form."""
    return {name: read_word(word) for name, word in parse_qsl(query, strict_parsing=bool(query))}
