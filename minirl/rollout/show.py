"""Trajectories for people: `python -m minirl.rollout.show runs/mine/rollouts/step-0-rank-0.jsonl [NUMBER]` prints the first NUMBER (10) episodes."""

import sys
from pathlib import Path

from minirl.rollout import records
from minirl.types import UserError


def main(arguments: list[str]) -> int:
    if not arguments or len(arguments) > 2 or not Path(arguments[0]).is_file() or not all(a.isdigit() for a in arguments[1:]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        for n, t in enumerate(records.read(Path(arguments[0]))):
            if n == int(arguments[1] if arguments[1:] else 10):
                break
            told = " ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in {**t.info, **t.info.get("env", {}), **t.info.get("rewards", {})}.items()
                            if isinstance(value, int | float) or name == "error" and value)
            print(f"── group {t.group} episode {t.episode} segment {t.segment}: reward {t.reward:.4g}, {int(t.sampled.sum())} of {len(t.tokens)} tokens sampled, "
                  f"weights of update {t.version}; {told}\n{t.info['prompt'] if isinstance(t.info['prompt'], str) else t.info['prompt'][-1]['content']}\n→ {t.info['completion']}\n")
    except UserError as error:
        print(f"minirl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
