"""Buffers and tracked objects: what is stored with a commit, and what a joining trainer gets back."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwell.session.run_state import RunBuffers, TrackedObjects, from_tensor_value, to_tensor_value
from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import common_pb2


def normalised() -> tuple[nn.Module, RunBuffers]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.register_buffer("constant", torch.arange(3.0))
    return module, RunBuffers(lambda: [("unit", module)])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.randn(2, 3).t(),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.randn(5).bfloat16(),
        torch.tensor([float("nan"), -0.0]),
    ],
)
def test_tensor_values_round_trip(tensor: torch.Tensor) -> None:
    restored = from_tensor_value(to_tensor_value(tensor))
    assert restored.dtype == tensor.dtype
    assert restored.shape == tensor.shape
    assert torch.equal(restored.view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))


def test_tensor_value_of_a_wrong_size_is_refused() -> None:
    with pytest.raises(UsageError, match="8 bytes came as 3"):
        from_tensor_value(common_pb2.TensorValue(dtype=common_pb2.DTYPE_FLOAT32, shape=[2], data=b"123"))


def test_every_item_starts_from_the_committed_buffers_and_rank_0_decides() -> None:
    module, buffers = normalised()
    norm = module[1]
    buffers.begin_item()
    module(torch.randn(8, 3))
    buffers.end_item()
    after_rank_0 = norm.running_mean.clone()
    buffers.begin_item()
    assert torch.equal(norm.running_mean, torch.zeros(4))
    module(torch.randn(8, 3))
    stored = buffers.to_proto()
    assert set(stored) == {"unit.1.running_mean", "unit.1.running_var", "unit.1.num_batches_tracked"}
    buffers.committed(stored)
    assert torch.equal(norm.running_mean, after_rank_0)
    assert norm.num_batches_tracked == 1
    assert buffers.to_proto() == {}


def test_a_joining_trainer_starts_from_the_runs_buffers() -> None:
    module, buffers = normalised()
    module(torch.randn(8, 3))
    buffers.begin_item()
    module(torch.randn(8, 3))
    buffers.end_item()
    stored = buffers.to_proto()
    other, joined = normalised()
    joined.committed(stored)
    joined.begin_item()
    assert torch.equal(other[1].running_var, module[1].running_var)


def test_buffers_of_another_shape_are_an_error() -> None:
    _module, buffers = normalised()
    buffers.begin_item()
    with pytest.raises(UsageError, match="the models differ"):
        buffers.committed({"unit.1.running_mean": to_tensor_value(torch.zeros(5))})


def scheduler_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), optimizer


def test_a_tracked_scheduler_is_restored_with_its_learning_rate() -> None:
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
def test_what_cannot_be_stored_is_named(state: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrackedObjects({}).track({"x": Stateful(state)})


def test_what_has_no_state_is_named() -> None:
    with pytest.raises(UsageError, match="int has no state_dict"):
        TrackedObjects({}).track({"x": 3})
