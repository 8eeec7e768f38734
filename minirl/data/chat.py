"""Messages to token ids, through the tokenizer's own chat template."""

import bisect
import json
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from minirl.errors import UserError, require


def load_tokenizer(
    folder: Path, *, chats: bool = True, template: str = "", plain: str = ""
) -> PreTrainedTokenizerBase:
    """`template`, `plain`: as in `use_template`. Raises UserError if there are chats to encode and
    no template for them.
    """
    tokenizer = use_template(
        AutoTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False), template, plain
    )  # it would not give texts back
    if chats and tokenizer.chat_template is None:
        raise UserError(
            f"policy.model = {folder}: its tokenizer has no chat template; name a file with one by data.chat_template"
        )
    return tokenizer


def use_template(
    tokenizer: PreTrainedTokenizerBase, path: str, plain: str
) -> PreTrainedTokenizerBase:
    """The tokenizer with another chat template, unless both are empty: that of the Jinja file
    `path` (data.chat_template), or the text `plain` (data.input_template) with the prompt in place
    of its `{}`, followed by an answer and the end-of-sequence token. Raises UserError.
    """
    if path:
        try:
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"data.chat_template = {path!r} cannot be read ({error}); give a text file with a Jinja template"
            ) from error
    if plain:
        before, after = (json.dumps(text, ensure_ascii=False) for text in plain.split("{}"))
        begin = (
            tokenizer.bos_token if tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id else ""
        )  # as the tokenizer begins a plain text
        refuse = "{{ raise_exception('data.input_template takes a prompt that is one text and an answer; leave it empty for chats') }}"
        tokenizer.chat_template = (
            f"{{% if messages[0].role != 'user' or messages|length > 2 %}}{refuse}{{% endif %}}{{{{ {json.dumps(begin)} + {before} + "
            f"messages[0].content + {after} }}}}{{% for m in messages[1:] %}}{{{{ m.content + eos_token }}}}{{% endfor %}}"
        )
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    """Every token that ends an answer: the tokenizer's and those of generation_config.json. Raises
    UserError if there is none.
    """
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(eos) if isinstance(eos, list) else {eos} if eos is not None else set()
    require(
        ids,
        f"policy.model = {folder}: neither tokenizer nor generation_config.json names an eos token, so no answer would end",
    )
    return sorted(ids)


def filling_token_id(tokenizer: PreTrainedTokenizerBase, stop_ids: list[int], where: str) -> int:
    """A token that can fill up short rows of a reward model: transformers takes a row's score at
    its last other token, so it must not end an answer. Raises UserError if the tokenizer has
    none.
    """
    for token in (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id):
        if token is not None and token not in stop_ids:
            return token
    raise UserError(
        f"{where}: its tokenizer has no pad token other than what ends an answer, and transformers would take a reward model's score "
        "before the end; give the tokenizer a pad_token of its own"
    )


def to_messages(prompt: str | list[dict], system_prompt: str) -> list[dict]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    *,
    header: bool = True,
    tools: list[dict] | None = None,
) -> str:
    """The chat as text, with `header` up to where the assistant begins to speak. Raises UserError
    if the template does.
    """
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=header, tools=tools
        )
    except (TemplateError, TypeError) as error:  # by its own will, or by adding what does not add
        raise UserError(
            f"the chat template refuses a chat: {error} ({str(messages)[:200]})"
        ) from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that has all its special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    trained: list[int],
    stop_ids: list[int],
) -> tuple[list[int], list[bool]]:
    """(token ids, mask) of a chat as the template renders it; nothing follows the last token in the
    loss.

    The mask is True on what a policy asked for the messages `trained` (indices of assistant turns)
    would sample: the content and the token that ends the turn, not the header before nor the line
    break behind. A turn begins where the rendering of the messages before it, with the header of an
    answer, ends; a token on both sides of that border is not in the loss. The whole is rendered and
    tokenised once. Raises UserError if the template renders a turn otherwise when others follow, or
    does not end one by a stop token.
    """
    text = render(tokenizer, messages, header=False)
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )  # long ones are cut later
    ids, spans = encoded["input_ids"], encoded["offset_mapping"]
    mask = [False] * len(ids)
    starts = [start for start, _ in spans]
    for i in trained:
        before, through = (
            render(tokenizer, messages[:i]),
            text if i == len(messages) - 1 else render(tokenizer, messages[: i + 1], header=False),
        )
        first = bisect.bisect_left(starts, len(before))
        while 0 < first < len(ids) and spans[first - 1][1] < len(
            before
        ):  # a token that holds the header's last space, which offsets leave out
            first += 1
        last = next((n for n in range(first, len(ids)) if ids[n] in stop_ids), None)
        if (
            not text.startswith(before)
            or last is not None
            and through[: spans[last][1]] != text[: spans[last][1]]
        ):
            raise UserError(
                f"the chat template renders message {i + 1} of a chat otherwise when others follow, so it cannot be trained on; "
                f"--data.train-on last_turn may help ({str(messages[i])[:100]})"
            )
        if last is None:
            raise UserError(
                f"the chat template does not end an answer by one of the stop tokens {stop_ids} ({str(messages[i])[:100]})"
            )
        mask[first : last + 1] = [True] * (last + 1 - first)
    length = len(mask) - mask[::-1].index(True) if any(mask) else 0
    return ids[:length], mask[:length]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[bool]]:
    """(token ids, mask) of a plain text with the tokens that begin and end one; all but the first
    are in the loss.
    """
    ids = tokenizer(text, verbose=False)["input_ids"]
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    return ids, [i > 0 for i in range(len(ids))]
