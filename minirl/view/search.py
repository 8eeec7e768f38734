"""Which groups of trajectories have a text in their prompts or answers, by reading all of them."""

import json

import numpy as np

from minirl.rollout import index
from minirl.view.table import Table
from minirl.view.trajectories import prompt_text


class Search:
    """Searches a table, and remembers what it has found of the last text."""

    def __init__(self, table: Table):
        self.table = table
        # The text, and by step: the files that were read, as they were then, and bool [N] of rows.
        self.last: tuple[str, dict[int, tuple[tuple, np.ndarray]]] = ("", {})

    def find(self, text: str) -> np.ndarray:
        """Return which groups have a text, bool [G]; all if it is empty. Case does not count."""
        table = self.table
        if not text or not len(table.groups):
            return np.ones(len(table.groups), bool)
        last_text, known = self.last
        found = known if last_text == text else {}
        for step, rows in table.of_steps.items():
            if step not in found or found[step][0] != table.seen[step]:
                found[step] = (table.seen[step], self._search(rows, text))
        self.last = (text, found)
        of_rows = np.concatenate([found[step][1] for step in table.steps()])
        return np.logical_or.reduceat(of_rows, table.groups["first"])

    def _search(self, rows: np.ndarray, text: str) -> np.ndarray:
        """Return which rows of a step have a text, bool [N].

        Most lines are sorted out without being parsed. (So of letters beyond ASCII case counts.)
        """
        as_written = json.dumps(text)[1:-1].lower().encode()
        has = np.zeros(len(rows), bool)
        for rank in np.unique(rows["rank"]):
            part = index.part_of(self.table.folder, int(rows["step"][0]), int(rank))
            block = part.lines.read_bytes()
            for i in np.flatnonzero(rows["rank"] == rank):
                start = int(rows["start"][i])
                line = block[start : start + int(rows["num_bytes"][i])]
                if as_written in line.lower():
                    has[i] = text.lower() in _texts(json.loads(line)["info"]).lower()
        return has


def _texts(info: dict) -> str:
    """Return what is searched of a trajectory."""
    row = info.get("row", {}).values()
    return "\n".join([prompt_text(info["prompt"]), info["completion"], info["error"], *row])
