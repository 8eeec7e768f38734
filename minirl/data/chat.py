"""Messages to texts and token ids, through the chat template of the tokenizer."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.base.reading import is_unicode, library_reads, read_text
from minirl.config.shared import RowsConfig
from minirl.data.messages import Messages, for_template, read_template_kwargs


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
    if chats and tokenizer.chat_template is None:
        raise UserError(
            f"policy.model = {folder}: its tokenizer has no chat template; name a file with one by "
            "data.chat_template"
        )
    if chats:
        named = f"data.chat_template = {data.chat_template}" if data and data.chat_template else ""
        check_template(tokenizer, named or f"policy.model = {folder}: its chat template")
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse a chat template that leaves out what the user says.

    One that refuses this chat may take those of the data; those that it refuses are named with
    their rows.

    Args:
        tokenizer: has the template.
        where: begins an error message.

    Raises:
        UserError: the prompt is in no rendering of it, neither as a text nor as parts.
    """
    text = "minirl asks"
    renderings = []
    for content in (text, [{"type": "text", "text": text}]):
        try:
            renderings.append(render(tokenizer, [{"role": "user", "content": content}]))
        except UserError:
            return
        is_whole_part = f"'text': '{text}'" in renderings[-1]  # Python's form of it.
        if text in renderings[-1] and not is_whole_part:
            return
    raise UserError(
        f"{where} leaves out the prompt: it renders {renderings[0][:80]!r} where the user says "
        f"{text!r}; correct it, or name another by data.chat_template"
    )


def check_tokens(
    tokenizer: PreTrainedTokenizerBase, stop_ids: list[int], vocab_size: int, where: str
) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for.

    Special tokens may lie beyond it, as that of images does in models for text alone. A prompt that
    has one is refused by `encode`.

    Args:
        tokenizer: of the model.
        stop_ids: tokens that end an answer.
        vocab_size: of the model's config.
        where: begins an error message.

    Raises:
        UserError: a token that texts are made of, or one that ends an answer, lies beyond.
    """
    advice = "take the tokenizer and the config.json that belong to the weights"
    wrong = [token for token in stop_ids if token >= vocab_size]
    require(
        not wrong,
        f"{where}: the eos tokens {wrong} lie beyond vocab_size = {vocab_size}; correct "
        f"eos_token_id in generation_config.json, or {advice}",
    )
    special = set(tokenizer.all_special_ids)
    for number, added in tokenizer.added_tokens_decoder.items():
        if added.special:
            special.add(number)
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

    Raises:
        UserError: there is none, or generation_config.json says it in another form.
    """
    ids = {tokenizer.eos_token_id}
    where = f"policy.model = {folder}: its generation_config.json"
    if (folder / "generation_config.json").exists():
        with library_reads(where):
            eos = GenerationConfig.from_pretrained(folder).eos_token_id
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
        f"policy.model = {folder}: neither tokenizer nor generation_config.json names an eos "
        "token, so no answer would end",
    )
    return sorted(ids)


def filling_token_id(tokenizer: PreTrainedTokenizerBase, stop_ids: list[int], where: str) -> int:
    """Return a token that can fill up short rows of a reward model.

    It must not end an answer, because transformers takes a row's score at the last token that is
    another.

    Raises:
        UserError: the tokenizer has no such token; `where` begins the message.
    """
    for token in (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id):
        if token is not None and token not in stop_ids:
            return token
    raise UserError(
        f"{where}: its tokenizer has no pad token other than what ends an answer, and transformers "
        "would take a reward model's score before the end; give the tokenizer a pad_token "
        "that ends no answer"
    )


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    header: bool = True,
    tools: list[dict] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> str:
    """Return the chat as text. This is the only place where a template is rendered.

    Args:
        tokenizer: has the chat template.
        messages: the chat.
        header: whether the header of an answer follows, up to where the assistant begins to speak.
        tools: JSON schemas of tools, for the template.
        chat_template_kwargs: further arguments of the template, of a row or of a request. They
            count before data.chat_template_kwargs, which `use_template` has put there.

    Raises:
        UserError: the template raises an error, or renders nothing.
    """
    shown = f"({str(messages)[:200]}); correct the messages or data.chat_template"
    try:
        text = tokenizer.apply_chat_template(
            for_template(messages),
            tokenize=False,
            add_generation_prompt=header,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
    except Exception as error:  # a template is a program: it may raise anything
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise UserError(f"the chat template refuses a chat: {kind}{error} {shown}") from error
    require(text, f"the chat template renders nothing for a chat {shown}")
    return str(text)


def renderer(tokenizer: PreTrainedTokenizerBase, row: dict) -> Callable[..., str]:
    """Return `render` for the chats of a row, with its tools and template arguments."""
    return partial(render, tokenizer, **row.get("template_inputs", {}))


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


def require_calls_shown(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a chat template that leaves out calls of tools.

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
        "minirl_asks" in render(tokenizer, messages, header=False),
        "the chat template of policy.model shows no tool_calls, and a message has some: their "
        "answers would be empty; name a template that renders `tool_calls` by data.chat_template",
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that has all its special tokens.

    Raises:
        UserError: the text has half of a surrogate pair.
    """
    require(
        text.isascii() or is_unicode(text),
        f"the text {text[:200]!r} has half of a surrogate pair, which is no character; remove it",
    )
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[bool]]:
    """Return the token ids and the loss mask of a plain text.

    The tokens that begin and end a text are among them; all but the first are in the loss.
    """
    ids = tokenizer(text, verbose=False)["input_ids"]
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids, [i > 0 for i in range(len(ids))]
