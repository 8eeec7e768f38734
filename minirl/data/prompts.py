"""Prompts for RL: what a row asks, and its token ids."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.config.shared import DataConfig
from minirl.data import chat, formats
from minirl.data.chat import to_messages
from minirl.data.order import make_order
from minirl.data.rows import Rows, errors_at
from minirl.data.sources import Source
from minirl.data.split import open_rows
from minirl.data.vision import Vision
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import Mesh


def open_prompts(
    source: str | list[str],
    setting: str,
    cfg: DataConfig,
    mesh: Mesh,
    *,
    env_prompts: bool = False,
) -> Rows:
    """Return the rows of `data.train` or `data.eval` for RL, of which distinct ones are used.

    Collective. They stay in the order of their sources. Every row has "prompt" and, where the
    source has one, "answer", whatever the columns are called there; "data_source" where a column
    names it or there are several sources; "template_inputs" where it has tools or arguments for the
    template; and all that it had.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.
        mesh: the ranks.
        env_prompts: the environment may make the prompts, so that rows need none. One without has
            the empty text.

    Raises:
        UserError: a source cannot be read. A row without a prompt raises one when it is read.
    """
    make_row = partial(
        _to_prompt, cfg=cfg, several=isinstance(source, list), env_prompts=env_prompts
    )
    return open_rows(source, setting, make_row, cfg, mesh, distinct=True, env_prompts=env_prompts)


def _to_prompt(
    raw: dict, source: Source, cfg: DataConfig, several: bool, env_prompts: bool
) -> dict:
    row = dict(raw)
    prompt = raw.get(cfg.prompt_key)
    answer = raw.get(cfg.answer_key)
    if not isinstance(prompt, str) or not prompt or answer is None:
        prompt, answer = formats.find_prompt(raw, cfg, env_prompts)
    images = (row.pop(cfg.images_key, None), row.pop("image", None))
    if any(images) or not isinstance(prompt, str):
        prompt = formats.with_images(prompt, raw, source, cfg)
    if raw.get(cfg.tools_key) or raw.get("chat_template_kwargs"):
        row |= formats.template_inputs(raw, cfg)
    row["prompt"] = prompt
    if answer is not None:
        row["answer"] = answer
    data_source = raw.get(cfg.source_key)
    if data_source is None and cfg.source_key == "data_source":
        data_source = raw.get("datasource")
    if data_source or several:
        row["data_source"] = str(data_source or source.name)
    return row


class Prompts:
    """Rows as token ids. A ticket is the number of a prompt in the order of a run."""

    def __init__(
        self,
        rows: Sequence[dict],
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        *,
        seed: int,
        shuffle: bool = True,
        vision: Vision | None = None,
    ):
        self.rows = rows
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.seed = seed
        self.shuffle = shuffle
        self.vision = vision
        self.order = make_order(rows, seed=seed, shuffle=shuffle)

    @property
    def cut_to(self) -> int:
        """Return how many of its last tokens a longer prompt keeps; 0: it is not cut."""
        return self.cfg.max_prompt_tokens if self.cfg.too_long == "truncate_left" else 0

    def row(self, ticket: int) -> dict:
        """Return the row of a ticket."""
        return self.rows[self.order[ticket]]

    def messages(self, row: dict) -> list[dict]:
        """Return the chat that a row's prompt begins, with data.system_prompt."""
        return to_messages(row["prompt"], self.cfg.system_prompt)

    def rendered(self, row: dict) -> str:
        """Return the text of a row's prompt, up to where the assistant begins; "" without one."""
        if not row["prompt"]:
            return formats.NO_PROMPT
        return chat.renderer(self.tokenizer, row)(self.messages(row))

    def encode(self, row: dict) -> list[int]:
        """Return the token ids of `rendered`."""
        ids = chat.encode(self.tokenizer, self.rendered(row))
        if self.vision and ids:
            ids = self.vision.expand(ids, chat.images_of(self.messages(row))).tokens
        return ids

    def check_lengths(self, mesh: Mesh, bit: int, num_tickets: int | None = None) -> int:
        """Encode prompts that may be too long, and drop those longer than data.max_prompt_tokens.

        With data.too_long = truncate_left they are cut when they are used; one with images cannot
        be. Each rank encodes its share of them. Collective. With data.too_long = error it suffices
        to look at the rows that will be used.

        Args:
            mesh: the ranks.
            bit: the mark of rows with prompts that may be too long, by `LengthBound`.
            num_tickets: how many tickets the run draws in the order of the rows; None: any row may
                be drawn.

        Returns:
            How many prompts were dropped, on all ranks together.

        Raises:
            UserError: a prompt is too long and data.too_long = error, or all prompts are too long.
        """
        if self.cut_to and not self.vision:
            return 0
        rows = self.rows
        assert isinstance(rows, Rows)
        limit = self.cfg.max_prompt_tokens
        is_asked = (rows.marks & bit) != 0
        if self.cfg.too_long == "error" and num_tickets is not None and num_tickets < len(rows):
            is_drawn = np.zeros(len(rows), bool)
            is_drawn[self.order.rows(0, num_tickets)] = True
            is_asked &= is_drawn
        numbers = np.flatnonzero(is_asked)
        too_long = []
        with errors_of_all(mesh):
            for number in numbers[mesh.rank :: mesh.world_size].tolist():
                row = rows[number]
                with errors_at(rows.place(number)):
                    num_tokens = len(self.encode(row))
                    is_cut = self.cut_to and not chat.images_of(self.messages(row))
                    if num_tokens <= limit or is_cut:
                        continue
                    if self.cfg.too_long != "drop":
                        raise UserError(
                            f"a prompt has {num_tokens} tokens, more than data.max_prompt_tokens = "
                            f"{limit}; raise it (and engine.max_model_len) or set data.too_long = "
                            f"drop: {str(row['prompt'])[:80]!r}..."
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
            self.rows = rows.take(np.delete(np.arange(len(rows)), dropped))
            self.order = make_order(self.rows, seed=self.seed, shuffle=self.shuffle)
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
        # How many tokens the template adds at most, by the roles of a chat.
        self.added_to_chat: dict[tuple[str, ...], float] = {}
        # And what surrounds a prompt that is a text, with the system prompt.
        around = to_messages("x", cfg.system_prompt)[:-1]
        self.added_to_text = self._added((*[message["role"] for message in around], "user"))
        self.added_to_text += sum(self._most_tokens(message["content"]) for message in around)

    def exceeds(self, row: dict) -> bool:
        """Return whether a row's prompt may have more than data.max_prompt_tokens tokens."""
        prompt = row["prompt"]
        if "template_inputs" in row:
            return True  # what a template adds for them is unknown
        if isinstance(prompt, str):
            return self._most_tokens(prompt) + self.added_to_text > self.cfg.max_prompt_tokens
        num_tokens = 0.0
        messages = to_messages(prompt, self.cfg.system_prompt)
        for message in messages:
            content = message["content"]
            if len(message) > 2 or not isinstance(content, str):
                return True  # images, or what a template reads next to the content
            num_tokens += self._most_tokens(content)
        roles = tuple([message["role"] for message in messages])
        if roles not in self.added_to_chat:
            self.added_to_chat[roles] = self._added(roles)
        return num_tokens + self.added_to_chat[roles] > self.cfg.max_prompt_tokens

    def _most_tokens(self, text: str) -> int:
        if text.isascii():
            return len(text)
        num_bytes = len(text.encode(errors="replace"))
        return num_bytes + self.NORMALISED * (num_bytes - len(text))

    def _added(self, roles: tuple[str, ...]) -> float:
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
