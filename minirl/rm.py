"""Reward models from pairs of answers of which one was preferred; mesh, verbs and files of a run are those of minirl.sft.

    torchrun --nproc-per-node 2 -m minirl.rm --config configs/rm_spell_backward.yaml

The model that it leaves is loaded by `AutoModelForSequenceClassification`, and its score is that of a sequence's last token. It answers HTTP
requests for rewards by

    python -m minirl.rm serve runs/rm/model --port 5000       # for minirl.rl --reward.function http://127.0.0.1:5000/get_reward
"""

import functools
import sys
from pathlib import Path

import numpy as np

from minirl import cli, sft
from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.checks import check_pairs
from minirl.config import PolicyConfig
from minirl.config_supervised import RMConfig, ServeConfig
from minirl.data import chat
from minirl.data.packing import pack, partition
from minirl.data.pairs import Pairs, load_pairs
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy
from minirl.rollout.remote import serve
from minirl.types import Packed, Trajectory, UserError


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


class Scorer:
    """Texts -> scores of their ends, with a trained reward model. Texts are whole: prompts with their chat template, answers behind."""

    def __init__(self, cfg: ServeConfig, mesh: Mesh):
        folder = build.resolve(cfg.model, "model")
        self.cfg, self.mesh, self.tokenizer = cfg, mesh, chat.load_tokenizer(folder, chats=False)
        self.stop_ids = chat.stop_token_ids(self.tokenizer, folder)
        self.model = Policy(PolicyConfig(dtype=cfg.dtype), folder, mesh, trainable=False, score=True)

    def __call__(self, texts: list[str]) -> list[float]:
        rows = [self._row(number, text) for number, text in enumerate(texts)]
        out = {}
        for (chosen,) in partition([len(t.tokens) - 1 for t in rows], 1, self.cfg.tokens_per_batch):
            batch = pack([rows[i] for i in chosen], self.mesh.device, layout=self.model.layout)
            self.model.annotate([[batch]], "values")
            numbers = [group for (group, *_), num in zip(batch.names, batch.loss_tokens.tolist(), strict=True) if num]
            out |= dict(zip(numbers, batch.values[batch.rows].tolist(), strict=True))
        return [out[number] for number in range(len(texts))]

    def _row(self, number: int, text: str) -> Trajectory:
        """With the token that ends an answer, and one more, whose row is the end's."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][-self.cfg.max_tokens + 1 :]
        ids = ids if ids[-1:] and ids[-1] in self.stop_ids else [*ids, self.stop_ids[0] if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id]
        tokens = np.array([*ids, ids[-1]], np.int32)
        return Trajectory(tokens=tokens, sampled=np.arange(len(tokens)) == len(ids), logprobs=np.zeros(len(tokens), np.float32), group=number)


def serve_model(cfg: ServeConfig, mesh: Mesh) -> None:
    if mesh.world_size > 1:
        raise UserError(f"minirl.rm serve is one process, and there are {mesh.world_size} ranks; start one server each, at ports of their own, and name "
                        "all of them in reward.function, separated by commas")
    if cfg.tokens_per_batch < cfg.max_tokens or cfg.max_tokens < 2:
        raise UserError(f"tokens_per_batch = {cfg.tokens_per_batch} must be at least max_tokens = {cfg.max_tokens}, and that at least 2")
    serve(Scorer(cfg, mesh), cfg.host, cfg.port)


if __name__ == "__main__":
    cli.run(ServeConfig, serve_model) if sys.argv[1:2] == ["serve"] else cli.run(RMConfig, main)
