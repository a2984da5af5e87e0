"""The last 16-bit stream of each shard, kept so that the servers send only what has changed since.

Note: [Kept streams]
    A stream is identified by its version and the checksum of its bytes, which the server announces. A delta is applied
    to the kept bytes in place, and the checksum of the result must be that of the new stream. The base is therefore
    never another one than the server's, also after a rollback, when a version has other values than before.

    One transfer at a time uses the kept bytes. Another transfer of the same shard meanwhile, such as one of the newest
    version for a work item that does not count any more, fetches a whole stream into memory of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import xxhash

from shardwell.memory.buffers import BufferPool
from shardwell.transport.base import Incoming
from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CorruptDataError
from shardwell_wire.v1 import shard_pb2

_SIZE_CLASSES = 64
"""Sizes of the buffers for deltas, as parts of the stream. With few sizes, buffers are reused."""

Use = Callable[[memoryview], None]
"""Decodes a whole stream."""


@dataclass(slots=True)
class DeltaCache:
    """The memory for all kept streams of a trainer or reader, and what they save. Thread-safe.

    Args:
        budget_bytes: Limit of the kept streams together.
    """

    budget_bytes: int
    reads_again: bool = True
    """Whether a kept stream is used again for its version without asking the server. Only for callers that forget all
    streams before versions are made again."""
    held_bytes: int = 0
    """Memory of the kept streams."""
    stream_bytes: int = 0
    """Size of the streams that were fetched with deltas, without deltas."""
    received_bytes: int = 0
    """Bytes that were received for them."""
    reused_bytes: int = 0
    """Size of streams that were not fetched, because the kept stream had the version."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def reserve(self, size_bytes: int) -> bool:
        """Takes memory from the budget; returns False if it does not suffice."""
        with self._lock:
            if self.held_bytes + size_bytes > self.budget_bytes:
                return False
            self.held_bytes += size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        """Returns memory to the budget."""
        with self._lock:
            self.held_bytes -= size_bytes

    def count(self, *, stream_bytes: int = 0, received_bytes: int = 0, reused_bytes: int = 0) -> None:
        """Counts a stream."""
        with self._lock:
            self.stream_bytes += stream_bytes
            self.received_bytes += received_bytes
            self.reused_bytes += reused_bytes

    def stats(self) -> dict[str, float]:
        """Returns the counters for ``session.stats()``."""
        with self._lock:
            return {
                "delta_cache_bytes": self.held_bytes,
                "delta_stream_bytes": self.stream_bytes,
                "delta_received_bytes": self.received_bytes,
                "delta_reused_bytes": self.reused_bytes,
                "delta_ratio": self.received_bytes / self.stream_bytes if self.stream_bytes else 1.0,
            }


class DeltaIncoming(Incoming):
    """A stream that may arrive as deltas. See Note: [Kept streams].

    Args:
        memory: The stream that this trainer has, which becomes the new one. [size of the stream]
        base: Version and checksum of the memory. Without a version, the memory has arbitrary content. Updated.
        use: Decodes the new stream.
        buffers: Memory for deltas.
        cache: Counts bytes.
    """

    def __init__(
        self,
        memory: memoryview,
        base: shard_pb2.StreamBase,
        use: Use,
        buffers: BufferPool,
        cache: DeltaCache,
        what: str,
    ) -> None:
        super().__init__(memory, use)
        self.base = self._base = base
        self.version: int | None = None
        """The version in the memory. None: the memory has arbitrary content, or the version of the base."""
        self._buffers, self._cache, self._what = buffers, cache, what
        self._buffer: torch.Tensor | None = None
        self._announced: tuple[int, shard_pb2.StreamDeltas | None] = 0, None

    def place(self, version: int, deltas: shard_pb2.StreamDeltas | None) -> memoryview:
        self._announced = version, deltas
        if deltas is None or not deltas.sizes_bytes:
            self._base.Clear()  # the stream overwrites it
            return super().place(version, deltas)
        self.received_bytes = sum(deltas.sizes_bytes)
        if not self._base.HasField("version") or self.received_bytes >= len(self._memory):
            raise CorruptDataError(
                f"{self._what}: the server announces deltas of {self.received_bytes} bytes for a stream of "
                f"{len(self._memory)} bytes, of which this process has "
                f"{'a base' if self._base.HasField('version') else 'no base'}: expected a smaller size, or the stream"
            )
        self.close()
        step = max(1, len(self._memory) // _SIZE_CLASSES)
        self._buffer = self._buffers.acquire(-(-self.received_bytes // step) * step)
        return memory_at(self._buffer.data_ptr(), self.received_bytes, self._buffer)

    def finish(self) -> None:
        version, deltas = self._announced
        if deltas is not None and deltas.sizes_bytes:
            self._apply(deltas)
        self.version = version
        if deltas is not None:
            self._base.version, self._base.checksum = version, deltas.checksum
        self._cache.count(stream_bytes=len(self._memory), received_bytes=self.received_bytes)
        super().finish()

    def close(self) -> None:
        """Releases the memory for deltas."""
        if self._buffer is not None:
            self._buffers.release(self._buffer)
            self._buffer = None

    def _apply(self, deltas: shard_pb2.StreamDeltas) -> None:
        assert self._buffer is not None
        self._base.Clear()  # until all deltas are applied
        received = memory_at(self._buffer.data_ptr(), self.received_bytes, self._buffer)
        value_deltas.apply_all(deltas, received, self._memory, self._what)


class KeptStream:
    """The stream of one shard that was received last. Thread-safe. See Note: [Kept streams].

    Args:
        cache: The memory of all kept streams. The stream takes its part when it is received for the first time.
    """

    def __init__(self, cache: DeltaCache, what: str) -> None:
        self._cache, self._what = cache, what
        self._in_use = threading.Lock()
        self._base, self._version = shard_pb2.StreamBase(), -1
        self._memory: torch.Tensor | None = None
        self._is_outdated = False

    def shows(self, version: int | None) -> bool:
        """Returns whether the kept stream has a version now."""
        return self._cache.reads_again and version is not None and self._version == version and not self._is_outdated

    def forget(self) -> None:
        """Forgets the stream: versions are going to be made again. A transfer in flight does not make it valid."""
        self._is_outdated = True
        self._drop_outdated()

    def read(self, version: int | None, use: Use) -> bool:
        """Uses the kept stream if it has a version; returns whether it does."""
        if not self.shows(version):
            return False
        with self._using() as is_mine:
            if not is_mine or not self.shows(version):
                return False
            memory = self._view()
            use(memory)
            self._cache.count(reused_bytes=len(memory))
            return True

    def copy(self, version: int) -> torch.Tensor | None:
        """Returns a copy of the kept stream. uint8. None: it is in use, or has another version."""
        with self._using() as is_mine:
            is_kept = is_mine and self._version == version and self._memory is not None and not self._is_outdated
            return self._memory.clone() if is_kept and self._memory is not None else None

    def has(self, version: int) -> bool:
        """Returns whether the kept stream has a version now, also if the version may have been made again."""
        return self._version == version and not self._is_outdated

    @contextmanager
    def incoming(self, size_bytes: int, use: Use, buffers: BufferPool) -> Iterator[Incoming | None]:
        """Returns the kept stream as memory for the next one. None: it is in use, or the budget does not suffice."""
        with self._using() as is_mine:
            if is_mine and self._memory is None and self._cache.reserve(size_bytes):
                self._memory = torch.empty(size_bytes, dtype=torch.uint8)
            if not is_mine or self._memory is None:
                yield None
                return
            incoming = DeltaIncoming(self._view(), self._base, use, buffers, self._cache, self._what)
            former, self._version = self._version, -1
            try:
                yield incoming
            finally:
                incoming.close()
                if incoming.version is not None:
                    self._version = incoming.version
                elif self._base.HasField("version"):
                    self._version = former  # nothing has arrived

    @contextmanager
    def _using(self) -> Iterator[bool]:
        """Context in which no other thread uses the stream, if its value is True."""
        if not self._in_use.acquire(blocking=False):
            yield False
            return
        try:
            yield True
        finally:
            self._in_use.release()
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Releases the memory of a forgotten stream. If a transfer uses it, the end of the transfer releases it."""
        if not self._is_outdated or not self._in_use.acquire(blocking=False):
            return
        try:
            if self._memory is not None:
                self._cache.release(self._memory.numel())
            self._base, self._version, self._memory = shard_pb2.StreamBase(), -1, None
            self._is_outdated = False
        finally:
            self._in_use.release()

    def _view(self) -> memoryview:
        assert self._memory is not None
        return memory_at(self._memory.data_ptr(), self._memory.numel(), self._memory)


class DecodedStream:
    """A stream that is encoded again from the values that were decoded from it, which gives the same bytes.

    Args:
        cache: Counts bytes.
        version: The version of the values. None: there are none.
        encode: Encodes the values into memory of the size of the stream.
    """

    def __init__(self, cache: DeltaCache, what: str, version: int | None, encode: Use) -> None:
        self._cache, self._what, self._version, self._encode = cache, what, version, encode

    @contextmanager
    def incoming(self, size_bytes: int, use: Use, buffers: BufferPool) -> Iterator[Incoming]:
        """See ``KeptStream.incoming``."""
        with buffers.acquired(size_bytes) as memory:
            base = shard_pb2.StreamBase()
            if self._version is not None:
                self._encode(memory)
                base.version, base.checksum = self._version, xxhash.xxh3_64_intdigest(memory)
            incoming = DeltaIncoming(memory, base, use, buffers, self._cache, self._what)
            try:
                yield incoming
            finally:
                incoming.close()


@contextmanager
def receiving(
    size_bytes: int, use: Use, buffers: BufferPool, kept: KeptStream | DecodedStream | None = None
) -> Iterator[Incoming]:
    """Context with the memory for an encoded stream: the kept stream, or temporary memory.

    Args:
        use: Decodes the stream.
        kept: The kept stream of the shard, if there is one.
    """
    if kept is not None:
        with kept.incoming(size_bytes, use, buffers) as incoming:
            if incoming is not None:
                yield incoming
                return
    with buffers.acquired(size_bytes) as memory:
        yield Incoming(memory, use)
