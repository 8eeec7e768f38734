"""A run's begin and end: flags, signals, time limits, and the reason why it ends."""

import contextlib
import json
import os
import time
from pathlib import Path

from minirl.base.files import write_whole


def write_error_file(message: str) -> None:
    """Leave the reason why this rank fails where torchrun's report looks for it.

    The format is that of torch.distributed.elastic.multiprocessing.errors. Its `record` is no help:
    it needs torch before the flags are read, and shows a traceback of what the user can correct.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    # Without the file the reason is missing in the report; the rank has printed it, too. Half a
    # file would end torchrun with a traceback.
    with contextlib.suppress(OSError):
        error = {"message": {"message": message, "extraInfo": details}}
        write_whole(Path(path), json.dumps(error))
