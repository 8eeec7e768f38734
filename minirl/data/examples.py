"""Examples to imitate or to compare, as token ids with their loss mask."""

from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.config.supervised import ChatsConfig, PairsConfig
from minirl.data import chat, images, turns
from minirl.data.formats import SIDES
from minirl.data.order import make_order
from minirl.data.rows import Rows, errors_at
from minirl.data.vision import Vision
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import Mesh
from minirl.types.packed import ImageSpan, Trajectory, prompt_length

# Episodes of a judged answer:
MATCHED = 0  # the row's answer,
MISMATCHED = 1  # and the answer of another row after this row's prompt.


def to_examples(
    tokenizer: PreTrainedTokenizerBase, vision: Vision | None, row: dict, stop_ids: list[int]
) -> list[Trajectory]:
    """Return a row of `open_chats` as token ids, with what is in the loss marked as sampled.

    It is one trajectory, or the segments of a chat with a history that the chat template rewrites.

    Raises:
        UserError: the chat has images and the model reads none, or the chat template fails.
    """
    if "text" in row:
        ids, mask = chat.encode_text(tokenizer, row["text"])
        return [_to_trajectory(ids, mask, None, [], segment=0)]
    messages = row["messages"]
    require(
        vision or not images.of_chat(messages),
        "a chat has images, and policy.model reads none; take a model of a family that does",
    )
    show = chat.renderer(tokenizer, row)
    segments = turns.encode_chat(tokenizer, messages, row["trained"], stop_ids, show)
    examples = []
    for number, (ids, mask, num_messages) in enumerate(segments):
        urls = images.of_chat(messages[:num_messages])
        examples.append(_to_trajectory(ids, mask, vision, urls, segment=number))
    return examples


def _to_trajectory(
    ids: list[int], mask: list[bool], vision: Vision | None, urls: list[str], *, segment: int
) -> Trajectory:
    """Return token ids with their images as a trajectory, the loss mask as what is sampled."""
    sampled = np.array(mask, bool)
    spans: list[ImageSpan] = []
    if vision and urls:
        ids, spans, sources = vision.expand(ids, urls)
        sampled = np.array([source >= 0 and sampled[source] for source in sources], bool)
    return Trajectory(
        tokens=np.array(ids, np.int32),
        sampled=sampled,
        logprobs=np.zeros(len(ids), np.float32),
        images=spans,
        segment=segment,
    )


class Encoded(NamedTuple):
    """What became of a row."""

    trajectories: list[Trajectory]  # None if the row is dropped.
    lost: tuple[bool, bool]  # Whether it is lost, in part or whole, by the two reasons of its kind.


@dataclass(frozen=True)
class StepExamples:
    """The examples of a step. An example is a row by its number in the order."""

    here: list[Trajectory]  # Those of this rank.
    # Of all ranks:
    num_rows: int  # Rows that are not dropped.
    num_tokens: int  # Tokens of the rows, in the loss or not.
    num_lost: list[int]  # Rows that are lost, by each of two reasons.


# The number of an example, its row, and what became of that.
_Example = tuple[int, int, Encoded]


class Chats:
    """Rows to imitate as token ids, cut to data.max_tokens.

    An example is a row, by its place in the order. A rank encodes those of its rows that a step
    needs, and while it trains those of the next step, in a thread. Encoded rows are kept while they
    are few. All ranks call the methods alike.
    """

    # What the log calls rows that are lost, by the two reasons.
    lost_names = ("rows_cut", "rows_dropped")
    # The error if every row of every rank is dropped: of how many rows, and why.
    none_left = (
        "none of the {num_rows} rows has a token in the loss within "
        "data.max_tokens = {max_tokens}; raise it"
    )
    KEPT_BYTES = 2**28  # Of the encoded rows that a rank keeps.
    OBJECT_BYTES = 1000  # Of a trajectory without its tokens.

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: list[int],
        cfg: ChatsConfig | PairsConfig,
        mesh: Mesh,
        thread: Executor,
        *,
        seed: int,
        shuffle: bool = True,
        vision: Vision | None = None,
        score: bool = False,
    ):
        """Put the rows in order, and see that not all will be dropped. Collective.

        Args:
            rows: all rows, as `open_chats` returns them (`open_pairs` for pairs).
            tokenizer: has the chat template.
            stop_ids: tokens that end an answer.
            cfg: has data.max_tokens.
            mesh: the ranks.
            thread: the only one that uses the tokenizer, which cannot work in two at once.
            seed: of the order.
            shuffle: whether the order is for training.
            vision: how the model reads images; None: it reads none.
            score: a model with a score head reads the end of a sequence. One more token follows, so
                that the last token has a row, which is the one that predicts it.

        Raises:
            UserError: every row is dropped.
        """
        self.rows = rows
        self.max_tokens = cfg.max_tokens
        self.to_examples = partial(to_examples, tokenizer, vision, stop_ids=stop_ids)
        self.mesh = mesh
        self.thread = thread
        self.shuffle = shuffle
        self.score = score
        self.order = make_order(rows, seed=seed, shuffle=shuffle)
        self.kept: dict[int, Encoded] = {}  # Encoded rows by their numbers.
        self.num_kept_bytes = 0
        # The examples of the next step, and their encoding.
        self.ahead: tuple[range, Future[list[_Example]]] | None = None
        # "{row}-{episode}" -> what takes the place of a trajectory's log-probs, float32 [L].
        self.reference_logprobs: dict[str, np.ndarray] = {}

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
            why = self.none_left.format(
                num_rows=len(rows),
                max_tokens=self.max_tokens,
                num_lost=sum(lost for _, lost in by_rank),
            )
            raise UserError(f"{rows.sources[0].label}: {why}")

    def __len__(self) -> int:
        return len(self.rows)

    def examples(self, numbers: range) -> StepExamples:
        """Return the examples of a step, and begin with those of the next one. Collective.

        Raises:
            UserError: a row cannot be encoded.
        """
        work = self._begin(numbers)
        encoded: list[_Example] = []
        with errors_of_all(self.mesh):
            encoded = work.result()
        if self.shuffle:  # an evaluation has no next step
            after = range(numbers.stop, numbers.stop + len(numbers))
            self.ahead = (after, self._begin(after))

        here = []
        num_lost = np.zeros(2, int)
        for number, row, result in encoded:
            num_lost += result.lost
            for t in result.trajectories:
                logprobs = t.logprobs
                if self.reference_logprobs:
                    logprobs = self.reference_logprobs[f"{row}-{t.episode}"]
                here.append(replace(t, group=number, logprobs=logprobs))
        counts = [len({t.group for t in here}), self.count_tokens(here), *num_lost.tolist()]
        num_rows, num_tokens, *lost = np.sum(self.mesh.gather(counts), axis=0).tolist()
        return StepExamples(here, num_rows, num_tokens, lost)

    def count_tokens(self, examples: list[Trajectory]) -> int:
        """Return the tokens of examples, in the loss or not."""
        return sum(len(t.tokens) for t in examples)

    def encoded_rows(self, numbers: range) -> dict[int, list[Trajectory]]:
        """Return this rank's rows among these by their numbers, without dropped ones. Collective.

        Raises:
            UserError: a row cannot be encoded.
        """
        here = [n for n in numbers if n % self.mesh.world_size == self.mesh.rank]
        encoded: list[Encoded] = []
        with errors_of_all(self.mesh):
            encoded = list(self.thread.map(self._encode_row, here))
        kept = {}
        for number, result in zip(here, encoded, strict=True):
            if result.trajectories:
                kept[number] = result.trajectories
        return kept

    def _begin(self, numbers: range) -> Future[list[_Example]]:
        """Begin to encode this rank's examples of a step, unless that has been begun."""
        if self.ahead and self.ahead[0] == numbers:
            return self.ahead[1]
        rows = self.order.rows(numbers.start, numbers.stop).tolist()
        return self.thread.submit(self._encode_step, numbers.start, rows)

    def _encode_step(self, first: int, rows: list[int]) -> list[_Example]:
        """Return this rank's examples of a step, in the thread.

        A row is always of the same rank, which may have kept it.

        Args:
            first: the number of the first example of the step.
            rows: the rows of its examples.
        """
        mesh = self.mesh
        return [
            (first + place, row, self._encode_place(rows, place))
            for place, row in enumerate(rows)
            if row % mesh.world_size == mesh.rank
        ]

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
            t.tokens = t.tokens[: self.max_tokens]
            t.sampled = t.sampled[: self.max_tokens]
            t.logprobs = t.logprobs[: self.max_tokens]
            t.images = [span for span in t.images if span.start < self.max_tokens]
            if t.sampled.any():
                kept.append(t)
        return Encoded(kept, (is_cut, not kept))


class Pairs(Chats):
    """Pairs as token ids: two trajectories of each row.

    Episode 0 is the chosen side, and its reward is the margin; episode 1 is the rejected one.
    """

    lost_names = ("pairs_too_long", "pairs_equal")
    none_left = (
        "of {num_rows} pairs none is left: {num_lost[0]} have a side of more than "
        "data.max_tokens = {max_tokens} tokens, {num_lost[1]} have a chosen side equal to the "
        "rejected one"
    )

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
                trained = [i for i in answer if messages[i]["role"] == "assistant"]
                example = {"messages": messages, "trained": trained}
                if "template_inputs" in row:
                    example["template_inputs"] = row["template_inputs"]
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
    none_left = (
        "of {num_rows} rows none is left: {num_lost[0]} have more than data.max_tokens = "
        "{max_tokens} tokens, {num_lost[1]} have no token in the loss"
    )

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
        """Add the answer of the nearest row before it that is not dropped, if there is one."""
        encoded = self._encode_row(rows[place])
        if not self.mismatched or not encoded.trajectories:
            return encoded
        (t,) = encoded.trajectories
        for distance in range(1, len(rows)):
            others = self._encode_row(rows[place - distance]).trajectories
            if others:
                break
        else:
            return encoded
        num_prompt = prompt_length(t)
        begin = prompt_length(others[0])
        tokens = np.concatenate([t.tokens[:num_prompt], others[0].tokens[begin:]])
        sampled = np.concatenate([np.zeros(num_prompt, bool), others[0].sampled[begin:]])
        mismatched = replace(
            t,
            tokens=tokens[: self.max_tokens],
            sampled=sampled[: self.max_tokens],
            logprobs=np.zeros(min(len(tokens), self.max_tokens), np.float32),
            images=[span for span in t.images if span.start < num_prompt],
            episode=MISMATCHED,
        )
        return Encoded([t, mismatched], encoded.lost)
