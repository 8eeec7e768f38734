"""The safetensors files of a model's folder: which there are, and what they hold."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from minirl.base.errors import UserError, require
from minirl.base.reading import read_json
from minirl.model.mixture import mxfp4

# What weights may be, by the names of safetensors.
FLOATS = ("F16", "BF16", "F32", "F64")


def open_weights(folder: Path) -> dict[str, Any]:
    """Open the safetensors files of a model's folder, and read none of their weights yet.

    Returns:
        Name of a weight -> what has its shape (`get_shape`) and reads what an index asks for.

    Raises:
        UserError: a file cannot be read.
    """
    weights = {}
    for path in weight_files(folder):
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise UserError(f"policy.model: cannot read {path}: {error}") from error
        names = file.keys()
        for name in names:
            weights[name] = file.get_slice(name)
    return mxfp4.join(weights)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that an index names, or else the single file, or else all there are.

    Raises:
        UserError: the index is not one.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        read = read_json(index, "policy.model:")
        file_of_weight = read.get("weight_map") if isinstance(read, dict) else None
        files: list[Any] = (
            list(file_of_weight.values()) if isinstance(file_of_weight, dict) else [None]
        )
        require(
            all(isinstance(file, str) for file in files),
            f"policy.model: {index} has no weight_map of names and files; write it as "
            "save_pretrained does, or remove it",
        )
        return sorted({folder / file for file in files})
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))


def file_of(weight: str, folder: Path) -> Path:
    """Return the file of a model's folder that a weight is in; it must be in one."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            if not {weight, weight + mxfp4.BLOCKS}.isdisjoint(file.keys()):
                return path
    raise KeyError(weight)


def check_floats(names: Iterable[str], weights: dict[str, Any], folder: Path) -> None:
    """Refuse weights that are no floating-point numbers of 16 bits or more.

    Args:
        names: of the weights that are wanted.
        weights: as `open_weights` returns them.
        folder: of the model.

    Raises:
        UserError: for the first; integers without their scales would be copied as they are.
    """
    for name in names:
        dtype = weights[name].get_dtype()
        if dtype not in FLOATS:  # Only then is the file looked for: that opens all of them.
            raise UserError(
                f"policy.model = {folder}: {name} in {file_of(name, folder)} is of dtype {dtype}; "
                f"take a model that is not quantized, with weights of {', '.join(FLOATS)}"
            )
