"""Keys of servers: they are in the environment, and no settings."""

import os

from minirl.base.errors import require


def key_of_environment(setting: str, name: str) -> str:
    """Return the key in the environment variable `name`; "" if that is empty.

    Keys are not settings themselves, because these are printed, logged and saved.

    Raises:
        UserError: There is no such variable, or it is empty.
    """
    key = os.environ.get(name, "").strip() if name else ""
    require(
        key or not name,
        f"{setting} = {name}: this environment variable is not set or empty; put the key into it",
    )
    return key
