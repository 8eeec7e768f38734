"""Supervised warm start: the same verbs as RL (exchange, pack, step) with another loss and the rows' own answers."""

import dataclasses

import numpy as np

from minirl.algo import losses
from minirl.config import RLConfig
from minirl.data import chat
from minirl.data.datasets import Prompts
from minirl.data.packing import exchange, pack
from minirl.log import Log
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy, learning_rate
from minirl.types import Trajectory


def warm_start(cfg: RLConfig, policy: Policy, prompts: Prompts, stop_ids: list[int], mesh: Mesh, log: Log) -> int:
    """`cfg.sft.num_steps` steps of negative log-likelihood on answers. Returns the tokens trained on.

    Example n of the run is a function of (seed, n) alone, so any number of ranks sees the same examples in the same steps.
    """
    sft, num_tokens = cfg.sft, 0
    policy.start_phase(dataclasses.replace(cfg.policy, lr=sft.lr, lr_schedule="cosine", lr_warmup_steps=sft.lr_warmup_steps))
    log.progress("sft", sft.num_steps)
    for step in range(sft.num_steps):
        examples = range(step * sft.batch_size, (step + 1) * sft.batch_size)
        own = [_example(prompts, n, sft.wrong_character, cfg.seed, stop_ids) for n in examples[mesh.rank :: mesh.world_size]]
        (minibatch,) = exchange(own, mesh, cfg.tokens_per_rank)
        batches = [pack(micro, mesh.device, layout=policy.layout) for micro in minibatch]
        metrics = policy.step(batches, losses.sft(), learning_rate(policy.cfg, step, sft.num_steps))
        num_tokens += sum(sum(b.lengths) for b in batches)
        log.scalars("sft", step, metrics)
        log.advance(loss=metrics["loss"])
    log.end_progress()
    policy.start_phase(cfg.policy)
    return num_tokens


def _example(prompts: Prompts, number: int, wrong_character: float, seed: int, stop_ids: list[int]) -> Trajectory:
    row, rng = prompts.row(number), np.random.default_rng([seed, number, 1])
    answer = str(row["answer"])
    if answer and rng.random() < wrong_character:
        at = int(rng.integers(len(answer)))
        alphabet = sorted(set(answer + str(prompts.row(int(rng.integers(len(prompts.rows))))["answer"])))
        answer = answer[:at] + str(rng.choice(alphabet)) + answer[at + 1 :]
    prompt = prompts.encode(row)
    tokens = prompt + chat.encode_answer(prompts.tokenizer, prompts.messages(row), answer, stop_ids)
    sampled = np.arange(len(tokens)) >= len(prompt)
    return Trajectory(tokens=np.array(tokens, dtype=np.int32), sampled=sampled, logprobs=np.zeros(len(tokens), np.float32), group=number)
