"""Rows of prompts, and their order as a function of seed and ticket alone."""

import difflib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS
from transformers import PreTrainedTokenizerBase

from minirl.config import ChatsConfig, DataConfig
from minirl.data import chat
from minirl.parallel.mesh import Mesh
from minirl.types import Trajectory, UserError

GYM = "reasoning_gym:"


def load_rows(source: str, setting: str, cfg: DataConfig) -> list[dict]:
    """Rows of `data.train` or `data.eval` (named by `setting` in errors), one for each distinct prompt, in file order.

    Every row has "prompt" and, where the source has one, "answer", whatever the columns were called. Raises UserError.
    """
    rows = _gym_rows(source, setting) if source.startswith(GYM) else _jsonl_rows(source, setting, cfg)
    distinct: dict[str, dict] = {}
    for row in rows:
        distinct.setdefault(json.dumps(row["prompt"]), row)
    if not distinct:
        raise UserError(f"{setting} = {source}: no rows")
    return list(distinct.values())


def load_chats(source: str, setting: str, cfg: ChatsConfig) -> list[dict]:
    """Rows to imitate, in file order: {"messages": chat, "trained": indices of the assistant turns in the loss} or {"text": text}.

    A row is, by the first of its columns that there is, a chat, a prompt with its completion (each a text or messages) or a text.
    Raises UserError.
    """
    numbered = enumerate(_gym_rows(source, setting), start=1) if source.startswith(GYM) else _read_jsonl(source, setting)
    rows = [_to_chat(row, f"{setting} = {source}: line {number}", cfg) for number, row in numbered]
    if not rows:
        raise UserError(f"{setting} = {source}: no rows")
    return rows


def _to_chat(row: object, where: str, cfg: ChatsConfig) -> dict:
    values = row if isinstance(row, dict) else {}
    messages, prompt, completion = (values.get(key) for key in (cfg.messages_key, cfg.prompt_key, cfg.completion_key))
    if isinstance(values.get(cfg.text_key), str) and messages is None and completion is None:
        return {"text": values[cfg.text_key]}
    if _is_prompt(messages) and isinstance(messages, list):
        turns, first = chat.to_messages(messages, cfg.system_prompt), 0
    elif messages is None and _is_prompt(prompt) and isinstance(completion, str | int | float | list):
        turns = chat.to_messages(prompt, cfg.system_prompt)
        first = len(turns)
        turns += completion if isinstance(completion, list) else [{"role": "assistant", "content": str(completion)}]
    else:
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"{where} has neither {cfg.messages_key!r} (messages with role and content), nor {cfg.prompt_key!r} with {cfg.completion_key!r}, "
                        f"nor {cfg.text_key!r} (its keys: {keys}); set data.messages_key, prompt_key and completion_key, or text_key")
    if not _is_prompt(turns) or not all(isinstance(m["content"], str) for m in turns):
        raise UserError(f"{where}: every message needs a role and a content that is a text")
    trained = [i for i, m in enumerate(turns) if i >= first and m["role"] == "assistant"]
    if not trained or not any(m["role"] != "system" for m in turns[: trained[0]]):
        raise UserError(f"{where}: " + ("no assistant turn follows" if not trained else "nothing is asked before the assistant's first turn"))
    return {"messages": turns[: trained[-1] + 1], "trained": trained if cfg.train_on == "all_turns" else trained[-1:]}


def _read_jsonl(source: str, setting: str) -> Iterator[tuple[int, object]]:
    """(line number, value) of each line that is not blank. Raises UserError."""
    path = Path(source)
    if not path.is_file():
        raise UserError(f"{setting} = {source!r}: no such file; give a JSONL file or {GYM}NAME")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() also cuts at line separators inside strings
    except UnicodeDecodeError as error:
        raise UserError(f"{setting} = {source}: not UTF-8 text ({error}); give a JSONL file") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{setting} = {source}: line {number} is not JSON: {error}") from error


def _jsonl_rows(source: str, setting: str, cfg: DataConfig) -> list[dict]:
    rows = []
    for number, row in _read_jsonl(source, setting):
        if not isinstance(row, dict) or not _is_prompt(row.get(cfg.prompt_key)):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise UserError(f"{setting} = {source}: line {number} has no {cfg.prompt_key!r} that is a text or a list of messages "
                            f"(its keys: {keys}); set data.prompt_key to the right one")
        answer = {"answer": row[cfg.answer_key]} if cfg.answer_key in row else {}
        rows.append({**row, "prompt": row[cfg.prompt_key], **answer})
    return rows


def _is_prompt(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    return isinstance(value, str) and bool(value)


def _gym_rows(source: str, setting: str) -> list[dict]:
    name, _, query = source.removeprefix(GYM).partition("?")
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        raise UserError(f"{setting} = {source}: reasoning-gym has no {name!r}" + (f"; did you mean {close[0]}?" if close else ""))
    try:
        options = {key: _option(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
        entries = list(reasoning_gym.create_dataset(name, **{"size": 1000, "seed": 1, **options}))
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{setting} = {source}: {error}") from error
    return [{**entry, "prompt": entry["question"]} for entry in entries]


def _option(value: str) -> object:
    """A number, a list, true or false; anything else is a text, and the generator says if it wants none."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def split(rows: list[dict], held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """(train, held out): `held_out` rows chosen by a hash of seed and prompt (of the whole row if it has none), so the choice does not
    depend on row order."""
    def identity(row: dict) -> str:
        return json.dumps(row.get("prompt", row))
    distinct = {identity(row): row for row in rows}
    if held_out >= len(distinct):
        raise UserError(f"data.held_out = {held_out} leaves nothing of the {len(distinct)} distinct prompts in data.train; lower it or set data.eval")
    chosen = sorted(distinct, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[:held_out]
    kept = distinct.keys() - chosen
    return [row for row in rows if identity(row) in kept], [distinct[name] for name in chosen]


class Order:
    """Which row an example is: 0, 1, 2, ... runs through a new permutation of the rows in every epoch. A function of the seed alone."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool):
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._epoch, self._rows = -1, np.arange(num_rows)

    def __getitem__(self, number: int) -> int:
        epoch, index = divmod(number, self.num_rows)
        if self.shuffle and epoch != self._epoch:
            self._epoch, self._rows = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return int(self._rows[index])


class Prompts:
    """Rows as token ids, addressed by ticket."""

    def __init__(self, rows: list[dict], tokenizer: PreTrainedTokenizerBase, cfg: DataConfig, *, seed: int, shuffle: bool = True):
        self.rows, self.tokenizer, self.cfg = rows, tokenizer, cfg
        self.order = Order(len(rows), seed=seed, shuffle=shuffle)

    def row(self, ticket: int) -> dict:
        return self.rows[self.order[ticket]]

    def messages(self, row: dict) -> list[dict]:
        return chat.to_messages(row["prompt"], self.cfg.system_prompt)

    def encode(self, row: dict) -> list[int]:
        return chat.encode_prompt(self.tokenizer, self.messages(row))

    def check_lengths(self, setting: str, part: slice) -> None:
        """Raise UserError for the first row of this part that is longer than data.max_prompt_tokens."""
        for row in self.rows[part]:
            if (length := len(self.encode(row))) > self.cfg.max_prompt_tokens:
                raise UserError(f"{setting}: a prompt has {length} tokens, more than data.max_prompt_tokens = {self.cfg.max_prompt_tokens}; "
                                f"raise it (and engine.max_model_len) or drop the row: {str(row['prompt'])[:80]!r}...")


class Chats:
    """Rows to imitate as token ids, cut to data.max_tokens. Each rank encodes and keeps its share; all know how many there are."""

    def __init__(self, rows: list[dict], setting: str, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int], cfg: ChatsConfig, mesh: Mesh, *,
                 seed: int, shuffle: bool = True):
        """Drops what has no token in the loss once it is cut. Raises UserError if that is everything."""
        def encode(row: dict) -> tuple[np.ndarray, np.ndarray, bool]:
            ids, mask = chat.encode_text(tokenizer, row["text"]) if "text" in row else chat.encode_chat(tokenizer, row["messages"], row["trained"], stop_ids)
            return np.array(ids[: cfg.max_tokens], np.int32), np.array(mask[: cfg.max_tokens], bool), len(ids) > cfg.max_tokens
        own = {n: encode(rows[n]) for n in range(mesh.rank, len(rows), mesh.world_size)}
        self.encoded = {n: (ids, mask) for n, (ids, mask, _) in own.items() if mask.any()}
        self.kept = sorted(n for part in mesh.gather(list(self.encoded)) for n in part)
        """Numbers of the rows that are trained on."""
        self.lost = sum(mesh.gather(sum(cut for *_, cut in own.values()))), len(rows) - len(self.kept)
        """How many rows were cut, and how many dropped."""
        if not self.kept:
            raise UserError(f"{setting}: none of the {len(rows)} rows has a token in the loss within data.max_tokens = {cfg.max_tokens}; raise it")
        self.order = Order(len(self.kept), seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self.kept)

    def examples(self, numbers: range) -> list[Trajectory]:
        """Those of the examples that this rank holds."""
        own = ((n, self.encoded.get(self.kept[self.order[n]])) for n in numbers)
        return [Trajectory(tokens=e[0], sampled=e[1], logprobs=np.zeros(len(e[0]), np.float32), group=n) for n, e in own if e]
