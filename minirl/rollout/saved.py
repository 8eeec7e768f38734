"""Unfinished groups of episodes in a checkpoint: a line of JSON each, which runs no code when read.

    ticket       number of the prompt
    version      optimizer steps that the weights had seen when it began; -1: it begins anew
    num_sampled  tokens of each episode, saved or not
    episodes     of each: {"trajectories": [...]} if it has ended, as rollout/records.py has them;
                 else where it stands, with the plain values of its environment (plain.py). None if
                 the group begins anew.

A group begins anew if an agent's episode goes on in it, an environment holds what is no plain value
and is not in a new environment either, or reward functions are to compare its completions.
"""

import dataclasses
import json
import sys
from typing import Any, NamedTuple

import numpy as np

from minirl.base.errors import UserError
from minirl.batch import routes
from minirl.engine.engine import Sampling
from minirl.engine.loop import Completion, Request
from minirl.envs.base import Agent
from minirl.rollout.conversation import Segment
from minirl.rollout.episode import Episode
from minirl.rollout.groups import Group
from minirl.rollout.plain import NotPlain, PlainReader, PlainWriter
from minirl.rollout.records import from_record, to_record
from minirl.types.images import ImageSpan
from minirl.types.packed import UNSET

# What a line raises that is of another version, or that somebody has written by hand.
BAD_LINE = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)


class SavedGroup(NamedTuple):
    """A line, read."""

    ticket: int
    version: int
    num_sampled: list[int]
    episodes: list[dict]


def write_group(group: Group) -> str:
    """Return a group as a line. Waits for the rewards of episodes that have ended."""
    num_sampled = [e.num_sampled() for e in group.episodes]
    anew = write_anew(group.ticket, num_sampled)
    if any(_cannot_go_on(e) for e in group.episodes):
        return anew
    saved = {"ticket": group.ticket, "version": group.version, "num_sampled": num_sampled}
    try:
        saved["episodes"] = [_save_episode(e) for e in group.episodes]
        return json.dumps(saved, default=np.ndarray.tolist)
    except (NotPlain, TypeError, RecursionError):  # TypeError: of json, for what a row or info has
        return anew


def _cannot_go_on(e: Episode) -> bool:
    """Whether an episode waits for others of its group, or is an agent's, or has not begun."""
    if e.outcome:
        return e.waits
    return e.env is UNSET or isinstance(e.env, Agent)


def write_anew(ticket: int, num_sampled: list[int]) -> str:
    """Return the line of a group that begins anew."""
    return json.dumps({"ticket": ticket, "version": -1, "num_sampled": num_sampled, "episodes": []})


def read_line(line: str) -> SavedGroup:
    """Return what a line says. Raises UserError if it is none."""
    try:
        saved = json.loads(line)
        return SavedGroup(
            int(saved["ticket"]),
            int(saved["version"]),
            [int(n) for n in saved["num_sampled"]],
            list(saved["episodes"]),
        )
    except BAD_LINE as error:
        raise UserError(
            f"resume: an unfinished group of the checkpoint cannot be read ({type(error).__name__}:"
            f" {error}); go on from another checkpoint"
        ) from error


def restore_episodes(group: Group, saved: SavedGroup) -> bool:
    """Put the saved episodes in the place of a new group's. Those beyond its number are left out.

    Episodes of the group need environments, in which the saved values are put.

    Returns:
        False if one of them cannot be restored; then the group is as new.
    """
    restored = []
    try:
        for new, state in zip(group.episodes, saved.episodes, strict=False):
            restored.append(_restore_episode(new, state))
    except (NotPlain, *BAD_LINE):
        return False
    group.episodes[: len(restored)] = restored
    return True


def _save_episode(e: Episode) -> dict:
    if e.outcome:
        return {"trajectories": [to_record(t) for t in e.outcome()]}
    segments = e.conversation.segments
    writer = PlainWriter(e.row)
    return {
        "segments": [_with_routes(vars(segment), segment.routes) for segment in segments],
        "segment": next((i for i, s in enumerate(segments) if s is e.segment), None),
        "request": _save_request(e.request) if e.request else None,
        "sampling": dataclasses.asdict(e.sampling),
        "rendered_prompt": e.row["rendered_prompt"],
        "num_prompt_messages": e.num_prompt_messages,
        "turn": e.turn,
        "answer": e.answer,
        "stopped": e.stopped,
        "truncated": e.truncated,
        "reward": e.reward,
        "error": e.error,
        "info": e.info,
        # Together, because the environment may hold the chat, too.
        "messages": writer.write(e.messages),
        "env": writer.write(vars(e.env)),
    }


def _restore_episode(new: Episode, saved: dict) -> Episode:
    """Return the episode that was saved; `new` is a new one of the same row and number."""
    if "trajectories" in saved:
        trajectories = [from_record(record) for record in saved["trajectories"]]
        return dataclasses.replace(new, outcome=lambda: trajectories)
    segments = [_restore_segment(fields) for fields in saved["segments"]]
    row = {**new.row, "rendered_prompt": saved["rendered_prompt"]}
    reader = PlainReader(row, _classes_beside(new.env))
    restored = dataclasses.replace(
        new,
        row=row,
        sampling=_restore_sampling(saved["sampling"]),
        num_prompt_messages=saved["num_prompt_messages"],
        turn=saved["turn"],
        answer=saved["answer"],
        stopped=saved["stopped"],
        truncated=saved["truncated"],
        reward=saved["reward"],
        error=saved["error"],
        info=saved["info"],
        messages=reader.read(saved["messages"]),
    )
    vars(new.env).update(reader.read(saved["env"], vars(new.env)))
    new.conversation.segments = segments
    if saved["segment"] is not None:
        restored.segment = segments[saved["segment"]]
    if saved["request"] is not None:
        restored.request = _restore_request(restored, saved["request"])
    return restored


def _classes_beside(env: Any) -> dict[str, type]:
    """Return the classes of the file that an environment is of, by their qualified names."""
    module = sys.modules[type(env).__module__]
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return {cls.__qualname__: cls for cls in classes if cls.__module__ == module.__name__}


def _save_request(request: Request) -> dict:
    return {
        "sampling": dataclasses.asdict(request.sampling),
        "seed": request.seed,
        "done": _with_routes(vars(request.done), request.done.routes),
    }


def _with_routes(fields: dict, value: np.ndarray | None) -> dict:
    """Return fields of which `routes` are as JSON takes them."""
    return fields | {"routes": routes.to_json(value)}


def _restore_request(e: Episode, saved: dict) -> Request:
    return Request(
        tokens=e.segment.tokens,
        images=e.segment.images,
        sampling=_restore_sampling(saved["sampling"]),
        seed=saved["seed"],
        name=(e.ticket, e.number),
        done=Completion(**saved["done"] | {"routes": routes.from_json(saved["done"]["routes"])}),
    )


def _restore_sampling(saved: dict) -> Sampling:
    return Sampling(**saved | {"stop_token_ids": tuple(saved["stop_token_ids"])})


def _restore_segment(saved: dict) -> Segment:
    images = [ImageSpan(*image) for image in saved["images"]]
    return Segment(**saved | {"images": images, "routes": routes.from_json(saved["routes"])})
