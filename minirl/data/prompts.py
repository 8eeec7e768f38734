"""Prompts for RL: what a row asks, and its token ids."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from transformers import PreTrainedTokenizerBase

from minirl.config.shared import DataConfig
from minirl.data import chat, formats
from minirl.data.chat import to_messages
from minirl.data.order import make_order
from minirl.data.rows import Order, Rows
from minirl.data.sources import Source, open_rows
from minirl.data.vision import Vision
from minirl.parallel.mesh import World


def open_prompts(
    source: str | list[str],
    setting: str,
    cfg: DataConfig,
    mesh: World,
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
        row |= formats.template_inputs(raw, source, cfg)
    row["prompt"] = prompt
    if answer is not None:
        row["answer"] = answer
    data_source = raw.get(cfg.source_key)
    if data_source is None and cfg.source_key == "data_source":
        data_source = raw.get("datasource")
    name = "" if data_source is None else str(data_source)
    if name or several:
        row["data_source"] = name or source.name
    return row


@dataclass(eq=False, repr=False)
class Prompts:
    """Rows as token ids. A ticket is the number of a prompt in the order of a run."""

    rows: Sequence[dict]
    tokenizer: PreTrainedTokenizerBase  # Has the chat template.
    cfg: DataConfig
    _: KW_ONLY
    seed: int  # Of the order.
    shuffle: bool = True  # Whether the order is for training.
    vision: Vision | None = None  # How the model reads images; None: it reads none.
    order: Order = field(init=False)

    def __post_init__(self) -> None:
        self.order = make_order(self.rows, seed=self.seed, shuffle=self.shuffle)

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
