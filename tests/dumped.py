"""Run folders with dumped trajectories, by the functions that a run writes them with."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from minirl.model.scratch import make_tokenizer
from minirl.rollout import index, records
from minirl.types.packed import Trajectory

NASTY = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


def trajectory(group: int, episode: int, text: str, tokenizer, **info: object) -> Trajectory:
    """An answer to `word GROUP`, each token with a log-prob of its own."""
    prompt = tokenizer.encode(f"word {group}: ")
    answer = tokenizer.encode(text)
    tokens = np.array([*prompt, *answer], np.int32)
    sampled = np.arange(len(tokens)) >= len(prompt)
    return Trajectory(
        tokens=tokens,
        sampled=sampled,
        logprobs=np.where(sampled, -0.1 * np.arange(1, len(tokens) + 1), 0).astype(np.float32),
        turn_rewards=np.zeros(len(tokens), np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        reward=float(episode % 2),
        group=group,
        episode=episode,
        version=3,
        info={
            "prompt": f"word {group}",
            "completion": text,
            "source": None,
            "stopped": True,
            "error": "",
            "answer_tokens": len(answer),
            "rewards": {"spelling": float(episode % 2), "length": 0.25},
        }
        | info,
    )


def tables(trajectories: list[Trajectory], places: list[tuple[int, int]], mismatch: float):
    """What a run writes of trajectories that their own rank trained on."""
    sampled, trained, values = [], [], [np.zeros((0, 3), np.float32)]
    start = 0
    for t, place in zip(trajectories, places, strict=True):
        numbers = (len(t.tokens), int(t.sampled.sum()), t.reward, t.reward, 1)
        ids = (t.group, t.episode, t.segment)
        flags = (t.info["stopped"], bool(t.info["error"]))
        sampled.append((*ids, *place, *numbers, *flags))
        trained.append((*ids, start, len(t.tokens), mismatch * (1 + t.group), 0.01, 0.5, 0.1))
        advantage = np.where(t.sampled, 1.0 if t.reward else -1.0, 0.0)
        entropy = np.where(t.sampled, 0.5, 0.0)
        values.append(np.stack([advantage, t.logprobs - 0.01, entropy], axis=1).astype(np.float32))
        start += len(t.tokens)
    return (
        np.array(sampled, index.SAMPLED),
        np.array(trained, index.TRAINED),
        np.concatenate(values),
    )


def write_step(folder: Path, step: int, trajectories: list[Trajectory], mismatch: float = 0.01):
    one = SimpleNamespace(rank=0, world_size=1)
    places = records.write_step(trajectories, folder, step, one)
    part = index.part_of(folder, step, 0)
    index.write_tables(part, *tables(trajectories, places, mismatch))


def write_rows(path: Path, rows: list[dict]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, num_steps: int = 3, groups: int = 4) -> Path:
    """A run with a truncated answer, a failed one, a group of equal rewards, and a hostile text."""
    tokenizer = make_tokenizer([])
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True)
    tokenizer.backend_tokenizer.save(str(rollouts / index.TOKENIZER))
    (folder / "config.yaml").write_text("seed: 0\n")
    summary = {"state": "finished", "reason": "", "accuracy_after_rl": 0.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = []
    for step in range(num_steps):
        dumped = []
        for group in range(groups):
            for episode in range(4):
                dumped.append(trajectory(groups * step + group, episode, "drow", tokenizer))
        dumped[0].info["completion"] = NASTY
        dumped[0] = trajectory(groups * step, 0, NASTY, tokenizer)
        dumped[1].info["stopped"] = False
        dumped[6].info["error"] = "step raised ValueError: no"
        for t in dumped[8:12]:
            t.reward = 1.0
        write_step(rollouts, step, dumped)
        times = {"time/rollout": 2.0, "time/forward": 1.0, "time/step": 3.2}
        row = {"phase": "rl", "step": step, "reward": step / num_steps, "entropy": 1.0, **times}
        rows.append(row)
    write_rows(folder / "metrics.jsonl", rows)
    answers = [{"prompt": "word 1", "answer": NASTY, "reward": 0.5}]
    row = {"phase": "eval", "step": 0, "name": "before_rl", "answers": answers}
    write_rows(folder / "answers.jsonl", [row])
    return folder
