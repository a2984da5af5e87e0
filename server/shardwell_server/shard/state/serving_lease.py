"""The lease under which a shard server serves trainers. A server that nobody has heard from stops by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwell_wire.errors import UnavailableError

_USUAL_S = 10.0
"""Length of a lease until the coordinator has granted one."""


class ServingLease:
    """Limits how long a server serves trainers after the last heartbeat that the coordinator acknowledged.

    The coordinator replaces a silent server only after a longer time, so two servers never serve one shard. A new lease
    has no limit, until it is renewed first.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expires_s = math.inf
        self.length_s = _USUAL_S
        """Length of the lease in seconds, as the coordinator grants it."""

    def suspend(self) -> None:
        """Ends the lease until ``confirm``: the server does not know yet which shards the coordinator has it serve."""
        self._expires_s = -math.inf

    def confirm(self) -> None:
        """Makes a suspended lease a new one."""
        if self._expires_s == -math.inf:
            self._expires_s = math.inf

    def renew(self, sent_s: float, lease_s: float) -> None:
        """Extends the lease.

        Args:
            sent_s: Time at which the acknowledged heartbeat was sent. The coordinator received it later.
            lease_s: Length of the lease.
        """
        former_s = self._expires_s if math.isfinite(self._expires_s) else -math.inf
        self._expires_s = max(former_s, sent_s + lease_s)
        self.length_s = lease_s

    @property
    def valid(self) -> bool:
        """True while this server may serve trainers."""
        return self._clock() < self._expires_s

    def check_confirmed(self) -> None:
        """Raises UnavailableError if the lease is suspended."""
        if self._expires_s == -math.inf:
            raise UnavailableError("this server has not registered with its coordinator yet: try again")

    def check(self) -> None:
        """Raises UnavailableError if the lease is suspended or has expired."""
        if not self.valid:
            self.check_confirmed()
            raise UnavailableError(
                f"the lease of this server expired {self._clock() - self._expires_s:.1f} s ago, because the "
                "coordinator has acknowledged no heartbeat since. Its shards may have moved to other servers: try "
                "again, or ask the coordinator which server has the shard now"
            )
