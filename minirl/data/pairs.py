"""Pairs of answers to one prompt, of which the first was preferred.

From TRL's and OpenRLHF's columns to token ids.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.config.supervised import PairsConfig
from minirl.data import chat
from minirl.data.examples import Examples, to_example
from minirl.data.images import Vision
from minirl.data.rows import is_prompt, open_rows, with_images
from minirl.data.sources import Source
from minirl.errors import UserError, require
from minirl.parallel.mesh import Mesh
from minirl.types import Trajectory

SIDES = ("chosen", "rejected")


def load_pairs(source: str | list[str], setting: str, cfg: PairsConfig) -> Sequence[dict]:
    """Return rows of pairs, in the order of their sources.

    With a reasoning-gym generator, a question's answer was preferred to that of another question.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.

    Returns:
        Rows {"prompt": messages, "chosen" and "rejected": the messages after it, "margin": float};
        without "prompt" if the two are plain texts.

    Raises:
        UserError: a row is no pair; with its line.
    """
    return open_rows(source, setting, partial(_to_pair, cfg=cfg), cfg.max_samples)


def _to_pair(raw: dict, source: Source, where: str, cfg: PairsConfig) -> dict:
    if source.is_generated:
        raw = {
            cfg.prompt_key: raw["prompt"],
            cfg.chosen_key: str(raw["answer"]),
            cfg.rejected_key: _other_answer(raw, source),
        }
    prompt = raw.get(cfg.prompt_key)
    chosen = _side(raw, "chosen", cfg.chosen_key, where)
    rejected = _side(raw, "rejected", cfg.rejected_key, where)
    if prompt is not None and not is_prompt(prompt):
        raise UserError(
            f"{where}: data.prompt_key = {cfg.prompt_key!r} must name a text or messages with role "
            f"and content, not {str(prompt)[:60]!r} (the row's keys: {', '.join(raw)}); set "
            "data.prompt_key to the one that holds the prompt"
        )
    require(
        type(chosen) is type(rejected),
        f"{where}: one side of the pair is a text and the other a list of messages",
    )
    margin = raw.get(cfg.margin_key, 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
        raise UserError(
            f"{where}: data.margin_key = {cfg.margin_key!r} must name a finite number, not "
            f"{margin!r}; correct it or set data.margin_key to another column"
        )
    pair = {"chosen": chosen, "rejected": rejected, "margin": float(margin)}
    if prompt is None and isinstance(chosen, str):
        return pair
    before: list[dict] = []
    if prompt is not None:
        before = chat.to_messages(with_images(prompt, raw, where, cfg), cfg.system_prompt)
    chosen = _whole_chat(before, chosen, cfg)
    rejected = _whole_chat(before, rejected, cfg)
    before = before or _shared_prompt(chosen, rejected)
    pair = {"prompt": before} | pair
    for side, whole in zip(SIDES, (chosen, rejected), strict=True):
        answer = whole[len(before) :]
        if not before or not _is_answer(answer):
            raise UserError(
                f"{where}: the {side} side must answer the prompt that both share, and end by an "
                "assistant's turn that is not empty; its content must be a text"
            )
        pair[side] = answer
    return pair


def _other_answer(raw: dict, source: Source) -> str:
    """Return another answer of a generator, the first behind a place that the prompt chooses."""
    first = zlib.crc32(raw["prompt"].encode())
    for k in range(len(source.rows)):
        other = source.rows[(first + k) % len(source.rows)]["answer"]
        if other != raw["answer"]:
            return str(other)
    return ""


def _side(raw: dict, side: str, key: str, where: str) -> str | list[dict]:
    answer = raw.get(key)
    if is_prompt(answer) and not (isinstance(answer, str) and not answer.strip()):
        return answer
    raise UserError(
        f"{where}: data.{side}_key = {key!r} must name a text or messages with role and content, "
        f"not empty, for the {side} side of a pair (it is {str(answer)[:60]!r}; the row's keys: "
        f"{', '.join(raw)}); set data.chosen_key and data.rejected_key, or drop the row"
    )


def _shared_prompt(chosen: list[dict], rejected: list[dict]) -> list[dict]:
    """Return what two chats begin with alike, up to the last message that is not an assistant's."""
    length = 0
    for i, message in enumerate(chosen[: len(rejected)]):
        if message != rejected[i]:
            break
        if message["role"] != "assistant":
            length = i + 1
    return chosen[:length]


def _whole_chat(before: list[dict], answer: str | list[dict], cfg: PairsConfig) -> list[dict]:
    """Return the chat of one side, whether `answer` repeats the prompt or not."""
    if isinstance(answer, str):
        return [*before, {"role": "assistant", "content": answer}]
    whole = chat.to_messages(answer, cfg.system_prompt)
    return whole if whole[: len(before)] == before else [*before, *answer]


def _is_answer(messages: list[dict]) -> bool:
    """Return whether these are texts, of which the last is an assistant's and not empty."""
    contents = [message["content"] for message in messages]
    if not contents or not all(isinstance(content, str) for content in contents):
        return False
    return messages[-1]["role"] == "assistant" and bool(contents[-1].strip())


class Pairs(Examples):
    """Pairs as token ids."""

    def __init__(
        self,
        rows: Sequence[dict],
        setting: str,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: list[int],
        cfg: PairsConfig,
        mesh: Mesh,
        *,
        score: bool,
        seed: int,
        shuffle: bool = True,
        vision: Vision | None = None,
    ):
        """Encode this rank's share; drop pairs that are too long, or equal in all tokens.

        `score`: a model with a score head reads the end of the answer. One more token follows, so
        that the answer's last token has a row, which is the one that predicts it.

        Raises:
            UserError: that leaves no pair.
        """
        encoded = {}
        num_long = 0
        num_equal = 0
        for number in range(mesh.rank, len(rows), mesh.world_size):
            row = rows[number]
            chosen, rejected = _encode(row, tokenizer, vision, stop_ids)
            if max(len(chosen.tokens), len(rejected.tokens)) > cfg.max_tokens:
                num_long += 1
            elif np.array_equal(chosen.tokens, rejected.tokens):
                num_equal += 1
            else:
                if score:
                    _repeat_last(chosen)
                    _repeat_last(rejected)
                encoded[number] = (chosen, rejected, row["margin"])
        # How many pairs were too long, and how many had two equal sides, on all ranks.
        self.num_lost = sum(mesh.gather(num_long)), sum(mesh.gather(num_equal))
        why_none = (
            f"{setting}: of {len(rows)} pairs none is left: {self.num_lost[0]} have a side of more "
            f"than data.max_tokens = {cfg.max_tokens} tokens, {self.num_lost[1]} have a chosen "
            "side equal to the rejected one"
        )
        super().__init__(rows, encoded, mesh, why_none, seed=seed, shuffle=shuffle)
        # Log-probs by a reference model, if there is one: "<row>-<episode>" -> float32 [L].
        self.logprobs: dict[str, np.ndarray] = {}

    def examples(self, numbers: range) -> list[Trajectory]:
        """Return those of the pairs that this rank holds, as two trajectories each.

        Episode 0 is the chosen side, and its reward is the margin; episode 1 is the rejected one.
        """
        out = []
        for number in self.numbers_here(numbers):
            row = self.row(number)
            chosen, rejected, margin = self.encoded[row]
            for episode, t in enumerate((chosen, rejected)):
                logprobs = self.logprobs.get(f"{row}-{episode}", t.logprobs)
                reward = 0.0 if episode else margin
                out.append(
                    replace(t, logprobs=logprobs, group=number, episode=episode, reward=reward)
                )
        return out


def _encode(
    row: dict, tokenizer: PreTrainedTokenizerBase, vision: Vision | None, stop_ids: list[int]
) -> tuple[Trajectory, Trajectory]:
    """Return both sides, with the answer as sampled."""
    chosen = to_example(tokenizer, vision, _one_side(row, "chosen"), stop_ids)
    rejected = to_example(tokenizer, vision, _one_side(row, "rejected"), stop_ids)
    if "prompt" not in row:
        # The answers begin where the texts differ. A first token is never sampled.
        tokens = enumerate(zip(chosen.tokens, rejected.tokens, strict=False))
        first = next((i for i, (a, b) in tokens if a != b), 0) or 1
        chosen.sampled[:first] = False
        rejected.sampled[:first] = False
    return chosen, rejected


def _repeat_last(t: Trajectory) -> None:
    """Add a token to an answer, so that its last one has a row."""
    t.tokens = np.append(t.tokens, t.tokens[-1:])
    t.sampled = np.append(t.sampled, True)
    t.logprobs = np.zeros(len(t.tokens), np.float32)


def _one_side(row: dict, side: str) -> dict:
    """Return one side of a pair as a row of `load_chats`, with the whole answer in the loss."""
    if "prompt" not in row:
        return {"text": row[side]}
    messages = row["prompt"] + row[side]
    answer = range(len(row["prompt"]), len(messages))
    return {
        "messages": messages,
        "trained": [i for i in answer if messages[i]["role"] == "assistant"],
    }
