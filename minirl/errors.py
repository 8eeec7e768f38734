"""The error that a user can mend, and the way to raise it."""


class UserError(Exception):
    """Something that the user can mend; printed as one message without a traceback, exit code 2."""


def require(ok: object, message: str) -> None:
    """Raises UserError(message) where that does not hold."""
    if not ok:
        raise UserError(message)
