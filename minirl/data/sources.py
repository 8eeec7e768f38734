"""Sources of rows: files, folders, data sets of the hub, and generators.

A source is a text, `PLACE` or `PLACE?option=value&...`, and PLACE is one of

    rows.jsonl, rows.json (a list, or JSON lines), rows.parquet, rows.csv (all values are texts; the
        first line has the names); all but Parquet also compressed: rows.jsonl.gz, rows.jsonl.zst
    a folder that `datasets` saved (save_to_disk) or can load, or a hub id; options `split` and
        `subset`
    reasoning_gym:NAME; options of that generator, `size` and `seed`

Every source has the options `weight`, its share of the training examples among several sources, and
`name`, what metrics call it. In YAML several sources are a list, with one on each line (or each in
quotes: a `?` has a meaning between brackets).

Rows are read when they are asked for: JSON lines from their place in the file, Parquet and what
`datasets` loads from memory-mapped Arrow files. So the ranks of a machine do not each hold a large
file's rows.
"""

import contextlib
import csv
import difflib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from minirl.base.errors import UserError, require
from minirl.base.reading import is_file, library_reads, parse_json
from minirl.config.named import GYM, check_source
from minirl.data.compressed import ENDINGS, decompressed
from minirl.data.json_lines import JsonLines
from minirl.parallel.machines import errors_of_machines
from minirl.parallel.mesh import Mesh

# `datasets` and reasoning-gym take a second each to import, and most runs read files of their own.
if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened source of rows."""

    label: str  # Setting and source, as an error message names them.
    name: str  # What metrics call it.
    weight: float | None  # Its share among several sources; None: by its size.
    is_generated: bool  # By reasoning-gym.
    rows: Sequence
    # They are of `datasets`: nested values have None for what other rows have there.
    is_arrow: bool

    def read(self, first: int, last: int) -> list:
        """Return the rows from `first` to before `last`, read at once."""
        if isinstance(self.rows, JsonLines):
            return self.rows.read(first, last)
        if self.is_arrow:
            columns: Any = self.rows[first:last]
            values = zip(*columns.values(), strict=True)
            return [dict(zip(columns, row, strict=True)) for row in values]
        return list(self.rows[first:last])

    def where(self, number: int) -> str:
        """Return the place of a row for an error message."""
        if isinstance(self.rows, JsonLines):
            return self.rows.where(number)
        return f"{self.label}: row {number + 1}"


def open_source(text: str, setting: str, mesh: Mesh | None = None) -> Source:
    """Open a source. Collective with a mesh.

    Args:
        text: the source.
        setting: names it in error messages.
        mesh: the ranks, which all open it; None: this process alone does.

    Raises:
        UserError: it is not there, or has no such option. A line that is no JSON raises one when it
            is read.
    """
    with errors_of_machines(mesh) if mesh else contextlib.nullcontext():
        source, lines = _open(text, setting)
    if lines:
        return replace(source, rows=JsonLines(lines, source.label, mesh))
    return source


def _open(text: str, setting: str) -> tuple[Source, Path | None]:
    """Open a source; return it, and the file of JSON lines whose rows it still lacks."""
    check_source(text, setting)
    label = f"{setting} = {text}"
    place, _, query = text.partition("?")
    path = Path(place)
    generator = place.removeprefix(GYM)
    is_generated = place.startswith(GYM)

    # 1. The options that every source has.
    weight = None
    try:
        options = dict(parse_qsl(query, strict_parsing=bool(query)))
        if "weight" in options:
            weight = float(options.pop("weight"))
            if not 0 < weight < math.inf:
                raise ValueError(f"weight = {weight} is not above 0 and finite")
    except ValueError as error:
        raise UserError(
            f"{label}: {error}; options are written ?name=value&name=value, and weight is a number "
            "above 0"
        ) from error
    plain = path.stem if path.suffix in ENDINGS else path.name  # Its name without `.gz`.
    name = options.pop("name", Path(plain).stem if is_file(path) else generator)

    # 2. Its rows.
    rows: Sequence | None
    is_arrow = False
    if is_generated:
        rows = _generate(generator, options, label)
    elif is_file(path):
        if options:
            raise UserError(
                f"{label}: a file has no option {next(iter(options))}; it has weight and name"
            )
        if path.suffix in ENDINGS:
            import datasets

            path = decompressed(path, Path(datasets.config.HF_DATASETS_CACHE), label)
        is_arrow = path.suffix == ".parquet"
        rows = _read_parquet(path, label) if is_arrow else _read_file(path, label)
    else:
        is_arrow = True
        rows = _load_dataset(path, options, label)
    source = Source(
        label=label,
        name=name,
        weight=weight,
        is_generated=is_generated,
        rows=() if rows is None else rows,
        is_arrow=is_arrow,
    )
    return source, path if rows is None else None


def _read_parquet(path: Path, label: str) -> "datasets.Dataset":
    import datasets
    from datasets.exceptions import DatasetsError
    from pyarrow.parquet import read_metadata

    datasets.disable_progress_bars()
    try:
        # Without rows `datasets` says no more than that an error occurred.
        require(read_metadata(path).num_rows, f"{label}: no rows")
        return datasets.Dataset.from_parquet(str(path))
    except (DatasetsError, OSError, ValueError) as error:
        raise UserError(
            f"{label}: not a good .parquet file: {error}; mend or replace it"
        ) from error


def _read_file(path: Path, label: str) -> Sequence | None:
    """Open a file of rows; None: it is one of JSON lines, which the ranks read together."""
    try:
        if path.suffix == ".csv":
            csv.field_size_limit(sys.maxsize)
            with path.open(newline="", encoding="utf-8-sig") as file:
                table = csv.DictReader(file, strict=True)
                rows = list(table)
                names = table.fieldnames or []
            require(
                len(set(names)) == len(names),
                f"{label}: the first line has a name twice ({', '.join(names)}); rename one",
            )
            require(
                not any(None in row or None in row.values() for row in rows),
                f"{label}: a row has more or fewer values than the first line has names",
            )
            return rows
        if path.suffix == ".json":
            text = path.read_text(encoding="utf-8-sig").lstrip()
            if text.startswith("["):
                return parse_json(text)
    except (csv.Error, OSError, ValueError) as error:
        raise UserError(
            f"{label}: not a good {path.suffix} file: {error}; mend or replace it"
        ) from error
    return None


def _load_dataset(path: Path, options: dict[str, str], label: str) -> "datasets.Dataset":
    import datasets

    datasets.disable_progress_bars()
    split = options.pop("split", None)
    subset = options.pop("subset", None)
    if options:
        raise UserError(
            f"{label}: a data set has no option {min(options)}; it has split, subset, weight and "
            "name"
        )
    is_saved = any(is_file(path / name) for name in ("state.json", "dataset_dict.json"))
    try:
        with library_reads(label):
            if is_saved:
                loaded = datasets.load_from_disk(str(path))
            else:
                loaded = datasets.load_dataset(str(path), subset, split=split)
    except UserError as error:
        raise UserError(
            f"{label}: no file or folder of that name, and no data set that can be loaded: {error}"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = dict(loaded)
    else:  # a saved data set, which has no splits, or the split that was asked for
        splits = {"" if is_saved else split: loaded}
    if split is None and len(splits) == 1:
        (split,) = splits
    require(
        split in splits and not (is_saved and subset),
        f"{label}: its splits are {', '.join(splits) or 'none'}; name one by ?split=NAME "
        "(a saved folder has no subset, and one of a single data set no split)",
    )
    return splits[split]


def _generate(name: str, options: dict[str, str], label: str) -> list[dict]:
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"{label}: reasoning-gym has no {name!r}{hint}")
    try:
        values = {key: option(value) for key, value in options.items()}
        entries = create_dataset(name, **({"size": 1000, "seed": 1} | values))
        return [entry | {"prompt": entry["question"]} for entry in entries]
    # What generators raise for options that do not go together.
    except (TypeError, ValueError, AssertionError, ArithmeticError, LookupError) as error:
        raise UserError(f"{label}: {type(error).__name__}: {error}; correct its options") from error


def option(value: str) -> Any:
    """Return the value of an option: a number, a list, true, false, or else a text.

    A generator that wants no text raises its own error.
    """
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
