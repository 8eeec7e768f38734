"""The tokenizer of a model's folder with its chat template, found and checked before it is used."""

import inspect
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.base.reading import library_reads, parsed, read_text
from minirl.config.shared import RowsConfig
from minirl.data.chat import ASKED, Messages, render

# What an assistant's message may call what was thought before its content.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# What minirl gives to the tokenizer's `apply_chat_template`, or what has a setting or column.
RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
RESERVED -= {"documents"}


def load_tokenizer(
    folder: Path, data: RowsConfig | None = None, *, chats: bool = True
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder.

    Args:
        folder: of the model (policy.model).
        data: may have another chat template, as in `use_template`.
        chats: whether there are chats to encode.

    Raises:
        UserError: the tokenizer cannot be read; or there are chats to encode, and no template for
            them, or one that leaves out what it is given.
    """
    with library_reads(f"policy.model = {folder}: its tokenizer"):
        # Cleaning up would not give texts back as they were.
        tokenizer = AutoTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False)
    if data:
        use_template(tokenizer, data)
    if chats:
        require(
            tokenizer.chat_template is not None,
            f"policy.model = {folder}: its tokenizer has no chat template; name a file with one by "
            "data.chat_template, or encode texts as they are by --data.no-apply-chat-template",
        )
        named = f"data.chat_template = {data.chat_template}" if data and data.chat_template else ""
        check_template(tokenizer, named or f"policy.model = {folder}: its chat template")
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse a chat template that leaves out what the user says.

    One that refuses this chat may take those of the data, which are named with their rows if not.

    Args:
        tokenizer: has the template.
        where: begins an error message.

    Raises:
        UserError: the prompt is not in its rendering.
    """
    try:
        rendering = render(tokenizer, [{"role": "user", "content": ASKED}])
    except UserError:
        return
    require(
        ASKED in rendering,
        f"{where} leaves out the prompt: it renders {rendering[:80]!r} where the user says "
        f"{ASKED!r}; correct it, or name another by data.chat_template",
    )


def check_tokens(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    vocab_size: int,
    where: str,
    *,
    chats: bool = True,
) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for.

    Special tokens may lie beyond it, and `forget_tokens` makes texts of them.

    Args:
        tokenizer: of the model.
        folder: of the model.
        vocab_size: of the model's config.
        where: begins an error message.
        chats: whether there are chats, of which the answers must end.

    Raises:
        UserError: a token that texts are made of, or one that ends an answer, lies beyond; or none
            ends an answer.
    """
    stop_ids = stop_token_ids(tokenizer, folder) if chats else []
    advice = "take the tokenizer and the config.json that belong to the weights"
    wrong = [token for token in stop_ids if token >= vocab_size]
    require(
        not wrong,
        f"{where}: the eos tokens {wrong} lie beyond vocab_size = {vocab_size}; correct "
        f"eos_token_id in generation_config.json, or {advice}",
    )
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    beyond = {
        text: number
        for text, number in tokenizer.get_vocab().items()
        if number >= vocab_size and number not in special
    }
    require(
        not beyond,
        f"{where}: its tokenizer has {len(beyond)} tokens beyond vocab_size = {vocab_size}, such "
        f"as {list(beyond.items())[:1]}; {advice}",
    )


def forget_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Let a tokenizer read special tokens beyond `vocab_size` as texts like any other.

    The model has no embedding for them: one for text alone may have a token of images.
    """
    if any(number >= vocab_size for number in tokenizer.added_tokens_decoder):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < vocab_size]
        of_library = type(tokenizer.backend_tokenizer)
        tokenizer._tokenizer = of_library.from_str(json.dumps(state))


def use_template(tokenizer: PreTrainedTokenizerBase, data: RowsConfig) -> PreTrainedTokenizerBase:
    """Give the tokenizer another chat template, if `data` has one.

    Args:
        tokenizer: changed in place.
        data: has data.chat_template, a file with a Jinja template; data.input_template, a text
            with the prompt in place of its `{}`, followed by an answer and the end-of-sequence
            token, which without data.apply_chat_template is `{}` itself; and
            data.chat_template_kwargs, which the template gets wherever it is rendered.

    Returns:
        The tokenizer.

    Raises:
        UserError: the file cannot be read, or an argument is none that a template can have.
    """
    if data.chat_template:
        tokenizer.chat_template = read_text(data.chat_template, "data.chat_template =")
    input_template = data.input_template if data.apply_chat_template else "{}"
    if input_template:
        # A chat begins as a plain text of this tokenizer does: with its first token, if it has one.
        begins = tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
        begin = json.dumps(tokenizer.bos_token if begins else "")
        texts = input_template.split("{}")
        around_prompt = [json.dumps(text, ensure_ascii=False) for text in texts]
        tokenizer.chat_template = (
            "{% if messages[0].role != 'user' or messages|length > 2 %}"
            "{{ raise_exception('data.input_template, and data.apply_chat_template = False, take "
            "a prompt that is one text and an answer; leave them as they are for chats') }}"
            "{% endif %}"
            f"{{{{ {begin} + {' + messages[0].content + '.join(around_prompt)} }}}}"
            "{% for m in messages[1:] %}{{ m.content + eos_token }}{% endfor %}"
        )
    # Give the template's variables values for where a rendering gives them none. A template writes
    # values as Python does.
    kwargs = read_template_kwargs(data.chat_template_kwargs, "data.chat_template_kwargs")
    defaults = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in (kwargs or {}).items()
    )
    if defaults:
        defaults += "{{ '' }}"  # A line break after a block would be left out of the template.
    template = tokenizer.chat_template
    if isinstance(template, dict):  # Some models have one for tools next to the default one.
        tokenizer.chat_template = {name: defaults + text for name, text in template.items()}
    elif template is not None:
        tokenizer.chat_template = defaults + template
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    """Return every token that ends an answer: the tokenizer's and generation_config.json's.

    Without that file config.json says it, as for the library.

    Raises:
        UserError: there is none, or the file says it in another form.
    """
    ids = {tokenizer.eos_token_id}
    names = [n for n in ("generation_config.json", "config.json") if (folder / n).exists()]
    if names:
        where = f"policy.model = {folder}: its {names[0]}"
        with library_reads(where):
            eos = GenerationConfig.from_pretrained(folder, names[0]).eos_token_id
        for token in eos if isinstance(eos, list) else [eos]:
            require(
                token is None or (type(token) is int and token >= 0),
                f"{where} has eos_token_id = {eos!r}; give the number of a token, or a list of "
                "numbers",
            )
            ids.add(token)
    ids.discard(None)
    require(
        ids,
        f"policy.model = {folder}: neither tokenizer nor generation_config.json (nor config.json, "
        "without that) names an eos token, so no answer would end",
    )
    return sorted(ids)


def filling_token_id(tokenizer: PreTrainedTokenizerBase, stop_ids: list[int], where: str) -> int:
    """Return a token that can fill up short rows of a reward model.

    It must not end an answer, because transformers takes a row's score at the last token that is
    another.

    Raises:
        UserError: the tokenizer has no such token; `where` begins the message.
    """
    usual = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    # Qwen3 has none of these: its pad token ends answers, too. The last ones are for images.
    for token in (*usual, *reversed(tokenizer.all_special_ids)):
        if token is not None and token not in stop_ids:
            return token
    raise UserError(
        f"{where}: its tokenizer has no pad token other than what ends an answer, and transformers "
        "would take a reward model's score before the end; give the tokenizer a pad_token "
        "that ends no answer"
    )


def require_tools_shown(tokenizer: PreTrainedTokenizerBase, tools: list[dict]) -> None:
    """Refuse a chat template that leaves out the tools it is given.

    The policy would be trained to use tools that it has never seen.

    Raises:
        UserError: a chat renders alike with and without these tools.
    """
    question: Messages = [{"role": "user", "content": "minirl asks"}]
    names = ", ".join(tool["function"]["name"] for tool in tools)
    require(
        render(tokenizer, question, tools=tools) != render(tokenizer, question),
        f"the chat template of policy.model shows no tools, and a chat comes with some ({names}): "
        "the policy would not know of them; name a template that renders `tools` by "
        "data.chat_template",
    )


def require_calls_shown(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict] | None = None
) -> None:
    """Refuse a chat template that leaves out calls of tools.

    Args:
        tokenizer: the tokenizer with the template.
        tools: those of the chat. Some templates show calls only with tools.

    Raises:
        UserError: an answer that calls a tool does not have the tool's name.
    """
    function = {"name": "minirl_asks", "arguments": {"number": 1}}
    call = {"id": "callminir", "type": "function", "function": function}
    messages: Messages = [
        {"role": "user", "content": "minirl asks"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    require(
        "minirl_asks" in render(tokenizer, messages, tools=tools, header=False),
        "the chat template of policy.model shows no tool_calls, and a message has some: their "
        "answers would be empty; name a template that renders `tool_calls` by data.chat_template",
    )


def require_thoughts_shown(tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Refuse a chat template that leaves out thoughts: answers would be trained without them.

    Args:
        tokenizer: the tokenizer with the template.
        key: what they are called in a message, one of THOUGHTS.

    Raises:
        UserError: an answer with thoughts does not have them.
    """
    answer = {"role": "assistant", "content": "minirl answers", key: "minirl thinks"}
    messages: Messages = [{"role": "user", "content": "minirl asks"}, answer]
    require(
        "minirl thinks" in render(tokenizer, messages, header=False),
        f"the chat template of policy.model leaves out the {key!r} of an answer, which would be "
        f"trained without it; give it another of the names {', '.join(THOUGHTS)}, remove it, or "
        f"name a template that renders it by data.chat_template",
    )


def read_tools(value: object, where: str, *, has_gaps: bool = True) -> list[dict] | None:
    """Return the JSON schemas of tools as chat templates want them; None for none.

    Args:
        value: a list of schemas of functions in OpenAI's form, or without its `type` around them;
            each of them, or the list, may be a JSON text, as data sets often keep them.
        where: begins an error message.
        has_gaps: whether what is None is a gap that `datasets` has filled, and is left out. In a
            JSON text it is what the user wrote (`"default": null`).

    Raises:
        UserError: it is none of these.
    """
    tools = parsed(value)
    if tools is None or tools == []:
        return None
    found = []
    for item in tools if isinstance(tools, list) else [tools]:
        tool = parsed(item)
        if has_gaps and tools is value and tool is item:  # Neither of them was a text.
            tool = without_none(tool)
        match tool:
            case {"function": {"name": str()}}:
                found.append(tool)
            case {"name": str()}:
                found.append({"type": "function", "function": tool})
            case _:
                raise UserError(
                    f"{where} holds {str(item)[:100]!r}, which describes no tool; give a list of "
                    'JSON schemas {"type": "function", "function": {"name": ..., "parameters": '
                    "...}}, or the JSON text of one"
                )
    return found


def read_template_kwargs(value: object, where: str) -> dict | None:
    """Return arguments of a chat template, a mapping or the JSON text of one; None for none.

    Raises:
        UserError: it is neither, or sets what is given to a template anyway; `where` begins the
            message.
    """
    kwargs = without_none(parsed(value))
    if not kwargs:
        return None
    wrong = [str(value)[:100]]
    if isinstance(kwargs, dict):
        wrong = [name for name in kwargs if not str(name).isidentifier() or name in RESERVED]
    require(
        not wrong,
        f"{where} has {wrong!r}, which is no argument of a chat template that can be set; give a "
        'mapping of variables that the template reads, such as {"enable_thinking": false}',
    )
    return kwargs


def without_none(value: Any) -> Any:
    """Return nested values without the keys that `datasets` fills with None."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_none(inner) for inner in value]
    return value
