"""OpenAI's chat completions and completions: what a request asks for, and a choice of its response.

A client's `model`, `temperature`, `top_p`, penalties and the like have no effect: the policy
answers, and samples as the run says, because it is trained on those log-probs. What the endpoint
cannot do (other forms of output, alternatives to the sampled tokens, forced tool calls) is refused.
"""

import contextlib
import functools
import json
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field
from transformers import PreTrainedTokenizerBase

from minirl.config.shared import EndpointConfig
from minirl.data import chat, images
from minirl.data.images import Vision
from minirl.errors import UserError
from minirl.rollout.conversation import Completion, Prompt, decode, decode_after
from minirl.rollout.engine_loop import Request
from minirl.serving.limits import BadRequest

# Tool calls are written as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
TOOL_CALL = "<tool_call>"
_TOOL_CALLS = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MAX_STOP_STRINGS = 64  # each is looked for after each token
_MAX_NESTING = 100  # of a tool call's arguments, which others will read by recursion
_UNSUPPORTED = ("top_logprobs", "response_format", "echo", "suffix")

JSONObject = dict[str, Any]  # an object
ToolCall = tuple[str, dict]  # name and arguments
Content = str | list[dict]  # of a message: a text, or parts


def _as_list(value: Any) -> Any:
    """Return a list of texts or of token ids also where a request has a single one of them."""
    is_list = isinstance(value, list) and (not value or isinstance(value[0], str | list))
    return value if is_list or value is None else [value]


class CompletionRequest(BaseModel, extra="allow"):
    """The body of a request, in OpenAI's form."""

    messages: list[JSONObject] | None = None
    # In place of messages. Texts are read as they are: special tokens in them count, none is added.
    prompt: Annotated[list[str] | list[list[int]] | None, BeforeValidator(_as_list)] = None
    n: int = Field(1, ge=1, le=128)
    # At most; rollout.max_tokens and the room in the context are limits, too.
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    # A completion is sampled until its text has one of these in it, and is sent up to before it.
    stop: Annotated[
        Annotated[list[str], Field(max_length=_MAX_STOP_STRINGS)] | None, BeforeValidator(_as_list)
    ] = None
    stream: bool | None = None
    stream_options: JSONObject | None = None
    # Of every sampled token, those included that end the completion or do not show in its text. In
    # a stream they come with the last chunk.
    logprobs: bool | int | None = None
    tools: list[JSONObject] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    @property
    def markers(self) -> list[str]:
        """What the client does not see, nor a text that may become it: what follows is hidden."""
        markers = list(self.stop or ())
        if self.tools and self.tool_choice != "none":
            markers.append(TOOL_CALL)
        return markers

    def check(self, cfg: EndpointConfig, vision: Vision | None, max_model_len: int) -> None:
        """Refuse what is too much or not to be had, before anything is made of it.

        Args:
            cfg: The limits.
            vision: How the model reads images; None: it reads none.
            max_model_len: Tokens of a context.

        Raises:
            UserError: The request asks for what the endpoint cannot do.
            KeyError, TypeError, ValueError: It is malformed.
        """
        extra = self.model_extra or {}
        for name in _UNSUPPORTED:
            if extra.get(name) not in (None, 0, "", {"type": "text"}):
                raise UserError(f"{name} is not supported here; leave it out")
        if self.max_tokens is not None and self.max_tokens > max_model_len:
            raise BadRequest(
                f"max_tokens = {self.max_tokens} is more than engine.max_model_len = "
                f"{max_model_len}; ask for fewer",
                code="context_length_exceeded",
            )
        num_prompts = 1 if self.messages is not None else len(self.prompt or ())
        if num_prompts > cfg.limits.prompts:
            raise UserError(
                f"the request has {num_prompts} prompts, more than endpoint.limits.prompts = "
                f"{cfg.limits.prompts}; send several requests"
            )
        if num_prompts * self.n > cfg.completions:
            raise UserError(
                f"the request asks for {num_prompts * self.n} completions, more than "
                f"endpoint.completions = {cfg.completions}; send several requests"
            )
        if self.messages is not None:
            _check_images(self.messages, vision, cfg.image_megapixels)

    def render_prompts(
        self, tokenizer: PreTrainedTokenizerBase, sampled_texts: dict[str, str]
    ) -> list[tuple[str | list[int], list[str]]]:
        """Return each prompt, as text or tokens, with the data URLs of its images.

        Call `check` first.

        Args:
            tokenizer: With the chat template.
            sampled_texts: The session's earlier completions as they were sampled, by
                `completion_key`. They stand in the chat for what the client sends back of them.

        Raises:
            UserError: The prompt is empty, or the template refuses it.
            KeyError, TypeError, ValueError: The request is malformed.
        """
        if self.messages is None:
            if not self.prompt or not all(self.prompt):
                raise UserError("prompt is empty; give a text or token ids")
            for prompt in self.prompt:
                ids = prompt if isinstance(prompt, list) else [0]
                if min(ids) < 0 or max(ids) >= len(tokenizer):
                    raise UserError(f"prompt has a token outside 0 ... {len(tokenizer) - 1}")
            return [(prompt, []) for prompt in self.prompt]
        messages = [_to_template_message(message, sampled_texts) for message in self.messages]
        tools = None if self.tool_choice == "none" else self.tools
        text = chat.render(tokenizer, messages, tools=tools)
        return [(text, images.of_chat(messages))]


def check_length(
    prompt: str | list[int], max_model_len: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a text that is too long whatever its tokens are: megabytes of it take seconds to read.

    Raises:
        BadRequest: it has more characters than a context of the longest tokens.
    """
    longest = _longest_token(tokenizer) * max_model_len
    if isinstance(prompt, str) and len(prompt) > longest:
        raise BadRequest(
            f"the prompt has {len(prompt)} characters, and the longest that engine.max_model_len = "
            f"{max_model_len} has room for has {longest}",
            code="context_length_exceeded",
        )


@functools.cache
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the characters of the longest token, or more."""
    return max(map(len, tokenizer.get_vocab()))


def _check_images(messages: list[JSONObject], vision: Vision | None, max_megapixels: float) -> None:
    """Refuse images that the model cannot read, by their heads. Raises UserError."""
    urls = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] == "image_url":
                urls.append(part["image_url"]["url"])
    if urls and vision is None:
        raise UserError(
            "a chat has images, and policy.model reads none; use a model of a family that does"
        )
    if vision is not None and len(urls) > vision.max_images:
        raise UserError(
            f"the chat has {len(urls)} images, more than engine.max_images = {vision.max_images}"
        )
    for url in urls:
        if not url.startswith("data:"):
            continue  # which is refused later
        width, height = images.size(url)
        if width * height > max_megapixels * 1e6:
            raise UserError(
                f"an image has {width} x {height} pixels, more than endpoint.image_megapixels = "
                f"{max_megapixels:g}; send a smaller one"
            )


def _to_template_message(message: JSONObject, sampled_texts: dict[str, str]) -> JSONObject:
    """Return a message as chat templates want it; the policy's own as it was sampled."""
    role = message["role"]
    content = _to_template_content(message.get("content") or "")
    tool_calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        tool_calls.append((function["name"], json.loads(function["arguments"])))
    if role == "assistant":
        sampled_text = sampled_texts.get(completion_key(content, tool_calls))
        if sampled_text is not None:
            return {"role": role, "content": sampled_text}
    template_message = message | {
        "role": "system" if role == "developer" else role,
        "content": content,
    }
    if tool_calls:
        template_message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in tool_calls
        ]
    return template_message


def _to_template_content(content: Content) -> Content:
    """Return the text of a content, or its parts if images are among them."""
    if isinstance(content, str):
        return content
    types = {part["type"] for part in content}
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    if types - {"text", "image_url"} or not all(url.startswith("data:") for url in urls):
        raise UserError(
            "a content is made of parts of type text and image_url, "
            "and an image must come as a data URL"
        )
    if urls:
        return images.attach([{"content": content}], ())[0]["content"]
    return "\n".join(part["text"] for part in content)


def completion_key(content: Content, tool_calls: list[ToolCall]) -> str:
    """Return a key of a completion, made of what a client sends back of it in later requests."""
    return json.dumps([content, tool_calls], sort_keys=True)


@dataclass
class Choice:
    """One choice of a response: it turns sampled tokens into text, tool calls, finish reason."""

    index: int
    request: CompletionRequest
    prompt: Prompt
    engine_request: Request  # Its `done` grows while the engine samples.
    tokenizer: PreTrainedTokenizerBase
    # What is read so far, without special tokens, and without a stop string and what follows it.
    text: str = ""
    num_read: int = 0  # Tokens that `text` was read from.
    num_sent: int = 0  # Characters.
    stop_string: str | None = None  # The one that was found.
    finish_reason: str = ""  # At the end: `stop`, `length` or `tool_calls`.
    tool_calls: list[ToolCall] = field(default_factory=list)  # At the end.

    def read_new_tokens(self, *, last: bool = False) -> None:
        """Read what the engine has sampled since the last call.

        The bytes of an incomplete character wait for the others, unless they are the `last`.
        """
        if self.stop_string is not None:
            return
        stop_ids = self.engine_request.sampling.stop_token_ids
        tokens = [token for token in self.engine_request.done.tokens if token not in stop_ids]
        text = decode_after(
            self.tokenizer,
            tokens[: self.num_read],
            tokens[self.num_read :],
            skip_special_tokens=True,
        )
        if text.endswith("\ufffd") and not last:
            return
        self.num_read = len(tokens)
        self.text += text
        end, self.stop_string = _find_first(self.request.stop or [], self.text)
        self.text = self.text[:end]

    def finish(self) -> None:
        """Read the last tokens, and set the tool calls and the finish reason."""
        self.read_new_tokens(last=True)
        if TOOL_CALL in self.request.markers:
            # In the form of Qwen and Hermes models. If one of them cannot be read there are none at
            # all, so that the client sees the text.
            with contextlib.suppress(
                ValueError, KeyError, TypeError, AttributeError, RecursionError
            ):
                self.tool_calls = [_to_tool_call(text) for text in _TOOL_CALLS.findall(self.text)]
        if self.tool_calls:
            self.finish_reason = "tool_calls"
        elif self.engine_request.done.stopped or self.stop_string is not None:
            self.finish_reason = "stop"
        else:
            self.finish_reason = "length"

    @property
    def visible_text(self) -> str:
        """The text that no later token changes; at the end, what stands before the tool calls."""
        if self.finish_reason and not self.tool_calls:
            return self.text
        end, marker = _find_first(self.request.markers, self.text)
        if marker is None:
            end = max(0, end + 1 - max(map(len, self.request.markers), default=1))
        return self.text[:end]

    def completion(self) -> Completion:
        """Return the tokens to train on: up to the stop string, if one was found."""
        done = self.engine_request.done
        if self.stop_string is None:
            return done
        end = self.num_read
        return Completion(done.tokens[:end], done.logprobs[:end], False, done.versions[:end])

    def next_chunk(self) -> JSONObject | None:
        """Return what was not sent yet as an entry of OpenAI's `choices`; None if nothing is new.

        Without streaming the only chunk is the whole choice.
        """
        visible_text = self.visible_text
        if len(visible_text) == self.num_sent and not self.finish_reason:
            return None
        text = visible_text[self.num_sent :]
        chunk: JSONObject = {"index": self.index, "finish_reason": self.finish_reason or None}
        logprobs = self.request.logprobs  # 0 asks for them, too
        if self.finish_reason and logprobs is not None and logprobs is not False:
            chunk["logprobs"] = self._logprobs()
        if self.request.messages is None:
            chunk["text"] = text
        else:
            chunk["delta" if self.request.stream else "message"] = self._message(text)
        self.num_sent = len(visible_text)
        return chunk

    def _message(self, text: str) -> JSONObject:
        """Return a message of a chat, or the delta of one."""
        message: JSONObject = {} if self.num_sent else {"role": "assistant"}
        message["content"] = text
        if not self.tool_calls:
            return message
        message["content"] = text or None
        name = "-".join(map(str, self.engine_request.name))
        message["tool_calls"] = [
            {
                "index": number,
                "id": f"call_{name}_{self.index}_{number}",
                "type": "function",
                "function": {"name": function, "arguments": json.dumps(arguments)},
            }
            for number, (function, arguments) in enumerate(self.tool_calls)
        ]
        return message

    def _logprobs(self) -> dict[str, list]:
        """Return the log-probs of all sampled tokens, in the form of a chat or of a completion."""
        completion = self.completion()
        tokens = [decode(self.tokenizer, [token]) for token in completion.tokens]
        if self.request.messages is None:
            return {"tokens": tokens, "token_logprobs": completion.logprobs}
        return {
            "content": [
                {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token, logprob in zip(tokens, completion.logprobs, strict=True)
            ]
        }


def _to_tool_call(text: str) -> ToolCall:
    """Return the call that the policy wrote.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RecursionError: It is none.
    """
    call = json.loads(text)
    arguments = dict(call.get("arguments", {}))
    if _is_deeper(arguments, _MAX_NESTING):
        raise ValueError("too deep to be written again")
    return str(call["name"]), arguments


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested in more than so many levels."""
    if not isinstance(value, list | dict):
        return False
    if not levels:
        return True
    parts = value.values() if isinstance(value, dict) else value
    return any(_is_deeper(part, levels - 1) for part in parts)


def _find_first(markers: list[str], text: str) -> tuple[int, str | None]:
    """Return where the first of the markers in the text begins, and which it is.

    Without one in it that is (its length, None).
    """
    places = [(text.find(marker), marker) for marker in markers if marker and marker in text]
    return min(places, default=(len(text), None))


def event(**data: Any) -> str:
    """Return a server-sent event; it has a name if the data have a `type`."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"
