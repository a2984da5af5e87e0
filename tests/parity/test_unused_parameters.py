"""Replicas whose parameters get a gradient in some steps only: ``find_unused_parameters`` and ``static_graph``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwell import ReplicaOptions, ShardingStrategy, UsageError
from shardwell.module.fully_shard import fully_shard
from tests.support.module_parity import Sharded
from tests.support.strategies import commit


class Switch(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x)  # type: ignore[no-any-return]


def switch_replica(replica: ReplicaOptions) -> Sharded:
    def wrap(model: nn.Module, session: Any) -> None:
        fully_shard(model, session, strategy=ShardingStrategy.NO_SHARD, replica=replica)

    return Sharded(Switch(), wrap)


def train_switch(sharded: Sharded, left: bool) -> None:
    sharded.model(torch.ones(1, 3), left).sum().backward()
    commit(sharded)


def test_unused_parameters_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sharded = switch_replica(ReplicaOptions(find_unused_parameters=True))
    for left in (True, True, False):
        train_switch(sharded, left)
    unit = "unit 'Switch-0': 2 parameters got no gradient:"
    assert [record.getMessage() for record in caplog.records] == [
        f"{unit} Switch-0.right.weight, Switch-0.right.bias",
        f"{unit} Switch-0.left.weight, Switch-0.left.bias",
    ]


def test_unused_parameters_are_not_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    train_switch(switch_replica(ReplicaOptions()), left=True)
    assert not caplog.records


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_changed_static_graph_is_refused(bucket_bytes: int) -> None:
    sharded = switch_replica(ReplicaOptions(static_graph=True, bucket_bytes=bucket_bytes))
    train_switch(sharded, left=True)
    before = sharded.state()
    with pytest.raises(
        UsageError, match=r"'Switch-0.left.weight' got no gradient.*'Switch-0.right.bias' got a gradient"
    ):
        train_switch(sharded, left=False)
    sharded.units.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in sharded.state().items())
    train_switch(sharded, left=True)
    assert not torch.equal(sharded.state()["left.bias"], before["left.bias"])


def test_gradient_as_bucket_view_is_refused() -> None:
    with pytest.raises(UsageError, match=r"gradient_as_bucket_view=True.*never copied"):
        ReplicaOptions(gradient_as_bucket_view=True)
