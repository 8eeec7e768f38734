"""What differs between two runs: a part of `preempt.py`."""

import json
from pathlib import Path
from typing import Any

from benchmarks.preempt_runs import MAX_STALENESS, PROMPTS, Run


def read_rows(output: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics.jsonl, without clocks."""
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = []
    for line in lines:
        if line.endswith("\n"):
            row = json.loads(line)
            clocks = ("time/", "tokens_per_second/", "host_gib/")
            rows.append({name: row[name] for name in row if not name.startswith(clocks)})
    return rows


def read_files(output: Path) -> dict[str, bytes]:
    """Return the contents of weights and episodes by name.

    References are left out: which ones are there depends on the checkpoints.
    """
    paths = [*output.glob("*/*.safetensors"), *output.glob("rollouts/*")]
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(paths)}


def differences(expected: Path, output: Path) -> list[str]:
    """Return what differs between two runs."""
    found = []
    rows = (read_rows(expected), read_rows(output))
    if rows[0] != rows[1]:
        pairs = zip(*rows, strict=False)
        unequal = [(a, b) for a, b in pairs if a != b]
        names = [name for a, b in unequal[:1] for name in a if a[name] != b.get(name)]
        first = f"first {unequal[0][0]['phase']} {unequal[0][0]['step']}" if unequal else ""
        found.append(f"{len(rows[0])} and {len(rows[1])} rows of metrics, {first} {names[:4]}")
    files = (read_files(expected), read_files(output))
    if files[0].keys() != files[1].keys():
        found.append(f"files {sorted(files[0].keys() ^ files[1].keys())}")
    unequal_files = [name for name in files[0] if files[1].get(name, b"") != files[0][name]]
    if unequal_files:
        found.append(f"contents of {len(unequal_files)} files, first {unequal_files[0]}")
    return found


def broken_promises(run: Run, output: Path) -> list[str]:
    """Return which promises a resumed run with rollout.ahead has not kept."""
    found = []
    steps = [row["step"] for row in read_rows(output) if row["phase"] == "rl"]
    if steps != list(range(run.num_steps)):
        found.append(f"steps {steps}")
    step_of: dict[int, int] = {}
    for step in range(run.num_steps):
        groups = set()
        for path in output.glob(f"rollouts/step-{step}-rank-*.jsonl"):
            for line in path.read_text().splitlines():
                episode = json.loads(line)
                groups.add(episode["group"])
                if step - episode["version"] > MAX_STALENESS:
                    found.append(f"step {step} trains on an episode of step {episode['version']}")
        if len(groups) != PROMPTS:
            found.append(f"step {step} has {len(groups)} prompts")
        twice = [group for group in groups if group in step_of]
        if twice:
            found.append(f"step {step} trains on prompts {twice} again")
        step_of |= dict.fromkeys(groups, step)
    return found
