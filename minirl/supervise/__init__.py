"""A run's begin and end: flags, signals, time limits, and the reason why it ends."""

import contextlib
import json
import os
import time


def write_error_file(message: str) -> None:
    """Leave the reason why this rank fails where torchrun's report looks for it.

    The format is that of torch.distributed.elastic.multiprocessing.errors. Its `record` is no help:
    it needs torch before the flags are read, and shows a traceback of what the user can correct.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    # Without the file the reason is missing in the report; the rank has printed it, too.
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": message, "extraInfo": details}}, file)
