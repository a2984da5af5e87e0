"""The checkpoints of one run: ``DIR/RUN/step-000000042-ID/`` with one file per shard server and a manifest.

``verify`` compares every checksum of a checkpoint, and names everything that is damaged or missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

from shardwell_wire.checkpoints.format import FileRecord, checksum_of
from shardwell_wire.checkpoints.manifest import MANIFEST_NAME, Manifest
from shardwell_wire.checkpoints.reading import (
    Checkpoint,
    StoredPiece,
    check_size,
    read_index,
    read_manifest,
    verify_piece,
)
from shardwell_wire.checkpoints.storage import Storage, open_storage
from shardwell_wire.errors import AccessError, CorruptDataError, NotFoundError

_FOLDER = re.compile(r"step-(\d{9,18})-([A-Za-z0-9]{1,64})")
_MAX_NAME_BYTES = 200


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in a list, complete or not."""

    run: str
    """Name of the run."""
    folder: str
    """Name of the checkpoint's folder in the run's folder."""
    url: str
    """Path or URL of the checkpoint."""
    step: int
    checkpoint_id: str
    manifest: Manifest | None
    """None: the checkpoint is incomplete or its manifest is damaged."""
    problem: str
    """Why the checkpoint cannot be loaded. Empty: nothing is known to be wrong. Contents are not read."""
    is_incomplete: bool
    """True if there is no manifest: the checkpoint is being written, or its writing was cut off."""

    @property
    def is_valid(self) -> bool:
        return not self.problem


class RunFolder:
    """The checkpoints of one run in a folder. All methods block and raise as ``Storage``."""

    def __init__(self, storage: Storage, run: str) -> None:
        self.run, self._storage, self._name = run, storage, folder_name(run)

    @classmethod
    def of(cls, url: str | Path, run: str) -> Self:
        """Returns the folder of a run. Creates nothing.

        Args:
            url: Path or URL of the folder of all runs.
            run: Name of the run.
        """
        return cls(open_storage(url), run)

    def url_of(self, folder: str) -> str:
        """Returns the path or URL of a checkpoint."""
        return self._storage.where(f"{self._name}/{folder}")

    # ---- writing ----

    def begin(self, step: int, checkpoint_id: str) -> str:
        """Makes the folder of a new checkpoint. Returns its name."""
        folder = checkpoint_folder(step, checkpoint_id)
        assert _FOLDER.fullmatch(folder), folder
        self._storage.make_folder(f"{self._name}/{folder}")
        return folder

    def publish(self, folder: str, manifest: Manifest) -> None:
        """Writes the manifest, after which the checkpoint is offered. All its files must be complete.

        Raises:
            NotFoundError: A file is missing: a server writes to another place than the coordinator.
            CorruptDataError: A file has another size than its server reported.
        """
        checkpoint = self._storage.below(f"{self._name}/{folder}")
        for file in manifest.files:
            try:
                check_size(checkpoint, file)
            except NotFoundError as error:
                raise NotFoundError(
                    f"{error}, although server {file.server_id!r} has written it: the coordinator and all shard "
                    "servers must reach the same checkpoint folder",
                    **error.data,
                ) from error
        checkpoint.write_whole(MANIFEST_NAME, manifest.to_bytes())

    # ---- listing ----

    def entries(self) -> list[Entry]:
        """Returns all checkpoints, newest first: by the time of creation, then by step. Incomplete ones come last."""
        return _entries(self._storage, self._name)

    def newest(self, *, lineage: Collection[str] | None = None, but: Collection[str] = ()) -> Entry | None:
        """Returns the newest checkpoint that can be loaded, as far as sizes tell.

        Args:
            lineage: Ids of runs. Checkpoints of other runs, which had the same name, are passed over. None: any.
            but: Ids of checkpoints that are passed over, for example because they are damaged.
        """
        for entry in self.entries():
            known = entry.manifest is not None and (lineage is None or entry.manifest.run_id in lineage)
            if known and entry.is_valid and entry.checkpoint_id not in but:
                return entry
        return None

    # ---- deleting ----

    def delete(self, folder: str) -> None:
        """Deletes a checkpoint: the manifest first, so that nobody finds half of it."""
        assert _FOLDER.fullmatch(folder), folder
        self._storage.delete(f"{self._name}/{folder}/{MANIFEST_NAME}")
        self._storage.delete_folder(f"{self._name}/{folder}")

    def keep_newest(self, count: int, *, lineage: Collection[str]) -> list[str]:
        """Deletes all but the newest checkpoints that can be loaded. Returns the names of deleted folders.

        Args:
            count: How many to keep. At least 1.
            lineage: Ids of the run and of those it was resumed from. Checkpoints of other runs stay.
        """
        assert count >= 1
        mine = [at for at in self.entries() if at.manifest is not None and at.manifest.run_id in lineage]
        kept = [at for at in mine if at.is_valid][:count]
        # Damaged ones newer than the oldest kept one stay for inspection.
        oldest = min((_age(at) for at in kept[-1:]), default=None)
        surplus = [at for at in mine if oldest is not None and at not in kept and _age(at) > oldest]
        for entry in surplus:
            self.delete(entry.folder)
        return [entry.folder for entry in surplus]


def _age(entry: Entry) -> tuple[bool, float, int]:
    created = entry.manifest.created if entry.manifest is not None else 0.0
    return entry.manifest is None, -created, -entry.step


def checkpoint_folder(step: int, checkpoint_id: str) -> str:
    """Returns the name of a checkpoint's folder in the run's folder."""
    return f"step-{step:09}-{checkpoint_id}"


def folder_name(run: str) -> str:
    """Returns the name of a run's folder: the run's name, percent-encoded where file systems or URLs object."""
    name = quote(run, safe=" +=@,")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    return name if len(name) <= _MAX_NAME_BYTES else f"{name[: _MAX_NAME_BYTES - 20]}~{checksum_of(run.encode())}"


def run_of(folder: str) -> str | None:
    """Returns the run of a folder; None if the name is no run's. A shortened name stays shortened."""
    name = unquote(folder, errors="replace")
    return name if folder_name(name) == folder or "~" in folder else None


def entries_below(url: str | Path) -> list[Entry]:
    """Returns all checkpoints in a folder of runs, in the folder of one run, or the one checkpoint at ``url``.

    Sorted by the folder of the run, then as ``RunFolder.entries``. Empty if there is none.

    Raises:
        ShardwellError: See ``Storage``.
    """
    storage = open_storage(url)
    names = storage.names()
    if MANIFEST_NAME in names or _FOLDER.fullmatch(_last(storage.url)):
        return [entry_at(storage)]
    if any(map(_FOLDER.fullmatch, names)):
        return _entries(storage, "")
    return [entry for name in names for entry in _entries(storage, name)]


def _entries(storage: Storage, folder: str) -> list[Entry]:
    """Returns the checkpoints in the folder of one run, newest first."""
    found = filter(_FOLDER.fullmatch, storage.names(folder))
    return sorted((entry_at(storage.below(f"{folder}/{name}".lstrip("/"))) for name in found), key=_age)


def entry_at(storage: Storage) -> Entry:
    """Describes the checkpoint in a folder, complete or not."""
    url, folder = storage.url, _last(storage.url)
    match = _FOLDER.fullmatch(folder)
    step, checkpoint_id = (int(match[1]), match[2]) if match else (0, "")
    run = run_of(_last(url.rstrip("/").rpartition("/")[0])) or ""
    manifest, problem, is_incomplete = None, "", False
    try:
        manifest = read_manifest(storage)
        if match and (manifest.step, manifest.checkpoint_id) != (step, checkpoint_id):
            raise CorruptDataError(
                f"the manifest in {url} belongs to checkpoint {manifest.checkpoint_id} of step {manifest.step}"
            )
        run, step, checkpoint_id = manifest.run, manifest.step, manifest.checkpoint_id
        for file in manifest.files:
            check_size(storage, file)
    except NotFoundError as error:
        is_incomplete = manifest is None
        problem = "it has no manifest" if is_incomplete else str(error)
    except (CorruptDataError, AccessError) as error:  # access: a link out of the folder for checkpoints
        problem = str(error)
    return Entry(run, folder, storage.url, step, checkpoint_id, manifest, problem, is_incomplete)


def _last(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


_THREADS = 4
"""Tensors that are read concurrently: buckets answer slowly, and a disk may have several queues."""


def verify(storage: Storage, count: Callable[[int], None]) -> Iterator[str]:
    """Yields one line for each damaged or missing file and tensor, after the whole checkpoint has been read.

    Args:
        storage: The checkpoint's folder.
        count: Called with the number of bytes of each tensor that has been read, in any thread.

    Raises:
        ShardwellError: The storage cannot be read. See ``Storage``.
    """
    try:
        manifest = read_manifest(storage)
    except (NotFoundError, CorruptDataError) as error:
        yield str(error)
        return
    is_damaged = False
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwell-verify") as threads:
        for file in manifest.files:
            for problem in _verify_file(storage, manifest, file, threads, count):
                is_damaged = True
                yield problem
    if not is_damaged:
        try:
            Checkpoint(storage)
        except CorruptDataError as error:
            yield str(error)


def _verify_file(
    storage: Storage, manifest: Manifest, file: FileRecord, threads: ThreadPoolExecutor, count: Callable[[int], None]
) -> Iterator[str]:
    try:
        index = read_index(storage, manifest, file)
    except (NotFoundError, CorruptDataError) as error:
        yield str(error)
        return

    def problem_of(stored: StoredPiece) -> str:
        try:
            verify_piece(storage, stored)
        except CorruptDataError as error:
            return str(error)
        finally:
            count(stored.piece.size_bytes)
        return ""

    yield from filter(None, threads.map(problem_of, (StoredPiece(file, placed) for placed in index.pieces)))
