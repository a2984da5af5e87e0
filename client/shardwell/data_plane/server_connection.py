"""This trainer's ways to one shard server: the rpcs, and the best lane there is."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shardwell.data_plane.lanes import Lane
from shardwell.data_plane.server_guard import ServerGuard
from shardwell.data_plane.shard_client import ShardClient
from shardwell.data_plane.shm_lane import ShmLane
from shardwell.data_plane.socket_lane import SocketLane
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import ConflictError, ShardwellError, UnavailableError
from shardwell_wire.run_identity import RunIdentity

logger = logging.getLogger(__name__)

AnyLane = TypeVar("AnyLane")
Result = TypeVar("Result")

_OPEN_TIMEOUT_S = 60.0
"""A server that takes in a large upload may be slow to answer; a lane given up too early costs more."""
_NOTICE_S = 1.0
"""A server may know sooner than this trainer that a lane broke."""

_WARMING_BYTES, _MEASURED_BYTES = 64 << 10, 1 << 20


class ServerConnection:
    """Connected to one shard server for one run.

    Args:
        address: host:port.
        run: The run, of which the server holds a unit already.
        kinds: Lanes to try, in this order.
        chunk_bytes: Payload per message over gRPC.
        check: Called while the server is unavailable; raises when trying again is pointless.
        guard: Decides what a failed operation means. By default each fails at once.
        credentials: Of the cluster. None: what ``find_credentials`` finds for the address.

    Raises:
        UnavailableError: None of the lanes can be opened.
    """

    def __init__(
        self,
        address: str,
        run: RunIdentity,
        *,
        kinds: Sequence[str],
        chunk_bytes: int,
        check: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
        guard: ServerGuard | None = None,
    ) -> None:
        self.guard = guard or ServerGuard(address)
        self.address, self._run, self._kinds, self._check = address, run, tuple(kinds), check
        self.client = ShardClient(address, chunk_bytes=chunk_bytes, check=check, credentials=credentials)
        self._count_lock, self._open_lock = threading.Lock(), threading.RLock()
        self.shm: ShmLane | None = None
        self._stream: Lane | None = None
        try:
            if self._shm_is_preferred:
                self.shm = self._try("shm", self._open_shm)
            if self.shm is None:
                self._stream = self._open_stream()
            self.bytes_per_s = self.shm.measure() if self.shm is not None else self._measure(self.stream)
            """Of the lane, measured when it was opened."""
        except BaseException:
            self._close_lanes()
            raise
        self.pushes_through_shm = self.shm is not None
        self.received_bytes = self.sent_bytes = 0
        """Streamed, as they travelled."""
        logger.info("shard server at %s: lane %s, %.2f GB/s", address, self.kind, self.bytes_per_s / 1e9)

    @property
    def _shm_is_preferred(self) -> bool:
        """A lane named before it, once open, would be used for everything."""
        return self._kinds[0] == "shm"

    @property
    def kind(self) -> str:
        """Of the lane that is used: ``shm``, ``socket`` or ``grpc``."""
        if self.shm is not None:
            return "shm"
        # Not self.stream, which opens another lane if this one broke: heartbeats, too, say what is used.
        return self._stream.kind if self._stream is not None else self.stream.kind

    @property
    def stream(self) -> Lane:
        """The lane for what cannot go through shared memory; another one if it broke."""
        with self._open_lock:
            if self._stream is None or self._stream.broke:
                self._stream = self._open_stream()
            return self._stream

    def streamed(self, action: Callable[[Lane], Result]) -> Result:
        """Does something over ``stream``, which may be repeated; raises as ``ServerGuard.run`` does."""
        return self.guard.run("a transfer", lambda: self._streamed(action))

    def _streamed(self, action: Callable[[Lane], Result]) -> Result:
        lane = self.stream
        try:
            return action(lane)
        except UnavailableError as error:
            if not lane.broke:
                raise
            logger.warning("shard server at %s: lane %s broke, opening another: %s", self.address, lane.kind, error)
        return action(self.stream)

    def controlled(self, action: Callable[[Lane], Result]) -> Result:
        """Does something that only messages go to and fro for: over ``stream`` if there may be one, else by an rpc."""
        return self.by_rpc(action) if self._kinds == ("shm",) else self.streamed(action)

    def by_rpc(self, action: Callable[[ShardClient], Result]) -> Result:
        """Does something by rpcs, which may be repeated; raises as ``ServerGuard.run`` does."""
        return self.guard.run("a request", lambda: action(self.client))

    def through_shm(self, action: Callable[[ShmLane], Result]) -> Result:
        """Does something over the lane through shared memory, which may be repeated; raises as ``ServerGuard.run``."""
        return self.guard.run("a transfer through shared memory", lambda: self._through_shm(action))

    def _through_shm(self, action: Callable[[ShmLane], Result]) -> Result:
        lane = self._require_shm()
        try:
            return action(lane)
        except (ConflictError, UnavailableError):  # a server knows nothing any more of a lane that broke
            if not lane.broke_within(_NOTICE_S):
                raise
        return action(self._require_shm())

    def _require_shm(self) -> ShmLane:
        with self._open_lock:
            assert self.shm is not None
            if self.shm.broke:
                logger.warning("shard server at %s: lane shm broke, opening another", self.address)
                self.shm = self._open_shm()
            return self.shm

    def count(self, *, received_bytes: int = 0, sent_bytes: int = 0) -> None:
        """Notes what was streamed; from any thread."""
        with self._count_lock:
            self.received_bytes += received_bytes
            self.sent_bytes += sent_bytes

    def describe(self) -> dict[str, Any]:
        """The lane and what it did, for people."""
        return {
            "server": self.address,
            "lane": self.kind,
            "bytes_per_s": self.bytes_per_s,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
        }

    def stream_gradients(self, reason: ShardwellError | OSError) -> None:
        """There is no room for gradients in shared memory: from now on they are streamed."""
        if self.pushes_through_shm:
            self.pushes_through_shm = False
            logger.warning(
                "shard server at %s: no shared memory for gradients, sending them over %s: %s",
                self.address,
                self.stream.kind,
                reason,
            )

    def give_mailboxes_back(self) -> None:
        """Has the server free the mailboxes; those that are needed are opened anew. Nothing may be under way."""
        if self.shm is None or not self.shm.has_mailboxes:
            return
        lane = self._try("shm", self._open_shm)
        if lane is not None:
            former, self.shm = self.shm, lane
            former.close()

    def close(self) -> None:
        """Closes the lanes and cancels what is in flight."""
        self.guard.close()
        self._close_lanes()

    def _close_lanes(self) -> None:
        for lane in (self.shm, self._stream):
            if lane is not None:
                lane.close()
        self.client.close()

    def _try(self, kind: str, open_lane: Callable[[], AnyLane]) -> AnyLane | None:
        try:
            return open_lane()
        except (ShardwellError, OSError) as error:
            # Elsewhere nobody expects shared memory.
            level = logging.INFO if kind == "shm" and not is_this_host(self.address) else logging.WARNING
            logger.log(level, "shard server at %s: no lane %s: %s", self.address, kind, error)
            return None

    def _measure(self, lane: Lane) -> float:
        lane.measure(_WARMING_BYTES, timeout_s=_OPEN_TIMEOUT_S)
        return lane.measure(_MEASURED_BYTES, timeout_s=_OPEN_TIMEOUT_S)

    def _open_shm(self) -> ShmLane:
        return ShmLane(self.client, self._run, timeout_s=_OPEN_TIMEOUT_S)

    def _open_stream(self) -> Lane:
        for kind in self._kinds:
            if kind == "grpc":
                return self.client
            if kind == "socket" and (lane := self._try("socket", self._open_socket)) is not None:
                return lane
        self._check()
        raise UnavailableError(
            f"shard server at {self.address}: none of the lanes {', '.join(self._kinds)} can be opened; "
            "the log says why: allow grpc too"
        )

    def _open_socket(self) -> SocketLane:
        return SocketLane(self.client, self._run, timeout_s=_OPEN_TIMEOUT_S)


def is_this_host(address: str) -> bool:
    """Whether host:port is on this machine, as far as its name tells."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")
