"""Trajectories for people: `python -m minirl.rollout.show runs/mine/rollouts/step-0-rank-0.jsonl |
less`
"""

import sys
from pathlib import Path

from minirl.errors import UserError
from minirl.rollout import records


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print(__doc__, file=sys.stderr)
        return 2
    try:
        for t in records.read_file(Path(arguments[0])):
            values = {**t.info, **t.info.get("env", {}), **t.info.get("rewards", {})}
            told = "".join(
                f", {name} {value:.4g}"
                for name, value in values.items()
                if isinstance(value, int | float)
            ) + (f", failed: {t.info['error']}" * bool(t.info["error"]))
            prompt = (
                t.info["prompt"]
                if isinstance(t.info["prompt"], str)
                else t.info["prompt"][-1]["content"]
            )
            print(
                f"── group {t.group} episode {t.episode} segment {t.segment}: reward {t.reward:.4g}, {int(t.sampled.sum())} of {len(t.tokens)} tokens sampled, "
                f"weights of update {t.version}{told}\n{prompt}\n→ {t.info['completion']}\n"
            )
    except UserError as error:
        print(f"minirl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
