"""Rows of a run: read once, looked at while they are, and divided.

Whatever a run cannot use is refused here, before a model is loaded.
"""

import os
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError
from minirl.base.log import say
from minirl.base.reading import is_file
from minirl.config.shared import DataConfig, RowsConfig
from minirl.data import chat
from minirl.data.messages import has_calls
from minirl.data.prompts import LengthBound
from minirl.data.rows import Rows, errors_at
from minirl.data.split import Mark, read_rows
from minirl.parallel.mesh import Mesh
from minirl.rewards.functions import Rewards

# What is noted of a prompt's row while it is read.
UNGRADED = 1  # A reward function cannot grade it.
NO_ANSWER = 2
MAY_BE_LONG = 4
# And of every row for a chat template.
HAS_TOOLS = 64
HAS_CALLS = 128


def marks_for_template(row: dict) -> int:
    """Return the marks of a row that say what its chat template has to show."""
    marks = HAS_TOOLS if "tools" in row.get("template_inputs", {}) else 0
    for name in ("messages", "prompt", "chosen", "rejected"):
        messages = row.get(name)
        if isinstance(messages, list) and has_calls(messages):
            marks |= HAS_CALLS
    return marks


def require_shown(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a chat template that leaves out the tools, or the calls of tools, of rows.

    Args:
        rows: read, with `marks_for_template`.
        tokenizer: has the template.

    Raises:
        UserError: with the place of the first such row.
    """
    number = rows.first_marked(HAS_TOOLS)
    if number is not None:
        with errors_at(rows.place(number)):
            chat.require_tools_shown(tokenizer, rows[number]["template_inputs"]["tools"])
    number = rows.first_marked(HAS_CALLS)
    if number is not None:
        with errors_at(rows.place(number)):
            chat.require_calls_shown(tokenizer)


class PromptChecks:
    """What is looked at in the rows of prompts while each is read once."""

    def __init__(
        self, rewards: Rewards | None, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig
    ):
        """`rewards`: what grades the answers; None: an environment does that itself."""
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.bound = LengthBound(tokenizer, cfg)

    def mark(self, row: dict) -> int:
        """Return the marks of a row."""
        marks = marks_for_template(row)
        if self.bound.exceeds(row):
            marks |= MAY_BE_LONG
        if row.get("answer") is None:
            marks |= NO_ANSWER
        if self.rewards:
            try:
                self.rewards.check_row(row)
            except UserError:
                marks |= UNGRADED
        return marks

    def refuse_bad(self, rows: Rows) -> None:
        """Refuse rows that no reward function can grade, or whose tools the template leaves out.

        Raises:
            UserError: for the first of them.
        """
        require_shown(rows, self.tokenizer)
        number = rows.first_marked(UNGRADED)
        if number is not None and self.rewards:
            with errors_at(rows.place(number)):
                self.rewards.check_row(rows[number])


def _places(sources: str | list[str]) -> set[str]:
    """Return where rows come from: of files the whole paths, without their options."""
    places = set()
    for source in [sources] if isinstance(sources, str) else sources:
        file, _, _ = source.partition("?")
        places.add(os.path.realpath(file) if is_file(file) else source)
    return places


def load_splits(
    open_rows: Callable[..., Rows],
    data: RowsConfig,
    seed: int,
    mesh: Mesh,
    mark: Mark,
) -> tuple[Rows, Rows]:
    """Read all rows once; return those to train on and the held-out ones. Collective.

    Args:
        open_rows: called as open_rows(source, setting, data, mesh); the setting names the source in
            errors.
        data: the sources. Without `data.eval`, `data.held_out` rows of `data.train` are held out.
        seed: decides which.
        mesh: the ranks.
        mark: what to note of each row.

    Raises:
        UserError: a source cannot be read, or a row is not as it should be.
    """
    train = open_rows(data.train, "data.train", data, mesh)
    if not data.eval:
        return read_rows(train, mesh, seed, data.held_out, mark)
    both = _places(data.train) & _places(data.eval)
    if both and mesh.rank == 0:
        say(
            f"data.eval and data.train both name {', '.join(sorted(both))}: held-out scores are of "
            "rows that are trained on; data.held_out sets some rows aside instead"
        )
    held_out = open_rows(data.eval, "data.eval", data, mesh)
    held_out.missing.clear()  # Held-out rows need not have every column that is named.
    train, _ = read_rows(train, mesh, seed, mark=mark)
    held_out, _ = read_rows(held_out, mesh, seed, mark=mark)
    return train, held_out
