"""A model with a score head instead of the language model's: a reward model, or a critic."""

import torch
from torch import Tensor, nn

from minirl.model.causal import CausalModel, last_hidden
from minirl.parallel.tensor import TensorParallel
from minirl.types.packed import Packed

SCORE = "score.weight"  # Of the score head, in files, too.


class ScoreHead(nn.Linear):
    """The head of `AutoModelForSequenceClassification` with one label, in float32 at least."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return one number for each hidden state: [..., H] -> [...]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ self.weight[0].to(wide)


def score_forward(
    self: CausalModel,
    batch: Packed,
    entropy_gradient: bool = False,
    *,
    tp: TensorParallel | None,
) -> tuple[Tensor, None]:
    """Return the score of what has been read up to each row, in place of `packed_forward`.

    Returns:
        [T], 0 where the target is not in the loss; and no entropy.
    """
    scores = self.score(last_hidden(self, batch, tp))
    if tp:
        scores = tp.gather_tokens(scores)
    return scores.squeeze(0).masked_fill(~batch.loss_mask, 0), None
