"""Accuracy, pass@k and mean reward on held-out prompts."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

from minirl.base.errors import UserError
from minirl.base.log import say
from minirl.config.shared import EvalConfig, SamplingConfig
from minirl.data.prompts import Prompts
from minirl.engine.engine import Sampling
from minirl.parallel.mesh import Mesh
from minirl.rollout.sampler import Sampler
from minirl.run.metrics import breakdown
from minirl.train.frozen import RewardModel
from minirl.types.packed import Trajectory

NUM_SHOWN = 5  # Prompts with answers that people may read.
SECONDS_BETWEEN_WORDS = 60.0  # Of how far an evaluation is.


def eval_sampling(cfg: SamplingConfig, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Return how an evaluation samples: as `eval` says, else as `rollout` says."""
    extra = cfg.eval_extra_tokens
    return Sampling(
        max_tokens=cfg.eval.max_tokens or cfg.rollout.max_tokens,
        stop_token_ids=stop_token_ids,
        temperature=cfg.eval.temperature,
        top_p=cfg.rollout.top_p if cfg.eval.top_p is None else cfg.eval.top_p,
        top_k=cfg.rollout.top_k if cfg.eval.top_k is None else cfg.eval.top_k,
        min_p=cfg.rollout.min_p,
        episode_tokens=cfg.env.max_tokens + extra,
        context_tokens=cfg.engine.max_model_len + extra,
    )


def evaluate(
    sampler: Sampler,
    prompts: Prompts,
    cfg: EvalConfig,
    sampling: Sampling,
    reward_model: RewardModel | None,
    num_shown: int = NUM_SHOWN,
) -> dict | None:
    """Sample `cfg.samples` answers to every prompt and score them. Collective.

    The engine must be awake. The seeds are the same at each call.

    Returns:
        What `score` returns; None: a signal to any rank has interrupted it.

    Raises:
        UserError: no prompt got an answer.
    """
    num_prompts = len(prompts.rows)
    with telling_progress(sampler, num_prompts):
        trajectories = sampler.collect(prompts, range(num_prompts), cfg.samples, sampling)
    if trajectories is None:
        return None
    reasons = sampler.evaluation.runner.troubles[:1]
    return score(trajectories, reasons, num_prompts, cfg, reward_model, sampler.mesh, num_shown)


@contextlib.contextmanager
def telling_progress(sampler: Sampler, num_prompts: int) -> Iterator[None]:
    """Say each minute of the block how many prompts have been answered on rank 0.

    Args:
        sampler: runs the evaluation.
        num_prompts: those of all ranks.
    """
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(SECONDS_BETWEEN_WORDS):
            groups = list(sampler.evaluation.groups.values())
            num_answered = sum(group.finished for group in groups)
            say(f"evaluation: {num_answered} prompts answered on rank 0, of {num_prompts} in all")

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    if sampler.mesh.rank == 0:
        thread.start()
    try:
        yield
    finally:
        is_over.set()


def score(
    trajectories: list[Trajectory],
    reasons: list[str],
    num_prompts: int,
    cfg: EvalConfig,
    reward_model: RewardModel | None,
    mesh: Mesh,
    num_shown: int = NUM_SHOWN,
) -> dict:
    """Score answers to held-out prompts. Collective.

    Args:
        trajectories: whole groups of all prompts, those that this rank has.
        reasons: why episodes failed, if some did.
        num_prompts: number of held-out prompts.
        cfg: what is evaluated.
        reward_model: adds its scores; None: there is none.
        mesh: the ranks that have the answers.
        num_shown: prompts with an answer to read.

    Returns:
        `scores`: accuracy (= pass@1), pass@k for k = cfg.samples (Chen et al. 2021, arXiv
        2107.03374, eq. 1, which is 1 for a prompt with a correct one among k samples, else 0),
        reward, answer_tokens, stopped (share of answers that ended by themselves), and what
        `breakdown` adds. `answers`: prompt, answer and reward of the first sample of the first
        `num_shown` prompts, and `last_turn` if an environment has several: the last of its answers,
        which reward functions grade.

    Raises:
        UserError: no prompt got an answer.
    """
    # Tokens of a grammar are outside the loss; they are still an answer.
    num_answers = sum(t.info["answer_tokens"] > 0 and not t.info["error"] for t in trajectories)
    episodes = [t for t in trajectories if t.segment == 0]
    by_rank = mesh.gather((num_answers, reasons, len(episodes)))
    found = itertools.chain.from_iterable(reasons for _, reasons, _ in by_rank)
    why = next(found, "")
    if why and mesh.rank == 0:
        say(f"held-out episodes failed or were refused a request, the first: {why}")
    if not any(num for num, _, _ in by_rank):
        cure = "fix env.name" if why else "give the prompts more room by engine.max_model_len"
        raise UserError(
            f"none of the {num_prompts} held-out prompts got an answer to evaluate: "
            f"{why or 'the policy sampled no token in any'}; {cure}"
        )
    num_scored = sum(num for _, _, num in by_rank)
    num_asked = num_prompts * cfg.samples
    if num_scored < num_asked and mesh.rank == 0:
        say(f"held-out scores are of {num_scored} of {num_asked} episodes; the others were dropped")
    if reward_model:
        reward_model.grade(trajectories)

    # 1. The means over the answers to each prompt, and whether one of them is correct.
    values = []
    for _, group in itertools.groupby(episodes, lambda t: t.group):
        samples = list(group)
        correct = [float(t.reward >= cfg.threshold) for t in samples]
        values_by_name = {
            "accuracy": correct,
            "reward": [t.reward for t in samples],
            "answer_tokens": [t.info["answer_tokens"] for t in samples],
            "stopped": [t.info["stopped"] for t in samples],
        }
        for name, sampled in values_by_name.items():
            values.append((name, sum(sampled) / len(samples)))
        values.append((f"pass@{cfg.samples}", max(correct)))

    # 2. Answers to read, in the order of their prompts.
    answers = {}
    for t in episodes:
        if t.group < num_shown and t.episode == 0:
            answers[t.group] = {
                "prompt": t.info["prompt"],
                "answer": t.info["completion"],
                "reward": t.reward,
            }
            if "last_turn" in t.info:
                answers[t.group]["last_turn"] = t.info["last_turn"]
    for others in mesh.gather(answers):
        answers |= others
    return {
        "scores": breakdown(episodes, cfg.threshold, mesh, values),
        "answers": [answers[group] for group in sorted(answers)],
    }
