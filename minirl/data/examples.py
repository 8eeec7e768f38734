"""Examples to imitate: from rows in anyone's columns to token ids with their loss mask."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.config.supervised import ChatsConfig, PairsConfig
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
    prompt = column(raw, cfg.prompt_key)
    completion = column(raw, cfg.completion_key)
    text = raw.get(cfg.text_key)
    if messages is None and completion is None and isinstance(text, str):
        return {"text": text}

    # 1. The messages outside the loss, and those whose answers may be in it.
    if isinstance(completion, str | int | float):
        completion = [{"role": "assistant", "content": str(completion)}]
    before = []
    if is_messages(messages):
        answer = chat.to_messages(messages, cfg.system_prompt)
    elif messages is None and is_prompt(prompt) and isinstance(completion, list):
        before = chat.to_messages(prompt, cfg.system_prompt)
        answer = completion
    else:
        raise UserError(
            f"{where} has neither {cfg.messages_key!r} (data.messages_key: messages with role and "
            f"content), nor {cfg.prompt_key!r} with {cfg.completion_key!r} (data.prompt_key, "
            f"data.completion_key), nor {cfg.text_key!r} (data.text_key) (its keys: "
            f"{', '.join(raw)}); set data.messages_key, prompt_key and completion_key, or text_key"
        )

    # 2. The turns in the loss.
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
        set(roles[: trained[0]]) - {"system"},
        f"{where}: nothing is asked before the assistant's first turn",
    )
    return {
        "messages": turns[: trained[-1] + 1],
        "trained": trained if cfg.train_on == "all_turns" else trained[-1:],
    }


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
    if vision and urls:
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


class Chats:
    """Rows to imitate as token ids, cut to data.max_tokens.

    Each rank encodes and keeps its share; all know how many there are.
    """

    # The error if every row of every rank is dropped: of how many rows, and why.
    none_left = (
        "none of the {num_rows} rows has a token in the loss within "
        "data.max_tokens = {max_tokens}; raise it"
    )

    def __init__(
        self,
        rows: Sequence[dict],
        setting: str,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: list[int],
        cfg: ChatsConfig | PairsConfig,
        mesh: Mesh,
        *,
        seed: int,
        shuffle: bool = True,
        vision: Vision | None = None,
        score: bool = False,
    ):
        """Encode this rank's share, and put the rows that are trained on in order. Collective.

        Args:
            rows: all rows, as `load_chats` returns them (`load_pairs` for pairs).
            setting: `data.train` or `data.eval`, for error messages.
            tokenizer: has the chat template.
            stop_ids: tokens that end an answer.
            cfg: has data.max_tokens.
            mesh: the ranks.
            seed: of the order.
            shuffle: whether the order is for training.
            vision: how the model reads images; None: it reads none.
            score: a model with a score head reads the end of a sequence. One more token follows, so
                that the last token has a row, which is the one that predicts it.

        Raises:
            UserError: no row is left.
        """
        self.max_tokens = cfg.max_tokens
        self.to_example = partial(to_example, tokenizer, vision, stop_ids=stop_ids)
        self.lost_here = [0, 0]  # `num_lost` of this rank's share
        # This rank's trajectories of a row, by its number in `rows`, without dropped rows.
        self.encoded = {}
        for number in range(mesh.rank, len(rows), mesh.world_size):
            trajectories = self.encode(rows[number])
            if trajectories:
                self.encoded[number] = trajectories
            for t in trajectories if score else []:
                t.tokens = np.append(t.tokens, t.tokens[-1:])
                t.sampled = np.append(t.sampled, True)
                t.logprobs = np.zeros(len(t.tokens), np.float32)

        # On all ranks: how many rows `encode` lost, by its two reasons; and which are trained on.
        self.num_lost = np.sum(mesh.gather(self.lost_here), axis=0)
        self.kept = sorted(itertools.chain(*mesh.gather(list(self.encoded))))
        why = self.none_left.format(
            num_rows=len(rows), max_tokens=cfg.max_tokens, num_lost=self.num_lost
        )
        require(self.kept, f"{setting}: {why}")
        self.order = make_order(take(rows, self.kept), seed=seed, shuffle=shuffle)

    def encode(self, row: dict) -> list[Trajectory]:
        """Return a row's trajectory, cut; none if nothing in the loss is left.

        `lost_here` counts the rows that are cut, and those that are dropped.
        """
        t = self.to_example(row)
        self.lost_here[0] += len(t.tokens) > self.max_tokens
        t.tokens = t.tokens[: self.max_tokens]
        t.sampled = t.sampled[: self.max_tokens]
        t.logprobs = t.logprobs[: self.max_tokens]
        t.images = [span for span in t.images if span.start < self.max_tokens]
        if t.sampled.any():
            return [t]
        self.lost_here[1] += 1
        return []

    def __len__(self) -> int:
        return len(self.kept)

    def row(self, number: int) -> int:
        """Return the number of the row that an example is."""
        return self.kept[self.order[number]]

    def examples(self, numbers: range) -> list[Trajectory]:
        """Return the trajectories of those examples that this rank holds."""
        out = []
        for number in numbers:
            for t in self.encoded.get(self.row(number), []):
                out.append(replace(t, group=number))
        return out
