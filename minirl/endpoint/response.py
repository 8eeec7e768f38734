"""A response in the making: what the engine samples for a request, as the client gets it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.types import Receive
from transformers import PreTrainedTokenizerBase

from minirl.config.shared import EndpointConfig
from minirl.data import harmony
from minirl.endpoint.http import BadRequest, wait_for_disconnect
from minirl.endpoint.protocol import (
    CompletionRequest,
    JSONObject,
    check_length,
    completion_key,
    event,
    messages_since_prompt,
)
from minirl.endpoint.tool_calls import ToolCall, ToolReader
from minirl.engine.engine import Sampling
from minirl.engine.loop import Completion, EngineLoop, Request
from minirl.rollout.conversation import (
    Conversation,
    Prompt,
    decode,
    decode_after,
    speaks_harmony,
)
from minirl.rollout.episode import sample_seed

MODEL = "policy"


@dataclass(kw_only=True)
class SessionState:
    """What the endpoint keeps for an API key."""

    seed: tuple[int, ...]
    sampling: Sampling
    conversation: Conversation
    engine_loop: EngineLoop
    cfg: EndpointConfig
    # The completions as they were sampled, by `completion_key`.
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

    def metrics(self) -> dict[str, float]:
        """Return numbers for the log: `endpoint/NAME`."""
        conversation = self.conversation
        num_guided = conversation.num_guided()
        num_tokens = num_guided + conversation.num_sampled()
        return {
            "refused": float(len(self.refusals)),
            "unguided": float(self.num_unguided),
            "outside_loss": num_guided / max(1, num_tokens),
        }


def read_prompts(session: SessionState, request: CompletionRequest) -> list[Prompt]:
    """Return the prompts of a request, which was checked, as the engine would read them.

    Raises:
        UserError: a prompt is too long, or the template refuses the chat.
        KeyError, TypeError, ValueError: the request is malformed.
    """
    conversation = session.conversation
    prompts = []
    for text, urls in request.render_prompts(conversation, session.sampled_texts):
        check_length(text, session.max_model_len, conversation.tokenizer)
        prompts.append(conversation.tokenize_prompt(text, urls))
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
        text: what was read so far, without special tokens, and without a stop string and what
            follows it.
        num_read: number of tokens that `text` was read from.
        num_sent: number of characters that the client has.
        stop_string: the stop string that was found.
        finish_reason: at the end `stop`, `length` or `tool_calls`.
        tool_calls: at the end, the calls in the answer.
        content: at the end, what the answer says besides them.
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
    content: str = ""

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

    def restart(self) -> None:
        """Forget what was read: the engine begins again."""
        self.text = ""
        self.num_read = 0

    @property
    def markers(self) -> list[str]:
        """The texts that end what the client sees; the start of one is held back, too."""
        markers = list(self.request.stop or ())
        if self.reader:
            markers.append(self.reader.marker)
        return markers

    @property
    def is_held_back(self) -> bool:
        """Whether nothing can be sent before the end.

        A guided answer may begin again; in some models a call may begin with any text; others
        think in a channel that is not shown.
        """
        is_guided = self.engine_request.guide is not None
        return is_guided or "" in self.markers or speaks_harmony(self.tokenizer)

    def finish(self) -> None:
        """Read the last tokens, and set the tool calls and the finish reason."""
        self.read_new_tokens(last=True)
        if speaks_harmony(self.tokenizer):
            self.text = harmony.visible_text(self._whole_text())
        if self.reader:
            self.content, self.tool_calls = self.reader.read(self._whole_text())
            if self.request.parallel_tool_calls is False:
                self.tool_calls = self.tool_calls[:1]
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
        if self.is_held_back:
            return self.content
        markers = self.markers
        end, marker = _find_first(markers, self.text)
        if marker is None:
            end = max(0, end + 1 - max(map(len, markers), default=1))
        return self.text[:end]

    def _whole_text(self) -> str:
        """Return the text up to a stop string, with the special tokens that begin calls."""
        stop_ids = self.engine_request.sampling.stop_token_ids
        tokens = [token for token in self.completion().tokens if token not in stop_ids]
        text = decode(self.tokenizer, tokens)
        end, _ = _find_first(self.request.stop or [], text)
        return text[:end]

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

    def next_chunk(self) -> JSONObject | None:
        """Return what was not sent yet as an entry of OpenAI's `choices`; None if nothing is new.

        Without streaming the only chunk is the whole choice.
        """
        if self.is_held_back and not self.finish_reason:
            return None
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
        calls = enumerate(self.calls_to_send())
        message["tool_calls"] = [{"index": number, **call} for number, call in calls]
        return message

    def calls_to_send(self) -> list[JSONObject]:
        """Return the tool calls in OpenAI's form."""
        name = "-".join(map(str, self.engine_request.name))
        calls: list[JSONObject] = []
        for number, (function, arguments) in enumerate(self.tool_calls):
            call_id = f"call_{name}_{self.index}_{number}"
            said = {"name": function, "arguments": json.dumps(arguments)}
            calls.append({"id": call_id, "type": "function", "function": said})
        return calls

    def _logprobs(self) -> dict[str, list]:
        """Return the log-probs of all sampled tokens, in the form of a chat or of a completion."""
        completion = self.completion()
        tokens = [decode(self.tokenizer, [token]) for token in completion.tokens]
        tops = []
        for likeliest in completion.top or [[] for _ in tokens]:
            tops.append([(decode(self.tokenizer, [token]), value) for token, value in likeliest])
        if self.request.messages is None:
            found: dict[str, list] = {"tokens": tokens, "token_logprobs": completion.logprobs}
            if completion.top:
                found["top_logprobs"] = [dict(top) for top in tops]
            return found
        content = []
        for token, logprob, top in zip(tokens, completion.logprobs, tops, strict=True):
            entry = _logprob_entry(token, logprob)
            content.append(entry | {"top_logprobs": [_logprob_entry(*each) for each in top]})
        return {"content": content}


def _logprob_entry(token: str, logprob: float) -> JSONObject:
    return {"token": token, "logprob": logprob, "bytes": None}


def _find_first(markers: list[str], text: str) -> tuple[int, str | None]:
    """Return where the first of the markers in the text begins, and which it is.

    Without one in it that is (its length, None).
    """
    places = [(text.find(marker), marker) for marker in markers if marker and marker in text]
    return min(places, default=(len(text), None))


# --------------------------------------------------------------------------------------------------
# a response


class PendingResponse:
    """The response to one request, while the engine samples it.

    The conversation gets the prompts and the completions when all of these are finished.
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
        self.choices: list[Choice] = []
        tokenizer = session.conversation.tokenizer
        request.check(session.cfg, session.conversation.vision, session.max_model_len)
        reader = request.reader(tokenizer, session.cfg.tool_parser)
        guide = request.guide(reader)
        for prompt in read_prompts(session, request):
            room = session.max_model_len - len(prompt.tokens)
            if room < 1:
                raise BadRequest(
                    f"the prompt has {len(prompt.tokens)} tokens, and engine.max_model_len = "
                    f"{session.max_model_len} leaves no room for a completion",
                    code="context_length_exceeded",
                )
            most = min(request.max_tokens or room, session.sampling.max_tokens, room)
            sampling = replace(session.sampling, max_tokens=most)
            for _ in range(request.n):
                index = len(self.choices)
                engine_request = Request(
                    tokens=prompt.tokens,
                    images=prompt.images,
                    sampling=sampling,
                    seed=sample_seed(*name, index),
                    name=name,
                    guide=guide,
                    top_logprobs=request.num_top_logprobs(),
                )
                choice = Choice(index, request, prompt, engine_request, tokenizer, reader)
                engine_request.on_restart = choice.restart
                self.choices.append(choice)
        session.num_unguided += guide is None and (request.demands_call() or request.demands_json())
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self.head = {
            "id": f"chatcmpl-{'-'.join(map(str, name))}",
            "object": kind if request.messages is not None else "text_completion",
            "created": int(time.time()),
            "model": MODEL,
        }
        self._chunks: asyncio.Queue[JSONObject | None] = asyncio.Queue()  # None: the end.
        self.task = asyncio.ensure_future(self._generate())
        self.task.add_done_callback(lambda _: self._chunks.put_nowait(None))
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

    def _append(self, choice: Choice) -> int:
        """Append a choice to the conversation; return the number of its tokens."""
        choice.finish()
        conversation = self.session.conversation
        completion = choice.completion()
        segment = conversation.append_prompt(choice.prompt)
        sampled_text = segment.append_completion(completion, conversation.tokenizer)
        key = completion_key(choice.visible_text, choice.tool_calls)
        self.session.sampled_texts[key] = sampled_text
        if self.request.messages is not None:
            message: JSONObject = {"role": "assistant", "content": choice.visible_text}
            if choice.tool_calls:
                message["tool_calls"] = choice.calls_to_send()
            segment.messages = messages_since_prompt(
                [*self.request.messages, message], self.session.sampled_texts
            )
        self._chunks.put_nowait(choice.next_chunk())
        return len(completion.tokens)

    def _on_tokens(self, choice: Choice, task: asyncio.Task[Completion]) -> None:
        choice.read_new_tokens()
        if choice.stop_string is not None:
            task.cancel()  # which is no failure of the task group
        elif self.request.stream and (chunk := choice.next_chunk()):
            self._chunks.put_nowait(chunk)

    async def chunks(self) -> AsyncIterator[JSONObject]:
        """Yield entries of OpenAI's `choices`: parts of them if the request asks for a stream.

        Raises:
            BadRequest: the session was closed.
        """
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        if self.task.cancelled():
            raise BadRequest("the session was closed")
        self.task.result()

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens so far; a prompt counts once for all its choices."""
        prompt_tokens = sum(len(c.prompt.tokens) for c in self.choices[:: self.request.n])
        completion_tokens = sum(len(c.completion().tokens) for c in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    async def body(self) -> JSONObject:
        """Return the whole response in OpenAI's form. Raises what `chunks` does."""
        return {
            **self.head,
            "choices": [choice async for choice in self.chunks()],
            "usage": self.usage(),
        }

    async def events(self) -> AsyncIterator[str]:
        """Yield the response as OpenAI's server-sent events. Raises what `chunks` does."""
        async for chunk in self.chunks():
            yield event(**self.head, choices=[chunk], usage=None)
        if (self.request.stream_options or {}).get("include_usage"):
            yield event(**self.head, choices=[], usage=self.usage())
        yield "data: [DONE]\n\n"
