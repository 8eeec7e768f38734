"""How a model writes calls of tools: vLLM's parsers, and which of them a chat template asks for.

A template writes the calls of earlier turns as the model learned to write them. So the parser of a
model is the one that reads back what its template writes.
"""

import contextlib
import copy
import functools
import json
import logging
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError
from minirl.base.reading import parse_json
from minirl.data import chat, harmony
from minirl.data.chat import is_text
from minirl.data.tokenizer import require_tools_shown
from minirl.engine import compat
from minirl.engine.grammars import Guide, tag_guide

ToolCall = tuple[str, dict]  # name and arguments

_DEFAULT = "hermes"
# What `auto` tries: vLLM's parsers of Qwen and Hermes, GLM, Qwen's coders, Mistral and Llama 3, and
# minirl's of gpt-oss.
_PARSERS = ("hermes", "glm45", "qwen3_coder", "mistral", "llama3_json", harmony.NAME)
_NAME = "minirl_tool"
_ARGUMENTS = {"city": "Rome"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_QUESTION = "minirl asks"


def preload() -> None:
    """Import what reading calls needs, which takes a second or two."""
    import vllm.entrypoints.openai.chat_completion.protocol  # noqa: F401
    import vllm.tool_parsers.hermes_tool_parser
    import vllm.tool_parsers.structural_tag_registry
    import vllm.v1.structured_output.backend_xgrammar  # noqa: F401

    # The log is not for calls that the policy writes wrongly.
    for logger in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(logger).setLevel(logging.CRITICAL + 1)


@dataclass(frozen=True)
class ToolReader:
    """Reads the calls in the answers to one request, and says how to force one."""

    parser: str  # vLLM's name of it.
    tokenizer: PreTrainedTokenizerBase
    request: Any  # vLLM's, with the tools and the choice among them.

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return what a text says besides its calls, and the calls.

        If one of them cannot be read there are none at all, so that the client sees the text.
        """
        if self.parser == harmony.NAME:  # vLLM's parser of gpt-oss is empty.
            content = harmony.visible_text(text)
            found = [(each.function, each.body) for each in harmony.parse(text) if each.function]
        else:
            parser = make_parser(self.parser, self.tokenizer, self.request.tools)
            said = parser.extract_tool_calls(text, self.request)
            content = said.content or ""
            found = [(call.function.name, call.function.arguments) for call in said.tool_calls]
        calls = []
        for name, written in found:
            try:
                arguments = parse_json(written)
                # It must be possible to send it: not NaN, nor half of a surrogate pair.
                sent = json.dumps([name, arguments], allow_nan=False, ensure_ascii=False)
            except (ValueError, TypeError):
                return text, []
            if not isinstance(arguments, dict) or not is_text(sent):
                return text, []
            calls.append((str(name), arguments))
        return (content, calls) if calls else (text, [])

    def guide(self) -> Guide | None:
        """Return the guide to a call that the request demands; None: the parser has none.

        Raises:
            UserError: vLLM cannot hold an answer to the schema of a tool.
        """
        if self.parser == harmony.NAME:
            return None
        parser = make_parser(self.parser, self.tokenizer, self.request.tools)
        tag = parser.get_structural_tag(self.request, **compat.tag_options())
        return tag_guide(tag.model_dump(mode="json")) if tag else None


def make_reader(
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict],
    tool_choice: str | dict,
    parser: str,
) -> ToolReader:
    """Return the reader of the answers to a request with tools.

    Args:
        tokenizer: has the chat template.
        tools: the request's tools, in OpenAI's form.
        tool_choice: the request's choice, in OpenAI's form.
        parser: endpoint.tool_parser.

    Raises:
        UserError: the template shows no tools, there is no such parser, or the request has not the
            tool that it demands.
        ValueError: the tools are malformed.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    parser = _find_parser(tokenizer, str(tokenizer.chat_template), parser)
    try:
        request = ChatCompletionRequest(
            model="policy", messages=[], tools=tools, tool_choice=tool_choice
        )
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]["msg"]
        raise UserError(f"the tools cannot be called: {problem}") from error
    except compat.client_errors() as error:
        raise UserError(f"the tools cannot be called: {str(error).splitlines()[0]}") from error
    for tool in request.tools or ():
        # Without a schema it has no parameters, and a grammar would let any value be its arguments.
        tool.function.parameters = tool.function.parameters or _NO_PARAMETERS
    if parser != harmony.NAME:
        make_parser(parser, tokenizer, request.tools)
    return ToolReader(parser, tokenizer, request)


@functools.cache
def _find_parser(tokenizer: PreTrainedTokenizerBase, template: str, name: str) -> str:
    """Return the name of the parser that reads back a call as the template writes it.

    `hermes` if the template writes no calls.

    Args:
        tokenizer: has the template.
        template: its template, which may change.
        name: `auto`, or the name to return, if the template shows tools.

    Raises:
        UserError: the template shows no tools, or writes calls that no parser reads.
    """
    require_tools_shown(tokenizer, [_TOOL])
    if name != "auto":
        return name
    question = {"role": "user", "content": _QUESTION}
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = chat.render(tokenizer, [question, answer], header=False, tools=[_TOOL])
    except UserError:
        return _DEFAULT
    _, _, written = text.rpartition(_QUESTION)
    # Answers are read without it, and vLLM 0.26 would take it for a part of a Mistral's call.
    written = written.removesuffix(tokenizer.eos_token or "")
    if _NAME not in written:
        return _DEFAULT
    for parser in _PARSERS:
        with contextlib.suppress(UserError):
            reader = make_reader(tokenizer, [_TOOL], "auto", parser)
            if reader.read(written)[1] == [(_NAME, _ARGUMENTS)]:
                return parser
    raise UserError(
        "the chat template writes calls of tools in a form that none of vLLM's parsers "
        f"{', '.join(_PARSERS)} reads back ({written[:200]!r}); name another by "
        "endpoint.tool_parser, or another template by data.chat_template"
    )


@functools.cache
def takes_calls_as_text(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether the template takes an answer with calls as the text that was sampled.

    Mistral's do not: where `tool_calls` are missing, roles seem not to alternate.

    Args:
        tokenizer: has the template.
        template: its template, which may change.
    """
    text = {"role": "assistant", "content": "text"}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": _NAME, "content": "1"}
    question = {"role": "user", "content": _QUESTION}
    try:
        chat.render(tokenizer, [question, text, result, text, result, text], header=False)
    except UserError:
        return False
    return True


def make_parser(name: str, tokenizer: PreTrainedTokenizerBase, tools: Any) -> Any:
    """Return vLLM's parser. Raises UserError if there is none, or the tokenizer is of others."""
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)(_with_vocabulary(tokenizer), tools)
    except KeyError as error:
        raise UserError(
            f"endpoint.tool_parser = {name}: vLLM has no parser of this name; give auto, or one of "
            f"{', '.join(ToolParserManager.list_registered())}"
        ) from error
    except (RuntimeError, ValueError, ImportError) as error:
        raise UserError(f"endpoint.tool_parser = {name}: {error}") from error


@functools.cache
def _with_vocabulary(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a copy of a tokenizer that keeps its vocabulary, which parsers ask for each time.

    To make the vocabulary of a large tokenizer takes a tenth of a second.
    """
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(copy.copy(tokenizer))
