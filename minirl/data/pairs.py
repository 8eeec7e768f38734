"""Pairs of answers to one prompt, of which the first was preferred: from TRL's and OpenRLHF's
columns to token ids.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.config.supervised import PairsConfig
from minirl.data import chat
from minirl.data.datasets import Examples, Rows, is_prompt, open_rows, to_example, with_images
from minirl.data.images import Vision
from minirl.data.sources import GYM, Source
from minirl.errors import UserError, require
from minirl.parallel.mesh import Mesh
from minirl.types import Trajectory

SIDES = ("chosen", "rejected")


def load_pairs(source: str | list[str], setting: str, cfg: PairsConfig) -> Rows:
    """Rows, in their order there: {"prompt": messages, "chosen", "rejected": the messages after it;
    "margin"}, or of plain texts without a prompt.

    Of a reasoning-gym generator, a question's answer was preferred to that of another. Raises
    UserError for a row that is no pair, with its line.
    """
    return open_rows(
        source,
        setting,
        lambda row, of, where: _to_pair(
            _judged(row, of, cfg) if f" = {GYM}" in of.shown else row, where, cfg
        ),
        cfg.max_samples,
    )


def _judged(row: dict, of: Source, cfg: PairsConfig) -> dict:
    others = (
        of.rows[(zlib.crc32(row["prompt"].encode()) + k) % len(of.rows)]["answer"]
        for k in range(len(of.rows))
    )
    wrong = next((str(answer) for answer in others if answer != row["answer"]), "")
    return {
        cfg.prompt_key: row["prompt"],
        cfg.chosen_key: str(row["answer"]),
        cfg.rejected_key: wrong,
    }


def _to_pair(row: dict, where: str, cfg: PairsConfig) -> dict:
    prompt, margin = row.get(cfg.prompt_key), row.get(cfg.margin_key, 0.0)
    sides = {
        side: row.get(key)
        for side, key in zip(SIDES, (cfg.chosen_key, cfg.rejected_key), strict=True)
    }
    for (side, answer), key in zip(sides.items(), (cfg.chosen_key, cfg.rejected_key), strict=True):
        if not is_prompt(answer) or isinstance(answer, str) and not answer.strip():
            raise UserError(
                f"{where}: the {side} side {key!r} of a pair must be a text or messages with role and content, and not empty (it is "
                f"{str(answer)[:60]!r}; the row's keys: {', '.join(row)}); set data.chosen_key and data.rejected_key, or drop the row"
            )
    if prompt is not None and not is_prompt(prompt):
        raise UserError(
            f"{where}: {cfg.prompt_key!r} must be a text or messages with role and content, not {str(prompt)[:60]!r}"
        )
    require(
        len({type(answer) for answer in sides.values()}) == 1,
        f"{where}: one side of the pair is a text and the other a list of messages",
    )
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
        raise UserError(f"{where}: {cfg.margin_key!r} must be a finite number, not {margin!r}")
    if prompt is None and isinstance(sides["chosen"], str):
        return {**sides, "margin": float(margin)}
    before = (
        []
        if prompt is None
        else chat.to_messages(with_images(prompt, row, where, cfg), cfg.system_prompt)
    )
    chats = [_whole(before, answer, cfg) for answer in sides.values()]
    if before == []:  # the two begin alike
        same = next(
            (i for i, (a, b) in enumerate(zip(*chats, strict=False)) if a != b),
            min(map(len, chats)),
        )
        before = chats[0][
            : next((i for i in range(same, 0, -1) if chats[0][i - 1]["role"] != "assistant"), 0)
        ]
    rest = [c[len(before) :] for c in chats]
    for side, messages in zip(SIDES, rest, strict=True):
        if (
            not before
            or not messages
            or messages[-1]["role"] != "assistant"
            or not all(isinstance(m["content"], str) for m in messages)
            or not messages[-1]["content"].strip()
        ):
            raise UserError(
                f"{where}: the {side} side must answer the prompt that both share, and end by an assistant's turn that is not empty; its "
                "content must be a text"
            )
    return {"prompt": before, **dict(zip(SIDES, rest, strict=True)), "margin": float(margin)}


def _whole(before: list[dict], answer: str | list[dict], cfg: PairsConfig) -> list[dict]:
    """The chat of one side, whether `answer` repeats the prompt or not."""
    if isinstance(answer, str):
        return [*before, {"role": "assistant", "content": answer}]
    whole = chat.to_messages(answer, cfg.system_prompt)
    return whole if whole[: len(before)] == before else [*before, *answer]


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
        """`score`: a model with a score head reads the end: one more token follows, so that the
        last of the answer has a row, which is the one that predicts it. Drops pairs that are too
        long and those whose sides are the same tokens. Raises UserError if that is everything.
        """
        self.score = score
        own = {
            n: _encode(rows[n], tokenizer, vision, stop_ids)
            for n in range(mesh.rank, len(rows), mesh.world_size)
        }
        short = {
            n: sides
            for n, sides in own.items()
            if max(len(t.tokens) for t in sides) <= cfg.max_tokens
        }
        encoded = {
            n: (*sides, rows[n]["margin"])
            for n, sides in short.items()
            if not np.array_equal(*(t.tokens for t in sides))
        }
        # How many pairs were too long, and how many have two equal sides.
        self.lost = (
            sum(mesh.gather(len(own) - len(short))),
            sum(mesh.gather(len(short) - len(encoded))),
        )
        super().__init__(
            rows,
            encoded,
            mesh,
            seed=seed,
            shuffle=shuffle,
            why_none=f"{setting}: of {len(rows)} pairs none is left: {self.lost[0]} have a side of more than data.max_tokens = {cfg.max_tokens} "
            f"tokens, {self.lost[1]} have a chosen side equal to the rejected one",
        )
        self.logprobs: dict[
            str, np.ndarray
        ] = {}  # float32 [L] of a reference, if there are any: "<row>-<0: chosen, 1: rejected>".

    def examples(self, numbers: range) -> list[Trajectory]:
        """Those of the pairs that this rank holds, as two trajectories each: episode 0 was chosen;
        its reward is the margin.
        """
        out = []
        for n, *sides, margin in self.own(numbers):
            for episode, t in enumerate(sides):
                tokens, sampled = (
                    (np.append(t.tokens, t.tokens[-1:]), np.append(t.sampled, True))
                    if self.score
                    else (t.tokens, t.sampled)
                )
                logprobs = self.logprobs.get(
                    f"{self.row(n)}-{episode}", np.zeros(len(tokens), np.float32)
                )
                out.append(
                    replace(
                        t,
                        tokens=tokens,
                        sampled=sampled,
                        logprobs=logprobs,
                        group=n,
                        episode=episode,
                        reward=0.0 if episode else margin,
                    )
                )
        return out


def _encode(
    row: dict, tokenizer: PreTrainedTokenizerBase, vision: Vision | None, stop_ids: list[int]
) -> list[Trajectory]:
    """Both sides, with the answer as sampled."""
    if "prompt" in row:
        before = row["prompt"]
        turns = [
            [len(before) + i for i, m in enumerate(row[side]) if m["role"] == "assistant"]
            for side in SIDES
        ]
        return [
            to_example(
                tokenizer, vision, {"messages": before + row[side], "trained": numbers}, stop_ids
            )
            for side, numbers in zip(SIDES, turns, strict=True)
        ]
    sides = [to_example(tokenizer, vision, {"text": row[side]}, stop_ids) for side in SIDES]
    same = next(
        (i for i, (a, b) in enumerate(zip(*(t.tokens for t in sides), strict=False)) if a != b), 1
    )
    for t in sides:
        t.sampled[: max(1, same)] = False
    return sides
