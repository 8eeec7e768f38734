"""Ways to score an answer: functions, endpoints over HTTP, TRL's functions, a reward model."""

from collections.abc import Callable

from minirl.data.chat import RowPrompt

# Of the prompt, the completion and the row.
RewardFunction = Callable[[RowPrompt, str, dict], float]
