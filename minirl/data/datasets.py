"""Rows of prompts and of chats, and their order as a function of seed and ticket alone."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.config.shared import DataConfig, RowsConfig
from minirl.config.supervised import ChatsConfig
from minirl.data import chat
from minirl.data.images import BadImage, Vision, attach, of_chat
from minirl.data.sources import Source, open_source
from minirl.errors import UserError, require
from minirl.parallel.mesh import Mesh
from minirl.types import Trajectory

# What TRL, OpenRLHF and others call a column: read where a row has none of the first name, unless a
# setting asks for another name.
OTHER_NAMES = {
    "prompt": ("instruction", "input", "context_messages", "messages"),
    "completion": ("output",),
    "answer": ("solution", "label"),
    "data_source": ("datasource",),
}


class Rows(Sequence[dict]):
    """Rows of some sources, each made when it is asked for; in memory is only where they are."""

    def __init__(
        self, sources: list[Source], make: Callable[[dict, Source, str], dict], places: np.ndarray
    ):
        """`make(what the source holds, source, its place for an error)` is the row. `places`: int64
        [N, 2], source and number in it.
        """
        self.sources, self.make, self.places = sources, make, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> dict:
        of, number = self.places[i].tolist()
        row, where = self.sources[of].rows[number], self.sources[of].where(number)
        require(
            isinstance(row, dict),
            f"{where}: a row must be an object of named values, not a {type(row).__name__}",
        )
        return self.make(row, self.sources[of], where)


def take(rows: Sequence[dict], numbers: Iterable[int]) -> Sequence[dict]:
    """Those of the rows."""
    if isinstance(rows, Rows):
        return Rows(rows.sources, rows.make, rows.places[np.fromiter(numbers, np.int64)])
    return [rows[n] for n in numbers]


def open_rows(
    source: str | list[str],
    setting: str,
    make: Callable[[dict, Source, str], dict],
    max_samples: int,
    *,
    distinct: Callable[[dict], object] | None = None,
) -> Rows:
    """The rows of one or several sources end to end, of each only the first `max_samples` (0: all),
    and of those that `distinct` maps to the same the first. Each is looked at once, so that a bad
    one ends the program now. Raises UserError.
    """
    sources = [
        open_source(text, setting) for text in ([source] if isinstance(source, str) else source)
    ]
    weighted = [s for s in sources if s.weight is not None]
    if weighted and (setting == "data.eval" or len(weighted) < len(sources)):
        raise UserError(
            f"{weighted[0].shown}: give a weight to every source of data.train or to none (held-out rows are all used once, without)"
        )
    lengths = [min(len(s.rows), max_samples or len(s.rows)) for s in sources]
    if 0 in lengths:
        raise UserError(f"{sources[lengths.index(0)].shown}: no rows")
    rows = Rows(
        sources,
        make,
        np.concatenate(
            [np.stack([np.full(n, i), np.arange(n)], axis=1) for i, n in enumerate(lengths)]
        ),
    )
    kept: dict[object, int] = {}
    for n, row in enumerate(rows):
        kept.setdefault(distinct(row) if distinct else n, n)
    return take(rows, kept.values())


def load_rows(source: str | list[str], setting: str, cfg: DataConfig) -> Rows:
    """Rows of `data.train` or `data.eval` (named by `setting` in errors), one for each distinct
    prompt, in their order there.

    Every row has "prompt" and, where the source has one, "answer", whatever the columns were
    called; "data_source" where a column says it or there are several sources; and all that it had.
    Raises UserError.
    """
    return open_rows(
        source,
        setting,
        lambda raw, of, where: _to_prompt(
            raw, of.name if isinstance(source, list) else "", where, cfg
        ),
        cfg.max_samples,
        distinct=lambda row: hashlib.blake2b(
            json.dumps(row["prompt"]).encode(), digest_size=16
        ).digest(),
    )


def load_chats(source: str | list[str], setting: str, cfg: ChatsConfig) -> Rows:
    """Rows to imitate, in their order there: {"messages": chat, "trained": indices of the assistant
    turns in the loss} or {"text": text}.

    A row is, by the first of its columns that there is, a chat, a prompt with its completion (each
    a text or messages) or a text. Raises UserError.
    """
    return open_rows(
        source, setting, lambda raw, of, where: _to_chat(raw, where, cfg), cfg.max_samples
    )


def column(row: dict, key: str) -> object:
    """What a row has under a name, or under what else others call it; None if nothing. Alpaca's
    `input` goes with its `instruction`.
    """
    found = next(
        (name for name in (key, *OTHER_NAMES.get(key, ())) if row.get(name) is not None), key
    )
    if (
        found == "instruction" != key
        and isinstance(row[found], str)
        and isinstance(row.get("input"), str)
    ):
        return "\n\n".join(text for text in (row["instruction"], row["input"]) if text)
    return row.get(found)


def _to_prompt(row: dict, source: str, where: str, cfg: DataConfig) -> dict:
    prompt, answer = column(row, cfg.prompt_key), column(row, cfg.answer_key)
    if (
        prompt is row.get("messages") is not None
        and cfg.prompt_key != "messages"
        and is_prompt(prompt)
        and prompt[-1]["role"] == "assistant"
    ):
        prompt, answer = (
            prompt[:-1],
            prompt[-1]["content"] if answer is None else answer,
        )  # a chat to imitate: its last turn is the answer
    if not is_prompt(prompt):
        raise UserError(
            f"{where} has no {cfg.prompt_key!r} that is a text or a list of messages (its keys: {', '.join(row)}); set data.prompt_key to the right one"
        )
    found = {
        "prompt": with_images(prompt, row, where, cfg),
        "answer": answer,
        "data_source": str(column(row, cfg.source_key) or source) or None,
    }
    rest = {key: value for key, value in row.items() if key not in (cfg.images_key, "image")}
    return rest | {key: value for key, value in found.items() if value is not None}


def with_images(
    prompt: str | list[dict], row: dict, where: str, cfg: RowsConfig
) -> str | list[dict]:
    """The prompt, with its row's images if it has some."""
    found = row.get(cfg.images_key) or ([] if row.get("image") is None else [row["image"]])
    if isinstance(prompt, str) and not found:
        return prompt
    try:
        return attach(chat.to_messages(prompt, ""), found)
    except BadImage as error:
        raise UserError(f"{where}: {error}") from error


def _to_chat(row: dict, where: str, cfg: ChatsConfig) -> dict:
    messages, completion = row.get(cfg.messages_key), column(row, cfg.completion_key)
    prompt = column(row, cfg.prompt_key) if messages is None else None
    if isinstance(row.get(cfg.text_key), str) and messages is None and completion is None:
        return {"text": row[cfg.text_key]}
    if is_prompt(messages) and isinstance(messages, list):
        turns, first = chat.to_messages(messages, cfg.system_prompt), 0
    elif (
        messages is None and is_prompt(prompt) and isinstance(completion, str | int | float | list)
    ):
        turns = chat.to_messages(prompt, cfg.system_prompt)
        first = len(turns)
        turns += (
            completion
            if isinstance(completion, list)
            else [{"role": "assistant", "content": str(completion)}]
        )
    else:
        raise UserError(
            f"{where} has neither {cfg.messages_key!r} (messages with role and content), nor {cfg.prompt_key!r} with {cfg.completion_key!r}, "
            f"nor {cfg.text_key!r} (its keys: {', '.join(row)}); set data.messages_key, prompt_key and completion_key, or text_key"
        )
    turns = with_images(turns, row, where, cfg)
    if not is_prompt(turns) or not all(isinstance(m["content"], str | list) for m in turns):
        raise UserError(
            f"{where}: every message needs a role and a content that is a text, or a list of texts and images"
        )
    trained = [i for i, m in enumerate(turns) if i >= first and m["role"] == "assistant"]
    if not trained or not any(m["role"] != "system" for m in turns[: trained[0]]):
        raise UserError(
            f"{where}: "
            + (
                "no assistant turn follows"
                if not trained
                else "nothing is asked before the assistant's first turn"
            )
        )
    return {
        "messages": turns[: trained[-1] + 1],
        "trained": trained if cfg.train_on == "all_turns" else trained[-1:],
    }


def is_prompt(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(
            isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value
        )
    return isinstance(value, str) and bool(value)


def split(rows: Sequence[dict], held_out: int, seed: int) -> tuple[Sequence[dict], Sequence[dict]]:
    """(train, held out): `held_out` rows chosen by a hash of seed and prompt (of the whole row if
    it has none), so the choice does not depend on row order.
    """
    names = [
        hashlib.sha256(f"{seed} {json.dumps(row.get('prompt', row))}".encode()).digest()
        for row in rows
    ]
    last = {name: n for n, name in enumerate(names)}
    if held_out >= len(last):
        raise UserError(
            f"data.held_out = {held_out} leaves nothing of the {len(last)} distinct prompts in data.train; lower it or set data.eval"
        )
    chosen = dict.fromkeys(sorted(last)[:held_out])
    return take(rows, [n for n, name in enumerate(names) if name not in chosen]), take(
        rows, [last[name] for name in chosen]
    )


class Order:
    """Which row an example is: 0, 1, 2, ... runs through a new permutation of the rows in every
    epoch. A function of the seed alone.
    """

    def __init__(self, num_rows: int, *, seed: int | list[int], shuffle: bool):
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._epoch, self._rows = -1, np.arange(num_rows)

    def __getitem__(self, number: int) -> int:
        epoch, index = divmod(number, self.num_rows)
        if self.shuffle and epoch != self._epoch:
            self._epoch, self._rows = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(self._of(epoch)),
            )
        return int(self._rows[index])

    def _of(self, epoch: int) -> np.ndarray:
        return np.arange(self.num_rows)


class Mixture(Order):
    """The order where sources have weights. Of an epoch, which is as long as there are rows, each
    source has its share, spread at random; they are the next rows of permutations of its own that
    run on from epoch to epoch, so after each all its rows have come equally often (or once
    more).
    """

    def __init__(self, rows: Rows, *, seed: int):
        super().__init__(len(rows), seed=seed, shuffle=True)
        exact = (
            np.array([s.weight for s in rows.sources])
            / sum(s.weight for s in rows.sources)
            * len(rows)
        )
        self.counts = np.floor(exact).astype(int)
        self.counts[
            np.argsort(self.counts - exact, kind="stable")[: len(rows) - self.counts.sum()]
        ] += 1  # those with the largest remainders
        self.own = [np.flatnonzero(rows.places[:, 0] == i) for i in range(len(exact))]
        for source, own, count in zip(rows.sources, self.own, self.counts, strict=True):
            if not len(own) or not count:
                raise UserError(
                    f"{source.shown}: {count} of {len(rows)} examples by its weight, from {len(own)} rows; raise its weight or leave it out"
                )
        self.orders = [
            Order(len(own), seed=[seed, i], shuffle=True) for i, own in enumerate(self.own)
        ]

    def _of(self, epoch: int) -> np.ndarray:
        numbers = [
            [order[n] for n in range(epoch * count, (epoch + 1) * count)]
            for order, count in zip(self.orders, self.counts.tolist(), strict=True)
        ]
        return np.concatenate([own[chosen] for own, chosen in zip(self.own, numbers, strict=True)])


def make_order(rows: Sequence[dict], *, seed: int, shuffle: bool) -> Order:
    """Of rows in training (`shuffle`) or evaluation, where they come one after the other."""
    weighted = shuffle and isinstance(rows, Rows) and rows.sources[0].weight is not None
    return Mixture(rows, seed=seed) if weighted else Order(len(rows), seed=seed, shuffle=shuffle)


class Prompts:
    """Rows as token ids, addressed by ticket."""

    def __init__(
        self,
        rows: Sequence[dict],
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        *,
        seed: int,
        shuffle: bool = True,
        vision: Vision | None = None,
    ):
        self.rows, self.tokenizer, self.cfg, self.seed, self.shuffle, self.vision = (
            rows,
            tokenizer,
            cfg,
            seed,
            shuffle,
            vision,
        )
        self.order = make_order(rows, seed=seed, shuffle=shuffle)

    def row(self, ticket: int) -> dict:
        return self.rows[self.order[ticket]]

    def messages(self, row: dict) -> list[dict]:
        return chat.to_messages(row["prompt"], self.cfg.system_prompt)

    def encode(self, row: dict) -> list[int]:
        messages = self.messages(row)
        ids = chat.encode(self.tokenizer, chat.render(self.tokenizer, messages))
        return self.vision.expand(ids, of_chat(messages))[0] if self.vision else ids

    def check_lengths(self, setting: str, mesh: Mesh) -> int:
        """Encode every prompt once, the ranks in parts. Of those longer than data.max_prompt_tokens
        the first is a UserError, or all are dropped (data.too_long); returns how many.
        Collective.
        """
        lengths = {
            n: len(self.encode(self.rows[n]))
            for n in range(mesh.rank, len(self.rows), mesh.world_size)
        }
        long = [n for n, length in lengths.items() if length > self.cfg.max_prompt_tokens]
        if long and self.cfg.too_long == "error":
            raise UserError(
                f"{setting}: a prompt has {lengths[long[0]]} tokens, more than data.max_prompt_tokens = {self.cfg.max_prompt_tokens}; raise it (and "
                f"engine.max_model_len) or set data.too_long drop: {str(self.rows[long[0]]['prompt'])[:80]!r}..."
            )
        dropped = {n for part in mesh.gather(long) for n in part}
        if len(dropped) == len(self.rows):
            raise UserError(
                f"{setting}: all {len(dropped)} prompts have more than data.max_prompt_tokens = {self.cfg.max_prompt_tokens} tokens; raise it"
            )
        if dropped:
            self.rows = take(self.rows, [n for n in range(len(self.rows)) if n not in dropped])
            self.order = make_order(self.rows, seed=self.seed, shuffle=self.shuffle)
        return len(dropped)


class Examples:
    """Rows as token ids. Each rank encodes and keeps its share; all know how many there are."""

    def __init__(
        self,
        rows: Sequence[dict],
        encoded: dict[int, tuple],
        mesh: Mesh,
        why_none: str,
        *,
        seed: int,
        shuffle: bool,
    ):
        """`encoded`: this rank's, by their numbers in `rows`, but for those that are dropped.
        Raises UserError(`why_none`) if that is everything.
        """
        self.encoded = encoded
        self.kept = sorted(
            n for part in mesh.gather(list(encoded)) for n in part
        )  # Numbers of the rows that are trained on.
        require(self.kept, why_none)
        self.order = make_order(take(rows, self.kept), seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self.kept)

    def row(self, number: int) -> int:
        return self.kept[self.order[number]]

    def own(self, numbers: range) -> list[tuple]:
        """(number, what `encoded` has) of those of the examples that this rank holds."""
        return [(n, *self.encoded[row]) for n in numbers if (row := self.row(n)) in self.encoded]


def to_example(
    tokenizer: PreTrainedTokenizerBase, vision: Vision | None, row: dict, stop_ids: list[int]
) -> Trajectory:
    """A row of `load_chats` as token ids, with what is in the loss as sampled."""
    shown = of_chat(row.get("messages", []))
    require(
        vision or not shown,
        "a chat has images, and policy.model reads none; take a model of a family that does",
    )
    ids, mask = (
        chat.encode_text(tokenizer, row["text"])
        if "text" in row
        else chat.encode_chat(tokenizer, row["messages"], row["trained"], stop_ids)
    )
    placed = []
    if shown:
        of_text = [
            sampled for token, sampled in zip(ids, mask, strict=True) if token != vision.token
        ]
        ids, placed = vision.expand(ids, shown)
        mask = np.zeros(len(ids), bool)
        mask[np.array(ids) != vision.token] = of_text
    return Trajectory(
        tokens=np.array(ids, np.int32),
        sampled=np.array(mask, bool),
        logprobs=np.zeros(len(ids), np.float32),
        images=placed,
    )


class Chats(Examples):
    """Rows to imitate as token ids, cut to data.max_tokens."""

    def __init__(
        self,
        rows: Sequence[dict],
        setting: str,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: list[int],
        cfg: ChatsConfig,
        mesh: Mesh,
        *,
        seed: int,
        shuffle: bool = True,
        vision: Vision | None = None,
    ):
        """Drops what has no token in the loss once it is cut. Raises UserError if that is
        everything.
        """
        own = {
            n: to_example(tokenizer, vision, rows[n], stop_ids)
            for n in range(mesh.rank, len(rows), mesh.world_size)
        }
        num_cut = sum(len(t.tokens) > cfg.max_tokens for t in own.values())
        for t in own.values():
            t.tokens, t.sampled, t.logprobs = (
                array[: cfg.max_tokens] for array in (t.tokens, t.sampled, t.logprobs)
            )
            t.images = [p for p in t.images if p.place < cfg.max_tokens]
        super().__init__(
            rows,
            {n: (t,) for n, t in own.items() if t.sampled.any()},
            mesh,
            seed=seed,
            shuffle=shuffle,
            why_none=f"{setting}: none of the {len(rows)} rows has a token in the loss within data.max_tokens = {cfg.max_tokens}; raise it",
        )
        # How many rows were cut, and how many dropped.
        self.lost = sum(mesh.gather(num_cut)), len(rows) - len(self.kept)

    def examples(self, numbers: range) -> list[Trajectory]:
        """Those of the examples that this rank holds."""
        return [replace(t, group=n) for n, t in self.own(numbers)]
