"""OpenAI's chat completions and completions: what a request asks for.

A client's `model`, `temperature`, `top_p`, penalties and the like have no effect: the policy
answers, and samples as the run says, because it is trained on those log-probs. What the endpoint
cannot do (functions of the old kind, and the like) is refused.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.config.shared import EndpointConfig
from minirl.data import images
from minirl.data.chat import images_of, parts_of
from minirl.data.tokenizer import read_template_kwargs
from minirl.data.vision import Vision
from minirl.endpoint.http import BadRequest
from minirl.endpoint.tool_calls import ToolReader, make_reader
from minirl.engine.grammars import Guide, json_guide
from minirl.rollout.conversation import Conversation, to_message

JSONObject = dict[str, Any]


def _as_list(value: Any) -> Any:
    """Return a list of texts or of token ids also where a request has a single one of them."""
    is_list = isinstance(value, list) and (not value or isinstance(value[0], str | list))
    return value if is_list or value is None else [value]


Count = Annotated[int, Field(ge=0, le=20)]  # vLLM's max_logprobs.
# Each is looked for after each token.
StopStrings = Annotated[list[str], Field(max_length=64)]


class CompletionRequest(BaseModel):
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
    stop: Annotated[StopStrings | None, BeforeValidator(_as_list)] = None
    stream: bool | None = None
    stream_options: JSONObject | None = None
    # Log-probs of every sampled token, those included that end the completion or do not show in its
    # text. In a stream they come with the last chunk.
    logprobs: Count | bool | None = None
    # In a chat, how many of the likeliest tokens to show in the place of each; in a completion
    # `logprobs` is this number.
    top_logprobs: Count | None = None
    tools: list[JSONObject] | None = None
    tool_choice: Literal["auto", "none", "required"] | JSONObject | None = None
    parallel_tool_calls: bool | None = None  # False: an answer shows its first call only.
    response_format: JSONObject | None = None
    chat_template_kwargs: JSONObject | None = None  # Further variables of the chat template.
    # What the endpoint cannot do.
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    functions: None = None
    function_call: None = None

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
        if self.tools and self.tool_choice != "none":
            return make_reader(tokenizer, self.tools, self.tool_choice or "auto", parser)
        require(
            not self.demands_call(),
            f"tool_choice = {self.tool_choice!r} demands a tool, and the request has none; add "
            "`tools`",
        )
        return None

    def guide(self, reader: ToolReader | None) -> Guide | None:
        """Return what the answers have to be held to; None: nothing.

        With tools that an answer may but need not call, a demanded format is none: the grammar
        would forbid the calls.

        Raises:
            UserError: vLLM cannot hold an answer to it, or there is no such format.
            KeyError, TypeError, AttributeError: the request is malformed.
        """
        if reader:
            return reader.guide() if self.demands_call() else None
        if not self.response_format or not self.demands_json():
            return None
        kind = self.response_format["type"]
        require(
            kind in ("json_schema", "json_object"),
            f"response_format has the type {kind!r}; give text, json_object or json_schema",
        )
        is_any = kind == "json_object"
        return json_guide(
            {"type": "object"} if is_any else self.response_format["json_schema"]["schema"]
        )

    def check(self, cfg: EndpointConfig, vision: Vision | None) -> None:
        """Refuse a request that is too large, by what can be seen without decoding an image.

        Args:
            cfg: the limits.
            vision: how the model reads images; None: it reads none.

        Raises:
            UserError: the request is refused.
            KeyError, TypeError, ValueError: the request is malformed.
        """
        num_prompts = len(self.prompt or ())
        require(
            num_prompts <= cfg.limits.prompts,
            f"the request has {num_prompts} prompts, more than endpoint.limits.prompts = "
            f"{cfg.limits.prompts}; send several requests",
        )
        urls = []
        for message in self.messages or ():
            for part in parts_of(message):
                if part["type"] == "image_url":
                    urls.append(part["image_url"]["url"])
        if not urls:
            return
        if vision is None:
            raise UserError(
                "a chat has images, and policy.model reads none; use a model of a family that does"
            )
        require(
            len(urls) <= vision.max_images,
            f"the chat has {len(urls)} images, more than engine.max_images = {vision.max_images}",
        )
        for url in urls:
            require(url.startswith("data:"), "an image must come as a data URL")
            width, height = images.size(url)
            require(
                width * height <= cfg.image_megapixels * 1e6,
                f"an image has {width} x {height} pixels, more than endpoint.image_megapixels = "
                f"{cfg.image_megapixels:g}; send a smaller one",
            )

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
        tokenizer = conversation.tokenizer
        if self.messages is None:
            require(self.prompt and all(self.prompt), "prompt is empty; give a text or token ids")
            for prompt in self.prompt or ():
                ids = prompt if isinstance(prompt, list) else [0]
                require(
                    min(ids) >= 0 and max(ids) < len(tokenizer),
                    f"prompt has a token outside 0 ... {len(tokenizer) - 1}",
                )
            return [(prompt, []) for prompt in self.prompt or ()]
        messages = []
        for each in self.messages:
            message = read_message(each)
            key = completion_key(message) if message["role"] == "assistant" else ""
            if key in sampled_texts:
                message = to_message(tokenizer, sampled_texts[key])
            messages.append(message)
        # None, too, is the request's: the tools of the session's row do not count.
        given: dict[str, Any] = {"tools": None if self.tool_choice == "none" else self.tools}
        kwargs = read_template_kwargs(self.chat_template_kwargs, "chat_template_kwargs")
        if kwargs:
            given["chat_template_kwargs"] = kwargs
        return [(conversation.render(messages, **given), images_of(messages))]


def parse_request(fields: Any) -> CompletionRequest:
    """Return the request in a body.

    Raises:
        BadRequest: there is none; the message names the field, and what would be right.
    """
    try:
        return CompletionRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "body"
        problem = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise BadRequest(f"malformed request: {name}: {problem}", param=name) from error


def read_message(message: JSONObject) -> JSONObject:
    """Return a message as chat templates want it: arguments of calls are mappings.

    Its content is a text, or the parts if images are among them. Raises what `render_prompts` does.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content") or ""
    if not isinstance(content, str):
        types = {part["type"] for part in content}
        require(
            types <= {"text", "image_url"},
            "a content is made of parts of type text and image_url",
        )
        if "image_url" in types:
            content = images.attach([{"content": content}], ())[0]["content"]
        else:
            content = "\n".join(part["text"] for part in content)
    read = message | {"role": role, "content": content}
    calls = []
    for call in read.pop("tool_calls", None) or ():
        function = call["function"]
        named = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        calls.append({"type": "function", "function": named})
    if calls:
        read["tool_calls"] = calls
    return read


def completion_key(message: JSONObject) -> str:
    """Return a key of an answer, made of what a client sends back of it in later requests.

    Args:
        message: the answer, by `read_message`.
    """
    return json.dumps([message["content"], message.get("tool_calls")], sort_keys=True)


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
    for each in messages:
        message = read_message(each)
        for call in each.get("tool_calls") or ():
            names[call.get("id")] = call["function"]["name"]
        if message.get("tool_call_id") in names:
            message = {"name": names[message["tool_call_id"]], **message}
        if since or (message["role"] == "assistant" and completion_key(message) in sampled_texts):
            since.append(message)
    return since
