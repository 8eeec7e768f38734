"""Games of guess to imitate, as rows of minirl.sft: python launch/guess_games.py
runs/guess_games.jsonl

The player halves the range that is left, but guesses any number at all with a chance of WILD: what
a policy learns from it is the game, played badly, and what RL then has to find out is which of its
habits wins.
"""

import json
import random
import sys
from pathlib import Path

from minirl.envs.base import State
from minirl.envs.guess import Guess

HIGH, TURNS, WILD = 16, 4, 0.6


def play(number: int, rng: random.Random) -> tuple[dict, bool]:
    """(row of minirl.sft, won)"""
    env, low, high = Guess(high=HIGH), 1, HIGH
    prompt, said = env.reset({"answer": number - 1}), []
    for turn in range(TURNS):
        guess = rng.randint(1, HIGH) if rng.random() < WILD else (low + high) // 2
        said.append({"role": "assistant", "content": str(guess)})
        result = env.step(State(row={}, answer=str(guess), stopped=True, turn=turn, messages=[]))
        if result.done:
            break
        said.append({"role": "user", "content": result.observation})
        low, high = (
            (max(low, guess + 1), high)
            if result.observation == "higher"
            else (low, min(high, guess - 1))
        )
    return {"prompt": prompt, "completion": said}, result.done


if __name__ == "__main__":
    rng = random.Random(1)
    games = [play(rng.randint(1, HIGH), rng) for _ in range(20_000)]
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row, _ in games))
    print(
        f"{file}: {len(games)} games, {sum(won for _, won in games) / len(games):.3f} of them won"
    )
