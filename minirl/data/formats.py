"""What rows mean, in anyone's columns: prompts, chats, pairs and judged answers.

Columns are read as TRL and OpenRLHF write them. A reader of a format takes a row as its source
holds it, with the source and the names of the columns, and raises UserError if it cannot be one.
`Rows` puts the place of the row before the message.
"""

import zlib
from functools import partial
from typing import Any

import numpy as np

from minirl.base.errors import UserError, require
from minirl.config.shared import DataConfig, RowsConfig
from minirl.config.supervised import ChatsConfig, LabelledConfig, PairsConfig
from minirl.data.images import attach
from minirl.data.messages import (
    Messages,
    RowPrompt,
    fault_of,
    for_template,
    has_calls,
    is_messages,
    is_prompt,
    read_template_kwargs,
    read_tools,
    to_messages,
    without_none,
)
from minirl.data.rows import Rows, open_rows
from minirl.data.sources import Source
from minirl.parallel.mesh import Mesh

# What TRL, OpenRLHF and others call a column. These names are tried where a row has none of the
# default name; a setting that asks for another name has no alternatives.
OTHER_NAMES = {
    "prompt": ("instruction", "input", "context_messages", "messages", "conversations"),
    "messages": ("conversations",),
    "completion": ("output",),
    "answer": ("solution", "label"),
    "data_source": ("datasource",),
}
NO_PROMPT = ""  # The prompt of a row for which the environment makes one.
SIDES = ("chosen", "rejected")


def column(row: dict, key: str) -> Any:
    """Return a row's value under `key` or under what others call it; None if there is none.

    Alpaca's `instruction` comes together with its `input`, if the row has that too.
    """
    value = row.get(key)
    if value is not None:
        return value
    for name in OTHER_NAMES.get(key, ()):
        value = row.get(name)
        if value is None:
            continue
        context = row.get("input")
        if name == "instruction" and isinstance(value, str) and isinstance(context, str):
            return "\n\n".join(text for text in (value, context) if text)
        return value
    return None


def require_column(raw: dict, setting: str, key: str, default: str) -> None:
    """Refuse a row without the named column that has the default one. Raises UserError.

    Rows may lack it. But one that has the default's column instead was meant otherwise.
    """
    if key in raw or key == default or raw.get(default) is None:
        return  # Nearly every row: a message is made for a bad one only.
    raise UserError(
        f"{setting} = {key!r} names no column, and the row has {default!r} ({_keys(raw)}); set "
        f"{setting} to one of them"
    )


def _keys(raw: dict) -> str:
    return f"its keys: {', '.join(map(str, raw))}"


def _with_images(prompt: RowPrompt, row: dict, source: Source, cfg: RowsConfig) -> RowPrompt:
    """Return the prompt with the images of its row: data.images_key, or the one in `image`.

    A text with images becomes messages, and messages get the form that chat templates want.

    Raises:
        UserError: an image cannot be read, or images and places for them do not match.
    """
    row_images = row.get(cfg.images_key)
    if not row_images and row.get("image") is not None:
        row_images = [row["image"]]
    if isinstance(prompt, str) and not row_images:
        return prompt
    return attach(_with_calls(to_messages(prompt, ""), source), row_images or [])


def _with_calls(messages: Messages, source: Source) -> Messages:
    """Return messages with the calls of tools, if they have any, as chat templates want them."""
    if not has_calls(messages):
        return messages
    return for_template(without_none(messages) if source.is_arrow else messages)


def _template_inputs(raw: dict, cfg: RowsConfig) -> dict:
    """Return what a chat template gets of a row beyond its messages, to be added to the row.

    Returns:
        {"template_inputs": arguments of `chat.render`, `tools` and `chat_template_kwargs`, each if
        the row has it}; {} if it has neither.

    Raises:
        UserError: one is not what it should be.
    """
    inputs: dict[str, list[dict] | dict] = {}
    tools = raw.get(cfg.tools_key) if cfg.tools_key else None
    if tools is not None and (found := read_tools(tools, f"data.tools_key = {cfg.tools_key!r}")):
        inputs["tools"] = found
    kwargs = raw.get("chat_template_kwargs")
    if kwargs is not None and (read := read_template_kwargs(kwargs, "chat_template_kwargs")):
        inputs["chat_template_kwargs"] = read
    return {"template_inputs": inputs} if inputs else {}


def _refuse_chats(cfg: RowsConfig, *values: object) -> None:
    """Refuse messages where no chat template is to be applied. Raises UserError."""
    if not cfg.apply_chat_template and any(isinstance(value, list) for value in values):
        raise UserError(
            "data.apply_chat_template = False takes texts, and the row has messages, which only a "
            "chat template makes a text of; set it to True"
        )


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
    raw: dict, source: Source, cfg: DataConfig, several: bool, env_prompts: bool = False
) -> dict:
    require_column(raw, "data.answer_key", cfg.answer_key, "answer")
    prompt = column(raw, cfg.prompt_key)
    is_left_to_env = prompt is None and env_prompts
    if is_left_to_env:
        prompt = NO_PROMPT
    answer = column(raw, cfg.answer_key)
    # Of a chat to imitate, the last turn is the answer.
    chats = ("messages", "conversations")
    is_chat = cfg.prompt_key not in chats and any(prompt is raw.get(name) for name in chats)
    if is_chat and is_messages(prompt) and prompt[-1]["role"] == "assistant":
        answer = prompt[-1]["content"] if answer is None else answer
        prompt = prompt[:-1]
    if not is_left_to_env and not is_prompt(prompt):
        raise UserError(
            f"data.prompt_key = {cfg.prompt_key!r} names no text and no list of messages with role "
            f"and content{fault_of(prompt)} ({_keys(raw)}); set data.prompt_key to the one that "
            "holds the prompt"
        )
    _refuse_chats(cfg, prompt)
    row = dict(raw)
    row.pop(cfg.images_key, None)
    row.pop("image", None)
    row |= _template_inputs(raw, cfg)
    row["prompt"] = _with_images(prompt, raw, source, cfg)
    if answer is not None:
        row["answer"] = answer
    data_source = column(raw, cfg.source_key) or (source.name if several else None)
    if data_source:
        row["data_source"] = str(data_source)
    return row


def open_chats(source: str | list[str], setting: str, cfg: ChatsConfig, mesh: Mesh) -> Rows:
    """Return rows to imitate, in the order of their sources. Collective.

    A row is, by the first of its columns that it has, a chat, a prompt with its completion (each a
    text or messages) or a text.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.
        mesh: the ranks.

    Returns:
        Rows {"messages": chat, "trained": indices of the assistant turns in the loss}, with
        "template_inputs" where they have some, or {"text": text}.

    Raises:
        UserError: a source cannot be read. A row that is none of these raises one when it is read.
    """
    return open_rows(source, setting, partial(_to_chat, cfg=cfg), cfg, mesh)


def _to_chat(raw: dict, source: Source, cfg: ChatsConfig) -> dict:
    # 1. The messages outside the loss, and those with answers that may be in it.
    messages = column(raw, cfg.messages_key)
    prompt = column(raw, cfg.prompt_key)
    completion = column(raw, cfg.completion_key)
    text = raw.get(cfg.text_key)
    if messages is None and completion is None and isinstance(text, str):
        return {"text": text}
    _refuse_chats(cfg, messages, prompt if completion is not None else None, completion)
    if isinstance(completion, str | int | float):
        completion = [{"role": "assistant", "content": str(completion)}]
    before = []
    if is_messages(messages):
        answer = to_messages(messages, cfg.system_prompt)
    elif messages is None and is_prompt(prompt) and is_messages(completion):
        before = to_messages(prompt, cfg.system_prompt)
        answer = completion
    else:
        raise UserError(
            f"the row has neither {cfg.messages_key!r} (data.messages_key: messages with role and "
            f"content{fault_of(messages)}), nor {cfg.prompt_key!r} (data.prompt_key: a text or "
            f"messages{fault_of(prompt)}) with {cfg.completion_key!r} (data.completion_key: the "
            f"same{fault_of(completion)}), nor {cfg.text_key!r} (data.text_key) ({_keys(raw)}); "
            "set data.messages_key, prompt_key and completion_key, or text_key"
        )

    # 2. The turns in the loss.
    whole = _with_images(before + answer, raw, source, cfg)
    assert not isinstance(whole, str)
    roles = [message["role"] for message in whole]
    trained = [i for i in range(len(before), len(whole)) if roles[i] == "assistant"]
    require(trained, "no assistant turn follows")
    require(
        set(roles[: trained[0]]) - {"system"},
        "nothing is asked before the assistant's first turn",
    )
    return {
        "messages": whole[: trained[-1] + 1],
        "trained": trained if cfg.train_on == "all_turns" else trained[-1:],
        **_template_inputs(raw, cfg),
    }


def open_labelled(source: str | list[str], setting: str, cfg: LabelledConfig, mesh: Mesh) -> Rows:
    """Return rows of judged answers, in TRL's unpaired columns. Collective.

    With a reasoning-gym generator, half of the questions have the answer to another question.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.
        mesh: the ranks.

    Returns:
        Rows as `open_chats` returns them, with `label`: whether the answer is wanted.

    Raises:
        UserError: a source cannot be read. A row without an answer or a label raises one when it is
            read.
    """
    return open_rows(source, setting, partial(_to_labelled, cfg=cfg), cfg, mesh)


def _to_labelled(raw: dict, source: Source, cfg: LabelledConfig) -> dict:
    if source.is_generated:
        is_right = zlib.crc32(raw["prompt"].encode()) % 2 == 0
        answer = str(raw["answer"]) if is_right else _other_answer(raw, source)
        raw = {cfg.prompt_key: raw["prompt"], cfg.completion_key: answer, cfg.label_key: is_right}
    label = raw.get(cfg.label_key)
    if not isinstance(label, bool) and (label not in (0, 1) or not isinstance(label, int)):
        why = "true or false (or 1 or 0)"
        if label is None and {"chosen", "rejected"} <= raw.keys():
            why += ", and rows with 'chosen' and 'rejected' are for minirl.dpo"
        raise UserError(
            f"data.label_key = {cfg.label_key!r} must name {why}; it is {str(label)[:60]!r} "
            f"({_keys(raw)})"
        )
    row = _to_chat(raw, source, cfg)
    if "text" in row:
        raise UserError(
            f"a plain text has no answer to judge; give {cfg.prompt_key!r} with "
            f"{cfg.completion_key!r}, or {cfg.messages_key!r}"
        )
    answer_texts = [message["content"] for message in row["messages"][row["trained"][0] :]]
    require(
        all(isinstance(text, str) for text in answer_texts) and answer_texts[-1].strip(),
        "the answer that is judged must be a text that is not empty",
    )
    return row | {"label": bool(label)}


def _other_answer(raw: dict, source: Source) -> str:
    """Return another answer of a generator, the first after a place that the prompt chooses."""
    first = zlib.crc32(raw["prompt"].encode())
    for k in range(len(source.rows)):
        other = source.rows[(first + k) % len(source.rows)]["answer"]
        if other != raw["answer"]:
            return str(other)
    return ""


def open_pairs(source: str | list[str], setting: str, cfg: PairsConfig, mesh: Mesh) -> Rows:
    """Return rows of pairs: answers to one prompt, of which the first was preferred. Collective.

    With a reasoning-gym generator, a question's answer was preferred to that of another question.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.
        mesh: the ranks.

    Returns:
        Rows {"prompt": messages, "chosen" and "rejected": the messages after it, "margin": float},
        with "template_inputs" where they have some; without "prompt" if the two
        are plain texts.

    Raises:
        UserError: a source cannot be read. A row that is no pair raises one when it is read.
    """
    return open_rows(source, setting, partial(_to_pair, cfg=cfg), cfg, mesh)


def _to_pair(raw: dict, source: Source, cfg: PairsConfig) -> dict:
    # 1. The columns.
    if source.is_generated:
        raw = {
            cfg.prompt_key: raw["prompt"],
            cfg.chosen_key: str(raw["answer"]),
            cfg.rejected_key: _other_answer(raw, source),
        }
    prompt = raw.get(cfg.prompt_key)
    if prompt is None:
        prompt = raw.get("conversations")
    chosen = _side(raw, "chosen", cfg.chosen_key, source)
    rejected = _side(raw, "rejected", cfg.rejected_key, source)
    if prompt is not None and not is_prompt(prompt):
        raise UserError(
            f"data.prompt_key = {cfg.prompt_key!r} must name a text or messages with role and "
            f"content, not {str(prompt)[:60]!r}{fault_of(prompt)} ({_keys(raw)}); set "
            "data.prompt_key to the one that holds the prompt"
        )
    _refuse_chats(cfg, prompt, chosen, rejected)
    require(
        type(chosen) is type(rejected),
        "one side of the pair is a text and the other a list of messages",
    )
    require_column(raw, "data.margin_key", cfg.margin_key, "margin")
    margin = raw.get(cfg.margin_key, 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
        raise UserError(
            f"data.margin_key = {cfg.margin_key!r} must name a finite number, not {margin!r}; "
            "correct it or set data.margin_key to another column"
        )
    pair = {"chosen": chosen, "rejected": rejected, "margin": float(margin)}
    if prompt is None and isinstance(chosen, str):
        return pair

    # 2. What both sides answer, and the answers.
    pair |= _template_inputs(raw, cfg)
    before = []
    if prompt is not None:
        before = to_messages(_with_images(prompt, raw, source, cfg), cfg.system_prompt)
    chosen = _whole_chat(before, chosen, cfg)
    rejected = _whole_chat(before, rejected, cfg)
    before = before or _shared_prompt(chosen, rejected)
    pair["prompt"] = before
    for side, whole in zip(SIDES, (chosen, rejected), strict=True):
        answer = whole[len(before) :]
        if not before or not _is_answer(answer):
            raise UserError(
                f"the {side} side must answer the prompt that both share, and end by an "
                "assistant's turn that is not empty; its content must be a text"
            )
        pair[side] = answer
    return pair


def _side(raw: dict, side: str, key: str, source: Source) -> RowPrompt:
    answer = raw.get(key)
    if isinstance(answer, str) and answer.strip():
        return answer
    if is_messages(answer):
        return _with_calls(answer, source)
    raise UserError(
        f"data.{side}_key = {key!r} must name a text or messages with role and content, not empty, "
        f"for the {side} side of a pair (it is {str(answer)[:60]!r}{fault_of(answer)}; "
        f"{_keys(raw)}); set data.chosen_key and data.rejected_key, or drop the row"
    )


def _is_answer(messages: Messages) -> bool:
    """Return whether messages are texts of which the last is an assistant's and not empty."""
    if not messages or not all(isinstance(message["content"], str) for message in messages):
        return False
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"].strip() or last.get("tool_calls"))


def _whole_chat(before: Messages, answer: RowPrompt, cfg: PairsConfig) -> Messages:
    """Return the chat of one side, whether `answer` repeats the prompt or not."""
    if isinstance(answer, str):
        return [*before, {"role": "assistant", "content": answer}]
    whole = to_messages(answer, cfg.system_prompt)
    return whole if whole[: len(before)] == before else [*before, *answer]


def _shared_prompt(chosen: Messages, rejected: Messages) -> Messages:
    """Return what two chats begin with alike, up to the last message that is not an assistant's."""
    length = 0
    for i, message in enumerate(chosen[: len(rejected)]):
        if message != rejected[i]:
            break
        if message["role"] != "assistant":
            length = i + 1
    return chosen[:length]
