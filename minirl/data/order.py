"""Which rows are trained on and which are held out, and the order in which they come.

Both are functions of the seed alone: the choice does not depend on the order of the rows, and no
order on the number of ranks.
"""

import base64
import hashlib
import io
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from minirl.base.errors import UserError, require
from minirl.base.log import say
from minirl.data.rows import Order, Rows
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import World

# What stands for a row: 8 bytes for its prompt, and 8 for all of it. Numbers that compare as the
# bytes do.
DIGEST = np.dtype([("prompt", ">u8"), ("row", ">u8")])
DIGEST_BYTES = DIGEST.itemsize
NUM_LOOKED_AT = 256  # Rows by which a resumed run knows whether it has those of before.
NUM_PARTS = 64  # Digests are sorted in so many parts; a power of 2.
# mark(row): bits that say what a program wants to know of a row, 0 to 255.
Mark = Callable[[dict], int]
# Rows that are held out where data.held_out is not set; of fewer than twice so many an eighth.
HELD_OUT = 128
HELD_OUT_SHARE = 8


def read_rows(
    rows: Rows, mesh: World, seed: int, held_out: int | None = 0, mark: Mark = lambda row: 0
) -> tuple[Rows, Rows]:
    """Read every row once, and divide them into those to train on and `held_out` others.

    Each rank reads its share, so that a bad row ends the program now, on every rank. Collective.

    A hash of seed and prompt (of the whole row if it has none) chooses the held-out prompts, so
    that the choice does not depend on the order of the rows, and no held-out prompt is trained on.
    Of equal rows, only the first is used if `rows.distinct`. Of several rows with a held-out prompt
    one is held out and the others are dropped. Of chats rows are chosen; of judged ones, those that
    ask what a held-out one asks are dropped, unless all do.

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
    asked = np.zeros(last - first if has_choice and not rows.distinct else 0, np.uint64)
    with errors_of_all(mesh):
        for i, row in enumerate(rows.read(first, last)):
            marks[i] = mark(row)
            if has_choice:
                share[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)] = _digest(row, seed)
                if row.keys() >= {"messages", "trained", "label"}:  # A judged answer.
                    asked[i] = _asked(row)
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

    # 2. The choice among all rows. Of many rows the digests are most of the memory.
    table = np.frombuffer(share, np.uint8).reshape(-1, DIGEST_BYTES)
    digests = mesh.gather_array(table).view(DIGEST)[:, 0]
    del share, table
    prompts = digests["prompt"]
    if rows.env_prompts and len(prompts) > 1 and (prompts == prompts[0]).all():
        # All have the same prompt, which then is none: rows differ by all else that they have.
        digests = digests.copy()
        digests["prompt"] = digests["row"]
    asked = mesh.gather_array(asked)
    if held_out is None:
        has_prompts = len(np.unique(asked)) > 1
        held_out = _default_held_out(asked if has_prompts else digests["prompt"], rows, mesh)
    is_trained, chosen, num_doubles = choose(digests, held_out, distinct=rows.distinct)
    del digests, prompts
    if asked.any():
        held = asked[chosen]
        leaks = is_trained & np.isin(asked, held[held > 0])
        num_leaks = int(leaks.sum())
        if 0 < num_leaks < is_trained.sum():
            is_trained &= ~leaks
            if mesh.rank == 0:
                label = rows.sources[0].label
                say(f"{label}: {num_leaks} rows ask what held-out ones ask, and are left out")
    return replace(marked.take(is_trained), num_doubles=num_doubles), marked.take(chosen)


def _digest(row: dict, seed: int) -> bytes:
    """Return 8 bytes that stand for the prompt of a row, and 8 for all of it.

    Two of ten million prompts have the same 8 bytes with a chance of 3 in a million, and then they
    are only on the same side of the held-out split. A row is lost where both are the same.
    """
    prompt = row.get("prompt") or row
    prompt_hash = hashlib.sha256(f"{seed} ".encode() + _bytes_of(prompt))
    half = DIGEST_BYTES // 2
    if prompt is row:
        return prompt_hash.digest()[:DIGEST_BYTES]
    first = prompt_hash.digest()[:half]
    rest = {key: value for key, value in row.items() if key != "prompt"}
    metadata = rest.get("metadata")
    if isinstance(metadata, dict) and "source_dataset" in metadata:  # of reasoning-gym
        rest["metadata"] = {k: v for k, v in metadata.items() if k != "source_index"}
    prompt_hash.update(_bytes_of(rest))
    return first + prompt_hash.digest()[:half]


def _bytes_of(value: object) -> bytes:
    """Return bytes that are equal for equal values."""
    try:
        return json.dumps(value).encode()
    except TypeError:  # values that JSON does not have, such as the bytes of Parquet
        return pickle.dumps(value)


def hash_of(rows: Sequence[dict]) -> str:
    """Return eight digits that change with the number of rows, their order, and what they hold.

    Of many rows some are looked at, from the first to the last.
    """
    found = hashlib.sha256(str(len(rows)).encode())
    numbers = np.linspace(0, len(rows) - 1, min(len(rows), NUM_LOOKED_AT))
    for number in numbers.astype(np.int64).tolist():
        found.update(_bytes_of(rows[number]))
    return found.hexdigest()[:8]


def _asked(row: dict) -> int:
    """Return a number above 0 that stands for what a judged answer answers."""
    before = json.dumps(row["messages"][: row["trained"][0]], default=str)
    return int.from_bytes(hashlib.sha256(before.encode()).digest()[:8], "big") | 1


def _default_held_out(prompts: np.ndarray, rows: Rows, mesh: World) -> int:
    """Return how many rows to hold out where data.held_out does not say, and say it if few.

    `prompts` are numbers that stand for the prompts of the rows.
    """
    num_prompts = 0
    for part in (prompts[: 2**16], prompts):  # The first ones nearly always suffice.
        num_prompts = len(np.unique(part))
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


class WeightedOrder(Order):
    """The order of rows from sources with weights.

    An epoch is as long as there are rows. Each source has its share of it, spread at random. The
    rows of a source come from its permutations, which continue from epoch to epoch, so that after
    each epoch all its rows have come equally often (or once more).
    """

    def __init__(self, rows: Rows, *, seed: int):
        """Divide an epoch among the sources.

        Raises:
            UserError: a source has no rows left, or its weight is too small for one example.
        """
        super().__init__(len(rows), seed=seed, shuffle=True)
        weights = np.array([source.weight for source in rows.sources])
        exact = weights / sum(weights) * len(rows)
        counts = np.floor(exact).astype(int)  # examples of each source in an epoch
        largest_remainders = np.argsort(counts - exact, kind="stable")
        counts[largest_remainders[: len(rows) - counts.sum()]] += 1
        self.shares = []  # of each source: its rows, the order among them, examples in an epoch
        source_numbers = np.searchsorted(rows.first_numbers, rows.numbers, side="right") - 1
        for i, source in enumerate(rows.sources):
            numbers = np.flatnonzero(source_numbers == i)
            count = int(counts[i])
            require(
                len(numbers) and count,
                f"{source.label}: {count} of {len(rows)} examples by its weight, from "
                f"{len(numbers)} rows; raise its weight or leave it out",
            )
            order = Order(len(numbers), seed=[seed, i], shuffle=True)
            self.shares.append((numbers, order, count))

    def _rows_of(self, epoch: int) -> np.ndarray:
        parts = []
        for numbers, order, count in self.shares:
            parts.append(numbers[order.rows(epoch * count, (epoch + 1) * count)])
        return np.concatenate(parts)


def make_order(rows: Sequence[dict], *, seed: int, shuffle: bool) -> Order:
    """Return the order of rows in training (`shuffle`), or in evaluation, as they are."""
    if shuffle and isinstance(rows, Rows) and rows.sources[0].weight is not None:
        return WeightedOrder(rows, seed=seed)
    return Order(len(rows), seed=seed, shuffle=shuffle)


class Curriculum(Order):
    """The row that each ticket is, drawn by p(1 - p), the variance of a success of probability p.

    What is always or never right teaches nothing. Rows are drawn without repetition, with weights
    max(4 p (1 - p), floor). p = (right + 1) / (tries + 2), Laplace's rule, is 1/2 for a prompt that
    was never tried, which makes it the most uncertain; the floor lets what was once hopeless or
    easy be tried again. Foster and Foerster 2025 (arXiv 2502.12272).
    """

    def __init__(self, order: Order, floor: float, saved: str = ""):
        """Draw for the tickets from 0 on.

        Args:
            order: the order of the rows without a curriculum, which has their number and the seed.
            floor: the least weight of a row (rollout.curriculum_floor).
            saved: what `save` returned in the run that this one resumes; empty: a new run.

        Raises:
            UserError: the sources of the rows have weights, or `saved` is of other rows.
        """
        require(
            not isinstance(order, WeightedOrder),
            f"rollout.curriculum_floor = {floor} draws prompts by their success, and the `weight` "
            "of sources in data.train by their source; set it to 0 or give no weights",
        )
        super().__init__(order.num_rows, seed=order.seed, shuffle=True)
        self.floor = floor
        # int32 [2, N]: how often each row was answered, and how often rightly.
        self.outcomes = np.zeros((2, self.num_rows), np.int32)
        if saved:
            with np.load(io.BytesIO(base64.b64decode(saved))) as arrays:
                rows = arrays["rows"]
                last = rows.max(initial=-1)
                require(
                    last < self.num_rows,
                    f"the checkpoint has the outcomes of prompt {last}, and data.train has "
                    f"{self.num_rows} prompts now; resume with the same data",
                )
                self.outcomes[:, rows] = arrays["outcomes"]
        self.first = 0  # The ticket that gets the first of `_rows`.
        self.start(0)

    def start(self, ticket: int) -> None:
        """Draw for the tickets from this one on.

        The draw is a function of seed, ticket and outcomes, and of no rank. Until the next call, a
        ticket's row stays. The order of E_i / w_i, with E_i exponential, draws without repetition
        by weight: Efraimidis and Spirakis 2006.
        """
        rng = np.random.default_rng([self.seed, ticket])
        tries, right = self.outcomes
        p = (right + 1) / (tries + 2)
        weights = np.maximum(4 * p * (1 - p), self.floor)
        keys = rng.exponential(size=self.num_rows) / weights
        self.first = ticket
        self._rows = np.argsort(keys, kind="stable")

    def __getitem__(self, number: int) -> int:
        return int(self._rows[(number - self.first) % self.num_rows])

    def record(self, results: np.ndarray) -> None:
        """Add the results of a step, on whatever rank: int [N, 2], a row and 1 if it was right."""
        rows, is_right = results.T
        tries, right = self.outcomes
        np.add.at(tries, rows, 1)
        np.add.at(right, rows, is_right)

    def save(self) -> str:
        """Return the outcomes as a text for a checkpoint: about 10 bytes for each row with some."""
        tries, _ = self.outcomes
        rows = np.flatnonzero(tries)
        file = io.BytesIO()
        np.savez_compressed(file, rows=rows, outcomes=self.outcomes[:, rows])
        return base64.b64encode(file.getvalue()).decode()
