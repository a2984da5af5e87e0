"""Asks the coordinator for checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwell_wire.errors import UnavailableError
from shardwell_wire.v1 import coordinator_pb2

if TYPE_CHECKING:  # commands use this module without torch
    from shardwell.membership.membership import Membership

POLL_S = 1.0
"""How long one rpc waits for the end of a checkpoint."""

Call = Callable[[str, Any], Any]
"""Calls an rpc of the coordinator: name and request."""


def save_checkpoint(membership: Membership, *, wait: bool) -> str:
    """Saves a checkpoint of a trainer's run. See ``Session.save_checkpoint``."""
    call = partial(membership.call, member=False)  # a rollback ends the membership, not the run
    progress = request_checkpoint(call, membership.run, run_id=membership.identity.run_id)
    while is_writing(progress) and (wait or not progress.url):
        progress = follow_checkpoint(call, membership.run, progress)
    require_not_failed(progress, membership.run)
    url: str = progress.url
    return url


def request_checkpoint(call: Call, run: str, *, run_id: str = "") -> coordinator_pb2.CheckpointProgress:
    """Starts a checkpoint of the newest version, or joins one of this version that is being written."""
    response = call("SaveCheckpoint", coordinator_pb2.SaveCheckpointRequest(run=run, run_id=run_id))
    progress: coordinator_pb2.CheckpointProgress = response.checkpoint
    return progress


def follow_checkpoint(
    call: Call, run: str, progress: coordinator_pb2.CheckpointProgress
) -> coordinator_pb2.CheckpointProgress:
    """Waits up to ``POLL_S`` for the end of a checkpoint, and returns its state."""
    request = coordinator_pb2.SaveCheckpointRequest(run=run, checkpoint_id=progress.checkpoint_id, wait_s=POLL_S)
    found: coordinator_pb2.CheckpointProgress = call("SaveCheckpoint", request).checkpoint
    return found


def is_writing(progress: coordinator_pb2.CheckpointProgress) -> bool:
    """Returns whether the servers are writing a checkpoint."""
    return bool(progress.state == coordinator_pb2.CHECKPOINT_STATE_WRITING)


def require_not_failed(progress: coordinator_pb2.CheckpointProgress, run: str) -> None:
    """Raises UnavailableError if a checkpoint could not be written."""
    if progress.state == coordinator_pb2.CHECKPOINT_STATE_FAILED:
        raise UnavailableError(
            f"the checkpoint of step {progress.step} of run {run!r} was not written: {progress.error}", run=run
        )
