"""How a model writes calls of tools: vLLM's parsers, and which of them a chat template asks for.

A template writes the calls of earlier turns as the model learned to write them. So the parser of a
model is the one that reads back what its template writes.
"""

import contextlib
import functools
import json
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError
from minirl.data import chat, harmony
from minirl.data.tokenizer import require_tools_shown
from minirl.engine import compat
from minirl.engine.grammars import Guide, is_deeper, tag_guide

ToolCall = tuple[str, dict]  # name and arguments

_MAX_NESTING = 100  # of a call's arguments, which others will read by recursion
_DEFAULT = "hermes"
# Parsers that `auto` tries: vLLM's of Qwen and Hermes, GLM, Qwen's coders, Mistral and Llama 3, and
# minirl's of gpt-oss. With each, the text that begins a call, if it is ordinary text: what stands
# before it can be streamed. "": an answer of which parts may become a call is sent at its end.
_MARKERS = {
    "hermes": "<tool_call>",
    "glm45": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "mistral": "",
    "llama3_json": "",
    harmony.NAME: "",
}
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

    @property
    def marker(self) -> str:
        """The text that a call begins with; "" if it may begin with any."""
        return _MARKERS.get(self.parser, "")

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return what a text says besides its calls, and the calls.

        If one of them cannot be read there are none at all, so that the client sees the text.
        """
        parser = _make_parser(self.parser, self.tokenizer, self.request.tools)
        found = parser.extract_tool_calls(text, self.request)
        calls = []
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            for call in found.tool_calls:
                arguments = json.loads(call.function.arguments)
                if not isinstance(arguments, dict) or is_deeper(arguments, _MAX_NESTING):
                    return text, []
                calls.append((str(call.function.name), arguments))
        if len(calls) != len(found.tool_calls) or not calls:
            return text, []
        return found.content or "", calls

    def guide(self) -> Guide | None:
        """Return the guide to a call that the request demands; None: the parser has none.

        Raises:
            UserError: vLLM cannot hold an answer to the schema of a tool.
        """
        parser = _make_parser(self.parser, self.tokenizer, self.request.tools)
        tag = parser.get_structural_tag(self.request, **compat.tag_options())
        if tag is None:
            return None
        return tag_guide(tag.model_dump(mode="json"))


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
    template = str(tokenizer.chat_template)
    _require_shown(tokenizer, template)
    if parser == "auto":
        parser = _find_parser(tokenizer, template)
    return _make_reader(tokenizer, tools, tool_choice, parser)


def _make_reader(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict], tool_choice: str | dict, parser: str
) -> ToolReader:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        request = ChatCompletionRequest(
            model="policy", messages=[], tools=tools, tool_choice=tool_choice
        )
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]["msg"]
        raise UserError(f"the tools cannot be called: {problem}") from error
    except compat.client_errors() as error:
        raise UserError(f"the tools cannot be called: {str(error).splitlines()[0]}") from error
    _make_parser(parser, tokenizer, request.tools)
    return ToolReader(parser, tokenizer, request)


@functools.cache
def _require_shown(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Refuse a template that shows no tools. `template`: the tokenizer's."""
    require_tools_shown(tokenizer, [_TOOL])


@functools.cache
def _find_parser(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return the parser that reads back a call as the template writes it.

    `hermes` if the template writes no calls. `template`: the tokenizer's, which may change.
    """
    question = {"role": "user", "content": _QUESTION}
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = chat.render(tokenizer, [question, answer], header=False, tools=[_TOOL])
    except UserError:
        return _DEFAULT
    _, _, written = text.rpartition(_QUESTION)
    if _NAME not in written:
        return _DEFAULT
    for name in _MARKERS:
        with contextlib.suppress(UserError):
            reader = _make_reader(tokenizer, [_TOOL], "auto", name)
            if reader.read(written)[1] == [(_NAME, _ARGUMENTS)]:
                return name
    raise UserError(
        "the chat template writes calls of tools in a form that none of vLLM's parsers "
        f"{', '.join(_MARKERS)} reads back ({written[:200]!r}); name another by "
        "endpoint.tool_parser, or another template by data.chat_template"
    )


def _make_parser(name: str, tokenizer: PreTrainedTokenizerBase, tools: Any) -> Any:
    """Return vLLM's parser. Raises UserError if there is none, or the tokenizer is of others."""
    from vllm.tool_parsers import ToolParserManager

    if name == harmony.NAME:
        return _HarmonyParser()
    try:
        return ToolParserManager.get_tool_parser(name)(tokenizer, tools)
    except KeyError as error:
        raise UserError(
            f"endpoint.tool_parser = {name}: vLLM has no parser of this name; give auto, or one of "
            f"{', '.join(ToolParserManager.list_registered())}"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise UserError(f"endpoint.tool_parser = {name}: {error}") from error


class _HarmonyParser:
    """Reads calls in harmony, in the form of vLLM's parsers. Its own one for gpt-oss is empty."""

    def extract_tool_calls(self, text: str, request: Any) -> Any:
        """Return what vLLM's parsers do: `content` and `tool_calls`."""
        calls = [
            SimpleNamespace(function=SimpleNamespace(name=m.function, arguments=m.body))
            for m in harmony.parse(text)
            if m.function
        ]
        return SimpleNamespace(content=harmony.visible_text(text), tool_calls=calls)

    def get_structural_tag(self, request: Any, **options: Any) -> None:
        """Return no grammar: a demanded call is asked for, not forced."""
