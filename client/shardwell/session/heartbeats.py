"""Heartbeats, which keep a trainer's lease and report what the trainer uses and computes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwell.session.coordinator_client import CoordinatorClient
from shardwell_wire.errors import ConflictError, RunDeletedError, ShardwellError, StaleEpochError, UnauthenticatedError
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_REPORT_ITEM_AFTER_S = 0.25
"""Time after which a heartbeat reports a work item in progress, beside those that keep the lease."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemInWork:
    """A work item that this trainer computes."""

    step: int
    global_rank: int
    since_s: float
    """Start of the item, by ``time.monotonic``."""

    def to_proto(self) -> coordinator_pb2.ItemInProgress:
        for_s = time.monotonic() - self.since_s
        return coordinator_pb2.ItemInProgress(step=self.step, global_rank=self.global_rank, for_s=for_s)


@dataclass(slots=True, eq=False)
class TrainerReports:
    """What a trainer's heartbeats report. The functions are called in the heartbeat thread."""

    transports: Callable[[], Sequence[coordinator_pb2.TransportReport]] = tuple
    """Returns the transports to the shard servers."""
    unreachable: Callable[[], Sequence[coordinator_pb2.UnreachableServer]] = tuple
    """Returns the servers that cannot be reached."""
    item: ItemInWork | None = None
    """The work item that the trainer computes."""


class Heartbeats:
    """Sends the heartbeats of one membership from a background thread.

    Args:
        coordinator: The coordinator.
        membership: A request that names the membership. The reports are added to copies of it.
        reports: What to report.
        lease_s: Duration of the lease.
        note_news: Called with each answer.
        end: Called in the thread with the error that ended the membership. No heartbeats follow.
        stop: Ends the thread when set.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        membership: coordinator_pb2.HeartbeatRequest,
        reports: TrainerReports,
        *,
        lease_s: float,
        note_news: Callable[[coordinator_pb2.HeartbeatResponse], None],
        end: Callable[[ShardwellError], None],
        stop: threading.Event,
    ) -> None:
        self._coordinator, self._membership, self._reports = coordinator, membership, reports
        self._interval_s = lease_s / 3
        self._note_news, self._end, self._stop = note_news, end, stop
        self._thread = threading.Thread(target=self._run, name="shardwell-heartbeat", daemon=True)
        self._thread.start()

    def send(self, timeout_s: float) -> coordinator_pb2.HeartbeatResponse:
        """Sends a heartbeat at once, in the calling thread. Returns the answer."""
        request = coordinator_pb2.HeartbeatRequest()
        request.CopyFrom(self._membership)
        request.transports.extend(self._reports.transports())
        request.unreachable.extend(self._reports.unreachable())
        if (item := self._reports.item) is not None:
            request.item_in_progress.CopyFrom(item.to_proto())
        response: coordinator_pb2.HeartbeatResponse = self._coordinator.call("Heartbeat", request, timeout_s=timeout_s)
        self._note_news(response)
        return response

    @property
    def epoch(self) -> int:
        """Epoch of the membership."""
        return self._membership.epoch

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        reached = True
        sent_s, reported = time.monotonic(), None
        while not self._stop.wait(min(_REPORT_ITEM_AFTER_S, self._interval_s / 2)):
            now, item = time.monotonic(), self._reports.item
            long = item is not None and item is not reported and now - item.since_s > _REPORT_ITEM_AFTER_S
            if not long and now - sent_s < self._interval_s:
                continue
            sent_s, reported = now, item
            try:
                self.send(self._interval_s)
                reached = True
            except (StaleEpochError, RunDeletedError, ConflictError, UnauthenticatedError) as error:
                self._end(error)
                return
            except ShardwellError as error:
                if reached:
                    logger.warning("the coordinator does not answer heartbeats, still trying: %s", error)
                reached = False
