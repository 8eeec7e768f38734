"""The reward of the comparison with TRL, for both: chance decides, so every group has both."""


def parity(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """Return, of each completion, whether the sum of its token ids is odd."""
    return [float(sum(tokens) % 2) for tokens in completion_ids]
