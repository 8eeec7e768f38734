"""Examples to imitate or to compare, as token ids with their loss mask.

A turn is trained as a policy that is asked for it would see it: after what the chat template
renders when a generation prompt follows the messages before it. Most templates render a turn alike
whatever follows, and a chat is one rendering. Some rewrite history (Qwen3's drops what was thought
in earlier turns). Then the turns that one rendering holds as the policy would see them share it,
and each of the others is in another rendering.
"""

import bisect
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.config.supervised import ChatsConfig, PairsConfig
from minirl.data.chat import Messages, images_of, renderer
from minirl.data.formats import SIDES, in_loss
from minirl.data.order import make_order
from minirl.data.rows import Rows, errors_at
from minirl.data.vision import Vision
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import World
from minirl.types.packed import ImageSpan, Trajectory, prompt_length

# Episodes of a judged answer:
MATCHED = 0  # the row's answer,
MISMATCHED = 1  # and the answer of another row after this row's prompt.


def to_examples(
    tokenizer: PreTrainedTokenizerBase, vision: Vision | None, row: dict, stop_ids: list[int]
) -> list[Trajectory]:
    """Return a row of `formats.to_chat` as token ids, with what is in the loss marked as sampled.

    It is one trajectory, or the segments of a chat with a history that the chat template rewrites.

    Raises:
        UserError: the chat has images and the model reads none, or the chat template fails.
    """
    messages = row.get("messages", [])
    require(
        vision or not images_of(messages),
        "a chat has images, and policy.model reads none; take a model of a family that does",
    )
    if "text" in row:
        segments = [Rendering(*encode_text(tokenizer, row["text"]), 0)]
    else:
        show = renderer(tokenizer, row)
        segments = encode_chat(tokenizer, messages, row["trained"], stop_ids, show)
    examples = []
    for number, (ids, mask, num_messages) in enumerate(segments):
        sampled = np.array(mask, bool)
        spans: list[ImageSpan] = []
        urls = images_of(messages[:num_messages])
        if vision:  # Without images, too: a text must not hold the places of some.
            ids, spans, sources = vision.expand(ids, urls)
            sampled = np.array([source >= 0 and sampled[source] for source in sources], bool)
        examples.append(
            Trajectory(
                tokens=np.array(ids, np.int32),
                sampled=sampled,
                logprobs=np.zeros(len(ids), np.float32),
                images=spans,
                segment=number,
            )
        )
    return examples


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[bool]]:
    """Return the token ids and the loss mask of a plain text.

    The tokens that begin and end a text are among them; all but the first are in the loss.
    """
    ids = tokenizer(text, verbose=False)["input_ids"]
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids, [i > 0 for i in range(len(ids))]


class Rendering(NamedTuple):
    """A chat up to one of its turns, as token ids."""

    ids: list[int]  # Token ids.
    mask: list[bool]  # Of each token: whether it is in the loss.
    num_messages: int  # The messages of the chat that it holds.


class _Turn(NamedTuple):
    """A chat up to one of its turns, which nothing follows."""

    num_messages: int  # Up to the turn, with it.
    text: str
    start: int  # Number of characters before the answer.


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    trained: list[int],
    stop_ids: list[int],
    show: Callable[..., str] | None = None,
) -> list[Rendering]:
    """Return a chat as the renderings that hold all of its turns, each turn in the loss of one.

    The mask is True on what a policy that is asked for the messages `trained` would sample: the
    content and the token that ends the turn, not the header before nor the line break after it. A
    token on both sides of the border between header and answer is not in the loss. Nothing follows
    the last token in the loss.

    Args:
        tokenizer: has the chat template.
        messages: the chat.
        trained: indices of the assistant turns in the loss, in order; each follows a message.
        stop_ids: tokens that end an answer.
        show: renders a chat of this row, as `chat.renderer` returns it; None: as the template does
            without tools and arguments.

    Returns:
        The renderings, in the order of their last turns. All but the last one are there because the
        template renders their turns otherwise when others follow.

    Raises:
        UserError: the template refuses the chat, renders a call of a tool otherwise than its
            generation prompt begins it, or does not end a turn by a stop token.
    """
    show = show or renderer(tokenizer, {})
    turns = [_render_turn(tokenizer, messages, i, stop_ids, show) for i in trained]
    renderings = []
    while turns:
        # The rendering of the last turn, and the turns that it holds as the policy would see them.
        text = turns[-1].text
        ids, spans = _encode(tokenizer, text)
        mask = [False] * len(ids)
        length = 0
        others = []
        for turn in turns:
            # The first token that has none of the characters before the answer. Offsets leave out a
            # space that a token begins with: if the token before ends too early, this one holds the
            # last of these characters.
            first = bisect.bisect_left(spans, turn.start, key=lambda span: span[0])
            while 0 < first < len(spans) and spans[first - 1][1] < turn.start:
                first += 1
            last = next((n for n in range(first, len(ids)) if ids[n] in stop_ids), None)
            end = len(text) if last is None else spans[last][1]
            if turn.text[:end] != text[:end]:
                others.append(turn)
                continue
            if last is None:
                raise UserError(
                    "the chat template does not end an answer by one of the stop tokens "
                    f"{stop_ids}; name one that does by data.chat_template, or its token as "
                    f"eos_token_id in generation_config.json ({text[turn.start :][:100]!r})"
                )
            mask[first : last + 1] = [True] * (last + 1 - first)
            length = max(length, last + 1)
        renderings.append(Rendering(ids[:length], mask[:length], turns[-1].num_messages))
        turns = others
    return renderings[::-1]


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a text, and of each its first character and the one after its last.

    Without a warning for long chats, which are cut later.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], encoded["offset_mapping"]


def _render_turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    index: int,
    stop_ids: list[int],
    show: Callable[..., str],
) -> _Turn:
    """Return the chat up to a turn as the template renders it, or as a policy would see it.

    The template's rendering is taken if it begins as the generation prompt does and has all of the
    turn's content. A generation prompt may, after the begin of the header, begin the answer by tags
    (`<think>` of DeepSeek-R1's distilled models) that the rendering does not have: then the answer
    begins where the two part.
    Else (the same template leaves out what was thought, even in the last turn) the content follows
    the generation prompt as it is.
    """
    before = show(messages[:index])
    text = show(messages[: index + 1], header=False)
    start = len(before)
    is_begun = text.startswith(before)
    if not is_begun:
        header = len(os.path.commonprefix([before, show(messages[:index], header=False)]))
        # Where the token of the generation prompt begins in which the two part.
        starts = [first for first, _ in _encode(tokenizer, before)[1]]
        num_shared = len(os.path.commonprefix([before, text]))
        start = starts[bisect.bisect_right(starts, num_shared) - 1]
        has_only_tags = re.fullmatch(r"(\s*<[^<>]+>\s*)+", before[start:]) is not None
        is_begun = start > header and has_only_tags
    content = messages[index]["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    has_all = "".join(content.split()) in "".join(text[start:].split())
    called = Counter(call["function"]["name"] for call in messages[index].get("tool_calls") or [])
    has_all &= all(text.count(name, start) >= num for name, num in called.items())
    if not is_begun and has_all and (answer := _answer_in(text, before, messages, index, show)):
        is_begun = True
        start = len(before)
        text = before + answer
    if not is_begun or not has_all:
        if not content.strip() or messages[index].get("tool_calls"):
            fault = "otherwise than its generation prompt begins it"
            if not has_all:
                fault = "without all of its content and calls"
            raise UserError(
                f"the chat template renders message {index + 1} of a chat {fault}; name another by "
                "data.chat_template, or write the message as it wants it "
                f"({str(messages[index])[:100]})"
            )
        # The generation prompt may end with the tag that the content begins with:
        # `<think>well</think>4` after `<|Assistant|><think>` is `well</think>4`.
        opening = re.search(r"(<[^<>]+>)(\s*)$", before)
        if opening and content.lstrip().startswith(opening[1]):
            content = content.lstrip().removeprefix(opening[1]).removeprefix(opening[2])
        start = len(before)
        text = before + content
    stops = [str(tokenizer.decode([token])) for token in stop_ids]
    if not any(stop in text[start:] for stop in stops):
        text += _end_of_calls(show, messages[: index + 1], text, stops)
    if not any(stop in text[start:] for stop in stops):
        text += _end_of_answers(show, stops)
    return _Turn(index + 1, text, start)


def _answer_in(
    text: str, before: str, messages: Messages, index: int, show: Callable[..., str]
) -> str:
    """Return how a rendering shows an answer after which the template rewrites what was before.

    gpt-oss drops the thoughts before a call once a final answer follows, Mistral's the system
    prompt once any answer follows. Empty: it is not found.

    Args:
        text: the rendering of the chat up to the answer.
        before: what a policy that is asked for it would see.
        messages: the chat.
        index: of the answer.
        show: renders a chat.
    """
    other = {"role": "assistant", "content": "minirl answers"}
    others = show([*messages[:index], other], header=False)
    num_shared = len(os.path.commonprefix([text, others]))
    header = before[len(os.path.commonprefix([before, show(messages[:index], header=False)])) :]
    asked = messages[index - 1]["content"]
    if not header and isinstance(asked, str) and asked.strip() in before:
        # Mistral's: the question ends as the answer's header does.
        header = before[before.rfind(asked.strip()) :]
    place = text.rfind(header, 0, num_shared) if header else -1
    return text[place + len(header) :] if place >= 0 else ""


def _end_of_calls(show: Callable[..., str], messages: Messages, text: str, stops: list[str]) -> str:
    """Return what follows the last message, if it calls tools, up to a stop token; else nothing.

    It is looked for before a tool's result (`<|observation|>` of GLM-4.5).
    """
    calls = messages[-1].get("tool_calls")
    if not calls:
        return ""
    result = {"role": "tool", "content": "minirl returns", "name": calls[0]["function"]["name"]}
    if "id" in calls[0]:
        result["tool_call_id"] = calls[0]["id"]
    whole = show([*messages, result], header=False)
    after = whole.removeprefix(text).partition("minirl returns")[0]
    return _up_to_stop(after, stops) if whole.startswith(text) else ""


def _end_of_answers(show: Callable[..., str], stops: list[str]) -> str:
    """Return what follows an answer up to a stop token; nothing if the template has none there.

    It is looked for after the last answer of a chat, then before another question (`<|user|>` of
    GLM-4.5).
    """
    chat = [
        {"role": "user", "content": "minirl asks"},
        {"role": "assistant", "content": "minirl answers"},
        {"role": "user", "content": "minirl asks again"},
    ]
    for messages in (chat[:2], chat):
        text = show(messages, header=False)
        after = text.partition("minirl answers")[2].partition("minirl asks again")[0]
        if end := _up_to_stop(after, stops):
            return end
    return ""


def _up_to_stop(text: str, stops: list[str]) -> str:
    """Return the text up to the first stop token, with it; nothing if it has none."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else ""


class Encoded(NamedTuple):
    """What became of a row, or of all rows of a rank in a step."""

    trajectories: list[Trajectory]  # Of a row that is dropped: none.
    # Whether the row is lost, in part or whole, by the two reasons of its kind; or how many are.
    lost: Sequence[int]


@dataclass(frozen=True)
class StepExamples:
    """The examples of a step. An example is a row by its number in the order."""

    here: list[Trajectory]  # Those of this rank.
    # Of all ranks:
    num_rows: int  # Rows that are not dropped.
    num_tokens: int  # Tokens of the rows, in the loss or not.
    num_lost: list[int]  # Rows that are lost, by each of two reasons.


@dataclass(eq=False, repr=False)
class Chats:
    """Rows to imitate as token ids, cut to data.max_tokens.

    An example is a row, by its place in the order. A rank encodes those of its rows that a step
    needs, and while it trains those of the next step, in a thread. Encoded rows are kept while they
    are few. All ranks call the methods alike.
    """

    rows: Rows  # All rows, as `open_examples` returns them.
    tokenizer: PreTrainedTokenizerBase  # Has the chat template.
    stop_ids: list[int]  # Tokens that end an answer.
    cfg: ChatsConfig | PairsConfig  # Has data.max_tokens.
    mesh: World  # The ranks.
    # The only thread that uses the tokenizer, which cannot work in two at once.
    thread: Executor
    _: KW_ONLY
    seed: int  # Of the order.
    shuffle: bool = True  # Whether the order is for training.
    vision: Vision | None = None  # How the model reads images; None: it reads none.
    # A model with a score head reads the end of a sequence. One more token follows, so that the
    # last token has a row, which is the one that predicts it.
    score: bool = False

    # What the log calls rows that are lost, by the two reasons.
    lost_names = ("rows_cut", "rows_dropped")
    KEPT_BYTES = 2**28  # Of the encoded rows that a rank keeps.
    OBJECT_BYTES = 1000  # Of a trajectory without its tokens.

    def __post_init__(self) -> None:
        """Put the rows in order, and see that not all will be dropped. Collective.

        Raises:
            UserError: every row is dropped.
        """
        rows = self.rows
        mesh = self.mesh
        self.max_tokens = self.cfg.max_tokens
        self.to_examples = partial(to_examples, self.tokenizer, self.vision, stop_ids=self.stop_ids)
        self.order = make_order(rows, seed=self.seed, shuffle=self.shuffle)
        self.kept: dict[int, Encoded] = {}  # Encoded rows by their numbers.
        self.num_kept_bytes = 0
        # The examples of the next step, and their encoding.
        self.ahead: tuple[range, Future[Encoded]] | None = None

        # Encode rows until one is not dropped.
        found = False
        num_lost = np.zeros(2, int)
        with errors_of_all(mesh):
            for number in range(mesh.rank, len(rows), mesh.world_size):
                encoded = self.thread.submit(self._encode_row, number).result()
                num_lost += encoded.lost
                found = bool(encoded.trajectories)
                if found:
                    break
        by_rank = mesh.gather((found, num_lost))
        if not any(found for found, _ in by_rank):
            counts = zip(self.lost_names, sum(lost for _, lost in by_rank), strict=True)
            kind = "rows" if self.shuffle else "held-out rows"
            others = "" if self.shuffle else ", or take others by data.held_out or data.eval"
            raise UserError(
                f"{rows.sources[0].label}: of {len(rows)} {kind} none is left "
                f"({', '.join(f'{name} {num}' for name, num in counts)}); correct them or raise "
                f"data.max_tokens = {self.max_tokens}{others}"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def examples(self, numbers: range) -> StepExamples:
        """Return the examples of a step, and begin with those of the next one. Collective.

        Raises:
            UserError: a row cannot be encoded.
        """
        work = self._begin(numbers)
        with errors_of_all(self.mesh):
            here, num_lost = work.result()
        if self.shuffle:  # an evaluation has no next step
            after = range(numbers.stop, numbers.stop + len(numbers))
            self.ahead = (after, self._begin(after))
        counts = [len({t.group for t in here}), self.count_tokens(here), *num_lost]
        num_rows, num_tokens, *lost = np.sum(self.mesh.gather(counts), axis=0).tolist()
        return StepExamples(here, num_rows, num_tokens, lost)

    def count_tokens(self, examples: list[Trajectory]) -> int:
        """Return the tokens of examples, in the loss or not, without the one after each."""
        return sum(len(t.tokens) - self.score for t in examples)

    def _begin(self, numbers: range) -> Future[Encoded]:
        """Begin to encode this rank's examples of a step, unless that has been begun."""
        if self.ahead and self.ahead[0] == numbers:
            return self.ahead[1]
        rows = self.order.rows(numbers.start, numbers.stop).tolist()

        def encode() -> Encoded:
            """Encode in the thread. A row is always of the same rank, which may have kept it."""
            here: list[Trajectory] = []
            num_lost = np.zeros(2, int)
            for place, row in enumerate(rows):
                if row % self.mesh.world_size == self.mesh.rank:
                    encoded = self._encode_place(rows, place)
                    here += [replace(t, group=numbers[place]) for t in encoded.trajectories]
                    num_lost += encoded.lost
            return Encoded(here, num_lost.tolist())

        return self.thread.submit(encode)

    def _encode_place(self, rows: list[int], place: int) -> Encoded:
        """Return the row at a place of a step as token ids."""
        return self._encode_row(rows[place])

    def _encode_row(self, number: int) -> Encoded:
        """Return a row as token ids, in the thread."""
        if number in self.kept:
            return self.kept[number]
        row = self.rows[number]
        with errors_at(self.rows.place(number)):
            encoded = self.encode(row)
        num_bytes = 0
        for t in encoded.trajectories:
            if self.score:
                t.tokens = np.append(t.tokens, t.tokens[-1:])
                t.sampled = np.append(t.sampled, True)
                t.logprobs = np.zeros(len(t.tokens), np.float32)
            num_bytes += self.OBJECT_BYTES + t.tokens.nbytes + t.sampled.nbytes + t.logprobs.nbytes
            num_bytes += sum(len(span.url) for span in t.images)
        if self.num_kept_bytes + num_bytes <= self.KEPT_BYTES:
            self.kept[number] = encoded
            self.num_kept_bytes += num_bytes
        return encoded

    def encode(self, row: dict) -> Encoded:
        """Return a row's trajectories, cut, without those that have nothing in the loss left.

        Rows are lost by being cut, and by being dropped.
        """
        is_cut = False
        kept = []
        for t in self.to_examples(row):
            is_cut |= len(t.tokens) > self.max_tokens
            # Copies, because a view would keep the whole array.
            t.tokens = t.tokens[: self.max_tokens].copy()
            t.sampled = t.sampled[: self.max_tokens].copy()
            t.logprobs = t.logprobs[: self.max_tokens].copy()
            t.images = [span for span in t.images if span.start < self.max_tokens]
            if t.sampled.any():
                kept.append(t)
        return Encoded(kept, (is_cut, not kept))


class Pairs(Chats):
    """Pairs as token ids: two trajectories of each row.

    Episode 0 is the chosen side, and its reward is the margin; episode 1 is the rejected one.
    """

    lost_names = ("pairs_too_long", "pairs_equal")

    def encode(self, row: dict) -> Encoded:
        """Return both sides with the answer as sampled; none if too long, or equal in all tokens.

        Pairs are lost by being too long, and by having two equal sides.
        """
        sides = []
        for episode, side in enumerate(SIDES):
            example = {"text": row[side]}
            if "prompt" in row:  # the whole answer is in the loss
                messages = row["prompt"] + row[side]
                answer = range(len(row["prompt"]), len(messages))
                trained = [i for i in answer if in_loss(messages[i])]
                example = row | {"messages": messages, "trained": trained}
            segments = self.to_examples(example)
            require(
                len(segments) == 1,
                f"the chat template renders a turn of the {side} side otherwise when others "
                "follow, and a side is one sequence; end the prompt before the last answer, or "
                "name a template by data.chat_template that keeps what was said",
            )
            segments[0].episode = episode
            sides.append(segments[0])
        chosen, rejected = sides
        if max(len(chosen.tokens), len(rejected.tokens)) > self.max_tokens:
            return Encoded([], (True, False))
        if np.array_equal(chosen.tokens, rejected.tokens):
            return Encoded([], (False, True))
        if "prompt" not in row:
            # The answers begin where the texts differ. A first token is never sampled.
            tokens = enumerate(zip(chosen.tokens, rejected.tokens, strict=False))
            first = next((i for i, (a, b) in tokens if a != b), 0) or 1
            chosen.sampled[:first] = False
            rejected.sampled[:first] = False
        require(
            self.score or (chosen.sampled.any() and rejected.sampled.any()),
            "a side of the pair is a single token, and nothing comes before it; remove the row",
        )
        chosen.reward = row["margin"]
        return Encoded(sides, (False, False))


class Labelled(Chats):
    """Judged answers as token ids. The reward of a trajectory is 1 (wanted) or -1.

    With `mismatched` a row has two trajectories: its answer, and after the same prompt the
    answer of the row before it in the step (of the last one, for the first), from which KTO
    estimates the KL. Which one that is depends on the order of the rows alone.
    """

    mismatched = True
    lost_names = ("rows_too_long", "rows_dropped")
    # The rows of a step, and what `_place_of_other_prompt` has found in it, by place.
    found_in: tuple[list[int], dict[int, int | None]] = ([], {})

    def encode(self, row: dict) -> Encoded:
        """Return the trajectory of a row; none if it is too long, or has nothing in the loss."""
        segments = self.to_examples(row)
        require(
            len(segments) == 1,
            "the chat template renders an answer otherwise when others follow, and a judged row is "
            "one sequence; set data.train_on last_turn, or name a template by data.chat_template "
            "that keeps what was said",
        )
        (t,) = segments
        if len(t.tokens) > self.max_tokens:
            return Encoded([], (True, False))
        if not t.sampled.any():
            return Encoded([], (False, True))
        t.episode = MATCHED
        t.reward = 1.0 if row["label"] else -1.0
        return Encoded([t], (False, False))

    def count_tokens(self, examples: list[Trajectory]) -> int:
        """Return the tokens that are trained on: those of rows with their answers."""
        return sum(len(t.tokens) for t in examples if t.episode == MATCHED)

    def _encode_place(self, rows: list[int], place: int) -> Encoded:
        """Add the answer of the nearest row before it that has another prompt, if there is one."""
        encoded = self._encode_row(rows[place])
        if not self.mismatched or not encoded.trajectories:
            return encoded
        other_place = self._place_of_other_prompt(rows, place)
        if other_place is None:
            return encoded
        (t,) = encoded.trajectories
        (other,) = self._encode_row(rows[other_place]).trajectories
        num_prompt = prompt_length(t)
        begin = prompt_length(other)
        tokens = np.concatenate([t.tokens[:num_prompt], other.tokens[begin:]])
        sampled = np.concatenate([np.zeros(num_prompt, bool), other.sampled[begin:]])
        mismatched = replace(
            t,
            tokens=tokens[: self.max_tokens],
            sampled=sampled[: self.max_tokens],
            logprobs=np.zeros(min(len(tokens), self.max_tokens), np.float32),
            images=[span for span in t.images if span.start < num_prompt],
            episode=MISMATCHED,
        )
        return Encoded([t, mismatched], encoded.lost)

    def _place_of_other_prompt(self, rows: list[int], place: int) -> int | None:
        """Return the place of the nearest row before it with another prompt; None: there is none.

        That of a row with the same prompt is also this row's, so that many such rows in a step are
        not walked over again for each of them.
        """
        if self.found_in[0] is not rows:
            self.found_in = rows, {}
        known = self.found_in[1]
        (t,) = self._encode_row(rows[place]).trajectories
        prompt = _prompt_of(t)
        found = None
        for distance in range(1, len(rows)):
            before = (place - distance) % len(rows)
            others = self._encode_row(rows[before]).trajectories
            if not others:  # it is dropped
                continue
            if _prompt_of(others[0]) != prompt:
                found = before
                break
            if before in known:
                found = known[before]
                break
        known[place] = found
        return found


def _prompt_of(t: Trajectory) -> tuple[list[int], list[str]]:
    """Return the tokens of a sequence's prompt, and its images."""
    num = prompt_length(t)
    return t.tokens[:num].tolist(), [span.url for span in t.images if span.start < num]
