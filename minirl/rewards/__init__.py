"""Ways to score an answer: functions, endpoints over HTTP, TRL's functions, a reward model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minirl.data.chat import RowPrompt

# Of the prompt, the completion and the row.
RewardFunction = Callable[[RowPrompt, str, dict], float]


@dataclass
class TrainerState:
    """Where a run stands, as functions written for TRL see it; names are those of transformers."""

    global_step: int = 0  # Optimizer steps of the policy so far.
    max_steps: int = 0  # Optimizer steps of the whole run.
    epoch: float = 0.0  # Passes over the training prompts so far.
    num_train_epochs: float = 0.0  # Passes over them in the whole run.
    is_world_process_zero: bool = True


@dataclass(kw_only=True)
class RewardCall:
    """What a reward function may read and log, besides prompt, completion and row."""

    tokens: list[int] = field(default_factory=list)  # Of the completion, the one that ends it too.
    #: What was said since the prompt, the completion last, with calls of tools and their replies.
    #: Empty: nothing was said in messages.
    messages: list[dict] = field(default_factory=list)
    state: TrainerState = field(default_factory=TrainerState)
    metrics: dict[str, list[float]] = field(default_factory=dict)  # Logged by the function.
    columns: dict[str, object] = field(default_factory=dict)  # Logged with the completion.

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number for the metrics of the step. Raises ValueError if it is not finite."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"its metric {name} is {number}, and must be finite")
        self.metrics.setdefault(name, []).append(number)

    def log_column(self, name: str, value: object) -> None:
        """Keep a value that the dump has with the completion."""
        self.columns[name] = to_plain(value)


@dataclass(kw_only=True)
class Answer:
    """A completion that is to be scored."""

    row: dict
    completion: str  # Without special tokens.
    call: RewardCall
    values: dict[str, float | None] = field(default_factory=dict)  # By function, so far.


class AdaptedReward:
    """A reward function that was written for another library: `score` or `score_all` is its own.

    Attributes:
        together: it is called for all completions of a prompt at once.
    """

    together = False

    def score(self, answer: Answer) -> float | None:
        """Return the reward of an answer."""
        raise NotImplementedError

    def score_all(self, answers: Sequence[Answer]) -> Sequence[float | None]:
        """Return the rewards of completions of one prompt."""
        return [self.score(answer) for answer in answers]

    def why_not(self, row: dict) -> str:
        """Return why no answer to this row can be scored; empty: it can."""
        return ""


def to_plain(value: object) -> object:
    """Return a value that a function logs as JSON can hold it; a text of it, if it is no such."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return str(value)
