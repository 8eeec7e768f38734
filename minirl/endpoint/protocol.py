"""OpenAI's chat completions and completions: what a request asks for.

A client's `model`, `temperature`, `top_p`, penalties and the like have no effect: the policy
answers, and samples as the run says, because it is trained on those log-probs. What the endpoint
cannot do (functions of the old kind, and the like) is refused.
"""

import functools
import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.config.shared import EndpointConfig
from minirl.data import images
from minirl.data.chat import for_template, images_of
from minirl.data.tokenizer import read_template_kwargs
from minirl.data.vision import Vision
from minirl.endpoint.http import BadRequest
from minirl.endpoint.tool_calls import ToolCall, ToolReader, make_reader
from minirl.engine.grammars import Guide, json_guide
from minirl.rollout.conversation import Conversation, to_message

_MAX_STOP_STRINGS = 64  # each is looked for after each token
_MAX_TOP_LOGPROBS = 20  # vLLM's max_logprobs.
_UNSUPPORTED = ("echo", "suffix", "functions", "function_call")

JSONObject = dict[str, Any]  # an object
Content = str | list[dict]  # of a message: a text, or parts


def _as_list(value: Any) -> Any:
    """Return a list of texts or of token ids also where a request has a single one of them."""
    is_list = isinstance(value, list) and (not value or isinstance(value[0], str | list))
    return value if is_list or value is None else [value]


class CompletionRequest(BaseModel, extra="allow"):
    """The body of a request, in OpenAI's form, as far as it counts here.

    Messages, tools and schemas stay as the client sent them: the chat template writes them into the
    prompt. (vLLM's own model of a request would rename fields and add some.)
    """

    messages: list[JSONObject] | None = None
    # Instead of messages. Texts are read as they are: special tokens in them count, none is added.
    prompt: Annotated[list[str] | list[list[int]] | None, BeforeValidator(_as_list)] = None
    n: int = Field(1, ge=1, le=128)
    # rollout.max_tokens and the room in the context are limits, too.
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    # A completion is sampled until its text has one of these in it, and is sent up to before it.
    stop: Annotated[
        Annotated[list[str], Field(max_length=_MAX_STOP_STRINGS)] | None, BeforeValidator(_as_list)
    ] = None
    stream: bool | None = None
    stream_options: JSONObject | None = None
    # Log-probs of every sampled token, those included that end the completion or do not show in its
    # text. In a stream they come with the last chunk.
    logprobs: bool | int | None = None
    # In a chat, how many of the likeliest tokens to show in the place of each; in a completion
    # `logprobs` is this number.
    top_logprobs: int | None = None
    tools: list[JSONObject] | None = None
    tool_choice: Literal["auto", "none", "required"] | JSONObject | None = None
    parallel_tool_calls: bool | None = None  # False: an answer shows its first call only.
    response_format: JSONObject | None = None
    chat_template_kwargs: JSONObject | None = None  # Further variables of the chat template.

    def reader(self, tokenizer: PreTrainedTokenizerBase, parser: str) -> ToolReader | None:
        """Return the reader of the calls in the answers; None if there are no tools to call.

        Args:
            tokenizer: has the chat template.
            parser: endpoint.tool_parser.

        Raises:
            UserError: the template shows no tools, or the request demands one that it does not
                have.
            KeyError, TypeError, ValueError: the request is malformed.
        """
        if self.tool_choice == "none":
            return None
        if not self.tools:
            require(
                self.tool_choice in (None, "auto"),
                f"tool_choice = {self.tool_choice!r} demands a tool, and the request has none; add "
                "`tools`",
            )
            return None
        return make_reader(tokenizer, self.tools, self.tool_choice or "auto", parser)

    def num_top_logprobs(self) -> int:
        """Return how many of the likeliest tokens to show in the place of each sampled one."""
        if self.messages is not None:
            return self.top_logprobs or 0
        return 0 if isinstance(self.logprobs, bool) else self.logprobs or 0

    def demands_call(self) -> bool:
        """Return whether an answer has to call a tool."""
        return self.tool_choice not in (None, "auto", "none")

    def demands_json(self) -> bool:
        """Return whether an answer has to be JSON."""
        return bool(self.response_format) and self.response_format != {"type": "text"}

    def guide(self, reader: ToolReader | None) -> Guide | None:
        """Return what the answers have to be held to; None: nothing.

        With tools that an answer may but need not call, a demanded format is none: the grammar
        would forbid the calls.

        Raises:
            UserError: vLLM cannot hold an answer to it, or there is no such format.
            KeyError, TypeError, AttributeError: the request is malformed.
        """
        schema = {"type": "object"}
        if self.demands_json() and self.response_format:
            kind = self.response_format["type"]
            if kind == "json_schema":
                schema = self.response_format["json_schema"]["schema"]
            elif kind != "json_object":
                raise UserError(
                    f"response_format has the type {kind!r}; give text, json_object or json_schema"
                )
        if reader:
            return reader.guide() if self.demands_call() else None
        return json_guide(schema) if self.demands_json() else None

    def check(self, cfg: EndpointConfig, vision: Vision | None, max_model_len: int) -> None:
        """Refuse a request that is too large, or that asks for what the endpoint cannot do.

        Args:
            cfg: the limits.
            vision: how the model reads images; None: it reads none.
            max_model_len: tokens of a context.

        Raises:
            UserError: the request is refused.
            KeyError, TypeError, ValueError: the request is malformed.
        """
        extra = self.model_extra or {}
        for name in _UNSUPPORTED:
            if extra.get(name) not in (None, 0, "", {"type": "text"}):
                raise UserError(f"{name} is not supported here; leave it out")
        require(not self.top_logprobs or self.logprobs, "top_logprobs needs logprobs true; set it")
        require(
            0 <= self.num_top_logprobs() <= _MAX_TOP_LOGPROBS,
            f"the request asks for {self.num_top_logprobs()} tokens in the place of each; ask for "
            f"0 to {_MAX_TOP_LOGPROBS}",
        )
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
        self, conversation: Conversation, sampled_texts: dict[str, str]
    ) -> list[tuple[str | list[int], list[str]]]:
        """Return each prompt, as text or tokens, with the data URLs of its images.

        Call `check` first.

        Args:
            conversation: the session's conversation. Variables of the chat template that its row
                has count where the request names none.
            sampled_texts: the session's earlier completions as they were sampled, by
                `completion_key`. They replace in the chat what the client sends back of them.

        Raises:
            UserError: the prompt is empty, or the template refuses it.
            KeyError, TypeError, ValueError: the request is malformed.
        """
        if self.messages is None:
            if not self.prompt or not all(self.prompt):
                raise UserError("prompt is empty; give a text or token ids")
            tokenizer = conversation.tokenizer
            for prompt in self.prompt:
                ids = prompt if isinstance(prompt, list) else [0]
                if min(ids) < 0 or max(ids) >= len(tokenizer):
                    raise UserError(f"prompt has a token outside 0 ... {len(tokenizer) - 1}")
            return [(prompt, []) for prompt in self.prompt]
        tokenizer = conversation.tokenizer
        messages = [_to_template(message, sampled_texts, tokenizer) for message in self.messages]
        tools = None if self.tool_choice == "none" else self.tools
        given: dict[str, Any] = {"tools": tools}
        kwargs = read_template_kwargs(self.chat_template_kwargs, "chat_template_kwargs")
        if kwargs:
            given["chat_template_kwargs"] = kwargs
        text = conversation.render(messages, **given)
        return [(text, images_of(messages))]


def parse_request(fields: Any) -> CompletionRequest:
    """Return the request in a body.

    Raises:
        BadRequest: there is none; the message names the field, and what would be right.
    """
    try:
        return CompletionRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        name = place[0] if place else "body"
        raise BadRequest(
            f"malformed request: {name}: {first['msg'][:1].lower()}{first['msg'][1:]}", param=name
        ) from error


def check_length(
    prompt: str | list[int], max_model_len: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a text that is too long whatever its tokens are: tokenizing megabytes takes seconds.

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
    """Refuse images that the model cannot read, by their file headers. Raises UserError."""
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


def _to_template(
    message: JSONObject, sampled_texts: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> JSONObject:
    """Return a message as chat templates want it; one that the policy wrote as it was sampled."""
    role = message["role"]
    content, tool_calls = _content_and_calls(message)
    if role == "assistant":
        sampled_text = sampled_texts.get(completion_key(content, tool_calls))
        if sampled_text is not None:
            return to_message(tokenizer, sampled_text)
    role = "system" if role == "developer" else role
    template_message = message | {"role": role, "content": content}
    if tool_calls:
        calls = []
        for name, arguments in tool_calls:
            calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
        template_message["tool_calls"] = calls
    return template_message


def _content_and_calls(message: JSONObject) -> tuple[Content, list[ToolCall]]:
    """Return what a message says, and the calls of tools in it."""
    tool_calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        tool_calls.append((function["name"], json.loads(function["arguments"])))
    return _to_template_content(message.get("content") or ""), tool_calls


def messages_since_prompt(
    messages: list[JSONObject], sampled_texts: dict[str, str]
) -> list[JSONObject]:
    """Return the messages from the first one that the session has sampled, for reward functions.

    Calls get mappings for arguments, and replies of tools the tools' names.

    Args:
        messages: the messages of a request.
        sampled_texts: the session's completions, as for `CompletionRequest.render_prompts`.
    """
    names = {}
    since: list[JSONObject] = []
    for message in messages:
        is_sampled = message["role"] == "assistant" and (
            completion_key(*_content_and_calls(message)) in sampled_texts
        )
        for call in message.get("tool_calls") or ():
            names[call.get("id")] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message = {"name": names[message["tool_call_id"]], **message}
        if since or is_sampled:
            since.append(message)
    return for_template(since)


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


def event(**data: Any) -> str:
    """Return a server-sent event; it has a name if the data have a `type`."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"
