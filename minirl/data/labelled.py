"""Single answers that were judged, wanted or not: from TRL's unpaired columns to token ids."""

import zlib
from dataclasses import replace
from functools import partial

import numpy as np

from minirl.base.errors import UserError, require
from minirl.config.supervised import LabelledConfig
from minirl.data.examples import Chats, Encoded, to_chat
from minirl.data.pairs import other_answer
from minirl.data.rows import Place, Rows, open_rows
from minirl.parallel.mesh import Mesh
from minirl.types.packed import Trajectory, prompt_length

MATCHED = 0  # Episode of a row's own answer,
MISMATCHED = 1  # and of another row's answer behind this row's prompt.


def open_labelled(source: str | list[str], setting: str, cfg: LabelledConfig, mesh: Mesh) -> Rows:
    """Return rows of judged answers, in the order of their sources. Collective.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.
        mesh: the ranks.

    Returns:
        Rows as `open_chats` returns them, with `label`: whether the answer is wanted.

    Raises:
        UserError: a source cannot be read. A row without an answer or a label raises one when it is
            read.
    """
    return open_rows(source, setting, partial(_to_labelled, cfg=cfg), cfg, mesh)


def _to_labelled(raw: dict, place: Place, cfg: LabelledConfig) -> dict:
    if place.source.is_generated:
        is_right = zlib.crc32(raw["prompt"].encode()) % 2 == 0
        answer = str(raw["answer"]) if is_right else other_answer(raw, place.source)
        raw = {cfg.prompt_key: raw["prompt"], cfg.completion_key: answer, cfg.label_key: is_right}
    label = raw.get(cfg.label_key)
    if not isinstance(label, bool) and (label not in (0, 1) or not isinstance(label, int)):
        why = "true or false (or 1 or 0)"
        if label is None and {"chosen", "rejected"} <= raw.keys():
            why += ", and rows with 'chosen' and 'rejected' are for minirl.dpo"
        raise UserError(
            f"{place}: data.label_key = {cfg.label_key!r} must name {why}; it is "
            f"{str(label)[:60]!r} (the row's keys: {', '.join(raw)})"
        )
    row = to_chat(raw, place, cfg)
    if "text" in row:
        raise UserError(
            f"{place}: a plain text has no answer to judge; give "
            f"{cfg.prompt_key!r} with {cfg.completion_key!r}, or {cfg.messages_key!r}"
        )
    first = row["trained"][0]
    answer_texts = [message["content"] for message in row["messages"][first:]]
    require(
        all(isinstance(text, str) for text in answer_texts) and answer_texts[-1].strip(),
        f"{place}: the answer that is judged must be a text that is not empty",
    )
    return row | {"label": bool(label)}


class Labelled(Chats):
    """Judged answers as token ids. The reward of a trajectory is 1 (wanted) or -1.

    With `mismatched` a row has two trajectories: its own answer, and behind the same prompt the
    answer of the row before it in the step (of the last one, for the first), from which KTO
    estimates the KL. Which one that is depends on the order of the rows alone.
    """

    mismatched = True
    lost_names = ("rows_too_long", "rows_dropped")
    none_left = (
        "of {num_rows} rows none is left: {num_lost[0]} have more than data.max_tokens = "
        "{max_tokens} tokens, {num_lost[1]} have no token in the loss"
    )

    def encode(self, row: dict) -> Encoded:
        """Return the row's own trajectory; none if it is too long, or has nothing in the loss."""
        segments = self.to_examples(row)
        require(
            len(segments) == 1,
            "the chat template renders an answer otherwise when others follow, and a judged row is "
            "one sequence; set data.train_on last_turn, or name a template by data.chat_template "
            "that keeps what was said",
        )
        (own,) = segments
        if len(own.tokens) > self.max_tokens:
            return Encoded([], (True, False))
        if not own.sampled.any():
            return Encoded([], (False, True))
        own.episode = MATCHED
        own.reward = 1.0 if row["label"] else -1.0
        return Encoded([own], (False, False))

    def count_tokens(self, examples: list[Trajectory]) -> int:
        """Return the tokens that are trained on: those of rows with their own answers."""
        return sum(len(t.tokens) for t in examples if t.episode == MATCHED)

    def _encode_step(self, rows: list[int], places: list[int]) -> list[Encoded]:
        encoded = super()._encode_step(rows, places)
        if not self.mismatched:
            return encoded
        return [
            self._with_mismatched(own, rows, place)
            for own, place in zip(encoded, places, strict=True)
        ]

    def _with_mismatched(self, encoded: Encoded, rows: list[int], place: int) -> Encoded:
        """Add the answer of the nearest row before it that is not dropped, if there is one."""
        if not encoded.trajectories:
            return encoded
        (own,) = encoded.trajectories
        for distance in range(1, len(rows)):
            others = self._encode_row(rows[place - distance]).trajectories
            if others:
                mismatched = _with_answer_of(own, others[0], self.max_tokens)
                return Encoded([own, mismatched], encoded.lost)
        return encoded


def _with_answer_of(own: Trajectory, other: Trajectory, max_tokens: int) -> Trajectory:
    """Return the prompt of one trajectory with the answer of another, cut to `max_tokens`."""
    num_prompt = prompt_length(own)
    begin = prompt_length(other)
    tokens = np.concatenate([own.tokens[:num_prompt], other.tokens[begin:]])[:max_tokens]
    sampled = np.concatenate([np.zeros(num_prompt, bool), other.sampled[begin:]])[:max_tokens]
    return replace(
        own,
        tokens=tokens,
        sampled=sampled,
        logprobs=np.zeros(len(tokens), np.float32),
        images=[span for span in own.images if span.start < num_prompt],
        episode=MISMATCHED,
    )
