"""Messages to token ids, through the tokenizer's own chat template."""

import bisect
import json
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from minirl.config.shared import RowsConfig
from minirl.errors import UserError, require

Messages = list[dict]  # A chat: each with a role and a content.
RowPrompt = str | Messages


def load_tokenizer(
    folder: Path, data: RowsConfig | None = None, *, chats: bool = True
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder.

    Args:
        folder: of the model (policy.model).
        data: may have another chat template, as in `use_template`.
        chats: whether there are chats to encode.

    Raises:
        UserError: there are chats to encode, and no template for them.
    """
    # Cleaning up would not give texts back as they were.
    tokenizer = AutoTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False)
    if data:
        use_template(tokenizer, data)
    if chats and tokenizer.chat_template is None:
        raise UserError(
            f"policy.model = {folder}: its tokenizer has no chat template; name a file with one by "
            "data.chat_template"
        )
    return tokenizer


def use_template(tokenizer: PreTrainedTokenizerBase, data: RowsConfig) -> PreTrainedTokenizerBase:
    """Give the tokenizer another chat template, if `data` has one.

    Args:
        tokenizer: changed in place.
        data: has data.chat_template, a file with a Jinja template, and data.input_template, a text
            with the prompt in place of its `{}`, followed by an answer and the end-of-sequence
            token.

    Returns:
        The tokenizer.

    Raises:
        UserError: the file cannot be read.
    """
    if data.chat_template:
        try:
            tokenizer.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"data.chat_template = {data.chat_template!r} cannot be read ({error}); give a "
                "text file with a Jinja template"
            ) from error
    if data.input_template:
        # A chat begins as a plain text of this tokenizer does: with its first token, if it has one.
        begins = tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
        begin = json.dumps(tokenizer.bos_token if begins else "")
        texts = data.input_template.split("{}")
        around_prompt = [json.dumps(text, ensure_ascii=False) for text in texts]
        tokenizer.chat_template = (
            "{% if messages[0].role != 'user' or messages|length > 2 %}"
            "{{ raise_exception('data.input_template takes a prompt that is one text and an "
            "answer; leave it empty for chats') }}{% endif %}"
            f"{{{{ {begin} + {' + messages[0].content + '.join(around_prompt)} }}}}"
            "{% for m in messages[1:] %}{{ m.content + eos_token }}{% endfor %}"
        )
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    """Return every token that ends an answer: the tokenizer's and generation_config.json's.

    Raises:
        UserError: there is none.
    """
    ids = {tokenizer.eos_token_id}
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids.update(eos if isinstance(eos, list) else [eos])
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
        "would take a reward model's score before the end; give the tokenizer a pad_token of its "
        "own"
    )


def to_messages(prompt: RowPrompt, system_prompt: str) -> Messages:
    """Return a prompt as messages, behind the system prompt unless it is empty or there is one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    header: bool = True,
    tools: list[dict] | None = None,
) -> str:
    """Return the chat as text.

    Args:
        tokenizer: has the chat template.
        messages: the chat.
        header: whether the header of an answer follows, up to where the assistant begins to speak.
        tools: descriptions of tools, for the template.

    Raises:
        UserError: the template raises an error.
    """
    try:
        return tokenizer.apply_chat_template(  # type: ignore[return-value]  # a text
            messages,
            tokenize=False,
            add_generation_prompt=header,
            tools=tools,  # type: ignore[arg-type]  # a list of dict is one of dict | Callable
        )
    except (TemplateError, TypeError) as error:  # raised on purpose, or by adding None to a text
        raise UserError(
            f"the chat template refuses a chat: {error} ({str(messages)[:200]})"
        ) from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that has all its special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    trained: list[int],
    stop_ids: list[int],
) -> tuple[list[int], list[bool]]:
    """Return the token ids and the loss mask of a chat as the template renders it.

    The mask is True on what a policy that is asked for the messages `trained` would sample: the
    content and the token that ends the turn, not the header before nor the line break behind. A
    turn begins where the rendering of the messages before it, with the header of an answer, ends; a
    token on both sides of that border is not in the loss. The whole is rendered and tokenised once.
    Nothing follows the last token in the loss.

    Args:
        tokenizer: has the chat template.
        messages: the chat.
        trained: indices of the assistant turns in the loss.
        stop_ids: tokens that end an answer.

    Returns:
        (token ids, mask), of equal length.

    Raises:
        UserError: the template renders a turn otherwise when others follow, or does not end one by
            a stop token.
    """
    text = render(tokenizer, messages, header=False)
    encoded = tokenizer(  # not verbose: long chats are cut later
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    ids = encoded["input_ids"]
    spans = encoded["offset_mapping"]  # of each token: (first character, behind its last)
    mask = [False] * len(ids)
    length = 0
    for i in trained:
        # 1. The turn's first token, and its first stop token.
        before = render(tokenizer, messages[:i])
        first = _first_token_behind(spans, len(before))
        last = next((n for n in range(first, len(ids)) if ids[n] in stop_ids), None)

        # 2. The whole chat must begin as the one up to this turn does.
        through = text
        if i < len(messages) - 1:
            through = render(tokenizer, messages[: i + 1], header=False)
        end = 0 if last is None else spans[last][1]
        if not text.startswith(before) or through[:end] != text[:end]:
            raise UserError(
                f"the chat template renders message {i + 1} of a chat otherwise when others "
                "follow, so it cannot be trained on; --data.train-on last_turn may help "
                f"({str(messages[i])[:100]})"
            )
        if last is None:
            raise UserError(
                f"the chat template does not end an answer by one of the stop tokens {stop_ids} "
                f"({str(messages[i])[:100]})"
            )

        # 3. Both tokens and what is between them are in the loss.
        mask[first : last + 1] = [True] * (last + 1 - first)
        length = max(length, last + 1)
    return ids[:length], mask[:length]


def _first_token_behind(spans: list[tuple[int, int]], num_characters: int) -> int:
    """Return the number of the first token that has none of the first characters."""
    first = bisect.bisect_left(spans, num_characters, key=lambda span: span[0])
    # Offsets leave out a space that a token begins with: if the token before ends too early, this
    # one holds the last of the characters.
    while 0 < first < len(spans) and spans[first - 1][1] < num_characters:
        first += 1
    return first


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[bool]]:
    """Return the token ids and the loss mask of a plain text.

    The tokens that begin and end a text are among them; all but the first are in the loss.
    """
    ids = tokenizer(text, verbose=False)["input_ids"]
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids, [i > 0 for i in range(len(ids))]
