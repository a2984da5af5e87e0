"""Tracked objects: the state that a commit stores and a joining trainer restores."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwell.training.training import TrackedObjects
from shardwell_wire.errors import UsageError


def scheduler_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), optimizer


def test_tracked_scheduler_is_restored_with_its_learning_rate() -> None:
    scheduler, optimizer = scheduler_and_optimizer()
    tracked = TrackedObjects({})
    tracked.track({"scheduler": scheduler})
    assert not tracked.restored
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    stored = tracked.to_json()
    restored_scheduler, restored_optimizer = scheduler_and_optimizer()
    again = TrackedObjects(stored)
    again.track({"scheduler": restored_scheduler})
    assert again.restored
    assert restored_optimizer.param_groups[0]["lr"] == 0.5
    assert restored_scheduler.last_epoch == 3


def test_object_that_replaces_a_tracked_one_gets_its_present_state() -> None:
    joined, _ = scheduler_and_optimizer()
    first = TrackedObjects({})
    first.track({"scheduler": joined})
    tracked = TrackedObjects(first.to_json())
    scheduler, optimizer = scheduler_and_optimizer()
    tracked.track({"scheduler": scheduler})
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    second, second_optimizer = scheduler_and_optimizer()
    tracked.track({"scheduler": second})
    assert second.last_epoch == 3
    assert second_optimizer.param_groups[0]["lr"] == 0.5


def test_object_is_replaced_with_its_state_after_the_first_commit_of_a_new_run() -> None:
    tracked = TrackedObjects({})
    scheduler, optimizer = scheduler_and_optimizer()
    tracked.track({"scheduler": scheduler})
    another, _ = scheduler_and_optimizer()
    optimizer.step()
    scheduler.step()
    tracked.track({"scheduler": another})  # no commit has the former one
    assert another.last_epoch == 0
    tracked.note_commit()
    another.optimizer.step()
    another.step()
    last, _ = scheduler_and_optimizer()
    tracked.track({"scheduler": last})
    assert last.last_epoch == 1


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": torch.zeros(1)}, r"x.state_dict\(\)\['a'\] is a Tensor"),
        ({"a": [1, {2: 3}]}, "has the key 2"),
        ({"a": {"b": object()}}, r"\['b'\] is a object"),
    ],
)
def test_state_that_cannot_be_stored_is_named(state: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrackedObjects({}).track({"x": Stateful(state)})


def test_object_without_state_dict_is_named() -> None:
    with pytest.raises(UsageError, match="int has no state_dict"):
        TrackedObjects({}).track({"x": 3})
