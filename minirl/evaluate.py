r"""A program that prints accuracy, pass@k and mean reward of a model on held-out prompts.

    torchrun --nproc-per-node 2 -m minirl.evaluate --model runs/quickstart/model \
        --data.eval held_out.jsonl --reward.function exact

`minirl.rl` scores its held-out prompts by the same `evaluation.evaluate`.
"""

if __name__ == "__main__":  # First the flags: the imports below take seconds. It does not return.
    from minirl.config.shared import EvaluateConfig
    from minirl.supervise import cli

    cli.run(EvaluateConfig, "minirl.evaluate:main")

import dataclasses
import json
from pathlib import Path

import torch

from minirl.base.errors import require
from minirl.base.files import write_whole
from minirl.base.log import say
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.shared import EvaluateConfig
from minirl.config.validate import check_settings
from minirl.data.lengths import check_lengths
from minirl.data.order import read_rows
from minirl.data.prompts import Prompts, open_prompts
from minirl.data.tokenizer import stop_token_ids
from minirl.data.vision import sampling_stops
from minirl.endpoint import open_endpoint
from minirl.engine.engine import RolloutEngine
from minirl.envs import Agent
from minirl.envs.registry import make_env
from minirl.parallel.machines import check_can_write, errors_of_all
from minirl.parallel.mesh import Mesh
from minirl.rewards.loading import make_rewards, try_rewards
from minirl.rollout.sampler import Sampler
from minirl.run import inputs
from minirl.run.evaluation import eval_sampling, evaluate
from minirl.train.frozen import RewardModel
from minirl.train.policy import Policy

WIDE = (torch.float32, torch.float16, torch.bfloat16)  # Dtypes in which a weight may be NaN.


def main(cfg: EvaluateConfig, mesh: Mesh) -> None:
    """Evaluate the model; rank 0 prints the scores as JSON and writes them to `cfg.output`."""
    # 1. Find and check what the config names.
    check_settings(cfg, mesh.world_size)
    inputs.check_engines(cfg.engine, mesh)
    if cfg.output:
        check_can_write(Path(cfg.output), "output", mesh)
    with errors_of_all(mesh, same_everywhere=True):
        folder, config, tokenizer, vision = inputs.find_model(cfg, mesh)
        code = f"one of env.name = {cfg.env.name}, reward.function = {cfg.reward.function}"
        with inputs.limited(cfg, mesh.watch, f"to import {code}, or to make an environment,"):
            env_maker = make_env(cfg.env.name)
            rewards = make_rewards(cfg.reward, mesh.watch)
        scorer = inputs.find_other_model(
            cfg.reward.model,
            config,
            ParallelConfig(),
            "reward.model",
            scores=True,
            tokenizer=tokenizer,
        )
        example = env_maker.example
        inputs.check_endpoint(cfg, example)
        if example.graded:
            rewards.check_supported()
    folders = {"model": folder}
    if scorer:
        folders["reward model"] = scorer
    inputs.check_same_models(folders, mesh)
    checks = inputs.PromptChecks(rewards if example.graded else None, tokenizer, cfg.data)
    env_prompts = not example.needs_prompt
    opened = open_prompts(cfg.data.eval, "data.eval", cfg.data, mesh, env_prompts=env_prompts)
    rows, _ = read_rows(opened, mesh, cfg.seed, mark=checks.mark)
    checks.refuse_bad(rows)
    if mesh.rank == 0 and rows.num_doubles:
        say(f"{rows.num_doubles} rows are left out because they equal others")
    prompts = Prompts(rows, tokenizer, cfg.data, seed=cfg.seed, shuffle=False, vision=vision)
    num_dropped = check_lengths(prompts, mesh, inputs.MAY_BE_LONG)
    if example.graded:
        try_rewards(rewards, prompts, cfg.reward.threads, mesh)

    # 2. Load the models.
    dtype = inputs.choose_dtype(cfg.engine.dtype, "engine.dtype", mesh)
    max_model_len = cfg.engine.max_model_len + cfg.eval_extra_tokens
    engine = RolloutEngine(
        dataclasses.replace(cfg.engine, max_model_len=max_model_len),
        folder,
        mesh,
        dtype=dtype,
        load_weights=True,
        vision=vision,
        num_answers=len(rows) * cfg.eval.samples,
        guides=isinstance(example, Agent),
    )
    with errors_of_all(mesh):
        parameters = engine.parameters().items()
        wrong = [name for name, p in parameters if p.dtype in WIDE and not p.isfinite().all()]
        require(
            not wrong,
            f"model = {folder} has NaN or infinity in {len(wrong)} of the engine's weights, "
            f"{', '.join(wrong[:3])}; take another checkpoint",
        )
    sampler = Sampler(engine, env_maker, rewards, prompts, cfg, open_endpoint)
    stop_ids = stop_token_ids(tokenizer, folder)
    reward_model = None
    if scorer:
        reward_model = RewardModel(
            Policy(PolicyConfig(dtype=dtype), scorer, mesh, trainable=False, score=True),
            stop_ids,
            tokenizer.eos_token_id,
            max(16384, max_model_len + 1),
            weight=cfg.reward.model_weight,
        )

    # 3. Sample, score, write.
    mesh.watch.phase = lambda: "evaluate"
    sampling = eval_sampling(cfg, sampling_stops(stop_ids, vision))
    result = evaluate(sampler, prompts, cfg.eval, sampling, reward_model)
    assert result, "only training is interrupted"
    if mesh.rank == 0:
        numbers = {"prompts": len(prompts.rows), "dropped": num_dropped, **result["scores"]}
        summary = {"model": cfg.model, "data": cfg.data.eval, **numbers}
        text = json.dumps(summary | {"answers": result["answers"]}, indent=2)
        print(text)
        if cfg.output:
            path = Path(cfg.output)
            if path.exists() and not path.is_file():  # a pipe, say
                path.write_text(text + "\n")
            else:
                write_whole(path.resolve(), text + "\n")
    sampler.close()
    engine.close()
