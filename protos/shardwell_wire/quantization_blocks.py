"""Cells from values and values from blocks: the arithmetic of the lossy wire dtypes.

A conversion is a few passes of torch over as many values as fit a core's cache; torch gives up the interpreter lock in
them. Nothing large is allocated, and several threads may convert at once.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from shardwell_wire.codec import Buffer, memory_at
from shardwell_wire.v1 import common_pb2
from shardwell_wire.wire_dtypes import AS_STORED, INT8_BLOCK_NUMEL, SCALE_BYTES, WireDtype

_SLICE_NUMEL = 1 << 17
"""Elements converted at once: with as much scratch 1 MiB, which a core's own cache can be expected to hold. On the
machine where it was measured int8 ran at 5.1, 6.4 and 7.7 GB/s with half, this, and twice as many."""

_SLICE_BLOCKS = _SLICE_NUMEL // INT8_BLOCK_NUMEL
"""Int8 blocks converted at once, however few elements they have."""

_KEPT_VIEWS = 64
"""Shapes of slices that a thread's scratch is kept in; those of a unit's shards are few."""

_LARGEST_INT8 = 127.0
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: with a subnormal scale a quotient could exceed 127."""

_HALF_DTYPES = {common_pb2.WIRE_DTYPE_BFLOAT16: torch.bfloat16, common_pb2.WIRE_DTYPE_FLOAT16: torch.float16}


class _Blocks(NamedTuple):
    """Scratch for int8 blocks of one size."""

    quotients: torch.Tensor
    """[num_blocks, numel]"""
    scales: torch.Tensor
    """[num_blocks]"""
    column: torch.Tensor
    """The scales. [num_blocks, 1]"""
    scale_bytes: torch.Tensor
    """The scales. [num_blocks, 4], uint8"""


class _Scratch(threading.local):
    """Memory that one thread's conversions pass through; it stays in that core's cache."""

    def __init__(self) -> None:
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.values = torch.empty(_SLICE_NUMEL, dtype=torch.float32, device="cpu")
            self.halves = torch.empty(_SLICE_NUMEL, dtype=torch.int16, device="cpu")
            self.encoded = torch.empty(_SLICE_NUMEL * 2, dtype=torch.uint8, device="cpu")
            self._quotients = torch.empty(_SLICE_NUMEL, dtype=torch.float32, device="cpu")
            self._scales = torch.empty(_SLICE_BLOCKS, dtype=torch.float32, device="cpu")
        # Making the views takes as long as a pass over a small slice.
        self.blocks = lru_cache(_KEPT_VIEWS)(self._make_blocks)

    @torch.inference_mode(False)
    def _make_blocks(self, num_blocks: int, numel: int) -> _Blocks:
        scales = self._scales[:num_blocks]
        return _Blocks(
            self._quotients[: num_blocks * numel].view(num_blocks, numel),
            scales,
            scales.view(num_blocks, 1),
            scales.view(torch.uint8).view(num_blocks, SCALE_BYTES),
        )


_scratch = _Scratch()


def at_once(kind: WireDtype, block_numel: int) -> int:
    """How many blocks of a lossy wire dtype ``encode`` and ``decode`` take at once."""
    return min(_SLICE_NUMEL // block_numel, _SLICE_BLOCKS if kind == common_pb2.WIRE_DTYPE_INT8 else _SLICE_NUMEL)


def scratch_values(numel: int) -> torch.Tensor:
    """This thread's room for values about to be encoded; others' from the next call on. [numel]"""
    return _scratch.values[:numel]


def scratch_encoded(size_bytes: int) -> torch.Tensor:
    """This thread's room for blocks about to be decoded. [size_bytes], uint8"""
    return _scratch.encoded[:size_bytes]


def encode(kind: WireDtype, block_numel: int, values: torch.Tensor, encoded: torch.Tensor) -> None:
    """Encodes blocks of one size.

    Args:
        kind: How the values travel.
        block_numel: Values in each block.
        values: float32, no more than ``at_once`` allows; or any number of bytes, if they travel as stored. [numel]
        blocks: Receives the blocks. uint8
    """
    if kind == AS_STORED:
        encoded.copy_(values)
    elif kind == common_pb2.WIRE_DTYPE_INT8:
        _quantise(values.view(-1, block_numel), encoded.view(-1, SCALE_BYTES + block_numel))
    else:
        _encode_halves(values, encoded, _HALF_DTYPES[kind])


def decode(kind: WireDtype, block_numel: int, encoded: torch.Tensor, values: torch.Tensor) -> None:
    """Decodes what ``encode`` made."""
    if kind == AS_STORED:
        values.copy_(encoded)
    elif kind == common_pb2.WIRE_DTYPE_INT8:
        _dequantise(encoded.view(-1, SCALE_BYTES + block_numel), values.view(-1, block_numel))
    else:
        _decode_halves(encoded, values, _HALF_DTYPES[kind])


def _quantise(values: torch.Tensor, encoded: torch.Tensor) -> None:
    """[num_blocks, numel] -> [num_blocks, 4 + numel]"""
    quotients, scales, column, scale_bytes = _scratch.blocks(*values.shape)
    torch.amax(torch.abs(values, out=quotients), 1, out=scales)
    scales.div_(_LARGEST_INT8).clamp_(min=_SMALLEST_SCALE)
    torch.div(values, column, out=quotients).round_()
    if not math.isfinite(scales.sum().item()):
        # Not finite stays not finite, whatever the integers are; these make them the same everywhere.
        scales.masked_fill_(~scales.isfinite(), math.nan)
        quotients.masked_fill_(scales.isnan()[:, None], 0.0)
    scale_places, integers = encoded.split_with_sizes((SCALE_BYTES, values.size(1)), 1)
    scale_places.copy_(scale_bytes)
    integers.view(torch.int8).copy_(quotients)


def _dequantise(encoded: torch.Tensor, values: torch.Tensor) -> None:
    """[num_blocks, 4 + numel] -> [num_blocks, numel]"""
    _, _, column, scale_bytes = _scratch.blocks(*values.shape)
    scales, integers = encoded.split_with_sizes((SCALE_BYTES, values.size(1)), 1)
    scale_bytes.copy_(scales)
    values.copy_(integers.view(torch.int8)).mul_(column)


def _encode_halves(values: torch.Tensor, encoded: torch.Tensor, dtype: torch.dtype) -> None:
    """[numel] -> [2 * numel]"""
    if _is_even(encoded):
        encoded.view(dtype).copy_(values)
    else:
        halves = _scratch.halves[: values.numel()]
        halves.view(dtype).copy_(values)
        encoded.copy_(halves.view(torch.uint8))


def _decode_halves(encoded: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
    """[2 * numel] -> [numel]"""
    if _is_even(encoded):
        values.copy_(encoded.view(dtype))
    else:
        halves = _scratch.halves[: values.numel()]
        halves.view(torch.uint8).copy_(encoded)
        values.copy_(halves.view(dtype))


def _is_even(encoded: torch.Tensor) -> bool:
    """Whether 16-bit numbers can be used in place: a received payload may lie at any address."""
    return encoded.data_ptr() % 2 == 0 and int(encoded.storage_offset()) % 2 == 0


def bytes_tensor(data: Buffer) -> torch.Tensor:
    """A buffer as a tensor of uint8, also if it is read-only; the caller keeps it alive and does not write."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    view = memoryview(data)
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    # torch warns of memory that may not be written to.
    address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return torch.frombuffer(memory_at(address, len(data)), dtype=torch.uint8)
