"""Fingerprints of batches: tensor-parallel ranks compare theirs, because all of them must compute the same batch."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from shardwell_wire.encoding.chunk_streams import memory_at

_MASK = (1 << 62) - 1
"""Fingerprints can be negated in 64 bits, and are above the negated ones of others."""


def fingerprint(batch: object) -> int:
    """Returns a number that depends on every value of a batch. Copies tensors to the host that are not there.

    Args:
        batch: Tensors, NumPy arrays, numbers and texts in any nesting of mappings, sequences and dataclasses. The order
            of a mapping's keys does not count. Of other objects, only the class counts.
    """
    digest = xxhash.xxh3_64()
    _add(digest, batch)
    return digest.intdigest() & _MASK


def _add(digest: xxhash.xxh3_64, value: object) -> None:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            _add(digest, item)
        return
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, (str, bytes)):
        digest.update(value if isinstance(value, bytes) else value.encode(errors="surrogatepass"))
    elif isinstance(value, int):
        digest.update(str(value).encode())
    elif isinstance(value, float):
        digest.update(struct.pack("<d", value))
    elif isinstance(value, Mapping):  # also a BatchEncoding of Hugging Face
        for key in sorted(value, key=str):
            digest.update(str(key).encode(errors="surrogatepass"))
            _add(digest, value[key])
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _add(digest, getattr(value, field.name, None))
    elif hasattr(value, "__array_interface__"):
        _add_array(digest, value)


def _add_array(digest: xxhash.xxh3_64, array: Any) -> None:
    digest.update(str((array.dtype, array.shape)).encode())
    if array.dtype.hasobject:  # the bytes are addresses
        _add(digest, array.tolist())
    else:
        digest.update(array.tobytes())


def _add_tensor(digest: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    if tensor.is_nested:  # it has no shape, or one with numbers of this process
        for part in tensor.unbind():
            _add_tensor(digest, part)
        return
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout is torch.strided and not tensor.is_meta and not hasattr(tensor, "placements"):
        values = tensor.detach().cpu().contiguous()
        digest.update(memory_at(values.data_ptr(), values.nbytes, values))
