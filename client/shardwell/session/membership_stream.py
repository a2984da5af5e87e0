"""The stream by which the coordinator notices the end of a trainer at once, and by which it tells the trainer news."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from shardwell.session.coordinator_client import CoordinatorClient
from shardwell.transport.rpc import MessageStream
from shardwell_wire.errors import InvalidRequestError, RunDeletedError, ShardwellError, StaleEpochError
from shardwell_wire.retry import backoff
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0
"""Pauses before a broken stream is opened again. The first is well below the coordinator's grace."""

_CLOSE_TIMEOUT_S = 2.0


class MembershipStream:
    """Keeps a membership stream open in a background thread. Opens it again when it breaks.

    Args:
        coordinator: The coordinator.
        request: Names the membership.
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
