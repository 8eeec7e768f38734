"""The two structs that everything exchanges: `Trajectory` on the host, `Packed` on the device.

A worked example. The prompt is `7 8`, the policy sampled `9 2` and 2 ends a sequence (no sibling shares the prompt):

    Trajectory.tokens    7    8    9    2
    Trajectory.sampled   F    F    T    T
    Trajectory.logprobs  0.  0.  -.3  -.1

`pack` shifts once, so that row t of every packed tensor speaks about `targets[t]`:

    Packed.inputs        7    8    9
    Packed.targets       8    9    2
    Packed.positions     0    1    2
    Packed.mask          F    T    T
    Packed.engine_logprobs 0. -.3  -.1
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class UserError(Exception):
    """Something that the user can mend; printed as one message without a traceback, exit code 2."""


def require(ok: object, message: str) -> None:
    """Raises UserError(message) where that does not hold."""
    if not ok:
        raise UserError(message)


class Placed(NamedTuple):
    """An image among the tokens of a sequence."""

    place: int  # of its first token
    num: int  # of its tokens
    url: str  # A data URL: the image itself.


@dataclass(kw_only=True)
class Trajectory:
    """One token-exact sequence: what the engine saw and sampled, id by id."""

    tokens: np.ndarray  # int32 [L]: prompt, sampled tokens, and what an environment said in between.
    sampled: np.ndarray  # bool [L]: True where the policy chose the token. The first token is never sampled.
    logprobs: np.ndarray  # float32 [L]: the engine's log-prob of sampled tokens at the sampling temperature, else 0.
    reward: float = 0.0
    group: int = 0  # Ticket of the prompt; siblings share it (the group baseline).
    episode: int = 0  # Number of the sample within its group.
    segment: int = 0  # Number within its episode: a new one begins where history was rewritten. Segments share reward and advantage.
    version: int = 0  # Optimizer steps that the weights had seen when the oldest token was sampled.
    versions: np.ndarray | None = None  # int32 [L]: the same of each token, -1 where none was sampled; stays on the rank that sampled it.
    # float32 [L]: the part of `reward` that was given for single answers, at their last tokens; None: there is none. The rest is the last token's.
    rewards: np.ndarray | None = None
    images: list[Placed] = field(default_factory=list)  # Those that an environment showed, in their order.
    group_tokens: int = 0  # Sampled tokens of all trajectories of the group; `exchange` counts them, on whatever ranks they are.
    info: dict = field(default_factory=dict)  # For logs only; stays on the rank that sampled it.


# The arrays that a rollout makes, of L values each.
ARRAYS = {"tokens": np.int32, "sampled": np.bool_, "logprobs": np.float32, "rewards": np.float32, "versions": np.int32}


@dataclass(frozen=True)
class Context:
    """The ranks that hold parts of the same sequences (context parallelism), and how their attention meets the others' keys."""

    group: ProcessGroup
    rank: int
    size: int
    ring: bool = False  # Keys travel from rank to rank; False: every rank gathers them all, layer by layer.


@dataclass(kw_only=True)
class Images:
    """Those of a micro-batch, each once, and the rows that they are in."""

    pixels: Tensor  # float32 [P, D]: patches.
    grids: Tensor  # int64 [I, 3]: how many patches an image has in time, height and width.
    rows: Tensor  # int64 [N]: whose input token stands for a part of an image,
    features: Tensor  # int64 [N]: and for which of the tower's outputs.
    positions: Tensor  # int64 [3, T]: of every row, in time, height and width.


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a model on its mesh asks of the rows of a micro-batch."""

    multiple: int = 1  # Their number on a rank is a multiple of this (sequence parallelism cuts them evenly).
    context: Context | None = None
    windowed: bool = False  # Some layers see a sliding window, and want `Packed.joined`.
    # `Vision.batch` (data/images.py) of a model that reads images.
    images: Callable[[list[tuple[list[Placed], np.ndarray]], torch.device], Images] | None = None


@dataclass(frozen=True)
class Run:
    """Row numbers in a rectangle; its ends repeat the last row."""

    rows: Tensor  # int64 [B, L]
    first: int | None  # If they count up by one, the first of them: a view does instead of a copy.


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """B pairs of like size."""

    queries: Run
    keys: Run
    filling: Tensor | None  # bool [B, Lq]: queries that only fill; None if there are none.
    # int64 [B, Lq], or [B, 1] of a block that is not causal: the last key that each query sees; None if that is the one at its own place, or all.
    last: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Block:
    """Part of an attention: ragged pairs of some query rows and the key rows that they see. A query is in one pair at most; what it
    sees in several blocks is merged by the log-sum-exp of its scores in each."""

    causal: bool  # The last query of a pair sees all its keys, and each one before it one key less. False: every query sees every key.
    rows: Tensor | None  # int64 [N]: the query rows, pair by pair; None: all rows in order.
    key_rows: Tensor | None  # int64 [M]: the same of the keys, which may repeat between pairs; None: the keys are the query rows, all in order.
    cu_queries: Tensor  # int32 [pairs + 1]: running sum of the pairs' queries.
    cu_keys: Tensor
    longest: tuple[int, int]  # Most queries and most keys of a pair, on the host so that no layer waits for the device.
    rectangles: tuple[Rectangle, ...]  # The same pairs for kernels that want equal lengths.
    places: Tensor | None  # int64 [N]: where each query is in the rectangles laid end to end; None if in order.


@dataclass(kw_only=True)
class Packed:
    """One micro-batch on the device: sequences laid end to end on one token axis of T rows, no padding.

    Answers to one prompt share its rows. The prompt but its last token is a sequence of its own, outside the loss; each answer's
    sequence begins with the last prompt token (whose target is the answer's first) and sees the prompt's keys before its own.
    """

    inputs: Tensor  # int64 [T]
    targets: Tensor  # int64 [T]: the next token of the same sequence.
    positions: Tensor  # int64 [T]: of the input token in its trajectory.
    mask: Tensor  # bool [T]: the target is in the loss.
    rows: Tensor  # int64 [N]: where `mask` is True; the language-model head runs on these rows only.
    lengths: tuple[int, ...]  # Rows of each of the S sequences, on the host so that no layer waits for the device.
    loss_tokens: Tensor  # int64 [S]: targets in the loss of each sequence, on all context ranks together.
    group_tokens: Tensor  # int64 [S]: targets in the loss of all sequences of its prompt, in whatever batches and on whatever ranks.
    rewards: Tensor  # float64 [S]: of the episode. This and `names` mean something where a sequence has targets in the loss.
    names: tuple[tuple[int, int, int], ...]  # (group, episode, segment) of each of the S sequences.
    # Attention without a window, in parts: each sequence's own rows, and what it sees before them. On a context ring: that of a rank's own rows, of
    # all rows with the first halves of an earlier rank, of the second halves with all rows of a later one.
    blocks: tuple[Block, ...]
    joined: Block | None = None  # The same as one causal block, for layers that see a sliding window only.
    images: Images | None = None  # Of a model that reads them.
    ends: Tensor | None = None  # bool [T]: the row is the last of a trajectory.
    pairs: Tensor | None = None  # int64 [P, 2], if asked for: numbers of the sequences of each pair's chosen and rejected answer.
    # Rows are this rank's part of each sequence: chunk r and chunk 2R - 1 - r of 2R, in zigzag so that causal work is even. Key rows of the blocks
    # count in the gathered rows of all ranks, rank by rank (but for those of a ring).
    context: Context | None = None
    temperature: float = 1.0  # Log-probs are of logits divided by it.
    engine_logprobs: Tensor | None = None  # float32 [T], as all below.
    turn_rewards: Tensor | None = None  # Part of `rewards` that was given for the answers which end with the targets.
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    old_entropy: Tensor | None = None
    advantages: Tensor | None = None
    values: Tensor | None = None  # A critic's, of what stood before the target.
    returns: Tensor | None = None  # What it should have said.
    forks: Tensor | None = None  # bool [T]: tokens whose policy gradient counts; None: all do.
