"""Accuracy, pass@k and mean reward on held-out prompts. Called from rl.py, and a program of its own:

    torchrun --nproc-per-node 2 -m minirl.evaluate --model runs/quickstart/model --data.eval held_out.jsonl --reward.function exact
"""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

from minirl import cli
from minirl.checks import check_rollout
from minirl.config import EvalConfig, EvaluateConfig, PolicyConfig
from minirl.data import chat
from minirl.data.datasets import Prompts, load_rows
from minirl.data.images import Vision, sampling_stops
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.rm import RewardModel
from minirl.rollout.engine import RolloutEngine, Sampling
from minirl.rollout.env import make_env
from minirl.rollout.rewards import make_rewards
from minirl.rollout.sampler import Sampler
from minirl.run import find_teacher
from minirl.types import Trajectory, UserError


def breakdown(trajectories: list[Trajectory], threshold: float, mesh: Mesh, more: Iterable[tuple[str, float]] = ()) -> dict[str, float]:
    """Means over all ranks: `source/NAME/accuracy` and `/reward` of each data source where rows have one, `reward/NAME` of each of several
    reward functions, `env/turns`, `/truncated`, `/failed` and what else an environment tells, and of `more` values by their names. `trajectories`:
    one of each episode. The same however they are spread over ranks. Collective."""
    own = [*more]
    for t in trajectories:
        own += [(f"{of}/{name}", float(value)) for of, told in (("reward", "rewards"), ("env", "env")) for name, value in t.info.get(told, {}).items()]
        if source := t.info["source"]:
            score = t.info.get("score", t.reward)  # in training, the reward before it was shaped
            own += [(f"source/{source}/accuracy", float(score >= threshold)), (f"source/{source}/reward", score)]
    pairs = sorted(itertools.chain(*mesh.gather(own)))
    found = {name: [value for _, value in of] for name, of in itertools.groupby(pairs, lambda pair: pair[0])}
    return {name: sum(values) / len(values) for name, values in found.items()}


def evaluate(sampler: Sampler, prompts: Prompts, cfg: EvalConfig, sampling: Sampling, mesh: Mesh, judge: RewardModel | None = None) -> dict:
    """Sample `cfg.samples` answers to every prompt. Collective; the engine must be awake. The seeds are the same at each call.

    Returns `scores`: accuracy (= pass@1), pass@k for k = cfg.samples (Chen et al. 2021, arXiv 2107.03374, eq. 1, which is 1 for a prompt with a correct
    one among k samples, else 0), reward, answer_tokens, stopped (share of answers that ended by themselves), and what `breakdown` adds; and
    `answers`: prompt, answer and reward of the first sample of the first five prompts.
    """
    trajectories = sampler.collect(prompts, range(len(prompts.rows)), cfg.samples, sampling)
    if judge:
        judge.grade(trajectories)
    once = [t for t in trajectories if t.segment == 0]
    own: list[tuple[str, float]] = []
    for _, group in itertools.groupby(once, lambda t: t.group):
        told = [{"accuracy": float(t.reward >= cfg.threshold), "reward": t.reward, **{name: t.info[name] for name in ("answer_tokens", "stopped")}} for t in group]
        own += [(name, sum(t[name] for t in told) / len(told)) for name in told[0]] + [(f"pass@{cfg.samples}", max(t["accuracy"] for t in told))]
    shown = [(t.group, {"prompt": t.info["prompt"], "answer": t.info["completion"], "reward": t.reward}) for t in trajectories if t.group < 5 and t.episode == 0]
    answers = sorted(itertools.chain(*mesh.gather(shown)), key=lambda a: a[0])
    return {"scores": breakdown(once, cfg.threshold, mesh, own), "answers": [a for _, a in answers]}


def main(cfg: EvaluateConfig, mesh: Mesh) -> None:
    check_rollout(cfg)
    if not cfg.model:
        raise UserError("model is empty: give a folder or a hub id with --model")
    if not cfg.data.eval:
        raise UserError("data.eval is empty: give a JSONL file or reasoning_gym:NAME")
    folder = build.resolve(cfg.model, "model")
    config = build.read_config(folder)
    families.check(config, f"model = {folder}", cfg.engine.tensor_parallel_size, device=mesh.device.type)
    rows = load_rows(cfg.data.eval, "data.eval", cfg.data)
    env, rewards = make_env(cfg.env.name), make_rewards(cfg.reward)
    judge = find_teacher(cfg.reward.model, config, 1, "reward.model", scores=True) if cfg.reward.model else None
    if env().graded:
        rewards.check(rows)
    tokenizer = chat.load_tokenizer(folder, template=cfg.data.chat_template, plain=cfg.data.input_template)
    vision = Vision(folder, cfg.engine.max_images) if families.reads_images(config) else None
    prompts = Prompts(rows, tokenizer, cfg.data, seed=cfg.seed, shuffle=False, vision=vision)
    num_dropped = prompts.check_lengths("data.eval", mesh)
    dtype = "bfloat16" if cfg.engine.dtype == "auto" else cfg.engine.dtype
    engine = RolloutEngine(cfg.engine, folder, mesh, dtype=dtype, load_weights=True, reads_images=vision is not None)
    sampler = Sampler(engine, env, rewards, prompts, cfg)
    r = cfg.rollout
    stop_ids = chat.stop_token_ids(tokenizer, folder)
    sampling = Sampling(max_tokens=r.max_tokens, stop_token_ids=sampling_stops(stop_ids, vision), temperature=cfg.eval.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p)
    judge = judge and RewardModel(PolicyConfig(dtype=dtype), judge, mesh, stop_ids, tokenizer.eos_token_id, max(16384, cfg.engine.max_model_len + 1), weight=cfg.reward.model_weight)
    result = evaluate(sampler, prompts, cfg.eval, sampling, mesh, judge)
    if mesh.rank == 0:
        text = json.dumps({"model": cfg.model, "data": cfg.data.eval, "prompts": len(prompts.rows), "dropped": num_dropped, **result["scores"],
                           "answers": result["answers"]}, indent=2)
        print(text)
        if cfg.output:
            Path(cfg.output).write_text(text + "\n")
    sampler.close()
    engine.close()


if __name__ == "__main__":
    cli.run(EvaluateConfig, main)
