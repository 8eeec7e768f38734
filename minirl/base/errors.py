"""The error that a user can correct, and the exit codes of programs."""

# Exit codes.
DONE = 0
CRASH = 1
BAD_INPUT = 2
BY_SIGNAL = 128  # Plus the signal's number, as shells report it.


class UserError(Exception):
    """A mistake that the user can correct: printed without traceback, exit code 2."""


def require(condition: object, message: str) -> None:
    """Raise UserError with `message` unless the condition holds."""
    if not condition:
        raise UserError(message)
