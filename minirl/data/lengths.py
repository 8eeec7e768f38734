"""Prompts that are too long, found before a run begins: few of them are encoded for it."""

import functools
import math

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.config.shared import DataConfig
from minirl.data import chat
from minirl.data.chat import to_messages
from minirl.data.order import make_order
from minirl.data.prompts import Prompts
from minirl.data.rows import Rows, errors_at
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import World


def check_lengths(prompts: Prompts, mesh: World, bit: int, num_tickets: int | None = None) -> int:
    """Encode prompts that may be too long, and drop those longer than data.max_prompt_tokens.

    So are those with more images than engine.max_images, which could never be answered.

    With data.too_long = truncate_left they are cut when they are used; one with images cannot
    be. Each rank encodes its share of them. Collective. With data.too_long = error it suffices
    to look at the rows that will be used.

    Args:
        prompts: rows that `read_rows` has marked; those that are dropped leave it.
        mesh: the ranks.
        bit: the mark of rows with prompts that may be too long, by `LengthBound`.
        num_tickets: how many tickets the run draws in the order of the rows; None: any row may
            be drawn.

    Returns:
        How many prompts were dropped, on all ranks together.

    Raises:
        UserError: a prompt is too long and data.too_long = error, or all prompts are too long.
    """
    if prompts.cut_to and not prompts.vision:
        return 0
    rows = prompts.rows
    assert isinstance(rows, Rows)
    limit = prompts.cfg.max_prompt_tokens
    is_asked = (rows.marks & bit) != 0
    if prompts.cfg.too_long == "error" and num_tickets is not None and num_tickets < len(rows):
        is_drawn = np.zeros(len(rows), bool)
        is_drawn[prompts.order.rows(0, num_tickets)] = True
        is_asked &= is_drawn
    numbers = np.flatnonzero(is_asked)
    too_long = []
    with errors_of_all(mesh):
        for number in numbers[mesh.rank :: mesh.world_size].tolist():
            row = rows[number]
            with errors_at(rows.place(number)):
                num_images = len(chat.images_of(prompts.messages(row)))
                require(
                    prompts.vision or not num_images,
                    "a prompt has images, and policy.model reads none; take a model of a family "
                    "that does",
                )
                num_tokens = len(prompts.encode(row))
                most_images = prompts.vision.max_images if prompts.vision else 0
                is_cut = prompts.cut_to and not num_images
                if (num_tokens <= limit or is_cut) and num_images <= most_images:
                    continue
                is_kept = prompts.cfg.too_long != "drop"
                require(
                    not is_kept or num_images <= most_images,
                    f"a prompt has {num_images} images, more than engine.max_images = "
                    f"{most_images}; raise it or set data.too_long = drop",
                )
                require(
                    not is_kept,
                    f"a prompt has {num_tokens} tokens, more than data.max_prompt_tokens = "
                    f"{limit}; raise it (and engine.max_model_len) or set data.too_long = "
                    f"drop: {str(row['prompt'])[:80]!r}...",
                )
                too_long.append(number)
    dropped = mesh.gather_array(np.array(too_long, np.int64))
    label = rows.sources[0].label
    require(
        len(dropped) < len(rows),
        f"{label}: all {len(dropped)} prompts have more than "
        f"data.max_prompt_tokens = {limit} tokens; raise it",
    )
    if len(dropped):
        prompts.rows = rows.take(np.delete(np.arange(len(rows)), dropped))
        prompts.order = make_order(prompts.rows, seed=prompts.seed, shuffle=prompts.shuffle)
    return len(dropped)


class LengthBound:
    """A number of tokens that a prompt cannot exceed, found without encoding it.

    A token stands for at least one byte of a text, so a text has no more tokens than bytes. What
    the template adds depends on the roles of the messages alone; where it does not (a template that
    repeats a text), there is no bound.
    """

    # Unicode normalisation (NFKC), which some tokenizers begin with, makes up to 11 bytes of a byte
    # that is not ASCII. A character has at most two of them for each byte more than one.
    NORMALISED = 20

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig):
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.most_added = functools.cache(self._most_added)

    def exceeds(self, row: dict) -> bool:
        """Return whether a row's prompt may have more than data.max_prompt_tokens tokens."""
        if "template_inputs" in row:
            return True  # what a template adds for them is unknown
        num_tokens = 0.0
        messages = to_messages(row["prompt"], self.cfg.system_prompt)
        for message in messages:
            content = message["content"]
            if len(message) > 2 or not isinstance(content, str):
                return True  # images, or what a template reads next to the content
            num_tokens += self._most_tokens(content)
        roles = tuple([message["role"] for message in messages])
        return num_tokens + self.most_added(roles) > self.cfg.max_prompt_tokens

    def _most_tokens(self, text: str) -> int:
        if text.isascii():
            return len(text)
        num_bytes = len(text.encode(errors="replace"))
        return num_bytes + self.NORMALISED * (num_bytes - len(text))

    def _most_added(self, roles: tuple[str, ...]) -> float:
        """Return how many tokens the template adds to a chat of these roles at most."""
        lengths = []
        try:
            for content in ("x", "xx"):
                messages = [{"role": role, "content": content} for role in roles]
                text = chat.render(self.tokenizer, messages)
                lengths.append(self._most_tokens(text) - len(content) * len(roles))
        except UserError:  # encoding the prompt says why
            return math.inf
        # Some tokenizers begin a text with a space that they add.
        return lengths[0] + 1 if lengths[0] == lengths[1] else math.inf
