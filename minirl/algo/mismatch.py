"""Whether the engine computes the model that is trained, by the log-probs of what it sampled."""

import math

from minirl.base.errors import require
from minirl.config.rl import RLConfig

# Nats, the mean over a step's tokens, by the coarser dtype of trainer and engine. A rounding error
# of a logit of 30 is 2^-8 of it in bfloat16, 0.1 at most, and 0.03 in TF32, in which a GPU may
# multiply float32 matrices; the mean over tokens is a fraction of it. (On CPU float32 makes 1e-6.)
# A bias that one of the two lacks makes 0.1 to 0.2, stale weights 0.6 to 6.
LIMITS = {"float32": 0.02, "bfloat16": 0.3}
PATIENCE = 3  # Steps in a row, after the first.


class MismatchWatch:
    """Ends a run whose engine samples from another model than the one that is trained."""

    def __init__(self, cfg: RLConfig):
        """Take the limit for the dtypes of trainer and engine.

        A temperature below 1 magnifies the differences of logits, and the limit with them.
        """
        of_engine = cfg.policy.dtype if cfg.engine.dtype == "auto" else cfg.engine.dtype
        self.dtype = "bfloat16" if "bfloat16" in (cfg.policy.dtype, of_engine) else "float32"
        self.limit = LIMITS[self.dtype] / min(1.0, cfg.rollout.temperature)
        self.num_checked = 0
        self.num_high = 0  # In a row.

    def check(self, step: int, metrics: dict[str, float]) -> None:
        """Look at the mean |trainer - engine| of a step, if its tokens are of the trained weights.

        The first step must be below the limit, for nothing has changed the weights yet but a
        refit. Later on single steps may be above it. Older tokens differ for good reasons.

        Args:
            step: number of the step.
            metrics: of the step: `mismatch`, unless the policy was not updated, and `staleness`.

        Raises:
            UserError: it is not finite, or too high at the first step or three times in a row.
        """
        if "mismatch" not in metrics or metrics["staleness"] > 0:
            return
        mismatch = metrics["mismatch"]
        require(
            math.isfinite(mismatch),
            f"step {step}: log-probs of the sampled tokens are not finite (mismatch {mismatch}): "
            "the policy's weights or activations have overflowed; go on from a checkpoint before, "
            "with a lower policy.lr",
        )
        self.num_high = self.num_high + 1 if mismatch > self.limit else 0
        is_first = self.num_checked == 0
        self.num_checked += 1
        require(
            self.num_high < (1 if is_first else PATIENCE),
            f"step {step}: the engine's log-probs of what it sampled differ from the trainer's at "
            f"the same weights by {mismatch:.3g} nats on average; {self.dtype} explains no more "
            f"than {self.limit:.3g}. The engine does not compute the model that is trained: its "
            "weights are stale or lost (--debug.check-refit compares them), or vLLM and "
            "transformers differ for this config.json; try --policy.dtype float32, and another "
            "version of vLLM",
        )
