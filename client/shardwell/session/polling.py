"""Rpcs of the coordinator that are repeated: until a response is final, or while the coordinator is unavailable."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from shardwell.session.config import WaitOptions
from shardwell.session.replica_epoch import ReplicaEpoch
from shardwell_wire.errors import DeadlineError, UnavailableError

logger = logging.getLogger(__name__)

_POLL_S = 10.0
"""Longest server-side wait of one rpc. A restarted coordinator is noticed within this time."""

_REPLICA_POLL_S = 1.0
"""The same for rpcs that a void process group ends."""


def poll(
    call: Callable[[Any, float, float], Any],
    request: Any,
    done: Callable[[Any], bool],
    *,
    what: str,
    waits: WaitOptions,
    log_level: int = logging.INFO,
    replica: ReplicaEpoch | None = None,
) -> Any:
    """Repeats an rpc with ``wait_s`` and ``waiting_for`` until ``done(response)`` is true; returns this response.

    Args:
        call: ``(request, timeout_s, until_s) -> response``; ``until_s`` is that of ``retry_and_warn``.
        request: The request; ``wait_s`` is set here.
        done: Returns whether the response is final.
        what: What the rpc waits for, for messages.
        waits: Limits.
        log_level: Level of messages about the wait.
        replica: The replica without which the trainer cannot go on. None: it does not matter.

    Raises:
        DeadlineError: Not done within ``wait_limit_s``. The message says what the coordinator waits for.
        ReplicaLostError: The replica's process group is void, and the response is not final.
    """
    started = last_report = time.monotonic()
    until_s = started + waits.wait_limit_s
    while True:
        is_void = replica is not None and replica.is_void  # before the rpc, whose response may be final
        longest_s = _REPLICA_POLL_S if replica is not None and replica.has_group else _POLL_S
        request.wait_s = 0.0 if is_void else max(0.0, min(longest_s, until_s - time.monotonic()))
        response = call(request, request.wait_s + waits.rpc_timeout_s, until_s)
        if done(response):
            return response
        if replica is not None and is_void:
            raise replica.lost_error()
        now, reasons = time.monotonic(), "; ".join(getattr(response, "waiting_for", ()))
        if now >= until_s:
            raise DeadlineError(f"waited {now - started:.0f} s for {what}: {reasons}", waiting_for=reasons)
        if now - last_report > _POLL_S / 2:
            logger.log(log_level, "waiting for %s (%.0f s): %s", what, now - started, reasons)
            last_report = now


def retry_and_warn(call: Callable[..., Any], waits: WaitOptions, until_s: float | None = None) -> Any:
    """Retries a call for ``wait_limit_s``. Logs a warning after ``warn_after_s``: the address may be wrong.

    Args:
        call: Takes ``retry_for_s``, how long to retry while the coordinator is unavailable, and ``until_s``, when the
            last attempt ends.
        waits: Limits.
        until_s: Time by ``time.monotonic`` when the last attempt ends. None: after ``wait_limit_s``.
    """
    started = time.monotonic()
    until_s = started + waits.wait_limit_s if until_s is None else until_s
    try:
        return call(retry_for_s=min(waits.warn_after_s, max(0.0, until_s - started)), until_s=until_s)
    except UnavailableError as error:
        if (left_s := until_s - time.monotonic()) <= 0:
            raise
        logger.warning("%s; retrying for %.0f s", error, left_s)
    return call(retry_for_s=left_s, until_s=until_s)
