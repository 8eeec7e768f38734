"""Groups of trajectories as the page shows them: texts of tokens, and a number of each by kind."""

import json
import math
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from minirl.rollout import index
from minirl.view.table import GROUP, Table, prompt_text

LONGEST_CHARACTER = 8  # Tokens; a character of more is shown as what it is in bytes.
UNFINISHED = "\ufffd"  # What a decoder makes of the first bytes of a character.


class Reader:
    """Reads groups of a table, with the tokenizer that the run has left."""

    def __init__(self, table: Table):
        self.table = table
        self.tokenizer: Tokenizer | None = None

    def group(self, rows: np.ndarray) -> dict[str, Any]:
        """Return the group of some rows of the table, ROW [N], with its trajectories."""
        trajectories = [self._trajectory(row) for row in rows]
        return {
            "step": rows["step"][0].item(),
            "group": rows["group"][0].item(),
            "prompt": trajectories[0]["prompt"],
            "row": trajectories[0]["row"],
            "trajectories": trajectories,
        }

    def describe(self, group: np.ndarray) -> dict[str, Any]:
        """Return what the list of groups says of one: its numbers, and in a line its prompt."""
        rows = self.table.members(group)
        info = self._record(rows[0])["info"]
        columns = [f"{name}: {value}" for name, value in info.get("row", {}).items()]
        texts = [prompt_text(info["prompt"])[-200:], *columns]
        described = {name: group[name].item() for name in GROUP.names or () if name != "first"}
        described["rewards"] = rows["reward"][rows["segment"] == 0].tolist()
        described["prompt"] = " · ".join(text for text in texts if text)[:400]
        return described

    def _record(self, row: np.ndarray) -> dict[str, Any]:
        part = index.part_of(self.table.folder, int(row["step"]), int(row["rank"]))
        return json.loads(index.read_line(part, row))

    def _trajectory(self, row: np.ndarray) -> dict[str, Any]:
        record = self._record(row)
        info = record["info"]
        texts = [f" {token}" for token in record["tokens"]]
        path = self.table.folder / index.TOKENIZER
        if self.tokenizer is None and path.is_file():
            self.tokenizer = Tokenizer.from_file(str(path))
        if self.tokenizer:
            texts = token_texts(self.tokenizer, record["tokens"])

        # What the trainer said of the tokens, [L] each; nan: nothing.
        values = np.full((len(texts), len(index.VALUES)), np.nan, np.float32)
        if row["trained_rank"] >= 0:
            part = index.part_of(self.table.folder, int(row["step"]), int(row["trained_rank"]))
            trained = np.zeros((), index.TRAINED)
            trained["start"] = row["trained_start"]
            trained["num_tokens"] = row["num_tokens"]
            values = index.read_values(part, trained)
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
        return {
            "episode": record["episode"],
            "segment": record["segment"],
            "prompt": prompt_text(info["prompt"]),
            "row": info.get("row", {}),
            "completion": info["completion"],
            "reward": record["reward"],
            "shaped": float(row["shaped"]),
            "rewards": info.get("rewards", {}),
            "env": info.get("env", {}),
            "stopped": info["stopped"],
            "error": info["error"],
            "why_empty": "" if record["tokens"] else why_empty,
            "source": info["source"],
            "version": record["version"],
            "texts": texts,
            "sampled": [int(sampled) for sampled in record["sampled"]],
            "turn_rewards": record["rewards"],
            "images": [
                image for image in record["images"] if str(image[2]).startswith("data:image/")
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


def token_texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Return texts that joined are the text of the tokens, one for each.

    A character of several tokens belongs to the last of them. A token is decoded after the one
    before it, because some decoders drop the space before the first.
    """
    texts: list[str] = []
    pending: list[int] = []
    before: list[int] = []
    for token in tokens:
        pending.append(token)
        known = tokenizer.decode(before, skip_special_tokens=False)
        text = tokenizer.decode(before + pending, skip_special_tokens=False)[len(known) :]
        if text.endswith(UNFINISHED) and len(pending) < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text)
        before = pending
        pending = []
    if pending:
        known = tokenizer.decode(before, skip_special_tokens=False)
        texts[-1] = tokenizer.decode(before + pending, skip_special_tokens=False)[len(known) :]
    return texts


def _rounded(values: np.ndarray) -> list[float | None]:
    """Return numbers of five digits; None for what is not finite."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]
