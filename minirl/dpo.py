"""Direct preference optimization on pairs of answers.

    torchrun --nproc-per-node 2 -m minirl.dpo --config configs/dpo_spell_backward.yaml

Mesh, steps and files of a run are those of minirl.sft.
"""

if __name__ == "__main__":  # First the flags: the imports below take seconds. It does not return.
    from minirl.config.supervised import DPOConfig
    from minirl.supervise import cli

    cli.run(DPOConfig, "minirl.dpo:DPOTrainer.main")

from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.config.supervised import DPOConfig
from minirl.data.examples import Pairs
from minirl.run.supervised import SupervisedTrainer, Task
from minirl.train.policy import Minibatch
from minirl.types.packed import Trajectory


class DPOTrainer(SupervisedTrainer):
    """A run with a frozen reference."""

    cfg: DPOConfig
    task = Task("dpo", Pairs, pairs=True, scores=("loss", "accuracy", "margin"))

    def make_loss(self) -> Loss:
        """Return the loss of the config: DPO, IPO or hinge."""
        return preference.dpo(self.cfg.algo)

    def make_batches(self, examples: list[Trajectory]) -> Minibatch:
        """Return micro-batches with the reference's log-probs."""
        batches = super().make_batches(examples)
        self.annotate_reference(batches)
        return batches
