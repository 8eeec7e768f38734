"""OpenAI's chat completions and completions: what a request asks for, and what answers it.

A client's `model`, `temperature`, `top_p`, penalties and the like have no effect: the policy
answers, and samples as the run says, because it is trained on those log-probs. What the endpoint
cannot do (functions of the old kind, and the like) is refused. How an answer is written for a
client is in forms.py.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError
from starlette.types import Receive
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.base.reading import LONGEST_CHARACTER
from minirl.config.shared import EndpointConfig
from minirl.data import harmony, images
from minirl.data.chat import images_of, parts_of
from minirl.data.tokenizer import read_template_kwargs
from minirl.data.vision import Vision
from minirl.endpoint.http import BadRequest, wait_for_disconnect
from minirl.endpoint.tool_calls import ToolCall, ToolReader, make_reader, takes_calls_as_text
from minirl.engine.engine import Sampling
from minirl.engine.grammars import Guide, json_guide
from minirl.engine.loop import Completion, EngineLoop, Request
from minirl.rollout.conversation import (
    Conversation,
    Prompt,
    decode,
    decode_after,
    read_answer,
    speaks_harmony,
    to_message,
)
from minirl.rollout.episode import sample_seed

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
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    # vLLM's own names of formats; `response_format` is taken.
    structured_outputs: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None

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
        if isinstance(self.tool_choice, dict):
            kind = self.tool_choice["type"]
            require(
                kind == "function",
                f"tool_choice has the type {kind!r}; give auto, none, required or a function",
            )
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
            sampled_texts: the session's earlier completions as they were sampled, by `chat_keys`
                and by `completion_key`. They replace in the chat what the client sends back of
                them.

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
        messages = list(map(read_message, self.messages))
        template = str(tokenizer.chat_template)
        for number, key in enumerate(list(chat_keys(messages))):
            message = messages[number]
            if message["role"] != "assistant":
                continue
            # By the whole chat first: it may have given the same answer elsewhere, in other tokens.
            known = key if key in sampled_texts else completion_key(message)
            if known not in sampled_texts:
                continue
            sampled = to_message(tokenizer, sampled_texts[known])
            lacks_calls = "tool_calls" in message and "tool_calls" not in sampled
            if not lacks_calls or takes_calls_as_text(tokenizer, template):
                messages[number] = sampled
        # None, too, is the request's: the tools of the session's row do not count.
        tools = None if self.tool_choice == "none" else self.tools or None
        given: dict[str, Any] = {"tools": tools}
        kwargs = read_template_kwargs(self.chat_template_kwargs, "chat_template_kwargs")
        if kwargs:
            given["chat_template_kwargs"] = kwargs
        return [(conversation.render(messages, **given), images_of(messages))]


def parse_request(fields: Any) -> CompletionRequest:
    """Return the request in a body.

    Raises:
        BadRequest: there is none; the message names the field, and what would be right.
    """
    if isinstance(fields, dict):  # Null is how clients write a field that they leave out.
        fields = {name: value for name, value in fields.items() if value is not None}
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
            # Read for the first time when they are counted: here each request brings all.
            read_parts = []
            for part in content:
                if part["type"] == "image_url":
                    part = {"type": "image", "image": part["image_url"]["url"]}
                read_parts.append(part)
            content = read_parts
        else:
            content = "\n".join(part["text"] for part in content)
    read = message | {"role": role, "content": content}
    calls = []
    for call in read.pop("tool_calls", None) or ():
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        named = {"name": function["name"], "arguments": arguments}
        identified = {"id": call["id"]} if call.get("id") else {}
        calls.append({**identified, "type": "function", "function": named})
    if calls:
        read["tool_calls"] = calls
    return read


def completion_key(message: JSONObject) -> str:
    """Return a key of a message, made of what a client sends back of it in later requests.

    Args:
        message: an answer or another message, by `read_message`.
    """
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"], calls], sort_keys=True)


def chat_keys(messages: Iterable[JSONObject]) -> Iterator[str]:
    """Yield a key of each message that also says what stands before it in the chat.

    Args:
        messages: by `read_message`.
    """
    digest = hashlib.sha256()
    for message in messages:
        digest.update(completion_key(message).encode())
        yield digest.hexdigest()


def messages_since_prompt(
    messages: list[JSONObject], sampled_texts: dict[str, str]
) -> list[JSONObject]:
    """Return the messages from the first one that the session has sampled, for reward functions.

    Calls get mappings for arguments, and replies of tools the tools' names.

    Args:
        messages: the messages of a request, by `read_message`.
        sampled_texts: the session's completions, as for `CompletionRequest.render_prompts`.
    """
    names = {}
    since: list[JSONObject] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message.get("tool_call_id") in names:
            message = {"name": names[message["tool_call_id"]], **message}
        if since or (message["role"] == "assistant" and completion_key(message) in sampled_texts):
            since.append(message)
    return since


# --------------------------------------------------------------------------------------------------
# what answers it


@dataclass(kw_only=True)
class SessionState:
    """What the endpoint keeps for an API key."""

    seed: tuple[int, ...]
    sampling: Sampling
    conversation: Conversation
    engine_loop: EngineLoop
    cfg: EndpointConfig
    longest_token: int  # Characters of the longest token of the vocabulary.
    # The completions as they were sampled, by `chat_keys` and by `completion_key`.
    sampled_texts: dict[str, str] = field(default_factory=dict)
    # One for each request so far.
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # Why requests were refused.
    # Requests that demanded a format or a call, to which the engine could not hold the answer.
    num_unguided: int = 0

    @property
    def max_model_len(self) -> int:
        """The most tokens of a context."""
        return self.sampling.context(self.engine_loop.engine.cfg.max_model_len)

    @property
    def limit(self) -> str:
        """The most tokens of a context as OpenAI's server says it, by which clients know it."""
        return (
            f"this model's maximum context length is {self.max_model_len} tokens "
            f"(engine.max_model_len = {self.max_model_len})"
        )

    def metrics(self) -> dict[str, float]:
        """Return numbers for the log: `endpoint/NAME`."""
        num_guided = self.conversation.num_guided()
        num_tokens = num_guided + self.conversation.num_sampled()
        return {
            "refused": float(len(self.refusals)),
            "unguided": float(self.num_unguided),
            "outside_loss": num_guided / max(1, num_tokens),
        }

    def read_prompts(self, request: CompletionRequest) -> list[Prompt]:
        """Return the prompts of a request as the engine would read them.

        Raises:
            UserError: the request is refused.
            KeyError, TypeError, ValueError: it is malformed.
        """
        request.check(self.cfg, self.conversation.vision)
        prompts = []
        longest = self.longest_token * self.max_model_len
        for text, urls in request.render_prompts(self.conversation, self.sampled_texts):
            if len(text) > longest:  # Whatever its tokens are; to tokenize megabytes takes seconds.
                raise BadRequest(
                    f"{self.limit}: {longest} characters at most, and the prompt has {len(text)}",
                    code="context_length_exceeded",
                )
            prompts.append(self.conversation.tokenize_prompt(text, urls))
        return prompts


# --------------------------------------------------------------------------------------------------
# a choice


@dataclass
class Choice:
    """One choice of a response: it turns sampled tokens into text, tool calls, finish reason.

    Attributes:
        index: its number in the response.
        request: the client's request.
        prompt: what the choice completes.
        engine_request: its `done` grows while the engine samples.
        tokenizer: the model's tokenizer.
        reader: reads tool calls; None: there are no tools to call.
        text: what the answer says so far, without special tokens, and without a stop string and
            what follows it; at the end without the calls in it.
        num_read: number of tokens that `text` was read from.
        num_sent: number of characters that the client has.
        stop_string: the stop string that was found.
        finish_reason: at the end `stop`, `length` or `tool_calls`.
        tool_calls: at the end, the calls in the answer.
    """

    index: int
    request: CompletionRequest
    prompt: Prompt
    engine_request: Request
    tokenizer: PreTrainedTokenizerBase
    reader: ToolReader | None = None
    text: str = ""
    num_read: int = 0
    num_sent: int = 0
    stop_string: str | None = None
    finish_reason: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def read_new_tokens(self, *, last: bool = False) -> None:
        """Read what the engine has sampled since the last call.

        The bytes of an incomplete character wait for the others, unless they are the `last`.
        """
        if self.stop_string is not None:
            return
        stop_ids = self.engine_request.sampling.stop_token_ids
        tokens = self.engine_request.done.tokens
        # Only the last token can be one that stops.
        new = [token for token in tokens[self.num_read :] if token not in stop_ids]
        before = tokens[: self.num_read]
        text = decode_after(self.tokenizer, before, new, skip_special_tokens=True)
        is_whole = len(new) >= LONGEST_CHARACTER or not text.endswith("\ufffd")
        if not is_whole and not last:
            return
        self.num_read += len(new)
        self.text, self.stop_string = self._cut(self.text + text)

    def _cut(self, text: str) -> tuple[str, str | None]:
        """Return the text before the first stop string in it, and that string."""
        stops = [stop for stop in self.request.stop or () if stop and stop in text]
        first = min(stops, key=text.find, default=None)
        return text if first is None else text[: text.find(first)], first

    def restart(self) -> None:
        """Forget what was read: the engine begins again."""
        self.text = ""
        self.num_read = 0

    def finish(self) -> None:
        """Read the last tokens, and set the tool calls and the finish reason."""
        self.read_new_tokens(last=True)
        done = self.completion()
        stop_ids = self.engine_request.sampling.stop_token_ids
        tokens = [token for token in done.tokens if token not in stop_ids]
        # With the special tokens that begin calls and channels.
        whole, _ = self._cut(decode(self.tokenizer, tokens))
        content, calls = self.reader.read(whole) if self.reader else ("", [])
        if speaks_harmony(self.tokenizer):  # It shows calls that could not be read.
            self.text = harmony.visible_text(whole, with_calls=not calls)
        self.finish_reason = "stop" if done.stopped or self.stop_string is not None else "length"
        if calls:
            self.text = content
            self.tool_calls = calls[:1] if self.request.parallel_tool_calls is False else calls
            self.finish_reason = "tool_calls"

    def answer(self) -> str:
        """Return what reward functions read: the text up to a stop string, with its calls."""
        return self._cut(read_answer(self.tokenizer, self.completion().tokens))[0]

    def completion(self) -> Completion:
        """Return the tokens to train on: those up to the stop string, if one was found."""
        done = self.engine_request.done
        if self.stop_string is None:
            return done
        end = self.num_read
        return replace(
            done,
            tokens=done.tokens[:end],
            logprobs=done.logprobs[:end],
            stopped=False,
            versions=done.versions[:end],
            guided=done.guided[:end],
            top=done.top[:end],
        )

    def next_part(self) -> "ChoicePart | None":
        """Return what was not sent yet; None if nothing is new.

        An answer that may end by a stop string or call a tool waits for its end, as one that is
        guided, which may begin again, and one with channels, of which some are not shown.
        """
        waits = self.request.stop or self.reader or self.engine_request.guide
        if not self.finish_reason and (waits or speaks_harmony(self.tokenizer)):
            return None
        text = self.text[self.num_sent :]
        if not text and not self.finish_reason:
            return None
        part = ChoicePart(self, text, self.finish_reason, self.num_sent == 0)
        self.num_sent = len(self.text)
        return part

    def calls_to_send(self) -> list[JSONObject]:
        """Return the tool calls in the form of OpenAI's chats.

        An id is 9 letters and digits, for Mistral's templates take no others.
        """
        calls: list[JSONObject] = []
        for number, (function, arguments) in enumerate(self.tool_calls):
            place = repr((self.engine_request.name, self.index, number))
            call_id = hashlib.sha256(place.encode()).hexdigest()[:9]
            said = {"name": function, "arguments": json.dumps(arguments)}
            calls.append({"id": call_id, "type": "function", "function": said})
        return calls


class ChoicePart(NamedTuple):
    """A part of a choice, for its client."""

    choice: Choice
    text: str
    finish_reason: str  # Empty: more parts follow.
    is_first: bool = True


# --------------------------------------------------------------------------------------------------
# a response


class PendingResponse:
    """The response to one request, while the engine samples it.

    The conversation gets the prompts and the completions when all of these are finished.

    Attributes:
        name: a name that no other response has.
        created: time of the request, in seconds since 1970.
        choices: what is sampled: `n` choices for each prompt.
    """

    def __init__(self, session: SessionState, request: CompletionRequest, receive: Receive):
        """Start sampling.

        Args:
            session: its conversation continues.
            request: what the client sent.
            receive: waits for the next message of the client's connection.

        Raises:
            UserError: the request cannot be answered.
            KeyError, TypeError, ValueError: the request is malformed.
        """
        self.session = session
        self.request = request
        name = (*session.seed, len(session.tasks))
        self.name = "-".join(map(str, name))
        self.created = int(time.time())
        self.choices: list[Choice] = []
        tokenizer = session.conversation.tokenizer
        prompts = session.read_prompts(request)
        reader = request.reader(tokenizer, session.cfg.tool_parser)
        guide = request.guide(reader)
        for prompt in prompts:
            room = session.max_model_len - len(prompt.tokens)
            if room < 1:
                raise BadRequest(
                    f"{session.limit}: the prompt has {len(prompt.tokens)}, which leaves no room "
                    "for a completion",
                    code="context_length_exceeded",
                )
            most = min(request.max_tokens or room, session.sampling.max_tokens, room)
            for _ in range(request.n):
                index = len(self.choices)
                engine_request = Request(
                    tokens=prompt.tokens,
                    images=prompt.images,
                    sampling=replace(session.sampling, max_tokens=most),
                    seed=sample_seed(*name, index),
                    name=name,
                    guide=guide,
                    top_logprobs=request.num_top_logprobs(),
                )
                choice = Choice(index, request, prompt, engine_request, tokenizer, reader)
                engine_request.on_restart = choice.restart
                self.choices.append(choice)
        session.num_unguided += guide is None and (request.demands_call() or request.demands_json())
        self._parts: asyncio.Queue[ChoicePart | None] = asyncio.Queue()  # None: the end.
        self.task = asyncio.ensure_future(self._generate())
        self.task.add_done_callback(lambda _: self._parts.put_nowait(None))
        session.tasks.append(self.task)
        # When the client leaves, sampling stops, and the conversation gets nothing.
        self._watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        self._watcher.add_done_callback(lambda _: self.task.cancel())

    async def _generate(self) -> None:
        """Sample all choices, then append them to the conversation."""
        num_used = 0
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.choices:
                    asked = choice.engine_request
                    task = group.create_task(self.session.engine_loop.generate(asked))
                    if self.request.stream or self.request.stop:  # else the text waits for the end
                        asked.on_tokens = partial(self._on_tokens, choice, task)
            for choice in self.choices:
                num_used += self._append(choice)
        finally:
            # Cancelled requests, and what follows a stop string, are not trained on.
            num_sampled = sum(len(choice.engine_request.done.tokens) for choice in self.choices)
            self.session.engine_loop.discarded_tokens += num_sampled - num_used

    def _on_tokens(self, choice: Choice, task: asyncio.Task[Completion]) -> None:
        choice.read_new_tokens()
        if choice.stop_string is not None:
            task.cancel()  # which is no failure of the task group
        elif self.request.stream and (part := choice.next_part()):
            self._parts.put_nowait(part)

    def _append(self, choice: Choice) -> int:
        """Append a choice to the conversation; return the number of its tokens."""
        choice.finish()
        conversation = self.session.conversation
        completion = choice.completion()
        segment = conversation.append_prompt(choice.prompt)
        sampled_text = segment.append_completion(completion, conversation.tokenizer)
        segment.answer = choice.answer()
        segment.stopped |= choice.stop_string is not None
        calls = choice.calls_to_send()
        message: JSONObject = {"role": "assistant", "content": choice.text, "tool_calls": calls}
        read = list(map(read_message, [*(self.request.messages or ()), message]))
        *_, key = chat_keys(read)
        self.session.sampled_texts[key] = sampled_text
        self.session.sampled_texts[completion_key(read[-1])] = sampled_text
        if self.request.messages is not None:
            segment.messages = messages_since_prompt(read, self.session.sampled_texts)
        self._parts.put_nowait(choice.next_part())
        return len(completion.tokens)

    async def parts(self) -> AsyncIterator[ChoicePart]:
        """Yield the answer in parts; without `stream` in the request, each choice is one.

        Raises:
            BadRequest: the session was closed.
        """
        while (part := await self._parts.get()) is not None:
            yield part
        if self.task.cancelled():
            raise BadRequest("the session was closed")
        self.task.result()

    def num_tokens(self) -> tuple[int, int]:
        """Return how many tokens the prompts have, and the completions so far.

        A prompt counts once for all its choices.
        """
        num_read = sum(len(choice.prompt.tokens) for choice in self.choices[:: self.request.n])
        return num_read, sum(len(choice.completion().tokens) for choice in self.choices)
