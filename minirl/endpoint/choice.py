"""A choice of a response: sampled tokens as text, tool calls and finish reason."""

import json
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from minirl.data import harmony
from minirl.endpoint.protocol import CompletionRequest, JSONObject
from minirl.endpoint.tool_calls import ToolCall, ToolReader
from minirl.engine.loop import Completion, Request
from minirl.rollout.conversation import Prompt, decode, decode_after, speaks_harmony


@dataclass
class Choice:
    """One choice of a response: it turns sampled tokens into text, tool calls, finish reason."""

    index: int
    request: CompletionRequest
    prompt: Prompt
    engine_request: Request  # Its `done` grows while the engine samples.
    tokenizer: PreTrainedTokenizerBase
    reader: ToolReader | None = None  # Of calls; None: there are no tools to call.
    # What is read so far, without special tokens, and without a stop string and what follows it.
    text: str = ""
    num_read: int = 0  # Tokens that `text` was read from.
    num_sent: int = 0  # Characters.
    stop_string: str | None = None  # The one that was found.
    finish_reason: str = ""  # At the end: `stop`, `length` or `tool_calls`.
    tool_calls: list[ToolCall] = field(default_factory=list)  # At the end,
    content: str = ""  # with what is said beside them.

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
        """Forget what was read: the engine samples anew."""
        self.text = ""
        self.num_read = 0

    @property
    def markers(self) -> list[str]:
        """What the client does not see, nor a text that may become it: what follows is hidden."""
        markers = list(self.request.stop or ())
        if self.reader:
            markers.append(self.reader.marker)
        return markers

    @property
    def is_held_back(self) -> bool:
        """Whether nothing can be sent before the end.

        A guided answer may begin anew; a call may begin with any text in some models; others think
        in a channel that is not shown.
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
        """Return the tokens to train on: up to the stop string, if one was found."""
        done = self.engine_request.done
        if self.stop_string is None:
            return done
        end = self.num_read
        return Completion(
            done.tokens[:end],
            done.logprobs[:end],
            False,
            done.versions[:end],
            done.guided[:end],
            done.routes,
            done.top[:end],
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
        message["tool_calls"] = [
            {"index": number, **call} for number, call in enumerate(self.calls_to_send())
        ]
        return message

    def calls_to_send(self) -> list[JSONObject]:
        """Return the tool calls in OpenAI's form."""
        name = "-".join(map(str, self.engine_request.name))
        return [
            {
                "id": f"call_{name}_{self.index}_{number}",
                "type": "function",
                "function": {"name": function, "arguments": json.dumps(arguments)},
            }
            for number, (function, arguments) in enumerate(self.tool_calls)
        ]

    def _logprobs(self) -> dict[str, list]:
        """Return the log-probs of all sampled tokens, in the form of a chat or of a completion."""
        completion = self.completion()
        tokens = [decode(self.tokenizer, [token]) for token in completion.tokens]
        tops = []
        for likeliest in completion.top or [[] for _ in tokens]:
            tops.append([(decode(self.tokenizer, [token]), value) for token, value in likeliest])
        if self.request.messages is None:
            found: dict[str, list] = {"tokens": tokens, "token_logprobs": completion.logprobs}
            return (
                found | {"top_logprobs": [dict(top) for top in tops]} if completion.top else found
            )
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
