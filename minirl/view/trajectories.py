"""The trajectories of a run as a table, which is filtered, sorted, searched and shown by groups.

The table is made of those next to the dumped trajectories (rollout/index.py): 100,000 trajectories
are about 10 MB, and no file of trajectories is read but for a search in their texts.
"""

import contextlib
import functools
import json
import math
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from minirl.base.errors import require
from minirl.base.reading import LONGEST_CHARACTER
from minirl.rollout import index

OF_TRAINING = ["mismatch", "mean_mismatch", "entropy", "advantage"]
# Of each trajectory: its row in SAMPLED, the part that it is in, and its row in TRAINED if it has
# one.
ROW = np.dtype(
    [
        *[(name, index.SAMPLED[name]) for name in index.SAMPLED.names or ()],
        ("step", "<i4"),
        ("rank", "<i4"),
        ("trained_rank", "<i4"),  # -1: not trained on, or not yet.
        ("trained_start", "<i8"),
        *[(name, index.TRAINED[name]) for name in OF_TRAINING],
    ]
)
LARGEST = ("mismatch", "entropy", "staleness", "num_tokens")  # Of the members of a group.
# Of each group: what it is filtered and sorted by. Largest values and `any` over its members.
GROUP = np.dtype(
    [
        ("step", "<i4"),
        ("group", "<i8"),
        ("first", "<i8"),  # Its first row.
        ("num_rows", "<i4"),
        *[(name, ROW[name]) for name in LARGEST],
        ("reward", "<f8"),  # The mean.
        ("cut_off", "?"),
        ("failed", "?"),
        ("equal", "?"),
    ]
)
NUM_BARS = 30  # Of a histogram.
UNFINISHED = "\ufffd"  # What a decoder makes of the first bytes of a character.


class Query(NamedTuple):
    """Which groups to show."""

    flags: tuple[str, ...] = ()  # Columns of GROUP: all of them must be set.
    unequal: bool = False  # Without groups in which all rewards are equal.
    first_step: int = 0
    last_step: int = 2**31 - 1
    sort: str = "step"  # A column of GROUP.
    ascending: bool = False
    page: int = 0
    page_size: int = 20
    search: str = ""  # What a prompt or an answer contains.


class Table:
    """The table of a folder of dumped trajectories, which grows while the run is not done."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows = np.zeros(0, ROW)
        self.groups = np.zeros(0, GROUP)
        self.tokenizer: Tokenizer | None = None  # That the run has left.
        self.time = 0  # When the folder was changed last, as far as it was read, in ns.
        self.seen: dict[int, tuple] = {}  # By step: the files that were read, as they were then.
        self.by_step: dict[int, np.ndarray] = {}  # ROW [N] by step.
        self.lock = threading.Lock()  # Requests come in threads, and reading may take seconds.

    def steps(self) -> list[int]:
        """Return the steps that have trajectories."""
        return sorted(self.by_step)

    def refresh(self) -> None:
        """Read what has changed since the last call.

        Files appear by a rename, which changes the folder, so that its time tells of any. A resumed
        run removes those of later steps: what was read stays until all of them are gone.
        """
        with self.lock, contextlib.suppress(FileNotFoundError):
            self._refresh()

    def _refresh(self) -> None:
        time = self.folder.stat().st_mtime_ns if self.folder.exists() else 0
        if time == self.time:
            return
        parts: dict[int, list[index.Part]] = {}
        for part in index.parts(self.folder):
            parts.setdefault(part.step, []).append(part)
        marks = {step: tuple(map(_mark, found)) for step, found in parts.items()}
        if marks != self.seen:
            by_step = {}
            for step, mark in marks.items():
                is_read = self.seen.get(step) == mark
                by_step[step] = self.by_step[step] if is_read else _read_step(parts[step])
            in_order = [by_step[step] for step in sorted(by_step)]
            self.rows = np.concatenate([np.zeros(0, ROW), *in_order])
            self.groups = _group(self.rows)
            self.by_step = by_step
            self.seen = marks
        self.time = time

    def select(self, query: Query) -> np.ndarray:
        """Return the groups that a query asks for, GROUP [N], those of all pages, in its order."""
        groups = self.groups
        keep = (groups["step"] >= query.first_step) & (groups["step"] <= query.last_step)
        if query.search and len(groups):
            found = [self._search(query.search, step, self.seen[step]) for step in self.steps()]
            keep &= np.logical_or.reduceat(np.concatenate(found), groups["first"])
        known = groups.dtype.names or ()
        for flag in query.flags:
            require(flag in known, f"flags = {flag}: give some of {', '.join(known)}")
            keep &= groups[flag]
        if query.unequal:
            keep &= ~groups["equal"]
        kept = np.flatnonzero(keep)
        require(query.sort in known, f"sort = {query.sort}: give one of {', '.join(known)}")
        values = groups[query.sort][kept].astype(np.float64)
        values = values if query.ascending else -values
        # What has no value comes last; equal ones in the order of steps.
        order = np.argsort(np.where(np.isnan(values), np.inf, values), kind="stable")
        return groups[kept[order]]

    @functools.lru_cache(maxsize=10_000)  # noqa: B019  # a table lives as long as its page
    def _search(self, text: str, step: int, mark: tuple) -> np.ndarray:
        """Return which rows of a step have a text in a prompt or an answer, bool [N].

        All lines are read, but most are sorted out without being parsed. Case does not count (but
        for letters beyond ASCII). What was found is kept for the files as they are by their mark.
        """
        # Roles and calls are not written in a line as they are shown; each word of them is.
        word = max(re.split(r'[\s":{}\\,]+', text), key=len)
        as_written = json.dumps(word)[1:-1].lower().encode()
        rows = self.by_step[step]
        has = np.zeros(len(rows), bool)
        for rank in np.unique(rows["rank"]):
            block = index.part_of(self.folder, step, int(rank)).lines.read_bytes()
            for i in np.flatnonzero(rows["rank"] == rank):
                start = int(rows["start"][i])
                line = block[start : start + int(rows["num_bytes"][i])]
                if as_written not in line.lower():
                    continue
                info = json.loads(line)["info"]
                texts = [prompt_text(info["prompt"]), info["completion"], info["error"]]
                texts += info.get("row", {}).values()
                has[i] = text.lower() in "\n".join(texts).lower()
        return has

    def histograms(self, groups: np.ndarray) -> dict[str, dict[str, list[float]]]:
        """Return the episodes of groups, GROUP [N], counted by reward and by sampled tokens."""
        is_kept = np.isin(self.groups["first"], groups["first"])
        rows = self.rows[np.repeat(is_kept, self.groups["num_rows"])]
        begins = np.flatnonzero(rows["segment"] == 0)  # of the episodes
        if not len(begins):
            return {}
        lengths = np.add.reduceat(rows["num_sampled"], begins)
        width = max(1, -(-int(np.ptp(lengths) + 1) // NUM_BARS))  # whole tokens
        bins = np.arange(lengths.min(), lengths.max() + width + 1, width)
        rewards = rows["reward"][begins]
        if np.ptp(rewards) <= 1e-9 * np.abs(rewards).max():  # They differ by rounding, if at all.
            rewards = np.full_like(rewards, rewards[0])
        counted = {
            "reward": np.histogram(rewards, NUM_BARS),
            "sampled tokens": np.histogram(lengths, bins),
        }
        found = {}
        for name, (counts, edges) in counted.items():
            found[name] = {"edges": edges.tolist(), "counts": counts.tolist()}
        return found

    def group(self, step: int, group: int) -> dict[str, Any]:
        """Return a group with its trajectories. Raises UserError if there is none."""
        found = (self.rows["step"] == step) & (self.rows["group"] == group)
        trajectories = [self._trajectory(row) for row in self.rows[found]]
        require(trajectories, f"step {step} has no group {group}")
        return {
            "step": step,
            "group": group,
            "prompt": trajectories[0]["prompt"],
            "row": trajectories[0]["row"],
            "trajectories": trajectories,
        }

    def describe(self, group: np.ndarray) -> dict[str, Any]:
        """Return what the list of groups says of one: its numbers, and in a line its prompt."""
        first = int(group["first"])
        rows = self.rows[first : first + int(group["num_rows"])]
        info = self._record(rows[0])["info"]
        columns = [f"{name}: {value}" for name, value in info.get("row", {}).items()]
        texts = [prompt_text(info["prompt"])[-200:], *columns]
        described = {name: group[name].item() for name in GROUP.names or () if name != "first"}
        described["rewards"] = rows["reward"][rows["segment"] == 0].tolist()
        described["prompt"] = " · ".join(text for text in texts if text)[:400]
        return described

    def _record(self, row: np.ndarray) -> dict[str, Any]:
        part = index.part_of(self.folder, int(row["step"]), int(row["rank"]))
        with part.lines.open("rb") as file:
            file.seek(int(row["start"]))
            return json.loads(file.read(int(row["num_bytes"])))

    def _trajectory(self, row: np.ndarray) -> dict[str, Any]:
        record = self._record(row)
        info = record["info"]
        texts = [f" {token}" for token in record["tokens"]]
        path = self.folder / index.TOKENIZER
        if self.tokenizer is None and path.is_file():
            self.tokenizer = Tokenizer.from_file(str(path))
        if self.tokenizer:
            texts = token_texts(self.tokenizer, record["tokens"])

        # What the trainer said of the tokens, [L] each; nan: nothing.
        values = np.full((len(texts), len(index.VALUES)), np.nan, np.float32)
        if row["trained_rank"] >= 0:
            part = index.part_of(self.folder, int(row["step"]), int(row["trained_rank"]))
            values = index.read_values(part, int(row["trained_start"]), len(texts))
        advantages, logprobs, entropies = values.T
        num_updates = record["version"] + int(row["staleness"])
        staleness = [num_updates - v if v >= 0 else None for v in record["versions"]]
        # Why the policy sampled nothing, as far as the dump says it.
        held = "all its tokens were held to a format or a call, and are outside the loss"
        refusal = info.get("refusal")
        reasons = [
            ("it failed", info["error"]),
            (f"the endpoint refused the agent's last request: {refusal}", refusal),
            (held, info.get("endpoint", {}).get("outside_loss")),
            ("a limit of tokens or turns left no room", info.get("env", {}).get("truncated")),
            ("the environment or agent asked for no answer", True),
        ]
        why_empty = next(reason for reason, is_so in reasons if is_so)
        said = {name: record[name] for name in ("episode", "segment", "reward", "version")}
        said |= {name: info[name] for name in ("completion", "stopped", "error", "source")}
        said |= {name: info.get(name, {}) for name in ("row", "rewards", "env")}
        return said | {
            "prompt": prompt_text(info["prompt"]),
            "shaped": float(row["shaped"]),
            "why_empty": "" if record["tokens"] else why_empty,
            "texts": texts,
            "sampled": [int(sampled) for sampled in record["sampled"]],
            "turn_rewards": record["rewards"],
            "images": [
                image
                for image in record["images"]
                if str(image[2]).startswith(("data:image/", "data:image;"))
            ],
            "values": {
                "advantage": _rounded(advantages),
                "logprob": _rounded(logprobs),
                "engine": _rounded(np.array(record["logprobs"])),
                "mismatch": _rounded(np.abs(logprobs - np.array(record["logprobs"]))),
                "entropy": _rounded(entropies),
                "staleness": staleness,
            },
        }


def prompt_text(prompt: Any) -> str:
    """Return a prompt, a text or messages with their calls of tools, as one text."""
    if isinstance(prompt, str):
        return prompt
    lines = []
    for message in prompt:
        calls = message.get("tool_calls") or []
        called = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        said = " ".join(filter(None, [message.get("content"), *called]))
        lines.append(f"{message['role']}: {said}")
    return "\n".join(lines)


def _mark(part: index.Part) -> tuple:
    """Return what changes when the files of a part do."""
    return tuple(
        (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
        for path in (part.lines, part.table)
    )


def _read_step(parts: list[index.Part]) -> np.ndarray:
    """Return the trajectories of a step, ROW [N], by group, episode and segment."""
    all_rows = []
    all_trained = []
    for part in parts:
        tables = index.read_table(part)
        sampled = tables[0] if tables else _from_lines(part)
        rows = np.zeros(len(sampled), ROW)
        rows[list(index.SAMPLED.names or ())] = sampled
        rows["step"] = part.step
        rows["rank"] = part.rank
        all_rows.append(rows)
        if tables:
            all_trained.append((part.rank, tables[1]))
    rows = np.concatenate(all_rows)
    order = np.lexsort((rows["segment"], rows["episode"], rows["group"]))
    rows = rows[order]
    # What training says of the trajectories, on whatever rank it was.
    rows["trained_rank"] = -1
    rows[OF_TRAINING] = np.nan
    names = ["group", "episode", "segment"]
    row_of = {key: i for i, key in enumerate(rows[names].tolist())}
    for rank, trained in all_trained:
        keys = trained[names].tolist()
        trained = trained[[key in row_of for key in keys]]
        places = [row_of[key] for key in keys if key in row_of]
        rows["trained_rank"][places] = rank
        rows["trained_start"][places] = trained["start"]
        rows[OF_TRAINING][places] = trained[OF_TRAINING]
    return rows


def _from_lines(part: index.Part) -> np.ndarray:
    """Return SAMPLED [N] from the trajectories themselves: the step is not done, or an old run's.

    Their rewards are not shaped yet.
    """
    lines = part.lines.read_bytes().split(b"\n")[:-1]
    rows = []
    for line, place in zip(lines, index.places(map(len, lines)), strict=True):
        record = json.loads(line)
        info = record["info"]
        names = (record["group"], record["episode"], record["segment"])
        numbers = (len(record["tokens"]), sum(record["sampled"]), record["reward"])
        state = (info.get("staleness", 0), info["stopped"], bool(info["error"]))
        rows.append((*names, *place, *numbers, record["reward"], *state))
    return np.array(rows, index.SAMPLED)


def _group(rows: np.ndarray) -> np.ndarray:
    """Return GROUP [G] of rows that are sorted by step and group."""
    if not len(rows):
        return np.zeros(0, GROUP)
    begins = (np.diff(rows["step"]) != 0) | (np.diff(rows["group"]) != 0)
    first = np.concatenate([[0], np.flatnonzero(begins) + 1])
    groups = np.zeros(len(first), GROUP)
    for name in ("step", "group"):
        groups[name] = rows[name][first]
    groups["first"] = first
    groups["num_rows"] = np.diff(first, append=len(rows))
    for name in LARGEST:
        groups[name] = np.fmax.reduceat(rows[name], first)
    begins_episode = rows["segment"] == 0
    num_episodes = np.add.reduceat(begins_episode.astype(int), first)
    rewards = np.where(begins_episode, rows["reward"], 0.0)
    groups["reward"] = np.add.reduceat(rewards, first) / np.maximum(num_episodes, 1)
    groups["cut_off"] = np.logical_or.reduceat(~rows["stopped"], first)
    groups["failed"] = np.logical_or.reduceat(rows["failed"], first)
    highest = np.maximum.reduceat(rows["shaped"], first)
    groups["equal"] = highest == np.minimum.reduceat(rows["shaped"], first)
    return groups


def token_texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Return texts that joined are the text of the tokens, one for each.

    A character of several tokens belongs to the last of them. A token is decoded after the one
    before it, because some decoders drop the space before the first.
    """
    texts: list[str] = []
    pending: list[int] = []
    before: list[int] = []
    for number, token in enumerate(tokens, start=1):
        pending.append(token)
        known = tokenizer.decode(before, skip_special_tokens=False)
        text = tokenizer.decode(before + pending, skip_special_tokens=False)[len(known) :]
        may_grow = len(pending) < LONGEST_CHARACTER and number < len(tokens)
        if text.endswith(UNFINISHED) and may_grow:
            texts.append("")
            continue
        texts.append(text)
        before = pending
        pending = []
    return texts


def _rounded(values: np.ndarray) -> list[float | None]:
    """Return numbers of five digits; None for what is not finite."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]
