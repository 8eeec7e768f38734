"""What memory is for, in the words of users: who asks for it says it."""

import os
import sys

from minirl.model import logprob, logprob_kernels

PARAMETERS = "parameters"
BASE = "policy's parameters"  # That another model computes with, too.
OPTIMIZER = "optimizer"  # Its state, and what a step needs meanwhile.
GATHERED = "gathered parameters"
GRADIENTS = "gradients"  # Of parameters: whole ones until they are reduced, and shards.
HEAD = "logits"  # And what the language-model head makes of them, in both directions.
ACTIVATIONS = "activations"  # Made by the forward pass.
RECOMPUTED = "recomputed activations"
BACKWARD = "backward"  # Gradients of activations, and of weights until FSDP takes them.
BATCH = "batch"
REFIT = "engine and refit"
OTHER = "other"

# Parts of a phase, which have peaks of their own.
START = "start"
MIDDLE = "middle"
END = "end"

_BY_PHASE = {
    "pack": BATCH,
    "annotate": ACTIVATIONS,
    "forward": ACTIVATIONS,
    "backward": BACKWARD,
    "optimizer": OPTIMIZER,
    "refit": REFIT,
    "receive": REFIT,
}
# Functions of FSDP2 that ask for memory.
_BY_FSDP_FUNCTION = {
    "unshard": GATHERED,
    "wait_for_unshard": GATHERED,
    "post_backward": GRADIENTS,
}
_FSDP = f"{os.sep}fsdp{os.sep}_fully_shard{os.sep}"
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")
_HEAD = (logprob.__file__, logprob_kernels.__file__)


def kind_of_new(phase: str) -> str:
    """Return what memory is for that the innermost of the functions being called asks for."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file in _HEAD:
            return HEAD
        if file.endswith(_CHECKPOINT) and phase == "backward":
            return RECOMPUTED
        if _FSDP in file and frame.f_code.co_name in _BY_FSDP_FUNCTION:
            return _BY_FSDP_FUNCTION[frame.f_code.co_name]
        frame = frame.f_back  # type: ignore[assignment]
    return _BY_PHASE.get(phase, OTHER)
