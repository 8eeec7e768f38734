"""Accuracy, pass@k and mean reward on held-out prompts. Called from rl.py, and a program of its
own:

torchrun --nproc-per-node 2 -m minirl.evaluate --model runs/quickstart/model --data.eval
held_out.jsonl --reward.function exact
"""

import json
from pathlib import Path

from minirl import cli
from minirl.config.shared import EvaluateConfig, PolicyConfig
from minirl.config.validate import resolve_lengths, validate_sampling
from minirl.data import chat
from minirl.data.images import Vision, sampling_stops
from minirl.data.prompts import Prompts, load_rows
from minirl.envs.registry import make_env
from minirl.errors import UserError
from minirl.evaluation import evaluate
from minirl.inputs import find_teacher
from minirl.model import build, families
from minirl.parallel.mesh import Mesh
from minirl.rewards.functions import make_rewards
from minirl.rewards.model import RewardModel
from minirl.rollout.engine import RolloutEngine, Sampling
from minirl.rollout.sampler import Sampler


def main(cfg: EvaluateConfig, mesh: Mesh) -> None:
    resolve_lengths(cfg)
    validate_sampling(cfg)
    if not cfg.model:
        raise UserError("model is empty: give a folder or a hub id with --model")
    if not cfg.data.eval:
        raise UserError("data.eval is empty: give a JSONL file or reasoning_gym:NAME")
    folder = build.find_folder(cfg.model, "model")
    config = build.read_config(folder)
    families.check_supported(
        config, f"model = {folder}", cfg.engine.tensor_parallel_size, device=mesh.device.type
    )
    rows = load_rows(cfg.data.eval, "data.eval", cfg.data)
    env, rewards = make_env(cfg.env.name), make_rewards(cfg.reward)
    reward_model = (
        find_teacher(cfg.reward.model, config, 1, "reward.model", scores=True)
        if cfg.reward.model
        else None
    )
    if env().graded:
        rewards.check_rows(rows)
    tokenizer = chat.load_tokenizer(
        folder, template=cfg.data.chat_template, plain=cfg.data.input_template
    )
    vision = Vision(folder, cfg.engine.max_images) if families.reads_images(config) else None
    prompts = Prompts(rows, tokenizer, cfg.data, seed=cfg.seed, shuffle=False, vision=vision)
    num_dropped = prompts.check_lengths("data.eval", mesh)
    dtype = "bfloat16" if cfg.engine.dtype == "auto" else cfg.engine.dtype
    engine = RolloutEngine(
        cfg.engine, folder, mesh, dtype=dtype, load_weights=True, reads_images=vision is not None
    )
    sampler = Sampler(engine, env, rewards, prompts, cfg)
    r = cfg.rollout
    stop_ids = chat.stop_token_ids(tokenizer, folder)
    sampling = Sampling(
        max_tokens=r.max_tokens,
        stop_token_ids=sampling_stops(stop_ids, vision),
        temperature=cfg.eval.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
    )
    reward_model = reward_model and RewardModel(
        PolicyConfig(dtype=dtype),
        reward_model,
        mesh,
        stop_ids,
        tokenizer.eos_token_id,
        max(16384, cfg.engine.max_model_len + 1),
        weight=cfg.reward.model_weight,
    )
    result = evaluate(sampler, prompts, cfg.eval, sampling, mesh, reward_model)
    if mesh.rank == 0:
        text = json.dumps(
            {
                "model": cfg.model,
                "data": cfg.data.eval,
                "prompts": len(prompts.rows),
                "dropped": num_dropped,
                **result["scores"],
                "answers": result["answers"],
            },
            indent=2,
        )
        print(text)
        if cfg.output:
            Path(cfg.output).write_text(text + "\n")
    sampler.close()
    engine.close()


if __name__ == "__main__":
    cli.run(EvaluateConfig, main)
