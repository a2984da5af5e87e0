"""``session.run_replica`` in worlds of one trainer, and what it does between two calls of the training function.

Replicas of several trainers: ``tests/faults/test_lost_replica_member.py``.
"""

from __future__ import annotations

import gc
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.session.session import short_collections
from shardwell_wire.errors import ReplicaLostError, UsageError

STEPS = 4


def join(cluster: shardwell.LocalCluster) -> shardwell.Session:
    return shardwell.join(cluster.address, run=uuid.uuid4().hex, host="here", seed=5)


class Script:
    """A model with buffers, an optimizer with momentum and a tracked scheduler. Made anew for each part of the run."""

    def __init__(self, session: shardwell.Session, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(17, 9), nn.BatchNorm1d(9), nn.Linear(9, 1))
        shardwell.fully_shard(self.model[0], session, name="first")
        shardwell.fully_shard(self.model, session, name="rest")
        self.optimizer = shardwell.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.5)
        session.track(scheduler=self.scheduler)
        self._session = session

    def train(self, num_steps: int) -> list[int]:
        """Returns the numbers of the steps for which it computed a batch."""
        computed = []
        for step in self._session.steps(num_steps):
            for batch in step.batches(lambda *_: torch.randn(5, 17)):
                self.model(batch).square().mean().backward()
                computed.append(step.number)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return computed

    def state(self) -> dict[str, Any]:
        return {**shardwell.full_state_dict(self.model), "lr": self.scheduler.get_last_lr()}


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


def test_training_goes_on_with_another_model_of_the_same_run(cluster: shardwell.LocalCluster) -> None:
    with join(cluster) as session:
        script = Script(session, seed=0)
        script.train(STEPS)
        expected = script.state()
    with join(cluster) as session:
        former = Script(session, seed=0)
        assert former.train(2) == [0, 1]
        unit_bytes = session.memory()
        session._start_over()
        with pytest.raises(UsageError, match="belongs to a model that ended when the replica"):
            former.model(torch.zeros(2, 17))
        with pytest.raises(UsageError):
            former.optimizer.step()
        released = weakref.ref(former.model)
        del former
        gc.collect()
        assert released() is None
        script = Script(session, seed=1)  # other initial values, which the run does not take
        assert script.train(STEPS) == [2, 3]
        require_equal(script.state(), expected)
        assert [unit.name for unit in session.memory().units] == [unit.name for unit in unit_bytes.units]


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Takes back for one test that the collections of this process skip the imported modules."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_collections_skip_what_existed_before() -> None:
    former, garbage = Cycle(), weakref.ref(Cycle())
    released = weakref.ref(former)
    with short_collections():
        assert garbage() is None, "garbage does not stay"
        del former
        later = weakref.ref(Cycle())
        gc.collect()
        assert later() is None and released() is not None
        count = gc.get_freeze_count()
        with short_collections():
            assert gc.get_freeze_count() <= count
        assert gc.get_freeze_count() > 0, "whoever has frozen objects releases them"
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert released() is None


def test_replica_of_one_trainer_is_never_formed_again(cluster: shardwell.LocalCluster) -> None:
    with join(cluster) as session:
        assert session.run_replica(lambda given: given is session) is True

        def fail(_: shardwell.Session) -> None:
            raise ReplicaLostError("lost")

        with pytest.raises(ReplicaLostError, match="lost"):
            session.run_replica(fail)
