"""Print trajectories for people.

python -m minirl.rollout.show runs/mine/rollouts/step-0-rank-0.jsonl | less
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minirl.base.errors import BAD_INPUT, DONE, UserError

if TYPE_CHECKING:
    from minirl.types.packed import Trajectory


def describe(t: "Trajectory") -> str:
    """Return a trajectory as text: its group and episode, numbers, prompt and completion."""
    place = f"group {t.group} episode {t.episode} segment {t.segment}"
    head = [
        f"── {place}: reward {t.reward:.4g}",
        f"{t.sampled.sum()} of {len(t.tokens)} tokens sampled",
        f"weights of update {t.version}",
    ]
    values = t.info | t.info.get("env", {}) | t.info.get("rewards", {})
    for name, value in values.items():
        if isinstance(value, int | float):
            head.append(f"{name} {value:.4g}")
    if t.info["error"]:
        head.append(f"failed: {t.info['error']}")
    prompt = t.info["prompt"]
    if not isinstance(prompt, str):
        prompt = prompt[-1]["content"]
    return f"{', '.join(head)}\n{prompt}\n→ {t.info['completion']}\n"


def main(arguments: list[str]) -> int:
    """Print the trajectories of a file, and return the exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print(__doc__, file=sys.stderr)
        return BAD_INPUT

    # Here, because this takes seconds.
    from minirl.base.log import printable
    from minirl.rollout import records

    try:
        for t in records.read_file(Path(arguments[0])):
            print(printable(describe(t)))
    except UserError as error:
        print(f"minirl: {error}", file=sys.stderr)
        return BAD_INPUT
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
