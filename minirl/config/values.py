"""How values are written: in YAML files, as words of flags, and in `NAME?option=value`."""

import json
import re
from typing import Any
from urllib.parse import parse_qsl

import yaml

from minirl.base.errors import UserError

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
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
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

# What the library raises for values that their tags do not allow (a 13th month, a number of 5,000
# digits, !!bool maybe) and for brackets that are nested too deep.
_BAD_VALUE = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def parse_yaml(text: str, where: str) -> Any:
    """Return the values of a YAML text; {} of an empty one.

    Args:
        text: one document.
        where: begins an error message.

    Raises:
        UserError: it is not valid, or a mapping has a key twice.
    """
    try:
        values = yaml.load(text, _Loader)
    except _BAD_VALUE as error:
        problem = str(error)
        if not isinstance(error, yaml.YAMLError):
            problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{where}: not valid YAML: {problem[:1000]}; correct it there") from error
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


def write_word(value: Any) -> str:
    """Return a word that `read_word` reads back equal."""
    is_plain_text = isinstance(value, str) and read_word(value) == value
    return value if is_plain_text else json.dumps(value, ensure_ascii=False)


def read_options(query: str) -> dict[str, Any]:
    """Return the values of `name=value&name=value`. Raises ValueError if it is not of this form."""
    return {name: read_word(word) for name, word in parse_qsl(query, strict_parsing=bool(query))}
