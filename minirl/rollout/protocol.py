"""OpenAI's chat completions and completions, as the endpoint speaks them: what is asked, and how an
answer is told while it is made.

A client's `model`, `temperature`, `top_p`, penalties and the like have no effect: the policy
answers, and samples as the run says, for it is trained on the log-probs of that. What else cannot
be had (forms of output, alternatives to the sampled tokens, a call that is forced) is refused.
"""

import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, Field
from transformers import PreTrainedTokenizerBase

from minirl.data import chat, images
from minirl.errors import UserError
from minirl.rollout.conversation import Completion, added
from minirl.rollout.engine_loop import Request

CALL = "<tool_call>"
_CALLS = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class CompletionRequest(BaseModel, extra="allow"):
    messages: list[dict[str, Any]] | None = None
    # Without messages. Texts are read as they are: special tokens in them count, and none is added.
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    n: int = Field(1, ge=1, le=128)
    # At most; rollout.max_tokens and what the context leaves are limits too
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    stop: str | list[str] | None = (
        None  # an answer is sampled until one of these is in it, and told up to before it
    )
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | int | None = (
        # of every sampled token, with those that end the answer or do not show in its text; of a
        # stream at its end
        None
    )
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, said: dict[str, str]
    ) -> list[tuple[str | list[int], list[str]]]:
        """With the images of each. `said`: the policy's own answers of this session as they were
        sampled, by `recognise`. Raises UserError, KeyError, TypeError or ValueError.
        """
        if refused := [
            f
            for f in ("top_logprobs", "response_format", "echo", "suffix")
            if (self.model_extra or {}).get(f) not in (None, 0, "", {"type": "text"})
        ]:
            raise UserError(f"{refused[0]} is not to be had here; leave it out")
        if self.messages is not None:
            messages = [_render(m, said) for m in self.messages]
            return [
                (
                    chat.render(
                        tokenizer,
                        messages,
                        tools=None if self.tool_choice == "none" else self.tools,
                    ),
                    images.of_chat(messages),
                )
            ]
        prompts = (
            self.prompt
            if isinstance(self.prompt, list) and not isinstance((*self.prompt, "")[0], int)
            else [self.prompt]
        )
        if (
            not prompts
            or not all(prompts)
            or not all(
                0 <= token < len(tokenizer)
                for prompt in prompts
                if isinstance(prompt, list)
                for token in prompt
            )
        ):
            raise UserError(f"prompt is empty, or has a token outside 0 ... {len(tokenizer) - 1}")
        return [(prompt, []) for prompt in prompts]


def _render(message: dict[str, Any], said: dict[str, str]) -> dict[str, Any]:
    """As chat templates want it; an answer of the policy's as it was sampled."""
    role, content = message["role"], message.get("content") or ""
    if not isinstance(content, str):
        shown = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
        if any(not url.startswith("data:") for url in shown) or any(
            part["type"] not in ("text", "image_url") for part in content
        ):
            raise UserError(
                "a content is made of parts of type text and image_url, and an image must come as a data URL"
            )
        content = (
            images.attach([{"content": content}], ())[0]["content"]
            if shown
            else "\n".join(part["text"] for part in content)
        )
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    if role == "assistant" and (raw := said.get(recognise(content, calls))) is not None:
        return {"role": role, "content": raw}
    read = (
        {
            "tool_calls": [
                {"type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls
            ]
        }
        if calls
        else {}
    )
    return message | {"role": "system" if role == "developer" else role, "content": content} | read


def recognise(content: str, calls: list[tuple[str, dict]]) -> str:
    """What of an answer a client sends back in the chats that follow, as a key."""
    return json.dumps([content, calls], sort_keys=True)


class Choice:
    """One choice, from its tokens to the text, the tool calls and the end that the client is
    told.
    """

    def __init__(
        self,
        request: Request,
        prompt: tuple,
        asked: CompletionRequest,
        tokenizer: PreTrainedTokenizerBase,
    ):
        """`request.done` grows while the engine works; `prompt`: as `Conversation.whole` gave
        it.
        """
        self.request, self.prompt, self.asked, self.tokenizer = request, prompt, asked, tokenizer
        self.stops = [
            stop
            for stop in ([asked.stop] if isinstance(asked.stop, str) else asked.stop or ())
            if stop
        ]
        self.marks = (
            [*self.stops, CALL] if asked.tools and asked.tool_choice != "none" else self.stops
        )  # what is not told, nor what may become it
        # So far, without special tokens, and without a stop string and what follows it; and the
        # number of tokens that it was read from
        self.text, self.num_read = "", 0
        self.stop: str | None = None  # the stop string that was found
        self.finish, self.calls = (
            "",
            [],
        )  # at the end: `stop`, `length` or `tool_calls`; names and arguments of the calls
        self.num_sent = 0  # characters

    def hear(self, *, last: bool = False) -> None:
        """Read what the engine has sampled since. Bytes of a character that is not complete wait
        for the others, unless they are the `last`.
        """
        tokens = [
            t for t in self.request.done.tokens if t not in self.request.sampling.stop_token_ids
        ]
        text = added(
            self.tokenizer,
            tokens[: self.num_read],
            tokens[self.num_read :],
            skip_special_tokens=True,
        )
        if self.stop is None and (last or not text.endswith("\ufffd")):
            self.num_read, self.text = len(tokens), self.text + text
            if found := [(at, stop) for stop in self.stops if (at := self.text.find(stop)) >= 0]:
                at, self.stop = min(found)
                self.text = self.text[:at]
        if last:
            self.calls = _calls(self.text) if CALL in self.marks else []
            self.finish = (
                "tool_calls"
                if self.calls
                else "stop"
                if self.request.done.stopped or self.stop is not None
                else "length"
            )

    @property
    def shown(self) -> str:
        """What no later token changes; at the end, the content: what is before the tool calls."""
        if self.finish and not self.calls:
            return self.text
        safe = max(0, len(self.text) + 1 - max(map(len, self.marks), default=1))
        return self.text[
            : min((at for mark in self.marks if (at := self.text.find(mark)) >= 0), default=safe)
        ]

    def kept(self) -> Completion:
        """What is to be learnt from."""
        done, n = self.request.done, self.num_read
        return (
            done
            if self.stop is None
            else Completion(done.tokens[:n], done.logprobs[:n], False, done.versions[:n])
        )

    def choice(self, index: int) -> dict[str, Any] | None:
        """What has not been told of it, if anything, as an entry of OpenAI's `choices`."""
        begin, shown, chat = self.num_sent, self.shown, self.asked.messages is not None
        if len(shown) == begin and not self.finish:
            return None
        self.num_sent = len(shown)
        choice, text = {"index": index, "finish_reason": self.finish or None}, shown[begin:]
        if (
            self.finish and self.asked.logprobs is not None and self.asked.logprobs is not False
        ):  # 0 asks for them, in a completion
            tokens, logprobs = (
                [self.tokenizer.decode([t]) for t in self.kept().tokens],
                self.kept().logprobs,
            )
            choice["logprobs"] = (
                {
                    "content": [
                        {"token": t, "logprob": p, "bytes": None, "top_logprobs": []}
                        for t, p in zip(tokens, logprobs, strict=True)
                    ]
                }
                if chat
                else {"tokens": tokens, "token_logprobs": logprobs}
            )
        if not chat:
            return choice | {"text": text}
        calls = [
            {
                "index": k,
                "id": f"call_{'-'.join(map(str, self.request.name))}_{index}_{k}",
                "type": "function",
                "function": {"name": f, "arguments": json.dumps(arguments)},
            }
            for k, (f, arguments) in enumerate(self.calls)
        ]
        said = (
            ({} if begin else {"role": "assistant"})
            | {"content": text or (None if calls else "")}
            | ({"tool_calls": calls} if calls else {})
        )
        return choice | {"delta" if self.asked.stream else "message": said}


def _calls(text: str) -> list[tuple[str, dict]]:
    """The calls that a text makes as Qwen and Hermes models do: `<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>`. None at all if one of them cannot be read, so that the text
    stays in sight.
    """
    try:
        return [
            (call["name"], dict(call.get("arguments", {})))
            for call in map(json.loads, _CALLS.findall(text))
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def error(message: str, status: int = 400, code: str | None = None) -> dict[str, Any]:
    """In OpenAI's form and Anthropic's at once."""
    return {
        "type": "error",
        "error": {
            "message": message,
            "type": "authentication_error" if status == 401 else "invalid_request_error",
            "param": None,
            "code": code,
        },
    }


def event(**data: Any) -> str:
    """A server-sent event, with a name if it has a type."""
    return (f"event: {data['type']}\n" if "type" in data else "") + f"data: {json.dumps(data)}\n\n"


async def whole(exchange: Any) -> dict[str, Any]:
    """`exchange`: of server.py. Raises what its `choices` does, as `events`."""
    return exchange.head | {
        "choices": [choice async for choice in exchange.choices()],
        "usage": exchange.usage(),
    }


async def events(exchange: Any) -> AsyncIterator[str]:
    async for choice in exchange.choices():
        yield event(**exchange.head, choices=[choice], usage=None)
    if (exchange.asked.stream_options or {}).get("include_usage"):
        yield event(**exchange.head, choices=[], usage=exchange.usage())
    yield "data: [DONE]\n\n"
