"""A trained reward model as a reward: it runs in process, on the mesh of the trainer."""

import math

import numpy as np

from minirl.base.errors import require
from minirl.train.policy import Policy
from minirl.train.updates import annotate_examples
from minirl.types.packed import Trajectory


class RewardModel:
    """A trained reward model in process: sequences of prompt and completion -> scores.

    Its parameters are offloaded; `grade` reloads them.
    """

    def __init__(
        self,
        model: Policy,
        stop_ids: list[int],
        eos_token_id: int | None,
        tokens_per_rank: int,
        *,
        weight: float = 1.0,
    ):
        """Offload the model.

        Args:
            model: a frozen model with a score head. The ranks of its mesh share the work.
            stop_ids: tokens that end a completion.
            eos_token_id: appended to a completion that no stop token ends; None: the first of
                `stop_ids` is.
            tokens_per_rank: token budget of a micro-batch; a sequence has at most one token less.
            weight: weight of the score in the sum of rewards.
        """
        self.model = model
        self.stop_ids = stop_ids
        self.end_id = stop_ids[0] if eos_token_id is None else eos_token_id
        self.tokens_per_rank = tokens_per_rank
        self.weight = weight
        model.sleeper.sleep_parameters()

    def __call__(self, trajectories: list[Trajectory]) -> list[float]:
        """Return the scores of this rank's sequences; all ranks share the work. Collective."""
        mesh = self.model.mesh
        examples = []
        for number, t in enumerate(trajectories):
            # The token that ends the sequence, and one more: its row is the last token's.
            end = [] if len(t.tokens) and t.tokens[-1] in self.stop_ids else [self.end_id]
            tokens = np.append(t.tokens, [*end, self.end_id]).astype(np.int32)
            examples.append(
                Trajectory(
                    tokens=tokens,
                    sampled=np.append(t.sampled, [False] * len(end) + [True]),
                    logprobs=np.zeros(len(tokens), np.float32),
                    group=t.group,  # Siblings keep sharing their prompt.
                    episode=number * mesh.world_size + mesh.rank,  # One number for each example.
                )
            )
        annotated = annotate_examples(self.model, examples, self.tokens_per_rank)
        scores = {example.episode: float(values[-1]) for example, values in annotated}
        for others in mesh.gather(scores):
            scores |= others
        return [scores[example.episode] for example in examples]

    def grade(self, trajectories: list[Trajectory]) -> None:
        """Add the weighted scores to the rewards of this rank's trajectories.

        Each score goes to `info["rewards"]["model"]`, too. If an episode has segments, the score of
        the last one counts. The parameters are offloaded afterwards. Collective.

        Raises:
            UserError: a score is not a finite number.
        """
        trajectories = [t for t in trajectories if len(t.tokens)]  # Others have no answer.
        self.model.sleeper.wake_parameters()
        scores = self(trajectories)
        self.model.sleeper.sleep_parameters()
        last_scores = {  # Segments are in their order.
            (t.group, t.episode): score for t, score in zip(trajectories, scores, strict=True)
        }
        for t in trajectories:
            score = last_scores[t.group, t.episode]
            require(
                math.isfinite(score),
                f"reward.model = {self.model.folder} scored {score} for prompt "
                f"{str(t.info['prompt'])[:80]!r}, completion {t.info['completion'][:80]!r}",
            )
            t.info.setdefault("rewards", {})["model"] = score
            t.reward += self.weight * score
