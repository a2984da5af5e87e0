"""Which run is meant: its name, and the id that tells it from a deleted run of the same name."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """One run. Equal names with different ids are different runs."""

    name: str
    """Chosen by people; free again once the run is deleted."""
    run_id: str
    """Random, made by the coordinator when the run is created; never used again."""

    def __str__(self) -> str:
        return f"{self.name}#{self.run_id}"


def new_run_id() -> str:
    """An id that no other run has: 16 hexadecimal digits."""
    return secrets.token_hex(_ID_BYTES)
