"""What torchrun's agent, which started this rank, is told of its end.

An agent that sees a rank fail ends the others, and torchrun's last words are a report of all ranks
that failed. A rank may leave a file for it, whose text then stands there as the root cause. So the
reason of an end is the last thing on the screen. (The format of the file is that of
torch.distributed.elastic.multiprocessing.errors.)

It imports nothing that takes long: mistakes in flags are answered before torch is imported, and the
guard (guard.py) runs this file by its path.
"""

import contextlib
import json
import os
import time

SECONDS_TO_BE_ENDED = 10.0  # The agent looks every tenth of a second; a loaded machine is slow.


def has_agent() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def tell_agent(message: str) -> None:
    """Leave a text that torchrun's report shows as the reason why this rank has failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    about = {"py_callstack": message, "timestamp": str(int(time.time()))}
    reply = {"message": {"message": message, "extraInfo": about}}
    # What cannot be written is missing in the report; the rank itself has said it, too.
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump(reply, file)
