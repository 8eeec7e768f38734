"""Ways to score an answer: functions, endpoints over HTTP, TRL's functions, a reward model."""
