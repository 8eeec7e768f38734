"""What must be the same on all machines of a run, checked before anything is loaded.

A file that only one of them has would end some ranks while the others wait for them.
"""

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from minirl.base.errors import UserError, require
from minirl.parallel.mesh import World


@contextlib.contextmanager
def errors_of_all(world: World) -> Iterator[None]:
    """Raise the UserError of a rank in the block on every rank: that of the lowest. Collective."""
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    raise_first(world.gather(message))


def raise_first(messages: list[str | None]) -> None:
    """Raise UserError with the first message; None: the rank has no error."""
    for message in messages:
        if message is not None:
            raise UserError(message)


@contextlib.contextmanager
def errors_of_machines(world: World) -> Iterator[None]:
    """Raise the UserError of a rank in the block on all, and say where it is one. Collective.

    For a block that does the same on every rank. An error that not all ranks have is of a machine.
    """
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    by_rank = world.gather(message)
    failed = [rank for rank, text in enumerate(by_rank) if text is not None]
    if not failed:
        return
    text = by_rank[failed[0]]
    if len(failed) < world.world_size:
        hosts = world.gather(socket.gethostname())
        good = [rank for rank in range(world.world_size) if rank not in failed]
        text = (
            f"{text} (so on {_places(failed, hosts)}, and not on {_places(good, hosts)}; every "
            "machine of a run needs the same files at the same place)"
        )
    raise UserError(text)


def check_same(values: Mapping[str, object], world: World) -> None:
    """Refuse values that differ between the ranks. Collective.

    Args:
        values: name for errors -> value, compared by its text.
        world: the ranks.

    Raises:
        UserError: for the first that differs.
    """
    by_rank = world.gather({name: str(value) for name, value in values.items()})
    names = dict.fromkeys(name for seen in by_rank for name in seen)
    for name in names:
        texts = [seen.get(name, "missing") for seen in by_rank]
        if len(set(texts)) == 1:
            continue
        hosts = world.gather(socket.gethostname())
        other = next(text for text in texts if text != texts[0])
        places = []
        for text in (texts[0], other):
            ranks = [rank for rank, found in enumerate(texts) if found == text]
            places.append(f"{text} on {_places(ranks, hosts)}")
        raise UserError(
            f"{name} is {' and '.join(places)}; every machine of a run needs the same settings and "
            "files"
        )


def check_shared(folder: Path, setting: str, world: World) -> None:
    """Refuse a folder that not all ranks can write to, or that is not the same one. Collective.

    Rank 0 writes a small file, for which the others look; what was made for it is removed again.
    Nobody but rank 0 may have looked for the folder before: a network file system may remember for
    a minute that there was none.

    Args:
        folder: it may not exist yet.
        setting: the setting that names it, for errors.
        world: the ranks.

    Raises:
        UserError: on all ranks.
    """
    # 1. Rank 0 writes.
    name = world.broadcast(f".seen-by-all-{uuid.uuid4().hex[:8]}", 0)
    made: list[Path] = []
    with errors_of_all(world):
        if world.rank == 0:
            try:
                made = [path for path in (folder, *folder.parents) if not path.exists()]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            except OSError as error:
                raise UserError(
                    f"{setting} = {folder} cannot be written to: {error}; choose another folder"
                ) from error

    # 2. All look. (pathlib would raise for a folder that this user may not enter.)
    hosts = world.gather(socket.gethostname())
    seen = world.gather(os.path.exists(folder / name))
    writable = world.gather(os.access(folder, os.W_OK))
    if world.rank == 0:
        (folder / name).unlink()
        with contextlib.suppress(OSError):  # another run has put something there meanwhile
            for path in made:
                path.rmdir()
    blind = [rank for rank in range(world.world_size) if not seen[rank]]
    require(
        not blind,
        f"{setting} = {folder} is not one folder for all machines: what rank 0 writes there on "
        f"{hosts[0]} is not seen on {_places(blind, hosts)}; name a folder of a file system that "
        "all machines of the run mount at the same place",
    )
    mute = [rank for rank in range(world.world_size) if not writable[rank]]
    require(
        not mute,
        f"{setting} = {folder} cannot be written to on {_places(mute, hosts)}; every rank writes "
        "its part of a checkpoint there, so mount it for writing on all machines",
    )


def check_on_one_machine(num_ranks: int, setting: str, world: World) -> None:
    """Refuse groups of consecutive ranks that span machines. Collective.

    Args:
        num_ranks: size of a group.
        setting: the setting that has it, for errors.
        world: the ranks.

    Raises:
        UserError: on all ranks.
    """
    hosts = world.gather(socket.gethostname())
    for first in range(0, world.world_size, num_ranks):
        group = list(range(first, first + num_ranks))
        require(
            len({hosts[rank] for rank in group}) == 1,
            f"{setting} = {num_ranks} puts ranks of {_places(group, hosts)} together, which must "
            "be on one machine; lower it, or start more ranks on each",
        )


def _places(ranks: list[int], hosts: list[str]) -> str:
    """Return the machines of some ranks with those ranks: `node-1 (ranks 2, 3)`."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    named = [
        f"{host} (rank{'s' * (len(numbers) > 1)} {', '.join(numbers)})"
        for host, numbers in by_host.items()
    ]
    if len(named) > 3:
        named = [*named[:3], f"{len(named) - 3} more"]
    return ", ".join(named)


def check_can_write(path: Path, setting: str, world: World) -> None:
    """Refuse a file that could not be written later; its folder is made. Collective.

    Rank 0, which will write it, tries; others that tried meanwhile would see its attempt, or remove
    it.

    Raises:
        UserError: on all ranks, if it is a folder, or its folder cannot be made or written to.
    """
    with errors_of_all(world):
        if world.rank != 0:
            return
        problem = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not os.path.lexists(path)
            with path.open("ab"):  # /proc says that it can be written to, and cannot
                pass
            if is_new:
                path.unlink()
        except IsADirectoryError:
            problem = "it is a folder"
        except (OSError, ValueError) as error:
            problem = str(error)
        require(not problem, f"{setting} = {path} cannot be written: {problem}; name another file")
