"""Writes one file of a checkpoint, in any order."""

from __future__ import annotations

import threading
from typing import Any

import xxhash

from shardwell_wire.checkpoints.format import FilePlan, Piece, checksum_of
from shardwell_wire.checkpoints.manifest import FileRecord
from shardwell_wire.checkpoints.storage import OutputFile, Storage


class CheckpointFileWriter:
    """Writes the tensors of a file as they become available. Methods may be called from any thread.

    Args:
        storage: The checkpoint's folder.
        server_id: Shard server or trainer that writes the file.
        plan: The tensors.
        name: Name of the file. Empty: that of a shard server's file.

    Raises:
        ShardwellError: See ``Storage``.
    """

    def __init__(self, storage: Storage, server_id: str, plan: FilePlan, *, name: str = "") -> None:
        self.name = name or file_name(server_id)
        self.plan, self._server_id = plan, server_id
        self._unfinished: dict[str, tuple[int, Any]] = {}
        """Bytes and hash so far of pieces that are written in parts, by name."""
        self._checksums: dict[str, str] = {}
        self._written_bytes = 0
        self._counting = threading.Lock()
        self._file: OutputFile = storage.create(self.name, plan.size_bytes)

    @property
    def written_bytes(self) -> int:
        """Bytes of tensors that were written."""
        return self._written_bytes

    def write(self, piece: Piece, data: Any) -> None:
        """Writes a whole tensor.

        Args:
            piece: A piece of the plan.
            data: Its bytes, as any contiguous buffer.

        Raises:
            ShardwellError: See ``Storage``.
        """
        view = memoryview(data).cast("B") if piece.size_bytes else memoryview(b"")
        assert view.nbytes == piece.size_bytes, f"{piece.name!r}: {view.nbytes} bytes, expected {piece.size_bytes}"
        self.write_part(piece, view)

    def write_part(self, piece: Piece, data: Any) -> None:
        """Writes the next bytes of a tensor. The parts of one tensor come in order, one call at a time."""
        view, name = memoryview(data).cast("B"), piece.name
        done, hasher = self._unfinished.pop(name, None) or (0, xxhash.xxh3_64())
        assert name not in self._checksums, f"{name!r} was written twice"
        assert done + view.nbytes <= piece.size_bytes, f"{name!r}: too many bytes"
        self._file.write(view, self.plan.offsets[name] + done)
        hasher.update(view)
        done += view.nbytes
        if done < piece.size_bytes:
            self._unfinished[name] = done, hasher
        else:
            self._checksums[name] = hasher.hexdigest()
        with self._counting:
            self._written_bytes += view.nbytes

    def finish(self) -> FileRecord:
        """Writes the header and makes the file durable.

        Raises:
            ShardwellError: See ``Storage``.
        """
        missing = [piece.name for piece in self.plan.pieces if piece.name not in self._checksums]
        assert not missing, f"{len(missing)} tensors were not written, such as {missing[0]!r}"
        header = self.plan.header(self._checksums)
        self._file.write(header, 0)
        self._file.finish()
        return FileRecord(
            name=self.name,
            server_id=self._server_id,
            size_bytes=self.plan.size_bytes,
            header_bytes=len(header),
            header_xxh3_64=checksum_of(header),
        )

    def abort(self) -> None:
        """Removes the file. Never raises. Harmless to repeat, and after ``finish``."""
        self._file.abort()


def file_name(server_id: str) -> str:
    """Returns the name of a shard server's file."""
    return f"shards-{server_id}.safetensors"
