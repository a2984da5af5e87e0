"""What keeps a trainer's membership alive: heartbeats, and a stream whose end the coordinator notices at once.

Heartbeats renew the lease, and report what the trainer uses and computes. The coordinator tells news in its answers and
over the stream, such as notices for the users of the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwell.transport.service_client import CoordinatorClient, MessageStream
from shardwell_wire.connection.channel import backoff
from shardwell_wire.errors import (
    ConflictError,
    InvalidRequestError,
    RunDeletedError,
    ShardwellError,
    StaleEpochError,
    UnauthenticatedError,
)
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_REPEAT_S = 60.0
"""Time after which a notice with the same cause as an earlier one is logged again."""


class RunNotices:
    """Logs each notice of a run once, as a warning. Thread-safe.

    Of notices with the same cause, the first is logged, and then one after every ``_REPEAT_S`` with the number of those
    before it.
    """

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock, self._lock = run, clock, threading.Lock()
        self._newest = 0
        self._logged: dict[str, tuple[float, int]] = {}
        """When a notice with this cause was logged last, and how many followed that were not."""

    def show(self, notices: Iterable[coordinator_pb2.Notice]) -> None:
        """Logs the notices that are new, oldest first."""
        with self._lock:
            for notice in notices:
                if notice.number > self._newest:
                    self._newest = notice.number
                    self._show(notice)

    def _show(self, notice: coordinator_pb2.Notice) -> None:
        logged_s, count = self._logged.get(notice.cause, (0.0, 0))
        if notice.cause and notice.cause in self._logged and self._clock() - logged_s < _REPEAT_S:
            self._logged[notice.cause] = logged_s, count + 1
            return
        self._logged[notice.cause] = self._clock(), 0
        repeated = f" ({count} like it were not logged)" if count else ""
        logger.warning("run %r: %s%s", self._run, notice.message, repeated)


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0
"""Pauses before a broken stream is opened again. The first is well below the coordinator's grace."""

_CLOSE_TIMEOUT_S = 2.0


class MembershipStream:
    """Keeps a membership stream open in a background thread. Opens it again when it breaks.

    Args:
        note_news: Called in the thread with each message.
        end: Called in the thread with the error that ended the membership.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        request: coordinator_pb2.KeepMembershipRequest,
        *,
        note_news: Callable[[coordinator_pb2.KeepMembershipResponse], None],
        end: Callable[[ShardwellError], None],
    ) -> None:
        self._coordinator, self._request = coordinator, request
        self._note_news, self._end = note_news, end
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._stream: MessageStream | None = None
        self._pauses: Iterator[float] = iter(())
        self._thread = threading.Thread(target=self._run, name="shardwell-membership", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the stream. Leave the run before: the coordinator takes a broken stream for the end of the process."""
        with self._lock:
            self._closed.set()
            if self._stream is not None:
                self._stream.end()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        self._reset_pauses()
        while not self._closed.is_set():
            try:
                for news in self._open():
                    self._reset_pauses()
                    self._note_news(news)
            except (StaleEpochError, RunDeletedError) as error:
                if not self._closed.is_set():
                    self._end(error)
                return
            except InvalidRequestError as error:
                logger.info("the coordinator keeps no membership streams, so only the lease counts: %s", error)
                return
            except ShardwellError as error:
                logger.debug("the membership stream broke: %s", error)
            self._closed.wait(next(self._pauses))

    def _open(self) -> Iterable[coordinator_pb2.KeepMembershipResponse]:
        with self._lock:
            if self._closed.is_set():
                return ()
            self._stream = self._coordinator.watch("KeepMembership", self._request)
            return self._stream

    def _reset_pauses(self) -> None:
        self._pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)


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
    device: coordinator_pb2.TrainerDevice | None = None
    """The device that the trainer has chosen."""
    report: coordinator_pb2.StepReport | None = None
    """Where the time of the last steps went. None: no step is measured."""
    ended_step: int | None = None
    """Number of committed steps at which the training loop has ended. None: it has not ended."""
    ended_iteration: coordinator_pb2.RunState | None = None
    """Tracked objects at the end of the last iteration of the loop. None: another trainer reports them."""


class Heartbeats:
    """Sends the heartbeats of one membership from a background thread.

    Args:
        membership: A request that names the membership. The reports are added to copies of it.
        reports: What to report.
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
        if (device := self._reports.device) is not None:
            request.device.CopyFrom(device)
        if (report := self._reports.report) is not None:
            request.report.CopyFrom(report)
        if (ended_step := self._reports.ended_step) is not None:
            request.ended_step = ended_step
        if (ended_iteration := self._reports.ended_iteration) is not None:
            request.ended_iteration.CopyFrom(ended_iteration)
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
