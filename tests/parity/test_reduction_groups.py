"""The reduction groups of a run determine the order in which gradients are added, and with it the bits."""

from __future__ import annotations

import uuid

import pytest

import shardwell
from shardwell_wire.errors import RunMismatchError, WorldError
from tests.support.reference import sha256, undisturbed_sha256
from tests.support.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


def train_four_ranks(cluster: shardwell.LocalCluster, groups: tuple[int, ...] | None) -> str:
    """Trains four ranks on one trainer and returns a hash of the weights."""
    with shardwell.join(
        cluster.address,
        run=uuid.uuid4().hex,
        world=shardwell.World(dp=4),
        min_trainers=1,
        reduction_groups=groups,
    ) as session:
        return sha256(train(session, steps=STEPS)[1])


def test_weights_are_those_of_plain_pytorch_in_the_order_of_the_groups(
    cluster_of_three: shardwell.LocalCluster,
) -> None:
    flat, pairs = (undisturbed_sha256(dp=4, steps=STEPS, groups=groups) for groups in ((), (2, 2)))
    assert flat != pairs
    assert train_four_ranks(cluster_of_three, (2, 2)) == pairs
    assert train_four_ranks(cluster_of_three, None) == flat
    assert train_four_ranks(cluster_of_three, (4,)) == flat


def test_groups_that_do_not_fit_the_world_are_refused() -> None:
    with pytest.raises(WorldError, match=r"reduction_groups=\(2, 2\): expected sizes that multiply to dp=6"):
        shardwell.join("localhost:1", world=shardwell.World(dp=6), reduction_groups=(2, 2))


def test_all_trainers_of_a_run_name_the_same_groups(
    cluster_of_three: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, world = uuid.uuid4().hex, shardwell.World(dp=4)
    with shardwell.join(cluster_of_three.address, run=run, world=world, min_trainers=1, reduction_groups=(2, 2)):
        message = r"has reduction_groups=\(2, 2\), but this trainer asks for reduction_groups=\(\)"
        with pytest.raises(RunMismatchError, match=message):
            shardwell.join(cluster_of_three.address, run=run, world=world, min_trainers=1)
        monkeypatch.setenv("SHARDWELL_REDUCTION_GROUPS", "2,2")
        shardwell.join(cluster_of_three.address, run=run, world=world, min_trainers=1).close()
