"""Rows of prompts, and their order as a function of seed and ticket alone."""

import difflib
import hashlib
import json
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS
from transformers import PreTrainedTokenizerBase

from minirl.config import DataConfig
from minirl.data import chat
from minirl.types import UserError

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


def _jsonl_rows(source: str, setting: str, cfg: DataConfig) -> list[dict]:
    path = Path(source)
    if not path.is_file():
        raise UserError(f"{setting} = {source!r}: no such file; give a JSONL file or {GYM}NAME")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() also cuts at line separators inside strings
    except UnicodeDecodeError as error:
        raise UserError(f"{setting} = {source}: not UTF-8 text ({error}); give a JSONL file") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{setting} = {source}: line {number} is not JSON: {error}") from error
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
    """(train, held out): `held_out` rows chosen by a hash of seed and prompt, so the choice does not depend on row order."""
    if held_out >= len(rows):
        raise UserError(f"data.held_out = {held_out} leaves nothing of the {len(rows)} distinct prompts in data.train; lower it or set data.eval")
    order = sorted(rows, key=lambda row: hashlib.sha256(f"{seed} {json.dumps(row['prompt'])}".encode()).digest())
    chosen = {json.dumps(row["prompt"]) for row in order[:held_out]}
    return [r for r in rows if json.dumps(r["prompt"]) not in chosen], order[:held_out]


class Prompts:
    """Rows as token ids, addressed by ticket: 0, 1, 2, ... runs through a new permutation of the rows in every epoch."""

    def __init__(self, rows: list[dict], tokenizer: PreTrainedTokenizerBase, cfg: DataConfig, *, seed: int, shuffle: bool = True):
        self.rows, self.tokenizer, self.cfg, self.seed, self.shuffle = rows, tokenizer, cfg, seed, shuffle
        self._epoch, self._order = -1, np.arange(len(rows))

    def row(self, ticket: int) -> dict:
        epoch, index = divmod(ticket, len(self.rows))
        if self.shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        return self.rows[self._order[index]]

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
