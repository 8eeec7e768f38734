"""What is said of gradients and weights that are not finite, and when they end the run."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirl.base.errors import require
from minirl.base.log import say
from minirl.config.rl import section_of
from minirl.model import loading
from minirl.parallel.fsdp import local

if TYPE_CHECKING:
    from minirl.train.policy import Policy

# Updates that may be skipped in a row. One does no harm, but a run that learns nothing must end.
MAX_SKIPPED = 5


def report_skipped(policy: "Policy", loss: float, lr: float) -> None:
    """Say on the console that an update is skipped, and why. Collective.

    Raises:
        UserError: it is the fifth in a row, or no later one could be any better.
    """
    section = section_of(policy.cfg)
    check_finite(
        policy,
        "every update would be skipped from now on; resume from an earlier checkpoint with "
        f"{section}.lr below {lr:g}",
    )
    gradients = {name: p.grad for name, p in policy.parameters().items() if p.grad is not None}
    wrong = names_of_not_finite(policy, gradients)
    places = f"in {len(wrong)} of {len(gradients)} weights {', '.join(wrong[:2])}".strip()
    cause = f"the loss is {loss:.4g}, and the gradient is NaN or infinite {places}"
    number = policy.num_updates + 1
    text = f"the gradient of update {number} of the {section} is not finite: {cause}"
    if policy.mesh.rank == 0:
        say(f"{text}; the update is skipped")
    require(
        policy.num_skipped + 1 < MAX_SKIPPED,
        f"{MAX_SKIPPED} updates in a row were skipped: {text}. Nothing is learned any more; "
        f"lower {section}.lr, take {section}.dtype float32, or look at what the loss is made "
        "of (rewards, advantages, log-probs in metrics.jsonl)",
    )


def check_finite(policy: "Policy", consequence: str) -> None:
    """Refuse weights that are NaN or infinite. Collective.

    Args:
        policy: the model.
        consequence: what that means, and what to do.

    Raises:
        UserError: on all ranks.
    """
    wrong = names_of_not_finite(policy, policy.parameters())
    require(
        not wrong,
        f"after {policy.num_updates} updates {len(wrong)} weights of {policy.folder} are not "
        f"finite, {', '.join(wrong[:3])}: {consequence}",
    )


def names_of_not_finite(policy: "Policy", shards: dict[str, Tensor]) -> list[str]:
    """Return the names of those tensors of which a rank has NaN or infinity. Collective."""
    is_wrong = [int(not loading.is_finite(local(t))) for t in shards.values()]
    num_wrong = policy.mesh.sums(torch.tensor(is_wrong)).tolist()
    return [name for name, num in zip(shards, num_wrong, strict=True) if num]
