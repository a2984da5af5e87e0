"""The relay of this trainer's host: found on first use, and again after it was lost.

Note: [One relay for all trainers of a host]
    The coordinator names one relay after another until the trainer can use one. It names the one that most trainers of
    the run use, so trainers of a host meet at the same one, whatever each of them has tried before.

    If trainers have different relays nevertheless, each relay pushes the gradients of its trainers as they are, after a
    wait. A trainer whose gradients were pushed as they are therefore asks again which relay to use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from shardwell.data_plane.shard import RemoteUnit
from shardwell.membership.membership import Membership
from shardwell.options import JoinConfig
from shardwell.transport.base import ByteCounter
from shardwell.transport.relay_connection import AddedUnit, RelayConnection, RelayLostError
from shardwell.transport.server_connection import ConnectOptions
from shardwell_wire.connection.channel import backoff
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
"""Pauses between two searches for a relay."""
_RECHECK_S = 10.0
"""Shortest pause between two questions whether the other trainers use another relay."""
_OPEN_TIMEOUT_S = 10.0


class HostRelay:
    """Finds the relay, and looks for another one when it is gone. Thread-safe.

    Trainers that want none never ask for it. Without a relay, a trainer talks to the servers.

    Args:
        membership: The membership of this trainer.
        config: Options of the trainer.
    """

    def __init__(self, membership: Membership, config: JoinConfig) -> None:
        self._membership, self._config = membership, config
        self.group: tuple[int, ...] = ()
        """The ranks with which this trainer's gradients are added. Changed by ``enter_group``."""
        self.when_found: Callable[[], object] = lambda: None
        """Called in a background thread when a relay was found after the first search."""
        self.counter = ByteCounter()
        """Bytes that relays have received from and sent to servers for this trainer."""
        self._rollback_count = membership.joined.rollback_count
        self._why_none = ""
        """Why the last search found no relay, and what to do."""
        self._recheck_at_s = 0.0
        """Earliest time of the next question whether the other trainers use another relay."""
        self._lock = threading.Lock()
        """Protects the next fields."""
        self._connection: RelayConnection | None = None
        self._thread: threading.Thread | None = None
        self._named: set[int] = set()
        """Indices of the units whose gradients the connection relays."""
        self._closed = threading.Event()

    def find(self) -> RelayConnection | None:
        """Returns the relay. None: there is none now; a background thread looks for it."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._connection = self._connect()
                if self._connection is None:
                    logger.warning(
                        "no relay on host %r: every trainer of this host fetches weights and pushes gradients itself; "
                        "%s",
                        self._config.host,
                        self._why_none,
                    )
                self._thread = threading.Thread(target=self._look, name="shardwell-relay", daemon=True)
                self._thread.start()
            connection = self._connection
        return None if connection is None or connection.is_lost else connection

    def added(self, unit: RemoteUnit) -> AddedUnit:
        """Returns a unit as a relay knows it."""
        return AddedUnit(unit.layout, self._membership.world.dp, tuple(self._config.reduction_groups))

    def for_gradients(self, unit: RemoteUnit) -> RelayConnection | None:
        """Returns the relay that relays gradients of a unit. None: this trainer pushes them to the servers."""
        connection = self.find()
        if connection is None or not connection.group:
            return None
        if unit.index not in self._named:
            try:
                connection.name_unit(self.added(unit), [(each.start_bytes, each.stop_bytes) for each in unit.shards])
            except (RelayLostError, ShardwellError) as error:
                logger.warning("gradients of unit %r are pushed to the servers: %s", unit.layout.unit, error)
                return None
            self._named.add(unit.index)
        return connection

    def skip(self, step: int) -> None:
        """Says that this trainer pushes its gradients itself, until the end of a step."""
        connection = self._connection
        if connection is not None and connection.group and not connection.is_lost:
            try:
                connection.skip(step)
            except (RelayLostError, ShardwellError) as error:
                logger.info("the relay waits for gradients of this trainer for a moment: %s", error)

    def enter_group(self, group: tuple[int, ...]) -> None:
        """Adds the gradients of this trainer's present rank to those of a group from now on. Empty: to none."""
        with self._lock:
            self.group, former = group, self._connection
            if self._thread is None or (former is not None and former.serves(self._dp_rank, group)):
                return
            self._replace(self._connect())
        self.when_found()

    def start_over(self, rollback_count: int) -> None:
        """Opens another transport: the run was rolled back, and the next versions have other values."""
        with self._lock:
            self._rollback_count = rollback_count
            if self._thread is not None:
                self._replace(self._connect())

    def close(self) -> None:
        """Leaves the relay, and looks for no other one."""
        self._closed.set()
        with self._lock:
            self._replace(None)

    def _look(self) -> None:
        """Notices when the relay is gone, and looks for another one."""
        pauses, missed = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), False
        while not self._closed.wait(next(pauses) if missed else _FIRST_PAUSE_S):
            connection, rollback_count = self._connection, self._rollback_count
            is_present = connection is not None and not connection.notice_loss()
            if is_present and not self._may_differ(connection):
                pauses, missed = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), False
                continue
            found = self._connect(connection if is_present else None)
            if found is None or found is connection:
                if connection is not None and not is_present and not missed:
                    logger.warning(
                        "the relay at %s is gone: this trainer fetches weights and pushes gradients itself until there "
                        "is another relay on this host; %s",
                        connection.address,
                        self._why_none,
                    )
                missed = not is_present
                continue
            missed = True  # until the connection has been seen
            with self._lock:
                if self._closed.is_set() or self._rollback_count != rollback_count:
                    found.close()
                    continue
                self._replace(found)
            logger.info("relay at %s is used from now on", found.address)
            self.when_found()

    def _may_differ(self, connection: RelayConnection | None) -> bool:
        """Returns whether to ask which relay the other trainers use, since this one did not have their gradients."""
        now = time.monotonic()
        if connection is None or not connection.has_pushed_alone or now < self._recheck_at_s:
            return False
        connection.has_pushed_alone, self._recheck_at_s = False, now + _RECHECK_S
        return True

    def _replace(self, connection: RelayConnection | None) -> None:
        """Replaces the connection. The caller holds the lock."""
        former, self._connection = self._connection, connection
        self._named = set()
        if former is not None:
            former.is_lost = True  # shards that it caches are mapped elsewhere
            former.close()

    def _connect(self, present: RelayConnection | None = None) -> RelayConnection | None:
        """Connects to the first relay of those that the coordinator names, one after another, that can be used.

        Args:
            present: The relay that is used now, which is returned if it is the first one. None: none is.

        Returns:
            None: there is none; ``_why_none`` says why.
        """
        membership, refused = self._membership, dict[str, str]()
        advice = f"start one: shardwell-server relay --coordinator {membership.coordinator_address}"
        self._why_none = f"no server relays for this host; {advice}"
        try:
            while True:
                request = coordinator_pb2.FindRelayRequest(
                    context=membership.context(0), trainer=membership.trainer, refused=refused
                )
                found: coordinator_pb2.FindRelayResponse = membership.call("FindRelay", request)
                if not found.server_id or found.server_id in refused:
                    return None
                if present is not None and found.server_id == present.server_id:
                    return present
                try:
                    return self._open(found)
                except (ShardwellError, OSError) as error:
                    refused[found.server_id] = f"{found.server_id!r} at {found.address} cannot be used: {error}"
                    logger.info("relay %s", refused[found.server_id])
                    self._why_none = f"{'; '.join(refused.values())}; {advice}"
        except ShardwellError as error:
            self._why_none = f"the coordinator names none: {error}"
            return None

    @property
    def _dp_rank(self) -> int:
        ranks = self._membership.rank_assignments
        return ranks[0].coordinates.dp_rank if ranks else 0

    def _open(self, relay: coordinator_pb2.FindRelayResponse) -> RelayConnection:
        membership = self._membership
        session = shard_pb2.RelaySession(rollback_count=self._rollback_count, dp_rank=self._dp_rank, group=self.group)
        options = ConnectOptions(
            (), self._config.transfers.chunk_bytes, membership.credentials, _OPEN_TIMEOUT_S, session
        )
        return RelayConnection(relay.address, membership.identity, options, relay.server_id, self.counter)
