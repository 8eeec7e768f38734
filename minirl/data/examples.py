"""Examples to imitate: from rows in anyone's columns to token ids with their loss mask."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.config.supervised import ChatsConfig
from minirl.data import chat, images
from minirl.data.images import ImageSpan, Vision
from minirl.data.order import make_order
from minirl.data.rows import column, is_messages, is_prompt, open_rows, take, with_images
from minirl.data.sources import Source
from minirl.errors import UserError, require
from minirl.parallel.mesh import Mesh
from minirl.types import Trajectory


def load_chats(source: str | list[str], setting: str, cfg: ChatsConfig) -> Sequence[dict]:
    """Return rows to imitate, in the order of their sources.

    A row is, by the first of its columns that it has, a chat, a prompt with its completion (each a
    text or messages) or a text.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.

    Returns:
        Rows {"messages": chat, "trained": indices of the assistant turns in the loss}, or
        {"text": text}.

    Raises:
        UserError: a source cannot be read, or a row is none of these.
    """
    return open_rows(source, setting, partial(_to_chat, cfg=cfg), cfg.max_samples)


def _to_chat(raw: dict, source: Source, where: str, cfg: ChatsConfig) -> dict:
    messages = raw.get(cfg.messages_key)
    completion = column(raw, cfg.completion_key)
    text = raw.get(cfg.text_key)
    if messages is None and completion is None and isinstance(text, str):
        return {"text": text}
    before, answer = _parts_of_chat(raw, where, cfg)
    turns = with_images(before + answer, raw, where, cfg)
    if not is_messages(turns) or not all(isinstance(m["content"], str | list) for m in turns):
        raise UserError(
            f"{where}: every message needs a role and a content that is a text, or a list of texts "
            "and images"
        )
    roles = [message["role"] for message in turns]
    trained = [i for i in range(len(before), len(turns)) if roles[i] == "assistant"]
    require(trained, f"{where}: no assistant turn follows")
    require(
        any(role != "system" for role in roles[: trained[0]]),
        f"{where}: nothing is asked before the assistant's first turn",
    )
    return {
        "messages": turns[: trained[-1] + 1],
        "trained": trained if cfg.train_on == "all_turns" else trained[-1:],
    }


def _parts_of_chat(raw: dict, where: str, cfg: ChatsConfig) -> tuple[list[dict], list[dict]]:
    """Return a row's messages: (those outside the loss, those whose answers may be in it)."""
    messages = raw.get(cfg.messages_key)
    if is_messages(messages):
        return [], chat.to_messages(messages, cfg.system_prompt)
    prompt = column(raw, cfg.prompt_key)
    completion = column(raw, cfg.completion_key)
    if isinstance(completion, str | int | float):
        completion = [{"role": "assistant", "content": str(completion)}]
    if messages is not None or not is_prompt(prompt) or not isinstance(completion, list):
        raise UserError(
            f"{where} has neither {cfg.messages_key!r} (data.messages_key: messages with role and "
            f"content), nor {cfg.prompt_key!r} with {cfg.completion_key!r} (data.prompt_key, "
            f"data.completion_key), nor {cfg.text_key!r} (data.text_key) (its keys: "
            f"{', '.join(raw)}); set data.messages_key, prompt_key and completion_key, or text_key"
        )
    return chat.to_messages(prompt, cfg.system_prompt), completion


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
        """Gather which rows are trained on, and put them in order. Collective.

        Args:
            rows: all rows.
            encoded: this rank's, by their numbers in `rows`, without those that are dropped.
            mesh: the ranks.
            why_none: the error message if every row of every rank is dropped.
            seed: of the order.
            shuffle: whether the order is for training.

        Raises:
            UserError: no row is left.
        """
        self.encoded = encoded
        # Numbers of the rows that are trained on, of all ranks.
        self.kept: list[int] = sorted(itertools.chain(*mesh.gather(list(encoded))))
        require(self.kept, why_none)
        self.order = make_order(take(rows, self.kept), seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self.kept)

    def row(self, number: int) -> int:
        """Return the number of the row that an example is."""
        return self.kept[self.order[number]]

    def numbers_here(self, numbers: range) -> list[int]:
        """Return those of the examples that this rank holds."""
        return [number for number in numbers if self.row(number) in self.encoded]


def to_example(
    tokenizer: PreTrainedTokenizerBase, vision: Vision | None, row: dict, stop_ids: list[int]
) -> Trajectory:
    """Return a row of `load_chats` as token ids, with what is in the loss marked as sampled.

    Raises:
        UserError: the chat has images and the model reads none, or the chat template fails.
    """
    urls = images.of_chat(row.get("messages", []))
    require(
        vision or not urls,
        "a chat has images, and policy.model reads none; take a model of a family that does",
    )
    if "text" in row:
        ids, mask = chat.encode_text(tokenizer, row["text"])
    else:
        ids, mask = chat.encode_chat(tokenizer, row["messages"], row["trained"], stop_ids)
    sampled = np.array(mask, bool)
    spans: list[ImageSpan] = []
    if vision is not None and urls:
        sampled_text = sampled[np.array(ids) != vision.token]
        ids, spans = vision.expand(ids, urls)
        sampled = np.zeros(len(ids), bool)
        sampled[np.array(ids) != vision.token] = sampled_text
    return Trajectory(
        tokens=np.array(ids, np.int32),
        sampled=sampled,
        logprobs=np.zeros(len(ids), np.float32),
        images=spans,
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
        """Encode this rank's share; drop rows with no token in the loss once they are cut.

        Raises:
            UserError: that leaves no row.
        """
        encoded = {}
        num_cut = 0
        for number in range(mesh.rank, len(rows), mesh.world_size):
            t = to_example(tokenizer, vision, rows[number], stop_ids)
            num_cut += len(t.tokens) > cfg.max_tokens
            t.tokens = t.tokens[: cfg.max_tokens]
            t.sampled = t.sampled[: cfg.max_tokens]
            t.logprobs = t.logprobs[: cfg.max_tokens]
            t.images = [span for span in t.images if span.start < cfg.max_tokens]
            if t.sampled.any():
                encoded[number] = (t,)
        why_none = (
            f"{setting}: none of the {len(rows)} rows has a token in the loss within "
            f"data.max_tokens = {cfg.max_tokens}; raise it"
        )
        super().__init__(rows, encoded, mesh, why_none, seed=seed, shuffle=shuffle)
        # How many rows were cut, and how many dropped, on all ranks.
        self.num_lost = sum(mesh.gather(num_cut)), len(rows) - len(self.kept)

    def examples(self, numbers: range) -> list[Trajectory]:
        """Return those of the examples that this rank holds."""
        return [
            replace(self.encoded[self.row(number)][0], group=number)
            for number in self.numbers_here(numbers)
        ]
