"""A response in the making: what the engine samples for a request, as the client gets it."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.types import Receive

from minirl.config.shared import EndpointConfig
from minirl.endpoint.choice import Choice
from minirl.endpoint.http import BadRequest
from minirl.endpoint.protocol import (
    CompletionRequest,
    JSONObject,
    check_length,
    completion_key,
    event,
    messages_since_prompt,
)
from minirl.engine.engine import Sampling
from minirl.engine.loop import Completion, EngineLoop, Request
from minirl.rollout.conversation import Conversation, Prompt
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

    def check(self, request: CompletionRequest) -> None:
        """Refuse a request that is too much. Raises what `CompletionRequest.check` does."""
        request.check(self.cfg, self.conversation.vision, self.max_model_len)

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
        UserError: A prompt is too long, or the template refuses the chat.
        KeyError, TypeError, ValueError: The request is malformed.
    """
    conversation = session.conversation
    prompts = []
    for text, urls in request.render_prompts(conversation, session.sampled_texts):
        check_length(text, session.max_model_len, conversation.tokenizer)
        prompts.append(conversation.tokenize_prompt(text, urls))
    return prompts


class PendingResponse:
    """The response to one request, while the engine samples it.

    The conversation gets the prompts and the completions when all of these are finished.
    """

    def __init__(self, session: SessionState, request: CompletionRequest, receive: Receive):
        """Start sampling.

        Args:
            session: Whose conversation the request continues.
            request: What the client sent.
            receive: Waits for the next message of the client's connection.

        Raises:
            UserError: The request cannot be answered.
            KeyError, TypeError, ValueError: The request is malformed.
        """
        self.session = session
        self.request = request
        name = (*session.seed, len(session.tasks))
        self.choices: list[Choice] = []
        tokenizer = session.conversation.tokenizer
        session.check(request)
        reader = request.reader(tokenizer, session.cfg.tool_parser)
        guide = request.guide(reader)
        for prompt in read_prompts(session, request):
            sampling = replace(session.sampling, max_tokens=self._max_tokens(prompt))
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
        self._watcher = asyncio.ensure_future(self._cancel_on_disconnect(receive))

    def _max_tokens(self, prompt: Prompt) -> int:
        """Return the most tokens to sample. Raises BadRequest if the prompt is too long."""
        max_model_len = self.session.max_model_len
        room = max_model_len - len(prompt.tokens)
        if room < 1:
            raise BadRequest(
                f"the prompt has {len(prompt.tokens)} tokens, and engine.max_model_len = "
                f"{max_model_len} leaves no room for a completion",
                code="context_length_exceeded",
            )
        return min(self.request.max_tokens or room, self.session.sampling.max_tokens, room)

    async def _generate(self) -> None:
        """Sample all choices, then append them to the conversation."""
        num_used = 0
        try:
            await self._sample()
            for choice in self.choices:
                num_used += self._append(choice)
        finally:
            # Cancelled requests, and what lies behind a stop string, are not trained on.
            num_sampled = sum(len(choice.engine_request.done.tokens) for choice in self.choices)
            self.session.engine_loop.discarded_tokens += num_sampled - num_used

    async def _sample(self) -> None:
        """Sample all choices."""
        async with asyncio.TaskGroup() as group:
            for choice in self.choices:
                task = group.create_task(self.session.engine_loop.generate(choice.engine_request))
                if self.request.stream or self.request.stop:  # else the text can wait for the end
                    choice.engine_request.on_tokens = partial(self._on_tokens, choice, task)

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

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        """Stop sampling when the client leaves; the conversation then gets nothing."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.task.cancel()

    async def chunks(self) -> AsyncIterator[JSONObject]:
        """Yield entries of OpenAI's `choices`: parts of them if the request asks for a stream.

        Raises:
            BadRequest: The session was closed.
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
