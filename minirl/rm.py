"""Reward models from pairs of answers of which one was preferred; mesh, verbs and files of a run
are those of minirl.sft.

    torchrun --nproc-per-node 2 -m minirl.rm --config configs/rm_spell_backward.yaml

The model that it leaves is loaded by `AutoModelForSequenceClassification`, and its score is that of
a sequence's last token. It answers HTTP requests for rewards by

    python -m minirl.rm serve runs/rm/model --port 5000       # for minirl.rl --reward.function
    http://127.0.0.1:5000/get_reward
"""

import functools
import sys
from pathlib import Path

import numpy as np

from minirl import cli
from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.config.shared import PolicyConfig
from minirl.config.supervised import RMConfig, ServeConfig
from minirl.data import chat
from minirl.data.pairs import Pairs
from minirl.errors import UserError
from minirl.inputs import check_head
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.rewards.http import serve
from minirl.rewards.model import RewardModel
from minirl.supervised import PairTrainer
from minirl.types import Trajectory


class Trainer(PairTrainer):
    name, score, make = "rm", True, functools.partial(Pairs, score=True)

    def find_inputs(self) -> tuple[Path, Pairs, Pairs]:
        folder, *rows = super().find_inputs()
        where, tokenizer = f"policy.model = {folder}", chat.load_tokenizer(folder, chats=False)
        families.score_class(build.read_config(folder), where)  # now, not when the run exports
        chat.filling_token_id(tokenizer, chat.stop_token_ids(tokenizer, folder), where)
        return folder, *rows

    def make_loss(self) -> Loss:
        return preference.reward_model(self.cfg.algo)


def serve_model(cfg: ServeConfig, mesh: Mesh) -> None:
    if mesh.world_size > 1:
        raise UserError(
            f"minirl.rm serve is one process, and there are {mesh.world_size} ranks; start one server each, at ports of their own, and name "
            "all of them in reward.function, separated by commas"
        )
    if cfg.tokens_per_batch < cfg.max_tokens:
        raise UserError(
            f"tokens_per_batch = {cfg.tokens_per_batch} must be at least max_tokens = {cfg.max_tokens}"
        )
    folder = check_head(build.find_folder(cfg.model, "model"), "model")
    tokenizer = chat.load_tokenizer(folder, chats=False)
    stop_ids = chat.stop_token_ids(tokenizer, folder)
    model = RewardModel(
        PolicyConfig(dtype=cfg.dtype),
        folder,
        mesh,
        stop_ids,
        tokenizer.eos_token_id,
        cfg.tokens_per_batch,
    )
    model.model.sleeper.wake_parameters()

    def score(texts: list[str]) -> list[float]:
        """Texts are whole: prompts with their chat template, answers behind."""
        ids = [
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][
                -cfg.max_tokens + 1 :
            ]
            for text in texts
        ]
        return model(
            [
                Trajectory(
                    tokens=np.array(row, np.int32),
                    sampled=np.zeros(len(row), bool),
                    logprobs=np.zeros(len(row), np.float32),
                )
                for row in ids
            ]
        )

    serve(score, cfg.host, cfg.port)


if __name__ == "__main__":
    cli.run(ServeConfig, serve_model) if sys.argv[1:2] == ["serve"] else cli.run(
        RMConfig, Trainer.main
    )
