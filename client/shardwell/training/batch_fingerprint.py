"""Fingerprints of batches: tensor-parallel ranks compare theirs, because all of them must compute the same batch."""

from __future__ import annotations

import struct

import torch
import xxhash
from torch.utils._pytree import tree_leaves

from shardwell_wire.encoding.chunk_streams import memory_at

_MASK = (1 << 62) - 1
"""Fingerprints can be negated in 64 bits, and are above the negated ones of others."""


def fingerprint(batch: object) -> int:
    """Returns a number that depends on every value of a batch. Copies tensors to the host that are not there.

    Args:
        batch: Tensors, NumPy arrays, numbers and texts in any nesting. Of other objects, only the class counts.
    """
    digest = xxhash.xxh3_64()
    for leaf in tree_leaves(batch):
        digest.update(type(leaf).__name__.encode())
        if isinstance(leaf, torch.Tensor):
            _add_tensor(digest, leaf)
        elif isinstance(leaf, (str, bytes)):
            digest.update(leaf if isinstance(leaf, bytes) else leaf.encode(errors="surrogatepass"))
        elif isinstance(leaf, int):
            digest.update(str(leaf).encode())
        elif isinstance(leaf, float):
            digest.update(struct.pack("<d", leaf))
        elif hasattr(leaf, "__array_interface__"):
            digest.update(str((leaf.dtype, leaf.shape)).encode())
            digest.update(leaf.tobytes())
    return digest.intdigest() & _MASK


def _add_tensor(digest: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout is torch.strided and not tensor.is_meta and not hasattr(tensor, "placements"):
        values = tensor.detach().cpu().contiguous()
        digest.update(memory_at(values.data_ptr(), values.nbytes, values))
