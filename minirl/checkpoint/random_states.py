"""The states of all generators that a run may draw from, as a checkpoint holds them."""

import base64
import random

import numpy as np
import torch


def random_states() -> dict:
    """Return the state of every generator that a run may draw from, as JSON has it."""
    version, python_state, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": [version, list(python_state), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _to_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = _to_text(torch.cuda.get_rng_state())
    return states


def set_random_states(states: dict) -> None:
    """Set every generator to its state in a checkpoint."""
    version, python_state, gauss = states["python"]
    random.setstate((version, tuple(python_state), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_from_text(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(states["cuda"]))


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
