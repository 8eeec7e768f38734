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

Rows are read when they are asked for, so that the ranks of a machine do not each hold a large
file's rows: Parquet and what `datasets` loads from memory-mapped Arrow files, JSON lines from their
place in the file. The JSON reader of `datasets` would take these, too. But it copies the file into
its cache, gives no line of an error, and changes values: a date in a text becomes a datetime, a
large integer a float; before version 5 it gives objects a None for each key that others have.
"""

import contextlib
import csv
import dataclasses
import difflib
import hashlib
import io
import math
import os
import shutil
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import numpy as np

from minirl.base.errors import UserError, require
from minirl.base.reading import is_file, library_reads, parse_json
from minirl.config.shared import RowsConfig
from minirl.config.validate import GYM, check_source
from minirl.config.values import read_word
from minirl.data.rows import MakeRow, Rows
from minirl.parallel.machines import check_same, errors_of_all
from minirl.parallel.mesh import World

# `datasets` and reasoning-gym take a second each to import, and most runs read JSON lines.
if TYPE_CHECKING:
    import datasets

COMPRESSIONS = (".gz", ".zst")  # Endings of files, by which pyarrow knows them.
BLOCK_BYTES = 2**20  # Of a compressed file, read at once.


class JsonLines(Sequence):
    """The lines of a file that are not blank, parsed when they are asked for.

    Memory holds 8 bytes a line.
    """

    def __init__(self, file: io.BufferedReader, label: str, mesh: World | None = None):
        """Find the lines of the file. Collective with a mesh: each rank reads its share.

        Args:
            file: the open file.
            label: begins an error message.
            mesh: the ranks; None: this process alone reads the file.

        Raises:
            UserError: the ranks see files of different sizes.
        """
        self.file = file
        self.label = label
        self.size = os.fstat(file.fileno()).st_size
        rank, world_size = (mesh.rank, mesh.world_size) if mesh else (0, 1)
        if mesh:
            sizes = mesh.gather(self.size)
            require(
                len(set(sizes)) == 1,
                f"{label}: the ranks see files of {min(sizes)} to {max(sizes)} bytes; give all "
                "machines the same file",
            )
        # A rank finds the lines that begin in its share of the bytes.
        first = self.size * rank // world_size
        last = self.size * (rank + 1) // world_size
        place = max(first - 1, 0)
        file.seek(place)
        if first:
            place += len(file.readline())
        found = array("q")
        for line in file:
            if place >= last:
                break
            if not line.isspace():
                found.append(place)
            place += len(line)
        starts = np.frombuffer(found, np.int64)
        # int64 [N]: the first byte of each line that is not blank.
        self.starts = mesh.gather_array(starts) if mesh else starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Any:  # type: ignore[override]  # takes no slices
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.read(i, i + 1)[0]

    def read(self, first: int, last: int) -> list:
        """Return the lines from `first` to before `last`, read at once and parsed.

        Raises:
            UserError: a line is not JSON.
        """
        begin = int(self.starts[first])
        end = int(self.starts[last]) if last < len(self) else self.size
        block = b""
        while piece := os.pread(self.file.fileno(), end - begin - len(block), begin + len(block)):
            block += piece  # Linux reads 2 GiB at once.
        rows = []
        for line in io.BytesIO(block):
            if line.isspace():
                continue
            try:
                rows.append(parse_json(line.decode()))
            except ValueError as error:
                wanted = "UTF-8 text" if isinstance(error, UnicodeDecodeError) else "JSON"
                raise UserError(
                    f"{self.where(first + len(rows))} is not {wanted}: {error}; correct or remove "
                    "the line"
                ) from error
        return rows

    def where(self, i: int) -> str:
        """Return the place of a line for an error message: its number in the file, from 1."""
        number = 1
        place = 0
        self.file.seek(0)
        for line in self.file:
            if place >= self.starts[i]:
                break
            place += len(line)
            number += 1
        return f"{self.label}: line {number}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened source of rows."""

    label: str  # Setting and source, as an error message names them.
    name: str  # What metrics call it.
    weight: float | None  # Its share among several sources; None: by its size.
    is_generated: bool  # By reasoning-gym.
    rows: Sequence
    is_named: bool = False  # The user has chosen the name.

    @property
    def is_arrow(self) -> bool:
        """Return whether nested values may have None for what other rows have there.

        In what `datasets` loads, some versions of it put that there.
        """
        return not isinstance(self.rows, list | JsonLines)

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


def open_source(text: str, setting: str, mesh: World | None = None) -> Source:
    """Open a source. Collective with a mesh.

    Args:
        text: the source.
        setting: names it in error messages.
        mesh: the ranks, which all open it; None: this process alone does.

    Raises:
        UserError: it is not there, or has no such option. A line that is no JSON raises one when it
            is read.
    """
    label = f"{setting} = {text}"
    place, _, query = text.partition("?")
    path = Path(place)
    generator = place.removeprefix(GYM)
    is_generated = place.startswith(GYM)
    with errors_of_all(mesh, same_everywhere=True) if mesh else contextlib.nullcontext():
        check_source(text, setting)
        options, weight = _read_options(query, label)
        name = options.pop("name", "")
        if is_generated:
            rows: Sequence | io.BufferedReader = _generate(generator, options, label)
            default_name = generator
        elif is_file(path):
            require(
                not options,
                f"{label}: a file has no option {min(options, default='')}; it has weight and name",
            )
            default_name = path.stem
            if path.suffix in COMPRESSIONS:
                default_name = Path(path.stem).stem
                path = decompressed(path, label)
            rows = _read_file(path, label)
        else:
            rows = _load_dataset(path, options, label)
            default_name = place
    return Source(
        label=label,
        name=name or default_name,
        is_named=bool(name),
        weight=weight,
        is_generated=is_generated,
        rows=JsonLines(rows, label, mesh) if isinstance(rows, io.BufferedReader) else rows,
    )


def open_rows(
    source: str | list[str],
    setting: str,
    make_row: MakeRow,
    cfg: RowsConfig,
    mesh: World,
    *,
    distinct: bool = False,
    env_prompts: bool = False,
) -> Rows:
    """Return the rows of one or several sources, end to end. Collective. `read_rows` checks them.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: what asks for them, `data.train` or `data.eval`, for error messages.
        make_row: makes a row of what its source holds.
        cfg: has data.max_samples (only so many rows of each source, its first; 0: all) and the
            names of the columns.
        mesh: the ranks.
        distinct: of equal rows only the first is to be used.
        env_prompts: an environment may make the prompts of the rows.

    Raises:
        UserError: a source cannot be read or has no rows, or only some of the sources have weights.
    """
    texts = [source] if isinstance(source, str) else source
    sources = [open_source(text, setting, mesh) for text in texts]
    times = Counter(opened.name for opened in sources)
    for place, (opened, text) in enumerate(zip(sources, texts, strict=True)):
        if times[opened.name] > 1 and not opened.is_named:  # gsm8k/test.jsonl, math/test.jsonl
            sources[place] = dataclasses.replace(opened, name=text)
    weighted = [opened for opened in sources if opened.weight is not None]
    if weighted and (setting == "data.eval" or len(weighted) < len(sources)):
        raise UserError(
            f"{weighted[0].label}: give a weight to every source of data.train or to none "
            "(held-out rows are all used once, without weights)"
        )
    same: dict[str, object] = {f"the number of rows of {s.label}": len(s.rows) for s in sources}
    for opened, text in zip(sources, texts, strict=True):
        file = text.partition("?")[0]
        if os.path.isfile(file):
            same[f"the size of {opened.label}"] = f"{os.path.getsize(file)} bytes"
    check_same(same, mesh)
    dtype = np.min_scalar_type(sum(len(s.rows) for s in sources))  # 4 bytes up to 2**32 rows
    parts = []
    first = 0
    for opened in sources:
        size = len(opened.rows)
        require(size, f"{opened.label}: no rows")
        parts.append(np.arange(first, first + min(size, cfg.max_samples or size), dtype=dtype))
        first += size
    numbers = np.concatenate(parts)

    values = dataclasses.asdict(cfg)
    named = {}
    for option in dataclasses.fields(cfg):
        key = values[option.name]
        if option.name.endswith("_key") and key and key != option.default:
            named[f"data.{option.name}"] = key
    return Rows(
        sources,
        make_row,
        distinct,
        numbers,
        marks=np.zeros(len(numbers), np.uint8),
        named=named,
        missing=set(named),
        env_prompts=env_prompts,
    )


def _read_options(query: str, label: str) -> tuple[dict[str, str], float | None]:
    """Return the options of a source, and its weight, which is none of them, if it has one."""
    weight = None
    try:
        # A plus is no space here: ?split=train+test.
        options = dict(parse_qsl(query.replace("+", "%2B"), strict_parsing=bool(query)))
        if "weight" in options:
            weight = float(options.pop("weight"))
            if not 0 < weight < math.inf:
                raise ValueError(f"weight = {weight} is not above 0 and finite")
    except ValueError as error:
        raise UserError(
            f"{label}: {error}; options are written ?name=value&name=value, and weight is a number "
            "above 0"
        ) from error
    return options, weight


def decompressed(path: Path, label: str) -> Path:
    """Return the decompressed copy of a file; its name ends as that of the file without `.gz`.

    A row is read from its place in a file, which a compressed file cannot be asked for. The first
    process to ask makes the copy, and the others on the machine wait. A file that has changed, by
    its size or time, is another file.

    Args:
        path: a file with one of the endings of COMPRESSIONS.
        label: begins an error message.

    Raises:
        UserError: it is damaged or cut off, or the cache of `datasets` has no room.
    """
    import datasets
    import filelock
    import pyarrow

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "minirl"
    try:
        status = path.stat()
        key = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        copy = folder / f"{name}{Path(path.stem).suffix}"
        partial = folder / f"{name}.partial"
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / f"{name}.lock"):
            if not copy.exists():
                try:
                    with pyarrow.input_stream(str(path)) as content, partial.open("wb") as file:
                        shutil.copyfileobj(content, file, BLOCK_BYTES)
                    partial.replace(copy)
                finally:
                    partial.unlink(missing_ok=True)  # it is there if something failed
    except OSError as error:
        raise UserError(
            f"{label}: not a good {path.suffix} file, or no room in {folder}: {error}; download or "
            "compress it again, or set HF_DATASETS_CACHE to another folder"
        ) from error
    return copy


def _read_file(path: Path, label: str) -> Sequence | io.BufferedReader:
    """Open a file of rows; one of JSON lines is returned open, for the ranks to read together."""
    if path.suffix == ".parquet":
        import datasets
        from pyarrow.parquet import read_metadata

        datasets.disable_progress_bars()
        with library_reads(label):
            # Without rows `datasets` says no more than that an error occurred.
            require(read_metadata(path).num_rows, f"{label}: no rows")
            return datasets.Dataset.from_parquet(str(path))
    try:
        if path.suffix == ".csv":
            csv.field_size_limit(sys.maxsize)
            with path.open(newline="", encoding="utf-8-sig") as file:
                table = csv.DictReader(file, strict=True)
                rows = list(table)
                names = table.fieldnames or []
            is_even = not any(None in row or None in row.values() for row in rows)
            require(
                is_even and len(set(names)) == len(names),
                f"{label}: each row must have as many values as the first line has names, each of "
                f"them once ({', '.join(names)}); correct the file",
            )
            return rows
        if path.suffix == ".json":
            text = path.read_text(encoding="utf-8-sig").lstrip()
            if text.startswith("["):
                return parse_json(text)
        return path.open("rb")
    except (csv.Error, OSError, ValueError) as error:
        raise UserError(
            f"{label}: not a good {path.suffix} file: {error}; correct or replace it"
        ) from error


def _load_dataset(path: Path, options: dict[str, str], label: str) -> "datasets.Dataset":
    import datasets

    datasets.disable_progress_bars()
    split = options.pop("split", None)
    subset = options.pop("subset", None)
    require(
        not options,
        f"{label}: a data set has no option {min(options, default='')}; it has split, subset, "
        "weight and name",
    )
    is_saved = any(is_file(path / name) for name in ("state.json", "dataset_dict.json"))
    with library_reads(f"{label}: no file of rows, and as a data set it"):
        if is_saved:
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), subset, split=split)
    if isinstance(loaded, datasets.DatasetDict):
        splits = dict(loaded)
    else:  # a saved data set, which has no splits, or the split that was asked for
        splits = {"" if is_saved else split: loaded}
    kinds = {loaded.builder_name for loaded in splits.values()}
    require(
        is_saved or kinds != {"csv"} or not path.is_dir(),
        f"{label}: of CSV files in a folder `datasets` makes numbers, 7 of 007; name the files",
    )
    if split is None and len(splits) == 1:
        (split,) = splits
    require(
        split in splits and not (is_saved and subset),
        f"{label}: its splits are {', '.join(splits) or 'none'}; name one by ?split=NAME "
        "(a saved folder has no subset, and one of a single data set no split)",
    )
    # Without the form that a saved one remembers (`set_format`): tensors, or some columns alone.
    return splits[split].with_format(None)


def _generate(name: str, options: dict[str, str], label: str) -> list[dict]:
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"{label}: reasoning-gym has no {name!r}{hint}")
    try:
        values = {key: read_word(value) for key, value in options.items()}
        entries = create_dataset(name, **({"size": 1000, "seed": 1} | values))
        return [entry | {"prompt": entry["question"]} for entry in entries]
    # What generators raise for options that do not go together.
    except (TypeError, ValueError, AssertionError, ArithmeticError, LookupError) as error:
        raise UserError(f"{label}: {type(error).__name__}: {error}; correct its options") from error
