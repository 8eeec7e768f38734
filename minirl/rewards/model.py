"""A trained reward model as a reward: it runs in process, on the mesh of the trainer."""

import math
from pathlib import Path

import numpy as np

from minirl.config.shared import PolicyConfig
from minirl.errors import UserError
from minirl.log import Timer
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy, annotate_examples
from minirl.types import Trajectory


class RewardModel:
    """A trained reward model in process: sequences of prompt and completion -> scores.

    Its parameters are offloaded until somebody wakes them; `grade` does.
    """

    def __init__(
        self,
        cfg: PolicyConfig,
        folder: Path,
        mesh: Mesh,
        stop_ids: list[int],
        eos_token_id: int | None,
        tokens_per_rank: int,
        *,
        weight: float = 1.0,
        sequence_parallel: bool = False,
        timer: Timer | None = None,
    ):
        """Load the model and offload it.

        Args:
            cfg: As Policy has it, like `folder`, `mesh`, `sequence_parallel` and `timer`.
            folder: Of the trained model.
            mesh: Whose ranks share the work.
            stop_ids: Tokens that end a completion.
            eos_token_id: Appended to a completion that no stop token ends; None: the first of
                `stop_ids` is.
            tokens_per_rank: Budget of a micro-batch; a sequence has at most one token less.
            weight: Of the score in the sum of rewards.
            sequence_parallel: Shard activations between tensor-parallel regions.
            timer: Of the program.
        """
        self.model = Policy(
            cfg,
            folder,
            mesh,
            trainable=False,
            score=True,
            sequence_parallel=sequence_parallel,
            timer=timer,
        )
        self.stop_ids = stop_ids
        self.end_id = stop_ids[0] if eos_token_id is None else eos_token_id
        self.tokens_per_rank = tokens_per_rank
        self.weight = weight
        self.model.sleeper.sleep_parameters()

    def __call__(self, trajectories: list[Trajectory]) -> list[float]:
        """Return the scores of this rank's sequences; all ranks share the work. Collective."""
        mesh = self.model.mesh
        examples = [
            self._make_example(number * mesh.world_size + mesh.rank, t)
            for number, t in enumerate(trajectories)
        ]
        scores = {
            (t.group, t.episode): float(values[-1])
            for t, values in annotate_examples(self.model, examples, self.tokens_per_rank)
        }
        for others in mesh.gather(scores):
            scores.update(others)
        return [scores[t.group, t.episode] for t in examples]

    def grade(self, trajectories: list[Trajectory]) -> None:
        """Add the weighted scores to the rewards of this rank's trajectories.

        Each score goes to `info["rewards"]["model"]`, too. Of an episode in segments the score of
        the last one counts. The parameters are offloaded afterwards. Collective.

        Raises:
            UserError: A score is not a finite number.
        """
        self.model.sleeper.wake_parameters()
        scores = self(trajectories)
        self.model.sleeper.sleep_parameters()
        pairs = zip(trajectories, scores, strict=True)
        last_scores: dict[tuple[int, int], float] = {}
        for t, score in sorted(pairs, key=lambda pair: pair[0].segment):
            last_scores[t.group, t.episode] = score
        for t in trajectories:
            score = last_scores[t.group, t.episode]
            if not math.isfinite(score):
                raise UserError(
                    f"reward.model = {self.model.folder} scored {score} for prompt "
                    f"{str(t.info['prompt'])[:80]!r}, completion {t.info['completion'][:80]!r}"
                )
            t.info.setdefault("rewards", {})["model"] = score
            t.reward += self.weight * score

    def _make_example(self, number: int, t: Trajectory) -> Trajectory:
        """Return the sequence with the token that ends it, and one more, whose row is the end's.

        Siblings keep sharing their prompt.
        """
        end = [] if len(t.tokens) and t.tokens[-1] in self.stop_ids else [self.end_id]
        tokens = np.append(t.tokens, [*end, self.end_id]).astype(np.int32)
        return Trajectory(
            tokens=tokens,
            sampled=np.append(t.sampled, [False] * len(end) + [True]),
            logprobs=np.zeros(len(tokens), np.float32),
            group=t.group,
            episode=number,
        )
