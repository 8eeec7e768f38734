"""Prompts for RL: from rows in anyone's columns to token ids."""

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from minirl.config.shared import DataConfig
from minirl.data import chat, images
from minirl.data.images import Vision
from minirl.data.order import make_order
from minirl.data.rows import column, is_messages, is_prompt, open_rows, take, with_images
from minirl.data.sources import Source
from minirl.errors import UserError, require
from minirl.parallel.mesh import Mesh


def load_rows(source: str | list[str], setting: str, cfg: DataConfig) -> Sequence[dict]:
    """Return the rows of `data.train` or `data.eval`, one for each distinct prompt.

    They stay in the order of their sources. Every row has "prompt" and, where the source has one,
    "answer", whatever the columns are called there; "data_source" where a column names it or there
    are several sources; and all that it had.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.

    Raises:
        UserError: a source cannot be read, or a row has no prompt.
    """
    make_row = partial(_to_prompt, cfg=cfg, several=isinstance(source, list))
    return open_rows(source, setting, make_row, cfg.max_samples, distinct_prompts=True)


def _to_prompt(raw: dict, source: Source, where: str, cfg: DataConfig, several: bool) -> dict:
    prompt = column(raw, cfg.prompt_key)
    answer = column(raw, cfg.answer_key)
    # Of a chat to imitate, the last turn is the answer.
    is_chat = prompt is raw.get("messages") and cfg.prompt_key != "messages"
    if is_chat and is_messages(prompt) and prompt[-1]["role"] == "assistant":
        answer = prompt[-1]["content"] if answer is None else answer
        prompt = prompt[:-1]
    if not is_prompt(prompt):
        raise UserError(
            f"{where}: data.prompt_key = {cfg.prompt_key!r} names no text and no list of messages "
            f"with role and content (its keys: {', '.join(raw)}); set data.prompt_key to the one "
            "that holds the prompt"
        )
    row = {key: value for key, value in raw.items() if key not in (cfg.images_key, "image")}
    row["prompt"] = with_images(prompt, raw, where, cfg)
    if answer is not None:
        row["answer"] = answer
    data_source = column(raw, cfg.source_key) or (source.name if several else None)
    if data_source:
        row["data_source"] = str(data_source)
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

    def row(self, ticket: int) -> dict:
        """Return the row of a ticket."""
        return self.rows[self.order[ticket]]

    def messages(self, row: dict) -> list[dict]:
        """Return the chat that a row's prompt begins, with data.system_prompt."""
        return chat.to_messages(row["prompt"], self.cfg.system_prompt)

    def encode(self, row: dict) -> list[int]:
        """Return the token ids of a row's prompt, up to where the assistant begins."""
        messages = self.messages(row)
        ids = chat.encode(self.tokenizer, chat.render(self.tokenizer, messages))
        if self.vision:
            ids, _ = self.vision.expand(ids, images.of_chat(messages))
        return ids

    def check_lengths(self, setting: str, mesh: Mesh) -> int:
        """Encode every prompt once and drop those longer than data.max_prompt_tokens.

        Each rank encodes its share of them. Collective.

        Returns:
            How many prompts were dropped, on all ranks together.

        Raises:
            UserError: a prompt is too long and data.too_long = error, or all prompts are too long.
        """
        limit = self.cfg.max_prompt_tokens
        too_long = []
        for number in range(mesh.rank, len(self.rows), mesh.world_size):
            row = self.rows[number]
            num_tokens = len(self.encode(row))
            if num_tokens <= limit:
                continue
            if self.cfg.too_long == "error":
                raise UserError(
                    f"{setting}: a prompt has {num_tokens} tokens, more than "
                    f"data.max_prompt_tokens = {limit}; raise it (and engine.max_model_len) or set "
                    f"data.too_long = drop: {str(row['prompt'])[:80]!r}..."
                )
            too_long.append(number)
        dropped: set[int] = set().union(*mesh.gather(too_long))
        require(
            len(dropped) < len(self.rows),
            f"{setting}: all {len(dropped)} prompts have more than "
            f"data.max_prompt_tokens = {limit} tokens; raise it",
        )
        if dropped:
            self.rows = take(self.rows, [n for n in range(len(self.rows)) if n not in dropped])
            self.order = make_order(self.rows, seed=self.seed, shuffle=self.shuffle)
        return len(dropped)
