"""Rows opened and read once, and divided into those to train on and the held-out ones."""

import dataclasses
import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from minirl.base.errors import UserError, require
from minirl.base.log import say
from minirl.config.shared import RowsConfig
from minirl.data.rows import MakeRow, Rows
from minirl.data.sources import open_source
from minirl.parallel.machines import check_same, errors_of_all
from minirl.parallel.mesh import Mesh

# What stands for a row: 8 bytes for its prompt, and 8 for all of it. Numbers that compare as the
# bytes do.
DIGEST = np.dtype([("prompt", ">u8"), ("row", ">u8")])
DIGEST_BYTES = DIGEST.itemsize
NUM_PARTS = 64  # Digests are sorted in so many parts; a power of 2.
ENCODER = json.JSONEncoder()  # as json.dumps has it
# mark(row): bits that say what a program wants to know of a row, 0 to 255.
Mark = Callable[[dict], int]
# Rows that are held out where data.held_out is not set; of fewer than twice so many an eighth.
HELD_OUT = 128
HELD_OUT_SHARE = 8


def open_rows(
    source: str | list[str],
    setting: str,
    make_row: MakeRow,
    cfg: RowsConfig,
    mesh: Mesh,
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
    weighted = [opened for opened in sources if opened.weight is not None]
    if weighted and (setting == "data.eval" or len(weighted) < len(sources)):
        raise UserError(
            f"{weighted[0].label}: give a weight to every source of data.train or to none "
            "(held-out rows are all used once, without weights)"
        )
    sizes = [len(opened.rows) for opened in sources]
    labels = [f"the number of rows of {opened.label}" for opened in sources]
    check_same(dict(zip(labels, sizes, strict=True)), mesh)
    dtype = np.min_scalar_type(sum(sizes))  # 4 bytes a row, up to four thousand million of them
    numbers = []
    first_number = 0
    for opened, size in zip(sources, sizes, strict=True):
        require(size, f"{opened.label}: no rows")
        last = first_number + min(size, cfg.max_samples or size)
        numbers.append(np.arange(first_number, last, dtype=dtype))
        first_number += size
    all_numbers = np.concatenate(numbers)

    values = dataclasses.asdict(cfg)
    named = {}
    for option in dataclasses.fields(cfg):
        if option.name.endswith("_key") and values[option.name] != option.default:
            named[f"data.{option.name}"] = values[option.name]
    return Rows(
        sources,
        make_row,
        distinct,
        all_numbers,
        marks=np.zeros(len(all_numbers), np.uint8),
        named=named,
        missing=set(named),
        env_prompts=env_prompts,
    )


def read_rows(
    rows: Rows, mesh: Mesh, seed: int, held_out: int | None = 0, mark: Mark = lambda row: 0
) -> tuple[Rows, Rows]:
    """Read every row once, and divide them into those to train on and `held_out` others.

    Each rank reads its share, so that a bad row ends the program now, on every rank. Collective.

    A hash of seed and prompt (of the whole row if it has none) chooses the held-out prompts, so
    that the choice does not depend on the order of the rows, and no held-out prompt is trained on.
    Of equal rows, only the first is used if `rows.distinct`. Of several rows with a held-out prompt
    one is held out and the others are dropped.

    Args:
        rows: as `open_rows` returns them.
        mesh: the ranks.
        seed: of the choice.
        held_out: how many rows, with different prompts, are held out. None: 128, or an eighth of
            the prompts where there are fewer than 256 of them.
        mark: what to note of each row; the rows that are returned have it in `marks`.

    Returns:
        (rows to train on, held-out rows). `num_doubles` of the first is that of all.

    Raises:
        UserError: a row is not as it should be, no row has a column that the user has named, or
            nothing would be left to train on.
    """
    # 1. This rank's share. The shares follow one another.
    has_choice = rows.distinct or held_out != 0
    size = -(-len(rows) // mesh.world_size)
    first = min(mesh.rank * size, len(rows))
    last = min(first + size, len(rows))
    share = bytearray(DIGEST_BYTES * (last - first))  # Zeros if nothing is chosen.
    marks = bytearray(last - first)
    with errors_of_all(mesh):
        for i, row in enumerate(rows.read(first, last)):
            marks[i] = mark(row)
            if has_choice:
                share[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)] = _digest(row, seed)
    missing = set.intersection(*mesh.gather(rows.missing))
    for setting, key in rows.named.items():
        if setting in missing:
            known = ", ".join(map(str, rows.place(0).source.read(0, 1)[0]))
            raise UserError(
                f"{setting} = {key!r} names a column that no row of {rows.sources[0].label} has; "
                f"the columns of its first row are {known}; set {setting} to one of them"
            )
    marked = replace(rows, marks=mesh.gather_array(np.frombuffer(marks, np.uint8)))
    if not has_choice:
        return marked, marked.take(np.arange(0))

    # 2. The choice among all rows.
    table = np.frombuffer(share, np.uint8).reshape(-1, DIGEST_BYTES)
    digests = mesh.gather_array(table).view(DIGEST)[:, 0]
    prompts = digests["prompt"]
    if rows.env_prompts and len(prompts) > 1 and (prompts == prompts[0]).all():
        # All have the same prompt, which then is none: rows differ by all else that they have.
        digests = digests.copy()
        digests["prompt"] = digests["row"]
    if held_out is None:
        held_out = _default_held_out(digests, rows, mesh)
    is_trained, chosen, num_doubles = choose(digests, held_out, distinct=rows.distinct)
    del share, table, digests, prompts  # Of many rows they are most of the memory.
    return replace(marked.take(is_trained), num_doubles=num_doubles), marked.take(chosen)


def _digest(row: dict, seed: int) -> bytes:
    """Return 8 bytes that stand for the prompt of a row, and 8 for all of it.

    Two of ten million prompts have the same 8 bytes with a chance of 3 in a million, and then they
    are only on the same side of the held-out split. A row is lost where both are the same.
    """
    prompt = row.get("prompt") or row
    prompt_hash = hashlib.sha256(f"{seed} {ENCODER.encode(prompt)}".encode())
    half = DIGEST_BYTES // 2
    if prompt is row:
        return prompt_hash.digest()[:DIGEST_BYTES]
    first = prompt_hash.digest()[:half]
    rest = {key: value for key, value in row.items() if key != "prompt"}
    metadata = rest.get("metadata")
    if isinstance(metadata, dict) and "source_dataset" in metadata:  # of reasoning-gym
        rest["metadata"] = {k: v for k, v in metadata.items() if k != "source_index"}
    try:
        text = ENCODER.encode(rest).encode()
    except TypeError:  # values that JSON does not have, such as the bytes of Parquet
        text = pickle.dumps(rest)
    prompt_hash.update(text)
    return first + prompt_hash.digest()[:half]


def _default_held_out(digests: np.ndarray, rows: Rows, mesh: Mesh) -> int:
    """Return how many rows to hold out where data.held_out does not say, and say it if few."""
    num_prompts = 0
    for part in (digests[: 2**16], digests):  # The first ones nearly always suffice.
        num_prompts = len(np.unique(part["prompt"]))
        if num_prompts >= 2 * HELD_OUT:
            return HELD_OUT
    held_out = max(1, num_prompts // HELD_OUT_SHARE)
    if mesh.rank == 0:
        say(
            f"{rows.sources[0].label}: {num_prompts} distinct prompts, of which {held_out} are "
            f"held out (an eighth of fewer than {2 * HELD_OUT}; set data.held_out or data.eval)"
        )
    return held_out


def choose(
    digests: np.ndarray, held_out: int, *, distinct: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Choose the rows to train on and those to hold out, as `read_rows` describes it.

    Args:
        digests: DIGEST [N]; rows with the same `prompt` have the same prompt, those with the same
            two numbers are equal.
        held_out: how many rows are held out, one of each prompt with the smallest digests: the
            first that has the prompt's smallest digest if `distinct`, else its last.
        distinct: of equal rows only the first is used.

    Returns:
        (which rows to train on, bool [N]; the numbers of the held-out rows, int64; how many rows
        are left out because they equal others).

    Raises:
        UserError: nothing would be left to train on.
    """
    is_trained = np.zeros(len(digests), bool)
    chosen = [np.zeros(0, np.int64)]
    num_missing = held_out
    num_prompts = 0
    num_doubles = 0
    # A part of the digests at a time, in ascending order: sorting all would take three times the
    # memory that they have.
    first_bytes = digests.view(np.uint8)[::DIGEST_BYTES]
    parts = first_bytes // (256 // NUM_PARTS)
    for part in range(NUM_PARTS):
        # 1. Sort. Rows with the same digest are neighbours then, in the order of their numbers.
        numbers = np.flatnonzero(parts == part)
        if not len(numbers):
            continue
        words = digests[numbers]
        keys = (words["row"], words["prompt"]) if distinct else (words["prompt"],)
        order = np.lexsort(keys)
        numbers = numbers[order]
        words = words[order]
        is_new_prompt = np.ones(len(words), bool)
        is_new_prompt[1:] = words["prompt"][1:] != words["prompt"][:-1]
        firsts = np.flatnonzero(is_new_prompt)
        lasts = np.append(firsts[1:], len(words)) - 1

        # 2. Of equal rows the first is used.
        is_used = np.ones(len(words), bool)
        if distinct:
            is_used[1:] = is_new_prompt[1:] | (words["row"][1:] != words["row"][:-1])
            num_doubles += len(words) - int(is_used.sum())

        # 3. The first prompts of all are held out.
        num_chosen = min(num_missing, len(firsts))
        chosen.append(numbers[(firsts if distinct else lasts)[:num_chosen]])
        num_missing -= num_chosen
        num_prompts += len(firsts)
        begin = firsts[num_chosen] if num_chosen < len(firsts) else len(words)
        is_trained[numbers[begin:][is_used[begin:]]] = True
    require(
        held_out < num_prompts,
        f"data.held_out = {held_out} leaves nothing of the {num_prompts} distinct prompts in "
        "data.train; lower it or set data.eval",
    )
    return is_trained, np.concatenate(chosen), num_doubles
