"""KTO: learning from single answers that were judged, wanted or not.

    torchrun --nproc-per-node 2 -m minirl.kto --config configs/kto_spell_backward.yaml

Mesh, steps and files of a run are those of minirl.sft.
"""

if __name__ == "__main__":  # First the flags: the imports below take seconds. It does not return.
    from minirl.config.supervised import KTOConfig
    from minirl.supervise import cli

    cli.run(KTOConfig, "minirl.kto:KTOTrainer.main")

import torch

from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.config.supervised import KTOConfig
from minirl.data.examples import MATCHED, Labelled
from minirl.run.supervised import SupervisedTrainer, Task
from minirl.train.policy import Metrics, Minibatch
from minirl.types.packed import Trajectory


class KTOTrainer(SupervisedTrainer):
    """A run with a frozen reference."""

    cfg: KTOConfig
    task = Task("kto", Labelled, single=True, scores=("loss", "accuracy", "margin", "kl"))

    def check_model(self) -> None:
        """Leave out the answers of other rows, if the loss does not need them."""
        for rows in (self.rows, self.held_out):
            assert isinstance(rows, Labelled)
            rows.mismatched = self.cfg.algo.loss == "kto"

    def make_loss(self) -> Loss:
        """Return the loss of the config: KTO or APO-zero."""
        return preference.kto(self.cfg.algo)

    def make_batches(self, examples: list[Trajectory]) -> Minibatch:
        """Return micro-batches with the reference's log-probs and the estimate of the KL."""
        batches = super().make_batches([t for t in examples if t.episode == MATCHED])
        self.annotate_reference(batches)
        baseline = torch.zeros((), dtype=torch.float64)
        if self.cfg.algo.loss == "kto":  # apo_zero_unpaired compares with 0
            # The policy's log-probs before the step, without gradients.
            mismatched = super().make_batches([t for t in examples if t.episode != MATCHED])
            self.annotate_reference(mismatched)
            with self.timer.phase("annotate"):
                self.policy.annotate([mismatched], "old_logprobs")
                baseline = preference.kto_baseline(mismatched, self.mesh.data_sums)
        for batch in batches:
            batch.preference.baseline = baseline.to(self.mesh.device)
        return batches

    def name_metrics(self, measured: Metrics) -> Metrics:
        """Return the metrics with the mean reward of each kind of answers, and their distance.

        Without answers of a kind it has no mean, and there is no distance.
        """
        metrics = dict(measured)
        wanted = metrics.pop("share_desirable")
        for name, share in (("reward_desirable", wanted), ("reward_undesirable", 1 - wanted)):
            total = metrics.pop(name)
            if share > 1e-9:
                metrics[name] = total / share
        if "reward_desirable" in metrics and "reward_undesirable" in metrics:
            metrics["margin"] = metrics["reward_desirable"] - metrics["reward_undesirable"]
        return metrics
