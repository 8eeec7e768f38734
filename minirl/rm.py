"""Reward models from pairs of answers of which one was preferred.

    torchrun --nproc-per-node 2 -m minirl.rm --config configs/rm_spell_backward.yaml

Mesh, steps and files of a run are those of minirl.sft. `AutoModelForSequenceClassification` loads
the model that it leaves; the score is that of a sequence's last token. The model answers HTTP
requests for rewards by the first command, and RL asks it by the flag below:

    python -m minirl.rm serve runs/rm/model --port 5000
    --reward.function http://127.0.0.1:5000/get_reward
"""

import sys

import numpy as np

from minirl import cli
from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.config.shared import PolicyConfig
from minirl.config.supervised import RMConfig, ServeConfig
from minirl.data import chat
from minirl.errors import require
from minirl.inputs import check_head
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy
from minirl.rewards.http import serve
from minirl.rewards.model import RewardModel
from minirl.supervised import PairTrainer
from minirl.types import Trajectory


class Trainer(PairTrainer):
    """A run that trains a model with a score head."""

    cfg: RMConfig
    name = "rm"
    score_head = True

    def check_model(self) -> None:
        """Refuse now what `transformers` could not load when the run has exported it."""
        folder, config, tokenizer, _ = self.files
        where = f"policy.model = {folder}"
        families.score_class(config, where)
        chat.filling_token_id(tokenizer, chat.stop_token_ids(tokenizer, folder), where)

    def make_loss(self) -> Loss:
        """Return -log sigmoid of the difference of scores, or what `algo` asks for."""
        return preference.reward_model(self.cfg.algo)


def serve_model(cfg: ServeConfig, mesh: Mesh) -> None:
    """Answer HTTP requests for the scores of texts until the process is ended."""
    require(
        mesh.world_size == 1,
        f"minirl.rm serve is one process, and there are {mesh.world_size} ranks; start one server "
        "each, at ports of their own, and name all of them in reward.function, separated by commas",
    )
    require(
        cfg.tokens_per_batch >= cfg.max_tokens,
        f"tokens_per_batch = {cfg.tokens_per_batch} must be at least max_tokens = {cfg.max_tokens}",
    )
    folder = build.find_folder(cfg.model, "model")
    check_head(folder, "model")
    tokenizer = chat.load_tokenizer(folder, chats=False)
    model = RewardModel(
        Policy(PolicyConfig(dtype=cfg.dtype), folder, mesh, trainable=False, score=True),
        chat.stop_token_ids(tokenizer, folder),
        tokenizer.eos_token_id,
        cfg.tokens_per_batch,
    )
    model.model.sleeper.wake_parameters()

    def score(texts: list[str]) -> list[float]:
        """Score whole texts: prompts with their chat template, followed by answers."""
        rows = []
        for text in texts:
            ids = chat.encode(tokenizer, text)
            tokens = np.array(ids[-cfg.max_tokens + 1 :], np.int32)
            zeros = np.zeros(len(tokens), np.float32)
            rows.append(Trajectory(tokens=tokens, sampled=zeros.astype(bool), logprobs=zeros))
        return model(rows)

    serve(score, cfg.host, cfg.port)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        cli.run(ServeConfig, serve_model)
    else:
        cli.run(RMConfig, Trainer.main)
