"""Derived seeds, which every process computes alike."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Returns a seed below 2**63 for numbers and names. Equal arguments give equal seeds on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
