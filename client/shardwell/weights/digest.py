"""A digest of all weights of a model, by which a copy is compared with a version of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from shardwell.weights.pinned_version import PinnedVersion
from shardwell_wire.encoding.chunk_streams import memory_at


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Returns a SHA-256 digest of names, dtypes, shapes and values of tensors, as hexadecimal text.

    ``Reader.digest`` returns the same digest for a version of a run.

    Args:
        weights: Tensors by name, such as those of ``full_state_dict``. Any order, devices and strides.
    """
    return _combined(_line(name, value) for name, value in weights.items())


def pinned_digest(pinned: PinnedVersion) -> str:
    """Returns the digest of a pinned version. Reads all of it as ``PinnedVersion.values``, and raises as it does.

    A tied parameter counts under each of its names, as in ``full_state_dict``.
    """
    aliases = {stored.name: stored.aliases for stored in (*pinned.parameters, *pinned.buffers)}
    return _combined(_line(each, value) for name, value in pinned.values() for each in (name, *aliases[name]))


def _combined(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _line(name: str, value: torch.Tensor) -> str:
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{name!r} {dtype} {shape} {hashlib.sha256(memory_at(flat.data_ptr(), flat.numel(), flat)).hexdigest()}\n"
