"""What a flat vector and those who exchange parts of it agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Exchange = Callable[[torch.Tensor], None]
"""Given a vector with one part in place, has the other parts written to theirs; on a GPU in the current stream's order,
without the caller waiting. uint8. [size_bytes]"""


class Completable(Protocol):
    """A flat vector of which a part can be received, and the rest come from other processes straight to its device."""

    @property
    def device_type(self) -> str:
        """Where its memory is."""
        ...

    def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
        """Takes over a part that was written to the receive buffer, and has the rest exchanged; waits for the end.

        From a background thread. Afterwards the vector is received.

        Args:
            start_bytes: Half-open range of the part.
            stop_bytes: Its end.
            exchange: Brings the rest.
            limit_s: How long a device may take for it.

        Raises:
            TimeoutError: It took longer. Once the exchange is ended, the whole vector may be received instead.
        """
        ...
