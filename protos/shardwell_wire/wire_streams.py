"""Streams of pieces in a lossy wire dtype, made and taken apart while they travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from shardwell_wire.codec import DEFAULT_CHUNK_BYTES, Buffer
from shardwell_wire.errors import ChunkError
from shardwell_wire.wire_dtypes import Piece, Run, WireDType, bytes_tensor


class _Buffer:
    """Memory that views keep alive, also as a tensor."""

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(bytearray(size_bytes))
        self.cells = torch.frombuffer(self.view, dtype=torch.uint8)


class StreamEncoder:
    """Encodes pieces, one after another, a chunk at a time.

    Args:
        pieces: In the order of the stream; not changed while it is made.
        wire_dtype: How float32 travels.
        chunk_bytes: The most that a chunk has. A chunk ends with a whole cell, so all but the last may
            be a little shorter.
    """

    def __init__(
        self, pieces: Iterable[Piece], wire_dtype: WireDType, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> None:
        self._runs = [run for piece in pieces for run in piece.runs(wire_dtype)]
        self._chunk_bytes = max([chunk_bytes, *(run.cell_bytes for run in self._runs)])
        self.total_bytes = sum(run.size_bytes for run in self._runs)
        """Length of the stream."""

    def chunks(self) -> Iterator[memoryview]:
        """The stream, each time from its beginning.

        There are two buffers: a chunk stays as it is while the next one is made, so that it can be on
        its way meanwhile, and is overwritten by the one after that.
        """
        room = min(self._chunk_bytes, self.total_bytes)
        buffers = [_Buffer(room), _Buffer(room)] if room else []
        filled = 0
        for run in self._runs:
            first = 0
            while first < run.num_cells:
                count = min(run.num_cells - first, (room - filled) // run.cell_bytes)
                stop = filled + count * run.cell_bytes
                run.encode(first, buffers[0].cells[filled:stop])
                first, filled = first + count, stop
                if first < run.num_cells:
                    yield buffers[0].view[:filled]
                    buffers.reverse()
                    filled = 0
        if filled:
            yield buffers[0].view[:filled]


class StreamDecoder:
    """Decodes a stream into pieces as its bytes arrive, in chunks of any size.

    Args:
        pieces: Receive the values, in the order of the stream.
        wire_dtype: How float32 travels.
        what: Names the stream in errors.
    """

    def __init__(self, pieces: Iterable[Piece], wire_dtype: WireDType, what: str) -> None:
        self._runs = [run for piece in pieces for run in piece.runs(wire_dtype)]
        self._what = what
        self._run, self._cell = 0, 0
        self._carry = bytearray()
        """The beginning of a cell that has not arrived whole."""
        self.total_bytes = sum(run.size_bytes for run in self._runs)
        """Length of the stream."""
        self.received_bytes = 0

    @property
    def complete(self) -> bool:
        return self.received_bytes == self.total_bytes

    def feed(self, data: Buffer) -> None:
        """Takes the next bytes; they are not needed any more afterwards.

        Raises:
            ChunkError: They are more than the stream has left; nothing of them is taken.
        """
        if self.received_bytes + len(data) > self.total_bytes:
            raise ChunkError(
                f"{self._what}: {self.received_bytes + len(data)} bytes or more, expected {self.total_bytes}"
            )
        self.received_bytes += len(data)
        rest = bytes_tensor(data)
        while rest.numel():
            rest = self._take(self._runs[self._run], rest)

    def _take(self, run: Run, data: torch.Tensor) -> torch.Tensor:
        """Decodes the whole cells of a run that begin the data, or keeps part of one; returns the rest."""
        if self._carry or data.numel() < run.cell_bytes:
            taken = min(data.numel(), run.cell_bytes - len(self._carry))
            self._carry += data[:taken].numpy().tobytes()
            if len(self._carry) == run.cell_bytes:
                self._decode(run, bytes_tensor(self._carry))
                self._carry = bytearray()
        else:
            taken = min(run.num_cells - self._cell, data.numel() // run.cell_bytes) * run.cell_bytes
            self._decode(run, data[:taken])
        return data[taken:]

    def _decode(self, run: Run, cells: torch.Tensor) -> None:
        run.decode(self._cell, cells)
        self._cell += cells.numel() // run.cell_bytes
        if self._cell == run.num_cells:
            self._run, self._cell = self._run + 1, 0
