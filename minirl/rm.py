"""Reward models from pairs of answers of which one was preferred.

    torchrun --nproc-per-node 2 -m minirl.rm --config configs/rm_spell_backward.yaml

Mesh, steps and files of a run are those of minirl.sft. `AutoModelForSequenceClassification` loads
the model that it leaves; the score is that of a sequence's last token. The model answers HTTP
requests for rewards by the first command, and RL asks it by the flag below:

    python -m minirl.rm serve runs/rm/model --port 5000
    --reward.function http://127.0.0.1:5000/get_reward
"""

if __name__ == "__main__":  # First the flags: the imports below take seconds. It does not return.
    import sys

    from minirl.config.supervised import RMConfig, ServeConfig
    from minirl.supervise import cli

    if sys.argv[1:2] == ["serve"]:
        cli.run(ServeConfig, "minirl.rm:serve_model")
    cli.run(RMConfig, "minirl.rm:RewardModelTrainer.main")

from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.base.errors import require
from minirl.config.policy import PolicyConfig
from minirl.config.supervised import RMConfig, ServeConfig
from minirl.data import chat
from minirl.data.examples import Pairs
from minirl.data.tokenizer import filling_token_id, load_tokenizer, stop_token_ids
from minirl.endpoint.reward_server import serve
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.run.inputs import check_head, choose_dtype
from minirl.run.supervised import SupervisedTrainer, Task
from minirl.train.frozen import RewardModel
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory


class RewardModelTrainer(SupervisedTrainer):
    """A run that trains a model with a score head."""

    cfg: RMConfig
    task = Task("rm", Pairs, pairs=True, score_head=True, scores=("loss", "accuracy", "margin"))

    def check_model(self) -> None:
        """Refuse now what `transformers` could not load when the run has exported it."""
        folder, config, tokenizer, _ = self.files
        where = f"policy.model = {folder}"
        families.score_class(config, where)
        filling_token_id(tokenizer, stop_token_ids(tokenizer, folder), where)

    def make_loss(self) -> Loss:
        """Return -log sigmoid of the difference of scores, or what `algo` asks for."""
        return preference.reward_model(self.cfg.algo)


def serve_model(cfg: ServeConfig, mesh: Mesh) -> None:
    """Answer HTTP requests for the scores of texts until the process is ended."""
    require(
        mesh.world_size == 1,
        f"minirl.rm serve is one process, and there are {mesh.world_size} ranks; start one server "
        "each, with different ports, and name all of them in reward.function, separated by commas",
    )
    folder = build.find_folder(cfg.model, "model")
    check_head(folder, "model", scores=True)
    config = build.read_config(folder).get_text_config()
    max_tokens = longest_text(cfg, config.max_position_embeddings)
    tokenizer = load_tokenizer(folder, chats=False)
    dtype = choose_dtype(cfg.dtype, "dtype", mesh)
    policy = Policy(PolicyConfig(dtype=dtype), folder, mesh, trainable=False, score=True)
    model = RewardModel(
        policy,
        stop_token_ids(tokenizer, folder),
        tokenizer.eos_token_id,
        cfg.tokens_per_batch,
    )
    model.model.sleeper.wake_parameters()
    longest_token = max(map(len, tokenizer.get_vocab()))
    encode = partial(_to_row, tokenizer, max_tokens, config.vocab_size, longest_token)
    serve(encode, model, cfg)


def longest_text(cfg: ServeConfig, num_positions: int) -> int:
    """Return the most tokens of a sequence. Raises UserError if the model takes fewer."""
    require(
        cfg.max_tokens <= num_positions and cfg.max_tokens != 1,
        f"max_tokens = {cfg.max_tokens}: the model {cfg.model} has {num_positions} positions "
        f"(max_position_embeddings); use 2 to {num_positions}, or 0 for 8192 or all of them",
    )
    max_tokens = cfg.max_tokens or min(8192, num_positions)
    require(
        cfg.tokens_per_batch >= max_tokens,
        f"tokens_per_batch = {cfg.tokens_per_batch} must be at least max_tokens = {max_tokens}",
    )
    return max_tokens


def _to_row(
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    vocab_size: int,
    longest_token: int,
    text: str,
) -> Trajectory:
    """Return a whole text as a sequence: a prompt with its chat template, and an answer.

    Raises:
        UserError: the text has half of a character, or a token beyond the model's vocabulary.
    """
    # Only the end is read. Megabytes before it would take seconds.
    text = text[-longest_token * max_tokens :]
    tokens = np.array(chat.encode(tokenizer, text)[-max_tokens + 1 :], np.int32)
    require(
        np.all(tokens < vocab_size),
        f"the text has the token {tokens.max(initial=0)}, and the model has {vocab_size} tokens",
    )
    zeros = np.zeros(len(tokens), np.float32)
    return Trajectory(tokens=tokens, sampled=zeros.astype(bool), logprobs=zeros)
