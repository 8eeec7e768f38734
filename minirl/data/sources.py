"""Where rows come from. A source is a text, `PLACE` or `PLACE?option=value&...`, and PLACE is one
of

    rows.jsonl, rows.json (a list, or JSON lines), rows.parquet, rows.csv (all texts; the first line
    has the names) a folder that `datasets` saved (save_to_disk) or can load, or a hub id; options
    `split` and `subset`
    reasoning_gym:NAME; options of that generator, `size` and `seed`

Options of every source: `weight`, its share of the training examples among several sources; `name`,
what metrics call it. In YAML several are a list, with one on each line (or each in quotes: a `?`
has a meaning between brackets).

Rows are read when they are asked for: JSON lines from their place in the file, Parquet and what
`datasets` loads from memory-mapped Arrow files. So the ranks of a machine do not each hold a large
file's rows.
"""

import csv
import difflib
import json
import os
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

import datasets
import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS

from minirl.errors import UserError, require

GYM = "reasoning_gym:"
datasets.disable_progress_bars()


@dataclass(frozen=True, kw_only=True)
class Source:
    shown: str  # Setting and source, as an error message says them.
    name: str
    weight: float | None
    rows: Sequence

    def where(self, number: int) -> str:
        """The place of a row in error messages."""
        return (
            f"{self.shown}: line {self.rows.lines[number, 2]}"
            if isinstance(self.rows, JsonLines)
            else f"{self.shown}: row {number + 1}"
        )


def open_source(text: str, setting: str) -> Source:
    """Raises UserError for what is not there or has no such option; a line that is not JSON is told
    when it is read.
    """
    shown = f"{setting} = {text}"
    place, _, query = text.partition("?")
    path = Path(place)
    try:
        options = dict(parse_qsl(query, strict_parsing=bool(query)))
        weight = float(options.pop("weight")) if "weight" in options else None
        if weight is not None and not 0 < weight < float("inf"):
            raise ValueError(f"weight = {weight} is not above 0 and finite")
    except ValueError as error:
        raise UserError(
            f"{shown}: {error}; options are written ?name=value&name=value, and weight is a number above 0"
        ) from error
    name = options.pop("name", path.stem if path.is_file() else place.removeprefix(GYM))
    if place.startswith(GYM):
        rows = _generate(place.removeprefix(GYM), options, shown)
    elif path.is_file():
        if options:
            raise UserError(
                f"{shown}: a file has no option {next(iter(options))}; it has weight and name"
            )
        rows = _read_file(path, shown)
    elif (
        place
        and path.is_dir()
        or re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", place)
        and path.suffix not in (".jsonl", ".json", ".parquet", ".csv")
    ):
        rows = _load_dataset(path, options, shown)
    else:
        raise UserError(
            f"{setting} = {text!r}: no such file; give a JSONL, JSON, Parquet or CSV file, a folder or hub id of datasets or {GYM}NAME"
        )
    return Source(shown=shown, name=name, weight=weight, rows=rows)


class JsonLines(Sequence):
    """The lines of a file that are not blank, parsed when asked for."""

    def __init__(self, path: Path, shown: str):
        self.file, self.shown = path.open("rb"), shown
        found, at = array("q"), 0
        for number, line in enumerate(
            self.file, start=1
        ):  # of bytes: cut at line feeds only, not at the separators that texts may hold
            if line.strip():
                found.extend((at, len(line), number))
            at += len(line)
        self.lines = np.array(found, np.int64).reshape(
            -1, 3
        )  # int64 [N, 3]: first byte, bytes and number of each.

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> object:
        at, length, number = self.lines[i].tolist()
        try:
            return json.loads(os.pread(self.file.fileno(), length, at).decode())
        except ValueError as error:
            wanted = "UTF-8 text" if isinstance(error, UnicodeDecodeError) else "JSON"
            raise UserError(f"{self.shown}: line {number} is not {wanted}: {error}") from error


def _read_file(path: Path, shown: str) -> Sequence:
    try:
        if path.suffix == ".parquet":
            return datasets.Dataset.from_parquet(str(path))
        if path.suffix == ".csv":
            csv.field_size_limit(sys.maxsize)
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.DictReader(file, strict=True))
            require(
                not any(None in row or None in row.values() for row in rows),
                f"{shown}: a row has not as many values as the first line has names",
            )
            return rows
        if (
            path.suffix == ".json"
            and (text := path.read_text(encoding="utf-8").lstrip())[:1] == "["
        ):
            return json.loads(text)
    except (datasets.exceptions.DatasetsError, csv.Error, ValueError) as error:
        raise UserError(f"{shown}: not a good {path.suffix} file: {error}") from error
    return JsonLines(path, shown)


def _load_dataset(path: Path, options: dict[str, str], shown: str) -> datasets.Dataset:
    if unknown := options.keys() - {"split", "subset"}:
        raise UserError(
            f"{shown}: a data set has no option {min(unknown)}; it has split, subset, weight and name"
        )
    saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        found = (
            datasets.load_from_disk(str(path))
            if saved
            else datasets.load_dataset(str(path), options.get("subset"), split=options.get("split"))
        )
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise UserError(
            f"{shown}: neither a file or folder here nor a data set that can be had: {error}"
        ) from error
    splits = (
        found
        if isinstance(found, datasets.DatasetDict)
        else {"" if saved else options["split"]: found}
    )
    split = options.get("split", next(iter(splits)) if len(splits) == 1 else None)
    require(
        split in splits and not (saved and "subset" in options),
        f"{shown}: its splits are {', '.join(splits) or 'none'}; name one by ?split=NAME "
        "(a saved folder has no subset, and one of a single data set no split)",
    )
    return splits[split]


def _generate(name: str, options: dict[str, str], shown: str) -> list[dict]:
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        raise UserError(
            f"{shown}: reasoning-gym has no {name!r}"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    try:
        given = {key: option(value) for key, value in options.items()}
        entries = list(reasoning_gym.create_dataset(name, **{"size": 1000, "seed": 1, **given}))
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{shown}: {error}") from error
    return [{**entry, "prompt": entry["question"]} for entry in entries]


def option(value: str) -> object:
    """A number, a list, true or false; anything else is a text, and the generator says if it wants
    none.
    """
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
