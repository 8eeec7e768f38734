"""Make games of guess to imitate, as rows of minirl.sft.

    python launch/guess_games.py runs/guess_games.jsonl

The player halves the range that is left, but guesses any number at all with a chance of WILD: what
a policy learns from it is the game, played badly, and what RL then has to find out is which of its
habits wins.
"""

import json
import random
import sys
from pathlib import Path

from minirl.envs import State
from minirl.envs.games import Guess

HIGH = 16
TURNS = 4
WILD = 0.6


def play(number: int, rng: random.Random) -> tuple[dict, bool]:
    """Return a row of minirl.sft, and whether the game was won."""
    env = Guess(high=HIGH)
    prompt = env.reset({"answer": number - 1})
    low, high = 1, HIGH
    messages = []
    for turn in range(TURNS):
        guess = rng.randint(1, HIGH) if rng.random() < WILD else (low + high) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        result = env.step(State(row={}, answer=str(guess), stopped=True, turn=turn, messages=[]))
        if result.done:
            break
        messages.append({"role": "user", "content": result.observation})
        if result.observation == "higher":
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return {"prompt": prompt, "completion": messages}, result.done


if __name__ == "__main__":
    rng = random.Random(1)
    games = [play(rng.randint(1, HIGH), rng) for _ in range(20_000)]
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row, _ in games))
    share = sum(won for _, won in games) / len(games)
    print(f"{file}: {len(games)} games, {share:.3f} of them won")
