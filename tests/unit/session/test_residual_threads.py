"""The thread that writes residuals to a checkpoint, while another thread leaves the run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shardwell.store import residuals as module
from shardwell.store.residuals import CheckpointResiduals
from shardwell_wire.v1 import common_pb2, coordinator_pb2


class Membership:
    """Notes the reports of residuals."""

    trainer, epoch = "a", 1

    def __init__(self) -> None:
        self.reported: list[str] = []

    def context(self, step: int) -> common_pb2.RequestContext:
        return common_pb2.RequestContext(run="r", step=step)

    def ask_residuals(self) -> None:
        """No checkpoint of the last step is wanted."""

    def call(self, rpc_name: str, request: Any) -> None:
        assert rpc_name == "AddResiduals"
        self.reported.append(request.checkpoint_id)


class Feedback:
    step = 3

    def capture(self, step: int) -> None:
        """This trainer has no residuals yet."""


class Pushes:
    feedback = Feedback()


def test_a_trainer_may_leave_at_the_instant_at_which_the_writing_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    membership, left = Membership(), []
    residuals = CheckpointResiduals(membership, Pushes())  # type: ignore[arg-type]

    def leave() -> None:
        residuals.finish()
        left.append(True)

    class Thread(threading.Thread):
        """The other thread leaves after this one was made, and before it runs."""

        def start(self) -> None:
            leaving = threading.Thread(target=leave)
            leaving.start()
            leaving.join()
            super().start()

    # Not in ``threading`` itself: the thread that leaves is an ordinary one.
    monkeypatch.setattr(module, "threading", type("Threading", (), {"Thread": Thread, "Lock": threading.Lock}))
    residuals.note_wanted(coordinator_pb2.WantedResiduals(checkpoint_id="c", step=3, url="/nowhere"))
    residuals.finish()
    assert left == [True], "joining a thread that has not started raises"
    assert membership.reported == ["c"]
