"""What a run has done so far, beside weights."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Progress:
    """What a checkpoint and the summary need beside weights."""

    # Name (before_sft, before_rl, after_rl, before, after) -> result of that evaluation.
    evaluations: dict[str, dict] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # Of each phase.
    # That checkpoints and exports were written beside training, which did not wait for them.
    background_seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # Generated, trained, ...
    # Prompts that dynamic sampling took beyond rollout.prompts_per_step, in all steps.
    extra_tickets: int = 0
    gpu_memory: dict[str, float] = field(default_factory=dict)  # Most GiB of a rank, by phase.
    kl_coef: float | None = None  # As adapted for algo.kl_target; None: it was not adapted.
    # Count, mean and squares about the mean of all rewards, for reward.normalize.
    reward_stats: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    outcomes: str = ""  # Of the prompts in past steps, as a curriculum saves them.

    def add_memory(self, memory: dict[str, float]) -> None:
        """Keep the largest value by name."""
        for name, value in memory.items():
            self.gpu_memory[name] = max(self.gpu_memory.get(name, 0.0), value)

    def add(self, seconds: dict[str, float], **tokens: int) -> None:
        """Add seconds by phase, and tokens by kind."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0) + value
        for name, num in tokens.items():
            self.tokens[name] = self.tokens.get(name, 0) + num
