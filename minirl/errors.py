"""The error that a user can correct, and the way to raise it."""


class UserError(Exception):
    """A mistake that the user can correct: printed without traceback, exit code 2."""


def require(condition: object, message: str) -> None:
    """Raise UserError with `message` unless the condition holds."""
    if not condition:
        raise UserError(message)
