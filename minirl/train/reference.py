"""The frozen model that the KL or a preference is taken to."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from minirl.batch.attention_plan import RowLayout
from minirl.train.policy import Minibatch, Policy


def is_base(policy: Policy, folder: Path) -> bool:
    """Return whether a folder's model is the policy without its adapters.

    Then there is no second model to load. What is trained whole beside adapters is not the base's
    any more.
    """
    whole = policy.cfg.lora.modules_to_save
    return policy.adapters is not None and not whole and folder == policy.folder


class Reference:
    """A model of its own, which sleeps unless it works, or the policy with its adapters off."""

    def __init__(self, policy: Policy, model: Policy | None):
        """Take the reference of a policy.

        Args:
            policy: the trained model.
            model: a frozen one. None: the policy's base.
        """
        self.policy = policy
        self.model = model
        if model:
            model.sleeper.sleep()

    @property
    def layout(self) -> RowLayout:
        """Return what `pack` must make of micro-batches for it."""
        return (self.model or self.policy).layout

    @contextlib.contextmanager
    def awake(self) -> Iterator[Policy]:
        """Yield the model that computes as the reference does inside the block."""
        if self.model is None:
            with self.policy.without_adapters():
                yield self.policy
            return
        self.model.sleeper.wake_parameters()
        yield self.model
        self.model.sleeper.sleep_parameters()

    def annotate(self, minibatches: list[Minibatch]) -> None:
        """Set `ref_logprobs` of every micro-batch. Collective."""
        with self.awake() as model:
            model.annotate(minibatches, "ref_logprobs")
