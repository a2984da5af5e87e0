"""The relay of this trainer's host: found on first use, and again after it was lost."""

from __future__ import annotations

import logging
import threading
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
        """The ranks with which this trainer's gradients are added. Set before the first use."""
        self.when_found: Callable[[], object] = lambda: None
        """Called in a background thread when a relay was found after the first search."""
        self.counter = ByteCounter()
        """Bytes that relays have received from and sent to servers for this trainer."""
        self._rollback_count = membership.joined.rollback_count
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
                        "start one: shardwell-server relay --coordinator %s",
                        self._config.host,
                        self._membership.coordinator_address,
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
            if connection is not None and not connection.notice_loss():
                pauses, missed = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), False
                continue
            if connection is not None and not missed:
                logger.warning(
                    "the relay at %s is gone: this trainer fetches weights and pushes gradients itself until there is "
                    "another relay on this host",
                    connection.address,
                )
            missed = True
            if (found := self._connect()) is None:
                continue
            with self._lock:
                if self._closed.is_set() or self._rollback_count != rollback_count:
                    found.close()
                    continue
                self._replace(found)
            logger.info("relay at %s is used from now on", found.address)
            self.when_found()

    def _replace(self, connection: RelayConnection | None) -> None:
        """Replaces the connection. The caller holds the lock."""
        former, self._connection = self._connection, connection
        self._named = set()
        if former is not None:
            former.close()

    def _connect(self) -> RelayConnection | None:
        """Connects to the relay that the coordinator names. None: there is none, or it cannot be reached."""
        membership = self._membership
        request = coordinator_pb2.FindRelayRequest(context=membership.context(0), trainer=membership.trainer)
        try:
            found: coordinator_pb2.FindRelayResponse = membership.call("FindRelay", request)
            if not found.server_id:
                return None
            ranks = membership.rank_assignments
            session = shard_pb2.RelaySession(
                rollback_count=self._rollback_count,
                dp_rank=ranks[0].coordinates.dp_rank if ranks else 0,
                group=self.group,
            )
            options = ConnectOptions(
                (), self._config.transfers.chunk_bytes, membership.credentials, _OPEN_TIMEOUT_S, session
            )
            return RelayConnection(found.address, membership.identity, options, found.server_id, self.counter)
        except ShardwellError as error:
            logger.info("no relay can be used: %s", error)
            return None
