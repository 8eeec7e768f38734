"""Reward models from pairs of answers of which one was preferred; mesh, verbs and files of a run are those of minirl.sft.

    torchrun --nproc-per-node 2 -m minirl.rm --config configs/rm_longer_word.yaml

The model that it leaves is loaded by `AutoModelForSequenceClassification`, and its score is that of a sequence's last token.
"""

import functools
from pathlib import Path

from minirl import cli, sft
from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.checks import check_pairs
from minirl.config import RMConfig
from minirl.data import chat
from minirl.data.pairs import Pairs, load_pairs
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.types import Packed, Trajectory


class PairTrainer(sft.Trainer):
    """What reward models and DPO share: rows are pairs, whose two sides stay in one micro-batch."""

    lost = "{} with more than {max_tokens} tokens and {} with two equal sides dropped"

    def find_inputs(self) -> tuple[Path, Pairs, Pairs]:
        return sft.find_inputs(self.cfg, self.mesh, check_pairs, load_pairs, functools.partial(Pairs, score=self.score))

    def batches(self, examples: list[Trajectory]) -> list[Packed]:
        return sft.batches_of(examples, self.policy, self.mesh, self.cfg.tokens_per_rank, pairs=True)

    def scores(self) -> dict[str, float]:
        """Of held-out pairs: loss, share in which the chosen answer is put higher, and by how much on average."""
        found = self.policy.measure(self.batches(self.held_out.examples(range(len(self.held_out)))), self.make_loss())
        return {name: found[name] for name in ("loss", "accuracy", "margin")}


class Trainer(PairTrainer):
    name, score = "rm", True

    def find_inputs(self) -> tuple[Path, Pairs, Pairs]:
        folder, *rows = super().find_inputs()
        where, tokenizer = f"policy.model = {folder}", chat.load_tokenizer(folder, chats=False)
        families.score_class(build.read_config(folder), where)  # now, not when the run exports
        chat.filling_token_id(tokenizer, chat.stop_token_ids(tokenizer, folder), where)
        return folder, *rows

    def make_loss(self) -> Loss:
        return preference.reward_model(self.cfg.algo)


def main(cfg: RMConfig, mesh: Mesh) -> None:
    trainer = Trainer(cfg, mesh)
    with trainer.run.saver:
        trainer.train()


if __name__ == "__main__":
    cli.run(RMConfig, main)
