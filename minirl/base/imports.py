"""Imports of thousands of modules, which take a fifth less time while nobody looks for garbage."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Import inside without garbage collections, and leave what is there out of later ones.

    Of what torch, transformers and vLLM make as they are imported, next to nothing is garbage. But
    Python looks through all of it whenever it has grown by a quarter, and later in every full
    collection, of which vLLM makes several as an engine starts. vLLM itself does so with what is
    there when an engine has started, and takes it all back when the engine ends.
    """
    gc.collect()  # What is garbage by now is not kept.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
