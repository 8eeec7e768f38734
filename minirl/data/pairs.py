"""Pairs of answers to one prompt, of which the first was preferred.

From TRL's and OpenRLHF's columns to token ids.
"""

import zlib
from functools import partial

import numpy as np

from minirl.base.errors import UserError, require
from minirl.config.supervised import PairsConfig
from minirl.data.chat import to_messages
from minirl.data.examples import Chats, Encoded
from minirl.data.messages import (
    Messages,
    RowPrompt,
    fault_of,
    for_template,
    has_calls,
    is_messages,
    is_prompt,
    without_none,
)
from minirl.data.rows import (
    Place,
    Rows,
    open_rows,
    refuse_chats,
    require_column,
    template_inputs,
    with_images,
)
from minirl.data.sources import Source
from minirl.parallel.mesh import Mesh

SIDES = ("chosen", "rejected")


def open_pairs(source: str | list[str], setting: str, cfg: PairsConfig, mesh: Mesh) -> Rows:
    """Return rows of pairs, in the order of their sources. Collective.

    With a reasoning-gym generator, a question's answer was preferred to that of another question.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.
        mesh: the ranks.

    Returns:
        Rows {"prompt": messages, "chosen" and "rejected": the messages after it, "margin": float},
        with "template_inputs" where they have some; without "prompt" if the two
        are plain texts.

    Raises:
        UserError: a source cannot be read. A row that is no pair raises one when it is read.
    """
    return open_rows(source, setting, partial(_to_pair, cfg=cfg), cfg, mesh)


def _to_pair(raw: dict, place: Place, cfg: PairsConfig) -> dict:
    if place.source.is_generated:
        raw = {
            cfg.prompt_key: raw["prompt"],
            cfg.chosen_key: str(raw["answer"]),
            cfg.rejected_key: other_answer(raw, place.source),
        }
    prompt = raw.get(cfg.prompt_key)
    if prompt is None:
        prompt = raw.get("conversations")
    chosen = _side(raw, "chosen", cfg.chosen_key, place)
    rejected = _side(raw, "rejected", cfg.rejected_key, place)
    if prompt is not None and not is_prompt(prompt):
        raise UserError(
            f"{place}: data.prompt_key = {cfg.prompt_key!r} must name a text or messages with role "
            f"and content, not {str(prompt)[:60]!r}{fault_of(prompt)} (the row's keys: "
            f"{', '.join(raw)}); set "
            "data.prompt_key to the one that holds the prompt"
        )
    refuse_chats(place, cfg, prompt, chosen, rejected)
    if type(chosen) is not type(rejected):
        raise UserError(f"{place}: one side of the pair is a text and the other a list of messages")
    require_column(raw, "data.margin_key", cfg.margin_key, "margin", place)
    margin = raw.get(cfg.margin_key, 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
        raise UserError(
            f"{place}: data.margin_key = {cfg.margin_key!r} must name a finite number, not "
            f"{margin!r}; correct it or set data.margin_key to another column"
        )
    pair = {"chosen": chosen, "rejected": rejected, "margin": float(margin)}
    if prompt is None and isinstance(chosen, str):
        return pair
    pair |= template_inputs(raw, place, cfg)
    before = []
    if prompt is not None:
        before = to_messages(with_images(prompt, raw, place, cfg), cfg.system_prompt)
    chosen = _whole_chat(before, chosen, cfg)
    rejected = _whole_chat(before, rejected, cfg)
    before = before or _shared_prompt(chosen, rejected)
    pair["prompt"] = before
    for side, whole in zip(SIDES, (chosen, rejected), strict=True):
        answer = whole[len(before) :]
        are_texts = all(isinstance(message["content"], str) for message in answer)
        if not (before and answer and are_texts and _is_answer(answer[-1])):
            raise UserError(
                f"{place}: the {side} side must answer the prompt that both share, and end by an "
                "assistant's turn that is not empty; its content must be a text"
            )
        pair[side] = answer
    return pair


def _is_answer(message: dict) -> bool:
    """Return whether a message is an assistant's and not empty."""
    says = message["content"].strip() or message.get("tool_calls")
    return message["role"] == "assistant" and bool(says)


def other_answer(raw: dict, source: Source) -> str:
    """Return another answer of a generator, the first behind a place that the prompt chooses."""
    first = zlib.crc32(raw["prompt"].encode())
    for k in range(len(source.rows)):
        other = source.rows[(first + k) % len(source.rows)]["answer"]
        if other != raw["answer"]:
            return str(other)
    return ""


def _side(raw: dict, side: str, key: str, place: Place) -> RowPrompt:
    answer = raw.get(key)
    if isinstance(answer, str) and answer.strip():
        return answer
    if is_messages(answer):
        if not has_calls(answer):
            return answer
        return for_template(without_none(answer) if place.source.is_arrow else answer)
    raise UserError(
        f"{place}: data.{side}_key = {key!r} must name a text or messages with role and content, "
        f"not empty, for the {side} side of a pair (it is {str(answer)[:60]!r}"
        f"{fault_of(answer)}; the row's keys: {', '.join(raw)}); set "
        "data.chosen_key and data.rejected_key, or drop the row"
    )


def _shared_prompt(chosen: Messages, rejected: Messages) -> Messages:
    """Return what two chats begin with alike, up to the last message that is not an assistant's."""
    length = 0
    for i, message in enumerate(chosen[: len(rejected)]):
        if message != rejected[i]:
            break
        if message["role"] != "assistant":
            length = i + 1
    return chosen[:length]


def _whole_chat(before: Messages, answer: RowPrompt, cfg: PairsConfig) -> Messages:
    """Return the chat of one side, whether `answer` repeats the prompt or not."""
    if isinstance(answer, str):
        return [*before, {"role": "assistant", "content": answer}]
    whole = to_messages(answer, cfg.system_prompt)
    return whole if whole[: len(before)] == before else [*before, *answer]


class Pairs(Chats):
    """Pairs as token ids: two trajectories of each row.

    Episode 0 is the chosen side, and its reward is the margin; episode 1 is the rejected one.
    """

    lost_names = ("pairs_too_long", "pairs_equal")
    none_left = (
        "of {num_rows} pairs none is left: {num_lost[0]} have a side of more than "
        "data.max_tokens = {max_tokens} tokens, {num_lost[1]} have a chosen side equal to the "
        "rejected one"
    )

    def encode(self, row: dict) -> Encoded:
        """Return both sides with the answer as sampled; none if too long, or equal in all tokens.

        Pairs are lost by being too long, and by having two equal sides.
        """
        sides = []
        for episode, side in enumerate(SIDES):
            example = {"text": row[side]}
            if "prompt" in row:  # the whole answer is in the loss
                messages = row["prompt"] + row[side]
                answer = range(len(row["prompt"]), len(messages))
                trained = [i for i in answer if messages[i]["role"] == "assistant"]
                example = {"messages": messages, "trained": trained}
                if "template_inputs" in row:
                    example["template_inputs"] = row["template_inputs"]
            segments = self.to_examples(example)
            require(
                len(segments) == 1,
                f"the chat template renders a turn of the {side} side otherwise when others "
                "follow, and a side is one sequence; end the prompt before the last answer, or "
                "name a template by data.chat_template that keeps what was said",
            )
            segments[0].episode = episode
            sides.append(segments[0])
        chosen, rejected = sides
        if max(len(chosen.tokens), len(rejected.tokens)) > self.max_tokens:
            return Encoded([], (True, False))
        if np.array_equal(chosen.tokens, rejected.tokens):
            return Encoded([], (False, True))
        if "prompt" not in row:
            # The answers begin where the texts differ. A first token is never sampled.
            tokens = enumerate(zip(chosen.tokens, rejected.tokens, strict=False))
            first = next((i for i, (a, b) in tokens if a != b), 0) or 1
            chosen.sampled[:first] = False
            rejected.sampled[:first] = False
        chosen.reward = row["margin"]
        return Encoded(sides, (False, False))
