"""The slices of a stream: values that are converted together, and how they are converted."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from shardwell_wire import low_rank_factors, quantization_blocks
from shardwell_wire.wire_dtypes import AS_STORED, LOW_RANK, WireDtype


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one parameter in a slice. Ranges count the slice's items."""

    parameter_index: int
    of_parameter: slice
    """Range in the flattened parameter."""
    of_slice: slice


@dataclass(frozen=True, slots=True)
class Slice(ABC):
    """Values that are converted together. They are consecutive in the flat vector.

    Its items are float32 values, or bytes of one parameter that is sent as stored.
    """

    kind: WireDtype
    """Encoding of the values."""
    numel: int
    """Number of items."""
    start_bytes: int
    """Half-open range in the unit's flat vector."""
    stop_bytes: int
    in_stream: slice
    """Range in the stream, in bytes."""
    parts: tuple[Part, ...]

    @property
    def encoded_bytes(self) -> int:
        """Size in the stream."""
        return int(self.in_stream.stop - self.in_stream.start)

    @abstractmethod
    def encode(self, values: torch.Tensor, stream: torch.Tensor, seed: int = 0) -> None:
        """Encodes the values into their range of the stream. [numel]

        Args:
            values: The values.
            stream: The whole stream.
            seed: Seed of random numbers, which low-rank dtypes use.
        """

    @abstractmethod
    def decode(self, stream: torch.Tensor, values: torch.Tensor) -> None:
        """Decodes the values from their range of the stream. [numel]"""

    @abstractmethod
    def decode_overlapping(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Decodes the values from memory that may overlap them. [encoded_bytes] -> [numel]"""

    @abstractmethod
    def round_trip(self, values: torch.Tensor, arrived: torch.Tensor) -> None:
        """Rounds the values as a transfer would. ``arrived`` may be ``values``. [numel]"""


@dataclass(frozen=True, slots=True)
class BlockSlice(Slice):
    """Blocks of one size."""

    block_numel: int
    """Items per block."""

    def encode(self, values: torch.Tensor, stream: torch.Tensor, seed: int = 0) -> None:
        """See ``Slice``."""
        quantization_blocks.encode(self.kind, self.block_numel, values, stream[self.in_stream])

    def decode(self, stream: torch.Tensor, values: torch.Tensor) -> None:
        """See ``Slice``."""
        quantization_blocks.decode(self.kind, self.block_numel, stream[self.in_stream], values)

    def decode_overlapping(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """See ``Slice``."""
        if self.kind == AS_STORED:
            # ctypes releases the interpreter lock.
            ctypes.memmove(values.data_ptr(), encoded.data_ptr(), encoded.numel())
        else:
            # Copied first, because torch decodes the blocks of a slice in any order.
            scratch = quantization_blocks.scratch_encoded(encoded.numel()).copy_(encoded)
            quantization_blocks.decode(self.kind, self.block_numel, scratch, values)

    def round_trip(self, values: torch.Tensor, arrived: torch.Tensor) -> None:
        """See ``Slice``."""
        if self.kind == AS_STORED:
            arrived.copy_(values)
            return
        scratch = quantization_blocks.scratch_encoded(self.encoded_bytes)
        quantization_blocks.encode(self.kind, self.block_numel, values, scratch)
        quantization_blocks.decode(self.kind, self.block_numel, scratch, arrived)


@dataclass(frozen=True, slots=True)
class MatrixSlice(Slice):
    """Consecutive elements of a matrix of low rank. They are encoded only together with all others of the matrix."""

    shape: tuple[int, int]
    """Rows and columns of the whole matrix."""

    @property
    def is_whole(self) -> bool:
        """True if the slice has all elements of the matrix."""
        return self.numel == self.shape[0] * self.shape[1]

    def encode(self, values: torch.Tensor, stream: torch.Tensor, seed: int = 0) -> None:
        """See ``Slice``."""
        assert self.is_whole, "a part of a matrix has no factors of its own"
        low_rank_factors.encode(values.view(self.shape), LOW_RANK[self.kind], stream[self.in_stream], seed)

    def decode(self, stream: torch.Tensor, values: torch.Tensor) -> None:
        """See ``Slice``."""
        low_rank_factors.decode(stream[self.in_stream], *self._place, values)

    def subtract(self, stream: torch.Tensor, values: torch.Tensor) -> None:
        """Subtracts what ``decode`` would return from ``values``. [numel]"""
        low_rank_factors.subtract(stream[self.in_stream], *self._place, values)

    def decode_overlapping(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """See ``Slice``."""
        low_rank_factors.decode(encoded, *self._place, values)  # which copies the factors first

    def round_trip(self, values: torch.Tensor, arrived: torch.Tensor) -> None:
        """See ``Slice``."""
        assert self.is_whole, "a part of a matrix has no factors of its own"
        factors = torch.empty(self.encoded_bytes, dtype=torch.uint8, device="cpu")
        low_rank_factors.encode(values.view(self.shape), LOW_RANK[self.kind], factors, 0)
        low_rank_factors.decode(factors, *self._place, arrived)

    @property
    def _place(self) -> tuple[int, int, int]:
        """Rank, columns, and index of the first element."""
        return LOW_RANK[self.kind], self.shape[1], self.parts[0].of_parameter.start
