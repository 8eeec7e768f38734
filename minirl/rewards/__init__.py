"""Ways to score an answer: functions, endpoints over HTTP, TRL's functions, a reward model."""

from collections.abc import Callable

RowPrompt = str | list[dict]  # A row's prompt: a text, or messages.
# Of the prompt, the completion and the row.
RewardFunction = Callable[[RowPrompt, str, dict], float]
