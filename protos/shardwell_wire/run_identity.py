"""Identity of a run: its name, and an id that distinguishes it from deleted runs of the same name."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Name and id of a run. Runs with the same name and different ids are different runs."""

    name: str
    """Chosen by the user. Can be reused once the run is deleted."""
    run_id: str
    """Random. The coordinator creates it with the run and never reuses it."""

    def __str__(self) -> str:
        return f"{self.name}#{self.run_id}"


def new_run_id() -> str:
    """Returns a new run id: 16 random hexadecimal digits."""
    return secrets.token_hex(_ID_BYTES)
