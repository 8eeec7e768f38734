"""A trained reward model as a reward: run in process, on the mesh of the trainer."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from minirl.config.shared import PolicyConfig
from minirl.errors import UserError
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy, annotate_examples
from minirl.types import Trajectory


class RewardModel:
    """A trained reward model, run in process: prompts with answers, as token ids -> the scores of
    their ends. Asleep until it is woken or `grade` does.
    """

    def __init__(
        self,
        cfg: PolicyConfig,
        folder: Path,
        mesh: Mesh,
        stop_ids: list[int],
        eos: int | None,
        tokens_per_rank: int,
        weight: float = 1.0,
        **how: Any,
    ):
        """An answer that no token of `stop_ids` ends gets the tokenizer's, `eos`; rows have at most
        tokens_per_rank - 1 tokens. `cfg` and `how`: as Policy has them.
        """
        self.model = Policy(cfg, folder, mesh, trainable=False, score=True, **how)
        self.stop_ids, self.tokens_per_rank, self.weight = stop_ids, tokens_per_rank, weight
        self.end = stop_ids[0] if eos is None else eos
        self.model.sleeper.sleep_parameters()

    def __call__(self, rows: list[Trajectory]) -> list[float]:
        """Of the sequences of this rank; all ranks share the work. Collective."""
        mesh = self.model.mesh
        ended = [
            self._ended(number * mesh.world_size + mesh.rank, t) for number, t in enumerate(rows)
        ]
        own = {
            (t.group, t.episode): float(values[-1])
            for t, values in annotate_examples(self.model, ended, self.tokens_per_rank)
        }
        found = {name: score for part in mesh.gather(own) for name, score in part.items()}
        return [found[t.group, t.episode] for t in ended]

    def grade(self, trajectories: list[Trajectory]) -> None:
        """Add the weighted scores to the rewards of this rank's trajectories, and each to
        `info["rewards"]`; of an episode in segments that of the last counts. Asleep afterwards.
        Collective. Raises UserError for a score that is no number.
        """
        self.model.sleeper.wake_parameters()
        scores = self(trajectories)
        self.model.sleeper.sleep_parameters()
        last = {
            (t.group, t.episode): score
            for t, score in sorted(
                zip(trajectories, scores, strict=True), key=lambda pair: pair[0].segment
            )
        }
        for t in trajectories:
            score = last[t.group, t.episode]
            if not math.isfinite(score):
                raise UserError(
                    f"reward.model = {self.model.folder} scored {score} for prompt {str(t.info['prompt'])[:80]!r}, completion {t.info['completion'][:80]!r}"
                )
            t.info.setdefault("rewards", {})["model"] = score
            t.reward += self.weight * score

    def _ended(self, number: int, t: Trajectory) -> Trajectory:
        """With the token that ends an answer, and one more, whose row is the end's. Siblings keep
        sharing their prompt.
        """
        end = [] if len(t.tokens) and t.tokens[-1] in self.stop_ids else [self.end]
        tokens, sampled = (
            np.append(t.tokens, [*end, self.end]).astype(np.int32),
            np.append(t.sampled, [False] * len(end) + [True]),
        )
        return Trajectory(
            tokens=tokens,
            sampled=sampled,
            logprobs=np.zeros(len(tokens), np.float32),
            group=t.group,
            episode=number,
        )
