"""Ways to score an answer: functions, endpoints over HTTP, TRL's functions, a reward model."""

import abc
from collections.abc import Callable
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
    """What belongs to one call of a reward function beside prompt, completion and row."""

    tokens: list[int] = field(default_factory=list)  # Of the completion, the one that ends it too.
    state: TrainerState = field(default_factory=TrainerState)
    metrics: dict[str, list[float]] = field(default_factory=dict)  # Logged by the function.
    columns: dict[str, object] = field(default_factory=dict)  # Logged beside the completion.

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number for the metrics of the step."""
        self.metrics.setdefault(name, []).append(float(value))


class AdaptedReward(abc.ABC):
    """A reward function that was written for another library."""

    @abc.abstractmethod
    def score(
        self, prompt: RowPrompt, completion: str, row: dict, call: RewardCall
    ) -> float | None:
        """Return the reward; None: the function does not apply to this row."""

    def why_not(self, row: dict) -> str:
        """Return why no answer to this row can be scored; empty: it can."""
        return ""
