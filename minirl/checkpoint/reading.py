"""Read the state of models and optimizers, and run nothing that somebody has put into the files.

torch keeps where tensors are in `.metadata`, and settings of optimizers among the tensors, both by
pickle, which runs what it reads. Here each is read by a pickle that knows the classes that torch
writes, and no others. Tensors torch reads so by itself.
"""

import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from minirl.base.errors import UserError
from minirl.base.reading import library_reads
from minirl.checkpoint.finding import Unreadable

_METADATA = "torch.distributed.checkpoint.metadata"
# What torch writes into `.metadata`: classes that hold values, and one function that returns one.
ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}
# torch writes a dtype by its name.
DTYPES = {str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _member(of: object, name: str) -> Any:
    """Return a member of torch's enum of memory formats, and nothing of anything else."""
    if of is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it names {name} of {of}, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING.__members__[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of torch's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # For an enum, as Python 3.11.2 does.
            return _member
        if (module, name) in ALLOWED or (module == "torch" and f"torch.{name}" in DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_metadata(state: Path) -> Metadata:
    """Return what torch has written where, in the folder `state` of a checkpoint.

    Raises:
        Unreadable: it cannot be read, or holds something else.
    """
    path = state / ".metadata"
    try:
        with library_reads(str(path)), path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
                raise pickle.UnpicklingError("it does not say what is where")
            for info in metadata.storage_data.values():
                if Path(info.relative_path).name != info.relative_path:
                    raise pickle.UnpicklingError(
                        f"it names {info.relative_path}, outside the folder"
                    )
    except UserError as error:
        raise Unreadable(str(error)) from error
    return metadata


class _Reader(dcp.FileSystemReader):
    """Reads the metadata with the classes above only, and checks what it reads."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.transforms = _CheckedStreams()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _CheckedStreams(_StorageReaderTransforms):
    """Compares what is read with the checksums that torch has written, and does not look at.

    torch writes each tensor, and each plain value, as a zip archive.
    """

    def transform_load_stream(self, read_item: ReadItem, names: Any, stream: IO[bytes]) -> Any:
        archive = io.BytesIO(stream.read(-1))
        damaged = zipfile.ZipFile(archive).testzip()
        if damaged:
            where = f"{damaged} of {read_item.storage_index.fqn}"
            raise zipfile.BadZipFile(f"{where} does not hold what was written")
        archive.seek(0)
        return super().transform_load_stream(read_item, names, archive)


class _Planner(DefaultLoadPlanner):
    """Reads what is no tensor with the classes of plain values only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises where torch, which reads it next, would not
        value.seek(0)
        super().load_bytes(read_item, value)


def read_state(checkpoint: Path, state: dict, *, alone: bool = False) -> None:
    """Fill a state dict from a checkpoint, in place. Collective.

    Args:
        checkpoint: the folder.
        state: nested dicts of tensors and plain values.
        alone: only this rank reads.

    Raises:
        Unreadable: the files do not hold it.
    """
    folder = checkpoint / "state"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(state, storage_reader=_Reader(folder), planner=_Planner(), no_dist=alone)
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, Unreadable):
            raise cause from error
        raise Unreadable(
            f"{folder} cannot be read (rank {rank}: {type(cause).__name__}: {cause})"
        ) from error


def saved_shapes(checkpoint: Path, prefix: str = "") -> dict[str, torch.Size]:
    """Return the shape of every weight of a model; a tied head may be there under both names.

    Raises:
        Unreadable: the metadata cannot be read.
    """
    start = f"{prefix}model."
    shapes = {}
    for name, entry in read_metadata(checkpoint / "state").state_dict_metadata.items():
        if name.startswith(start) and isinstance(entry, TensorStorageMetadata):
            shapes[name.removeprefix(start)] = entry.size
    return shapes
