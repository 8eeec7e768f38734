"""Routes: the experts to which an engine's routers sent each token (R3, arXiv 2510.11370).

The routes of a sequence are uint8 or int16 [R, M, k]: for the first R of its tokens and each of the
M mixtures of the model, in order of layers, the k experts that were chosen. The last token of a
sequence has no route, because the engine never reads it.
"""

import base64
from typing import Any

import numpy as np

LIVE = -1  # In place of an expert's number: the trainer's own router chooses.
_DTYPES = ("uint8", "int16")


def narrow(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Return numbers of experts in the smallest dtype that holds those of all `num_experts`."""
    return experts.astype(np.uint8 if num_experts <= 256 else np.int16)


def extended(routes: np.ndarray | None, longer: np.ndarray) -> np.ndarray:
    """Return the routes of a sequence with those of tokens that had none.

    A token keeps its first route, which the log-prob of the next token was computed by: a later
    request computes the sequence again, maybe with other weights.

    Args:
        routes: routes of the beginning of a sequence; None: there are none.
        longer: routes of a later request, from the first token of the sequence on.
    """
    if routes is None:
        return longer
    return np.concatenate([routes, longer[len(routes) :]])


def to_json(routes: np.ndarray | None) -> dict[str, Any] | None:
    """Return routes as JSON takes them: {"dtype", "shape", "data" in base 64}."""
    if routes is None:
        return None
    data = base64.b64encode(np.ascontiguousarray(routes).tobytes()).decode()
    return {"dtype": routes.dtype.name, "shape": list(routes.shape), "data": data}


def from_json(saved: dict[str, Any] | None) -> np.ndarray | None:
    """Return the routes that `to_json` was given. Raises ValueError, KeyError or TypeError."""
    if saved is None:
        return None
    if saved["dtype"] not in _DTYPES or len(saved["shape"]) != 3:
        raise ValueError(f"routes are {saved['dtype']} of shape {saved['shape']}")
    data = bytearray(base64.b64decode(saved["data"], validate=True))
    return np.frombuffer(data, saved["dtype"]).reshape(saved["shape"])
