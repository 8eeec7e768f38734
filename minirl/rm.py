"""Reward models from pairs of answers of which one was preferred; mesh, verbs and files of a run are those of minirl.sft.

    torchrun --nproc-per-node 2 -m minirl.rm --config configs/rm_spell_backward.yaml

The model that it leaves is loaded by `AutoModelForSequenceClassification`, and its score is that of a sequence's last token. It answers HTTP
requests for rewards by

    python -m minirl.rm serve runs/rm/model --port 5000       # for minirl.rl --reward.function http://127.0.0.1:5000/get_reward
"""

import functools
import math
import sys
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from minirl import cli, sft
from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.checks import check_pairs
from minirl.config import PolicyConfig, RewardConfig
from minirl.config_supervised import RMConfig, ServeConfig
from minirl.data import chat
from minirl.data.pairs import Pairs, load_pairs
from minirl.log import Timer
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy
from minirl.rollout.remote import serve
from minirl.run import complete, find_teacher
from minirl.sft import annotated
from minirl.types import Trajectory, UserError


class PairTrainer(sft.Trainer):
    """What reward models and DPO share: rows are pairs, whose two sides stay in one micro-batch."""

    lost = "{} with more than {max_tokens} tokens and {} with two equal sides dropped"
    pairs, check, load, make = True, staticmethod(check_pairs), staticmethod(load_pairs), functools.partial(Pairs, score=False)

    def scores(self, measured: dict[str, float]) -> dict[str, float]:
        """Of held-out pairs: loss, share in which the chosen answer is put higher, and by how much on average."""
        return {name: measured[name] for name in ("loss", "accuracy", "margin")}


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


def main(cfg: RMConfig, mesh: Mesh) -> None:
    complete(Trainer(cfg, mesh))


class RewardModel:
    """A trained reward model, run in process: prompts with answers, as token ids -> the scores of their ends. Asleep until it is woken or `grade` does."""

    def __init__(self, cfg: PolicyConfig, folder: Path, mesh: Mesh, stop_ids: list[int], eos: int | None, tokens_per_rank: int, *,
                 weight: float = 1.0, sequence_parallel: bool = False, timer: Timer | None = None):
        """An answer that no token of `stop_ids` ends gets the tokenizer's, `eos`; rows have at most tokens_per_rank - 1 tokens. `cfg`: how it runs."""
        self.model = Policy(cfg, folder, mesh, trainable=False, score=True, sequence_parallel=sequence_parallel, timer=timer)
        self.stop_ids, self.tokens_per_rank, self.weight = stop_ids, tokens_per_rank, weight
        self.end = stop_ids[0] if eos is None else eos
        self.model.sleeper.sleep_parameters()

    def __call__(self, rows: list[Trajectory]) -> list[float]:
        """Of the sequences of this rank; all ranks share the work. Collective."""
        mesh = self.model.mesh
        ended = [self._ended(number * mesh.world_size + mesh.rank, t) for number, t in enumerate(rows)]
        own = {(t.group, t.episode): float(values[-1]) for t, values in annotated(self.model, ended, self.tokens_per_rank, "values")}
        found = {name: score for part in mesh.gather(own) for name, score in part.items()}
        return [found[t.group, t.episode] for t in ended]

    def grade(self, trajectories: list[Trajectory]) -> None:
        """Add the weighted scores to the rewards of this rank's trajectories, and each to `info["rewards"]`; of an episode in segments that of the
        last counts. Asleep afterwards. Collective. Raises UserError for a score that is no number."""
        self.model.sleeper.wake_parameters()
        scores = self(trajectories)
        self.model.sleeper.sleep_parameters()
        last = {(t.group, t.episode): score for t, score in sorted(zip(trajectories, scores, strict=True), key=lambda pair: pair[0].segment)}
        for t in trajectories:
            score = last[t.group, t.episode]
            if not math.isfinite(score):
                raise UserError(f"reward.model = {self.model.folder} scored {score} for prompt {str(t.info['prompt'])[:80]!r}, completion {t.info['completion'][:80]!r}")
            t.info.setdefault("rewards", {})["model"] = score
            t.reward += self.weight * score

    def _ended(self, number: int, t: Trajectory) -> Trajectory:
        """With the token that ends an answer, and one more, whose row is the end's. Siblings keep sharing their prompt."""
        end = [] if len(t.tokens) and t.tokens[-1] in self.stop_ids else [self.end]
        tokens, sampled = np.append(t.tokens, [*end, self.end]).astype(np.int32), np.append(t.sampled, [False] * len(end) + [True])
        return Trajectory(tokens=tokens, sampled=sampled, logprobs=np.zeros(len(tokens), np.float32), group=t.group, episode=number)


def find_reward_model(cfg: RewardConfig, policy: PretrainedConfig, tensor_parallel: int = 1) -> Path | None:
    """The folder of reward.model, if it names one. Raises UserError for another vocabulary, or none with a score head."""
    return check_head(find_teacher(cfg.model, policy, tensor_parallel, "reward.model"), "reward.model") if cfg.model else None


def check_head(folder: Path, setting: str) -> Path:
    """A language model's would be made of zeros, which a critic can learn from and nobody else. Raises UserError."""
    if build.SCORE not in build.Weights(folder).slices:
        raise UserError(f"{setting} = {folder} is no reward model: its weights have no {build.SCORE}; train one with minirl.rm")
    return folder


class Scorer:
    """Texts -> scores of their ends. Texts are whole: prompts with their chat template, answers behind."""

    def __init__(self, cfg: ServeConfig, mesh: Mesh):
        folder = check_head(build.resolve(cfg.model, "model"), "model")
        self.max_tokens, self.tokenizer = cfg.max_tokens, chat.load_tokenizer(folder, chats=False)
        stop_ids = chat.stop_token_ids(self.tokenizer, folder)
        self.model = RewardModel(PolicyConfig(dtype=cfg.dtype), folder, mesh, stop_ids, self.tokenizer.eos_token_id, cfg.tokens_per_batch)
        self.model.model.sleeper.wake_parameters()

    def __call__(self, texts: list[str]) -> list[float]:
        ids = [self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][-self.max_tokens + 1 :] for text in texts]
        return self.model([Trajectory(tokens=np.array(row, np.int32), sampled=np.zeros(len(row), bool), logprobs=np.zeros(len(row), np.float32)) for row in ids])


def serve_model(cfg: ServeConfig, mesh: Mesh) -> None:
    if mesh.world_size > 1:
        raise UserError(f"minirl.rm serve is one process, and there are {mesh.world_size} ranks; start one server each, at ports of their own, and name "
                        "all of them in reward.function, separated by commas")
    if cfg.tokens_per_batch < cfg.max_tokens:
        raise UserError(f"tokens_per_batch = {cfg.tokens_per_batch} must be at least max_tokens = {cfg.max_tokens}")
    serve(Scorer(cfg, mesh), cfg.host, cfg.port)


if __name__ == "__main__":
    cli.run(ServeConfig, serve_model) if sys.argv[1:2] == ["serve"] else cli.run(RMConfig, main)
