"""What rows mean, in anyone's columns: prompts in other forms, chats, pairs and judged answers.

Columns are read as TRL, OpenRLHF and ShareGPT write them. A reader takes a row as its source holds
it, with the source and the names of the columns, and raises UserError if it cannot be one. `Rows`
puts the place of the row before the message.
"""

import json
import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

from minirl.base.errors import UserError, require
from minirl.base.reading import parsed
from minirl.config.shared import DataConfig, RowsConfig
from minirl.config.supervised import ChatsConfig, LabelledConfig, PairsConfig
from minirl.config.values import read_word
from minirl.data.chat import (
    Messages,
    RowPrompt,
    for_template,
    is_messages,
    parts_of,
    text_of_part,
    to_messages,
    why_no_messages,
)
from minirl.data.images import attach
from minirl.data.rows import Rows
from minirl.data.sources import Source, open_rows
from minirl.data.tokenizer import read_template_kwargs, read_tools, without_none
from minirl.parallel.mesh import World

# What TRL, OpenRLHF and others call a column. These names are tried where a row has none of the
# default name; a setting that asks for another name has no alternatives.
OTHER_NAMES = {
    "prompt": ("instruction", "input", "context_messages", "messages", "conversations"),
    "messages": ("conversations",),
    "completion": ("output",),
    "answer": ("solution", "label"),
}
# Who speaks in a row of ShareGPT's layout -> the role. Others are called as their role.
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
SPEAKERS |= {"function_call": "assistant", "observation": "tool"}
SPEAKERS |= {role: role for role in ("user", "assistant", "system", "tool")}
NO_PROMPT = ""  # The prompt of a row for which the environment makes one.
SIDES = ("chosen", "rejected")


def is_prompt(value: object) -> TypeGuard[RowPrompt]:
    """Return whether this is a text or a list of messages, and not empty."""
    return is_messages(value) or (isinstance(value, str) and bool(value))


def has_calls(messages: Messages) -> bool:
    """Return whether a message calls a tool."""
    return any(message.get("tool_calls") for message in messages)


def column(row: dict, key: str) -> Any:
    """Return a row's value under `key` or under what others call it; None if there is none.

    Alpaca's `instruction` comes together with its `input`, if the row has that too.
    """
    for name in (key, *OTHER_NAMES.get(key, ())):
        value = row.get(name)
        is_alpaca = name == "instruction" != key and isinstance(value, str)
        if is_alpaca and isinstance(row.get("input"), str):
            return "\n\n".join(text for text in (value, row["input"]) if text)
        if value is not None:
            return value
    return None


def wrong_column(setting: str, key: str, wanted: str, row: dict, *values: object) -> UserError:
    """Return the error for a row without something under a key.

    Args:
        setting: names the key.
        key: the column's name.
        wanted: what should be there.
        row: the row.
        values: what is there instead.
    """
    given = [value for value in values if value is not None]
    shown = f", not {str(given[0])[:60]!r}" if given else ""
    faults = filter(None, [why_no_messages(value) for value in given if isinstance(value, list)])
    if fault := next(faults, ""):
        speakers = ", ".join(SPEAKERS)
        shown = f"; {fault} (or ShareGPT's value, a text, and from, one of {speakers})"
    return UserError(
        f"{setting} = {key!r} must name {wanted}{shown} (the row has "
        f"{', '.join(map(str, row))}); correct the row, or set {setting} to another column"
    )


def require_named(row: dict, setting: str, key: str, default: str) -> None:
    """Refuse a row without the named column that has the default one. Raises UserError.

    Rows may lack it. But one that has the default's column instead was meant otherwise.
    """
    if key not in row and key != default and row.get(default) is not None:
        raise wrong_column(setting, key, f"a column, and the row has {default!r}", row)


def from_sharegpt(raw: dict) -> dict:
    """Return a row with role and content in its messages, where ShareGPT has `from` and `value`.

    A list of such messages is replaced in whatever column it is, and so is a single one: the two
    sides of a pair. `system`, if the row has it, is put before `conversations`, and `<image>` is
    the place of an image if the row has some.
    """
    found: dict[str, Messages] = {}
    has_images = bool(raw.get("image") or raw.get("images"))
    for key, value in raw.items():
        is_one = isinstance(value, dict) and value.keys() & {"role", "from"}
        messages = [value] if is_one else value
        if isinstance(messages, list) and messages and isinstance(messages[0], dict):
            found[key] = [_from_speaker(message, has_images) or message for message in messages]
    system = raw.get("system")
    chat = found.get("conversations", [])
    if chat and chat[0].get("role") != "system" and isinstance(system, str) and system:
        chat.insert(0, {"role": "system", "content": system})
    return raw | found


def _from_speaker(message: object, has_images: bool) -> dict:
    """Return one message of ShareGPT's with its role; {} for what is none."""
    match message:
        case {"from": "function_call", "value": str(text)}:
            call = {"type": "function", "function": parsed(text)}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"from": str(speaker), "value": str(text)} if speaker in SPEAKERS:
            role = SPEAKERS[speaker]
            return {"role": role, "content": _with_places(text) if has_images else text}
    return {}


def _with_places(text: str) -> str | list[dict]:
    """Return a text as the parts of a message in which each `<image>` is the place of an image."""
    if "<image>" not in text:
        return text
    parts = []
    for piece in text.split("<image>"):
        parts += [{"type": "image"}, {"type": "text", "text": piece}]
    # What the text begins with follows no image.
    return [part for part in parts[1:] if part.get("text", "x").strip()]


def find_prompt(raw: dict, cfg: DataConfig, env_prompts: bool) -> tuple[RowPrompt, Any]:
    """Return the prompt of a row, and its answer or None, in whatever form they are.

    Of a chat to imitate, the last turn is the answer.

    Raises:
        UserError: there is no prompt, or messages and no template to be applied, or the row has
            the default's column and not the named one.
    """
    require_named(raw, "data.answer_key", cfg.answer_key, "answer")
    row = from_sharegpt(raw)
    prompt = column(row, cfg.prompt_key)
    answer = column(row, cfg.answer_key)
    if prompt is None and env_prompts:
        return NO_PROMPT, answer
    if _ends_by_answer(prompt, row):
        *prompt, said = prompt
        if answer is None:
            answer = "".join(map(text_of_part, parts_of(said))) or said["content"]
    if not is_prompt(prompt):
        raise wrong_column("data.prompt_key", cfg.prompt_key, "a text or messages", raw, prompt)
    refuse_chats(cfg, prompt)
    return prompt, answer


def _ends_by_answer(prompt: Any, row: dict) -> TypeGuard[Messages]:
    """Return whether this is a chat to imitate, of which the last turn answers the others."""
    is_chat = prompt is row.get("messages") or prompt is row.get("conversations")
    return is_chat and is_messages(prompt) and prompt[-1]["role"] == "assistant"


def with_images(prompt: RowPrompt, row: dict, source: Source, cfg: RowsConfig) -> RowPrompt:
    """Return the prompt with the images of its row: data.images_key, or the one in `image`.

    A text with images becomes messages, and messages get the form that chat templates want. Where
    all messages are texts, `<image>` is the place of an image, as verl has it.

    Raises:
        UserError: an image cannot be read, or images and places for them do not match.
    """
    row_images = row.get(cfg.images_key)
    require(
        not row_images or cfg.images_key == "image" or row.get("image") is None,
        f"a row has images in {cfg.images_key} and in image; keep one of them",
    )
    if not row_images and row.get("image") is not None:
        row_images = [row["image"]]
    if not row_images:
        return prompt if isinstance(prompt, str) else attach(_with_calls(prompt, source), [])
    messages = _with_calls(to_messages(prompt, ""), source)
    if not any(map(parts_of, messages)):
        messages = [
            message | {"content": _with_places(message["content"] or "")}
            if message["role"] != "assistant"
            else message
            for message in messages
        ]
    is_one = not isinstance(row_images, list | tuple)
    return attach(messages, [row_images] if is_one else row_images)


def _with_calls(messages: Messages, source: Source) -> Messages:
    """Return messages with the calls of tools, if they have any, as chat templates want them.

    Of a table, what JSON has no values for (the time of a message) becomes a text.
    """
    if source.is_arrow:
        messages = list(map(_for_json, messages))
    if not has_calls(messages):
        return messages
    return for_template(without_none(messages) if source.is_arrow else messages)


def _for_json(message: dict) -> dict:
    plain = dict(message)
    for name, value in message.items():
        if name != "content" and not isinstance(value, str | int | float | None):
            plain[name] = json.loads(json.dumps(value, default=str))
    return plain


def template_inputs(raw: dict, source: Source, cfg: RowsConfig) -> dict:
    """Return what a chat template gets of a row beyond its messages, to be added to the row.

    Returns:
        {"template_inputs": arguments of `chat.render`, `tools` and `chat_template_kwargs`, each if
        the row has it}; {} if it has neither.

    Raises:
        UserError: one is not what it should be.
    """
    tools = raw.get(cfg.tools_key) if cfg.tools_key else None
    inputs = {
        "tools": read_tools(tools, f"data.tools_key = {cfg.tools_key!r}", has_gaps=source.is_arrow),
        "chat_template_kwargs": read_template_kwargs(
            raw.get("chat_template_kwargs"), "chat_template_kwargs"
        ),
    }
    inputs = {name: value for name, value in inputs.items() if value}
    return {"template_inputs": inputs} if inputs else {}


def refuse_chats(cfg: RowsConfig, *values: object) -> None:
    """Refuse messages where no chat template is to be applied. Raises UserError."""
    if not cfg.apply_chat_template and any(isinstance(value, list) for value in values):
        raise UserError(
            "data.apply_chat_template = False takes texts, and the row has messages, which only a "
            "chat template makes a text of; set it to True"
        )


def open_examples(
    source: str | list[str], setting: str, cfg: ChatsConfig | PairsConfig, mesh: World
) -> Rows:
    """Return rows to imitate or to compare, in the order of their sources. Collective.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns; by its class the rows are those of READERS.
        mesh: the ranks.

    Raises:
        UserError: a source cannot be read. A row that is none of these raises one when it is read.
    """
    return open_rows(source, setting, partial(READERS[type(cfg)], cfg=cfg), cfg, mesh)


LAST_WITHOUT_WEIGHT = (
    "the last assistant turn has the weight 0, and it is the one in the loss; remove the weight or "
    "the row"
)


def in_loss(message: dict) -> bool:
    """Return whether a message is an assistant's turn without OpenAI's `weight` of 0.

    Raises:
        UserError: the turn's weight is another than 0 or 1.
    """
    if message["role"] != "assistant":
        return False
    weight = message.get("weight")
    require(weight in (None, 0, 1), f"a turn has the weight {weight!r}; give 0, 1 or none")
    return weight != 0


def to_chat(raw: dict, source: Source, cfg: ChatsConfig) -> dict:
    """Return a row to imitate.

    It is, by the first of its columns that it has, a chat, a prompt with its completion (each a
    text or messages) or a text. Columns that the user names count before a chat.

    Returns:
        {"messages": chat, "trained": indices of the assistant turns in the loss}, with
        "template_inputs" if it has some, or {"text": text}.

    Raises:
        UserError: it is none of these.
    """
    # 1. The messages outside the loss, and those with answers that may be in it.
    row = from_sharegpt(raw)
    messages = column(row, cfg.messages_key)
    prompt = column(row, cfg.prompt_key)
    completion = column(row, cfg.completion_key)
    text = row.get(cfg.text_key)
    if cfg.messages_key == ChatsConfig.messages_key:
        # A column that the user names counts before a chat, which nobody has named.
        names_text = cfg.text_key != ChatsConfig.text_key and isinstance(text, str)
        keys = (cfg.prompt_key, cfg.completion_key)
        names_answer = keys != (ChatsConfig.prompt_key, ChatsConfig.completion_key)
        has_completion = completion is not None and prompt is not messages
        if names_text or (names_answer and has_completion):
            messages = None
    if messages is None and completion is None and isinstance(text, str):
        return {"text": text}
    refuse_chats(cfg, messages, prompt if completion is not None else None, completion)
    if isinstance(completion, str | int | float):
        completion = [{"role": "assistant", "content": str(completion)}]
    before = []
    if is_messages(messages):
        answer = to_messages(messages, cfg.system_prompt)
    elif messages is None and is_prompt(prompt) and is_messages(completion):
        before = to_messages(prompt, cfg.system_prompt)
        answer = completion
    else:
        key = cfg.completion_key
        if messages is None and is_prompt(prompt) and key in row and completion is None:
            raise wrong_column("data.completion_key", key, "a text or messages, not null", raw)
        wanted = (
            f"messages, or {cfg.prompt_key!r} (data.prompt_key) and {cfg.completion_key!r} "
            f"(data.completion_key) each a text or messages, or {cfg.text_key!r} (data.text_key) "
            "a text"
        )
        values = (messages, prompt, completion)
        raise wrong_column("data.messages_key", cfg.messages_key, wanted, raw, *values)

    # 2. The turns in the loss.
    whole = with_images(before + answer, row, source, cfg)
    assert not isinstance(whole, str)
    roles = [message["role"] for message in whole]
    trained = [i for i in range(len(before), len(whole)) if in_loss(whole[i])]
    require(trained, "no assistant turn follows, or all have the weight 0; remove the row")
    if cfg.train_on == "last_turn" or isinstance(cfg, LabelledConfig):
        require("assistant" not in roles[trained[-1] + 1 :], LAST_WITHOUT_WEIGHT)
    require(
        set(roles[: trained[0]]) - {"system"},
        "nothing is asked before the assistant's first turn",
    )
    return {
        "messages": whole[: trained[-1] + 1],
        "trained": trained if cfg.train_on == "all_turns" else trained[-1:],
        **template_inputs(raw, source, cfg),
    }


def to_labelled(raw: dict, source: Source, cfg: LabelledConfig) -> dict:
    """Return a judged answer, in TRL's unpaired columns.

    With a reasoning-gym generator, half of the questions have the answer to another question.

    Returns:
        The row as `to_chat` returns it, with `label`: whether the answer is wanted.

    Raises:
        UserError: there is no answer or no label.
    """
    if source.is_generated:
        is_right = zlib.crc32(raw["prompt"].encode()) % 2 == 0
        answer = str(raw["answer"]) if is_right else _other_answer(raw, source)
        raw = {cfg.prompt_key: raw["prompt"], cfg.completion_key: answer, cfg.label_key: is_right}
    label = raw.get(cfg.label_key)
    if isinstance(label, str) and label.lower() in ("true", "false", "1", "0"):  # Of a CSV file.
        label = read_word(label)
    if label not in (0, 1):
        wanted = "true or false (or 1 or 0)"
        if raw.keys() >= set(SIDES):
            wanted += ", and rows with 'chosen' and 'rejected' are for minirl.dpo"
        raise wrong_column("data.label_key", cfg.label_key, wanted, raw, label)
    row = to_chat(raw, source, cfg)
    require(
        "text" not in row,
        f"a plain text has no answer to judge; give {cfg.prompt_key!r} with "
        f"{cfg.completion_key!r}, or {cfg.messages_key!r}",
    )
    answers = row["messages"][row["trained"][0] :]
    require(
        all(isinstance(message["content"], str) for message in answers)
        and (answers[-1]["content"].strip() or answers[-1].get("tool_calls")),
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


def to_pair(raw: dict, source: Source, cfg: PairsConfig) -> dict:
    """Return a pair: answers to one prompt, of which the first was preferred.

    With a reasoning-gym generator, a question's answer was preferred to that of another question.

    Returns:
        {"prompt": messages, "chosen" and "rejected": the messages after it, "margin": float}, with
        "template_inputs" if it has some; without "prompt" if the two are plain texts.

    Raises:
        UserError: it is no pair.
    """
    # 1. The columns.
    if source.is_generated:
        raw = {
            cfg.prompt_key: raw["prompt"],
            cfg.chosen_key: str(raw["answer"]),
            cfg.rejected_key: _other_answer(raw, source),
        }
    row = from_sharegpt(raw)
    prompt = column(row, cfg.prompt_key)
    if prompt is not None and not is_prompt(prompt):
        raise wrong_column("data.prompt_key", cfg.prompt_key, "a text or messages", raw, prompt)
    if _ends_by_answer(prompt, row):
        prompt = prompt[:-1]
    to_side = partial(_side, row=row, source=source, cfg=cfg, is_whole=prompt is None)
    chosen = to_side("data.chosen_key", cfg.chosen_key)
    rejected = to_side("data.rejected_key", cfg.rejected_key)
    refuse_chats(cfg, prompt, chosen, rejected)
    require(
        type(chosen) is type(rejected),
        "one side of the pair is a text and the other a list of messages",
    )
    pair: dict[str, Any] = {"chosen": chosen, "rejected": rejected, "margin": _margin(raw, cfg)}
    if prompt is None and isinstance(chosen, str):
        return pair

    # 2. What both sides answer, and the answers.
    before = []
    if prompt is not None:
        before = to_messages(with_images(prompt, row, source, cfg), "")
        first = chosen[0]  # A letter, if the side is a text.
        is_shared = first == rejected[0] and before[0]["role"] != "system"
        if is_shared and isinstance(first, dict) and first["role"] == "system":
            before = [first, *before]
        before = to_messages(before, cfg.system_prompt)
    chosen = _whole_chat(before, chosen, cfg)
    rejected = _whole_chat(before, rejected, cfg)
    if not before:
        length = 0
        while chosen[length : length + 1] == rejected[length : length + 1] != []:
            length += 1
        while length and chosen[length - 1]["role"] == "assistant":
            length -= 1
        before = chosen[:length]
    for side, whole in zip(SIDES, (chosen, rejected), strict=True):
        answer = whole[len(before) :]
        is_text = all(isinstance(message["content"], str) for message in answer)
        last = answer[-1] if answer and is_text else {"role": ""}
        require(
            before
            and last["role"] == "assistant"
            and (last["content"].strip() or last.get("tool_calls")),
            f"the {side} side must answer the prompt that both share, and end by an assistant's "
            "turn that is not empty; its content must be a text",
        )
        require(in_loss(last), f"{side}: {LAST_WITHOUT_WEIGHT}")
        pair[side] = answer
    return pair | {"prompt": before, **template_inputs(raw, source, cfg)}


def _margin(raw: dict, cfg: PairsConfig) -> float:
    """Return by how much the chosen side is better. Raises UserError if that is no number."""
    require_named(raw, "data.margin_key", cfg.margin_key, "margin")
    margin = raw.get(cfg.margin_key)
    if margin is None:  # As a table has it where other rows have one.
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise wrong_column("data.margin_key", cfg.margin_key, "a finite number", raw, margin)
    return float(margin)


def _side(
    setting: str, key: str, *, row: dict, source: Source, cfg: PairsConfig, is_whole: bool
) -> RowPrompt:
    """Return one side of a pair. Raises UserError if there is none.

    A side that is whole, with what both answer, has the images of the row there.
    """
    answer = row.get(key)
    if not is_prompt(answer) or not str(answer).strip():
        raise wrong_column(setting, key, "a text or messages, not empty", row, answer)
    if is_whole:
        whole = with_images(answer, row, source, cfg)
        require(
            isinstance(answer, list) or isinstance(whole, str),
            "two plain texts have no place for the row's images; give chats",
        )
        return whole
    return answer if isinstance(answer, str) else _with_calls(answer, source)


def _whole_chat(before: Messages, answer: RowPrompt, cfg: PairsConfig) -> Messages:
    """Return the chat of one side, whether `answer` repeats the prompt or not."""
    if isinstance(answer, str):
        return [*before, {"role": "assistant", "content": answer}]
    whole = to_messages(answer, cfg.system_prompt)
    rest = whole[len(before) :]
    if list(map(_said, whole[: len(before)])) == list(map(_said, before)):
        return [*before, *rest]
    require(
        answer[0]["role"] == "assistant" or before[-1]["role"] != "user",
        f"a side of the pair begins by the {answer[0]['role']}'s message "
        f"{str(answer[0]['content'])[:60]!r}, and neither repeats {cfg.prompt_key!r} nor answers "
        "it; give each side the whole chat, or the answer alone",
    )
    return [*before, *answer]


def _said(message: dict) -> tuple[str, object, list]:
    """Return what counts of a message where two chats are compared."""
    content = "".join(map(text_of_part, parts_of(message))) or message["content"] or ""
    return message["role"], content, message.get("tool_calls") or []


# Class of the settings -> what makes a row of what a source holds.
READERS: dict[type, Callable[..., dict]] = {
    ChatsConfig: to_chat,
    LabelledConfig: to_labelled,
    PairsConfig: to_pair,
}
