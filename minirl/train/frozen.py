"""Frozen models next to the trained one: the reference of the KL, and a reward model.

Both run on the mesh of the trainer, and are awake only while they compute.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minirl.base.errors import require
from minirl.batch.attention_plan import RowLayout
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack, unpack
from minirl.model.causal import trained
from minirl.parallel.fsdp import local, reshard
from minirl.train.policy import Minibatch, Policy
from minirl.types.packed import Trajectory


def is_base(policy: Policy, folder: Path) -> bool:
    """Return whether a folder's model is the policy without its adapters.

    Then no second model is loaded. Modules that are trained whole differ from the base's.
    """
    whole = policy.cfg.lora.modules_to_save
    return policy.adapters is not None and not whole and folder == policy.folder


def copy_trained(policy: Policy) -> dict[str, Tensor]:
    """Return copies of this rank's shards of what is trained, by name, in host memory."""
    return {name: shard.cpu().clone() for name, shard in _shards(policy).items()}


@contextlib.contextmanager
def with_trained(policy: Policy, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Compute with other values of what is trained inside the block, which has no backward.

    Args:
        policy: a model with adapters, which is awake.
        values: shards of this rank by name, on any device; what is not among them stays.
    """
    shards = _shards(policy)
    present = {name: shard.clone() for name, shard in shards.items()}
    replays = policy.replays_routes
    policy.replays_routes = False  # They were chosen with the present values.
    for name, value in values.items():
        shards[name].copy_(value)
    try:
        yield
    finally:
        for name, shard in _shards(policy).items():
            shard.copy_(present[name])
        policy.replays_routes = replays


def _shards(policy: Policy) -> dict[str, Tensor]:
    reshard(policy.model)
    if policy.cfg.cpu_offload and torch.cuda.is_available():
        torch.cuda.synchronize()  # The device may still be copying them from the host.
    return {name: local(p).detach() for name, p in trained(policy.model).items()}


class Reference:
    """The frozen model that the policy is compared with.

    It is a second model, which is awake only while it computes, or the policy without adapters or
    with those that it started from.

    Args:
        policy: the trained model.
        model: a frozen model; None: the policy's base.
        start: where there is no `model`, what the policy's base is with; None: without adapters.
    """

    def __init__(
        self, policy: Policy, model: Policy | None, start: Mapping[str, Tensor] | None = None
    ):
        self.policy = policy
        self.model = model
        self.start = start
        if model:
            model.sleeper.sleep()

    @property
    def layout(self) -> RowLayout:
        """Return how `pack` lays out micro-batches for the reference."""
        return (self.model or self.policy).layout

    def annotate(self, minibatches: list[Minibatch]) -> None:
        """Set `ref_logprobs` of every micro-batch. Collective."""
        if self.model is None:
            policy = self.policy
            with with_trained(policy, self.start) if self.start else policy.without_adapters():
                policy.annotate(minibatches, "ref_logprobs")
            return
        self.model.sleeper.wake_parameters()
        self.model.annotate(minibatches, "ref_logprobs")
        self.model.sleeper.sleep_parameters()


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
        examples: list[Trajectory] = []
        # Equal sequences are read once: in other micro-batches their scores would differ by
        # rounding, and equal answers of a group must have equal rewards.
        number_of: dict[tuple, int] = {}
        numbers = []
        for t in trajectories:
            key = (t.group, t.tokens.tobytes(), *(image.url for image in t.images))
            numbers.append(number_of.setdefault(key, len(number_of)))
            if numbers[-1] < len(examples):
                continue
            # The token that ends the sequence, and one more: its row is the last token's.
            end = [] if len(t.tokens) and t.tokens[-1] in self.stop_ids else [self.end_id]
            tokens = np.append(t.tokens, [*end, self.end_id]).astype(np.int32)
            examples.append(
                Trajectory(
                    tokens=tokens,
                    sampled=np.append(t.sampled, [False] * len(end) + [True]),
                    logprobs=np.zeros(len(tokens), np.float32),
                    images=t.images,
                    group=t.group,  # Siblings keep sharing their prompt.
                    # One number for each example.
                    episode=len(examples) * mesh.world_size + mesh.rank,
                )
            )
        scores = {}  # Of the examples that this rank reads, by number.
        (minibatch,) = exchange(examples, mesh, self.tokens_per_rank)
        with self.model.inference():
            for micro in minibatch:
                batch = pack(micro, mesh.device, layout=self.model.layout)
                outputs, _ = self.model.model(batch)
                for example, values in zip(micro, unpack(outputs, micro, batch), strict=True):
                    scores[example.episode] = float(values[-1])
        for others in mesh.gather(scores):
            scores |= others
        return [scores[examples[number].episode] for number in numbers]

    def grade(self, trajectories: list[Trajectory]) -> None:
        """Add the weighted scores to the rewards of this rank's trajectories.

        Each score goes to `info["rewards"]["model"]`, too. If an episode has segments, the score of
        the last one counts. The parameters are offloaded afterwards. Collective.

        Raises:
            UserError: a score is not a finite number.
        """
        # Others have no answer, or have failed and earn env.error_reward.
        trajectories = [t for t in trajectories if len(t.tokens) and not t.info.get("error")]
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
