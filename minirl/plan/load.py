"""What a rank works on, and what is done with it."""

from dataclasses import dataclass, field
from typing import Literal

from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.rl import RefitConfig
from minirl.model.logprob import CHUNK_BYTES
from minirl.plan.cards import CARDS, Card

# What is minimised. frozen: nothing; the model computes log-probs.
LossName = Literal["policy", "value", "sft", "reward", "dpo", "kto", "frozen"]


@dataclass(kw_only=True)
class Load:
    """What a rank trains on in an optimizer step.

    With context parallelism, it is what the ranks of a context share.
    """

    tokens: int  # Rows of a micro-batch, at most.
    num_micro: int = 2  # Micro-batches.
    sequence: int = 1024  # Tokens of a sequence, prompt and answer.
    prompt: int = 256  # Of these, tokens that are not in the loss.
    samples: int = 8  # Answers to a prompt, which share its rows.
    whole_groups: bool = False  # And are never in two micro-batches: pairs.

    @property
    def answer(self) -> int:
        """Return the tokens of a sequence that are in the loss."""
        return self.sequence - self.prompt

    @property
    def num_answers(self) -> int:
        """Return how many answers a micro-batch holds; one at least."""
        groups, rest = divmod(self.tokens, self.rows(self.samples))
        if self.whole_groups:
            return max(1, groups) * self.samples
        more = max(0, rest - self.rows(0)) // self.answer
        return max(1, groups * self.samples + more)

    def rows(self, num_answers: int) -> int:
        """Return the rows of so many answers: theirs, and those of prompts but their last."""
        num_prompts = max(1, -(-num_answers // self.samples))
        return num_answers * self.answer + num_prompts * (self.prompt - 1)


@dataclass(kw_only=True)
class Job:
    """A model and what is done with it."""

    folder: str  # Holds config.json.
    load: Load
    world_size: int = 8
    gpus_per_node: int = 8
    card: Card = CARDS["h200"]
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    loss: LossName = "policy"
    share_base: bool = False  # It computes with the frozen base of another model with adapters.
    sleep: bool = False  # Behind the steps it sleeps and wakes.
    refit: RefitConfig | None = None  # Moves the weights into an engine, too, while it sleeps.
    head_chunk_bytes: int = CHUNK_BYTES["cuda"]  # Of the logits that are alive at once.
