"""From supervised examples to a minibatch, and to the log-probs of a model that is not trained."""

import numpy as np

from minirl.batch.exchange import exchange
from minirl.batch.packing import pack, unpack
from minirl.train.policy import Minibatch, Policy
from minirl.types.packed import Trajectory


def make_minibatch(
    examples: list[Trajectory],
    policy: Policy,
    tokens_per_rank: int,
    *,
    pairs: bool = False,
    single: bool = False,
) -> Minibatch:
    """Return this rank's micro-batches of one optimizer step. Collective.

    Args:
        examples: any number of examples of this rank; they are spread over all ranks.
        policy: the model that will read them.
        tokens_per_rank: token budget of a micro-batch.
        pairs: whether groups are pairs; the two sides of a pair stay in one micro-batch.
        single: whether every answer counts alone, as in `pack`.
    """
    (minibatch,) = exchange(examples, policy.mesh, tokens_per_rank, whole_groups=pairs)
    return [
        pack(micro, policy.mesh.device, layout=policy.layout, pairs=pairs, single=single)
        for micro in minibatch
    ]


def annotate_examples(
    model: Policy, examples: list[Trajectory], tokens_per_rank: int
) -> list[tuple[Trajectory, np.ndarray]]:
    """Return the model's log-probs (or scores) of the examples of all ranks. Collective.

    Returns:
        (example, values [L] in the model's float dtype) on the ranks that computed them.
    """
    annotated: list[tuple[Trajectory, np.ndarray]] = []
    (minibatch,) = exchange(examples, model.mesh, tokens_per_rank)
    with model.inference():
        for micro in minibatch:
            batch = pack(micro, model.mesh.device, layout=model.layout)
            values, _ = model.model(batch)
            annotated += zip(micro, unpack(values, micro, batch), strict=True)
    return annotated
