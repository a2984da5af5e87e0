"""Derived seeds, which every process computes alike."""

from __future__ import annotations

import functools
import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """Returns a seed below 2**63 for numbers and names. Equal arguments give equal seeds on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(seed: int) -> None:
    """Seeds torch's default generators, as ``torch.manual_seed`` does."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        # torch.manual_seed formats the call stack for each kind of device that is not in use, which takes longer.
        torch.default_generator.manual_seed(seed)


@functools.cache
def _has_accelerator() -> bool:
    """True if this build of torch supports a device beside the CPU."""
    return torch.accelerator.current_accelerator() is not None
