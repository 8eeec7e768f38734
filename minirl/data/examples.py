"""Examples to imitate: from rows in anyone's columns to token ids with their loss mask."""

from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.config.supervised import ChatsConfig, PairsConfig
from minirl.data import chat, images, turns
from minirl.data.messages import fault_of, is_messages, is_prompt, why_no_messages
from minirl.data.order import make_order
from minirl.data.rows import (
    Place,
    Rows,
    column,
    errors_at,
    open_rows,
    refuse_chats,
    template_inputs,
    with_images,
)
from minirl.data.vision_base import Vision
from minirl.parallel.machines import errors_of_all, raise_first
from minirl.parallel.mesh import Mesh
from minirl.types.images import ImageSpan
from minirl.types.packed import Trajectory


def open_chats(source: str | list[str], setting: str, cfg: ChatsConfig, mesh: Mesh) -> Rows:
    """Return rows to imitate, in the order of their sources. Collective.

    A row is, by the first of its columns that it has, a chat, a prompt with its completion (each a
    text or messages) or a text.

    Args:
        source: one source, or several, as sources.py describes them.
        setting: `data.train` or `data.eval`, for error messages.
        cfg: the names of the columns.
        mesh: the ranks.

    Returns:
        Rows {"messages": chat, "trained": indices of the assistant turns in the loss}, with
        "template_inputs" where they have some, or {"text": text}.

    Raises:
        UserError: a source cannot be read. A row that is none of these raises one when it is read.
    """
    return open_rows(source, setting, partial(to_chat, cfg=cfg), cfg, mesh)


def to_chat(raw: dict, place: Place, cfg: ChatsConfig) -> dict:
    """Return a row as `open_chats` does. Raises UserError if it is none of these."""
    messages = column(raw, cfg.messages_key)
    prompt = column(raw, cfg.prompt_key)
    completion = column(raw, cfg.completion_key)
    text = raw.get(cfg.text_key)
    if messages is None and completion is None and isinstance(text, str):
        return {"text": text}

    # 1. The messages outside the loss, and those whose answers may be in it.
    refuse_chats(place, cfg, messages, prompt if completion is not None else None, completion)
    if isinstance(completion, str | int | float):
        completion = [{"role": "assistant", "content": str(completion)}]
    before = []
    for kind, key, value in (
        ("prompt", cfg.prompt_key, prompt),
        ("completion", cfg.completion_key, completion),
    ):
        require(
            messages is not None or not isinstance(value, list) or is_messages(value),
            f"{place}: {key!r} (data.{kind}_key) is a list but no messages with role and "
            f"content{fault_of(value)}; give a text, or such a list",
        )
    if is_messages(messages):
        answer = chat.to_messages(messages, cfg.system_prompt)
    elif messages is None and is_prompt(prompt) and is_messages(completion):
        before = chat.to_messages(prompt, cfg.system_prompt)
        answer = completion
    else:
        raise UserError(
            f"{place} has neither {cfg.messages_key!r} (data.messages_key: messages with role and "
            f"content{fault_of(messages)}), nor {cfg.prompt_key!r} with {cfg.completion_key!r} "
            f"(data.prompt_key, data.completion_key), nor {cfg.text_key!r} (data.text_key) "
            f"(its keys: {', '.join(raw)}); set data.messages_key, prompt_key and "
            "completion_key, or text_key"
        )

    # 2. The turns in the loss.
    if problem := why_no_messages(before + answer):
        raise UserError(
            f"{place}: every message needs a role and a content that is a text, or a list of texts "
            f"and images; {problem}"
        )
    whole = with_images(before + answer, raw, place, cfg)
    assert not isinstance(whole, str)
    roles = [message["role"] for message in whole]
    trained = [i for i in range(len(before), len(whole)) if roles[i] == "assistant"]
    if not trained:
        raise UserError(f"{place}: no assistant turn follows")
    if not set(roles[: trained[0]]) - {"system"}:
        raise UserError(f"{place}: nothing is asked before the assistant's first turn")
    return {
        "messages": whole[: trained[-1] + 1],
        "trained": trained if cfg.train_on == "all_turns" else trained[-1:],
        **template_inputs(raw, place, cfg),
    }


def to_examples(
    tokenizer: PreTrainedTokenizerBase, vision: Vision | None, row: dict, stop_ids: list[int]
) -> list[Trajectory]:
    """Return a row of `open_chats` as token ids, with what is in the loss marked as sampled.

    It is one trajectory, or the segments of a chat whose history the chat template rewrites.

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


class _Work(NamedTuple):
    """The encoding of a step's rows on this rank."""

    numbers: range  # The examples of the step, on all ranks.
    numbers_here: list[int]  # Those of this rank,
    rows: list[int]  # and the numbers of their rows.
    encoded: Future[list[Encoded]]


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
    OBJECT_BYTES = 1000  # Of a trajectory beside its tokens.

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
        self.ahead: _Work | None = None  # Of the next step.
        # "{row}-{episode}" -> what takes the place of a trajectory's log-probs, float32 [L].
        self.reference_logprobs: dict[str, np.ndarray] = {}
        self._require_rows()

    def __len__(self) -> int:
        return len(self.rows)

    def examples(self, numbers: range) -> StepExamples:
        """Return the examples of a step, and begin with those of the next one. Collective.

        Raises:
            UserError: a row cannot be encoded.
        """
        work = self._begin(numbers)
        encoded: list[Encoded] = []
        error = None
        try:
            encoded = work.encoded.result()
        except UserError as caught:
            error = str(caught)
        if self.shuffle and not error:  # an evaluation has no next step
            self.ahead = self._begin(range(numbers.stop, numbers.stop + len(numbers)))

        here = []
        num_lost = np.zeros(2, int)
        for number, row, result in zip(work.numbers_here, work.rows, encoded, strict=not error):
            num_lost += result.lost
            for t in result.trajectories:
                logprobs = t.logprobs
                if self.reference_logprobs:
                    logprobs = self.reference_logprobs[f"{row}-{t.episode}"]
                here.append(replace(t, group=number, logprobs=logprobs))
        num_rows = len({t.group for t in here})
        num_tokens = self.count_tokens(here)
        of_ranks = self.mesh.gather((error, [num_rows, num_tokens, *num_lost.tolist()]))
        raise_first([error for error, _ in of_ranks])
        num_rows, num_tokens, *lost = np.sum([counts for _, counts in of_ranks], axis=0).tolist()
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
            encoded = self.thread.submit(self._encode_rows, here).result()
        kept = {}
        for number, result in zip(here, encoded, strict=True):
            if result.trajectories:
                kept[number] = result.trajectories
        return kept

    def _begin(self, numbers: range) -> _Work:
        """Begin to encode this rank's rows of a step, unless that has been begun."""
        if self.ahead and self.ahead.numbers == numbers:
            return self.ahead
        rows = self.order.rows(numbers.start, numbers.stop)
        # A row is always of the same rank, which may have kept it.
        is_here = rows % self.mesh.world_size == self.mesh.rank
        places = np.flatnonzero(is_here)
        numbers_here = (numbers.start + places).tolist()
        encoded = self.thread.submit(self._encode_step, rows.tolist(), places.tolist())
        return _Work(numbers, numbers_here, rows[is_here].tolist(), encoded)

    def _require_rows(self) -> None:
        """Encode rows until one is not dropped. Collective. Raises UserError if all are."""
        found = False
        num_lost = np.zeros(2, int)
        with errors_of_all(self.mesh):
            for number in range(self.mesh.rank, len(self.rows), self.mesh.world_size):
                (encoded,) = self.thread.submit(self._encode_rows, [number]).result()
                num_lost += encoded.lost
                found = bool(encoded.trajectories)
                if found:
                    break
        of_ranks = self.mesh.gather((found, num_lost))
        if not any(found for found, _ in of_ranks):
            why = self.none_left.format(
                num_rows=len(self.rows),
                max_tokens=self.max_tokens,
                num_lost=sum(lost for _, lost in of_ranks),
            )
            raise UserError(f"{self.rows.sources[0].label}: {why}")

    def _encode_step(self, rows: list[int], places: list[int]) -> list[Encoded]:
        """Return those of a step's rows that have these places in it, in the thread."""
        return self._encode_rows([rows[place] for place in places])

    def _encode_rows(self, numbers: list[int]) -> list[Encoded]:
        """Return rows as token ids, in the thread."""
        return [self._encode_row(number) for number in numbers]

    def _encode_row(self, number: int) -> Encoded:
        if number in self.kept:
            return self.kept[number]
        with errors_at(self.rows.place(number)):
            encoded = self.encode(self.rows[number])
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
