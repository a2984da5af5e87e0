"""Weights that trainers read in place: writes to them and overwritten versions are detected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwell
from tests.support.reference import ADAMW, sha256

WeightWrite = Callable[[torch.Tensor], object]


class WritingLinear(nn.Module):
    """A linear layer whose forward first modifies its weight, once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32))
        self.write: WeightWrite | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        write, self.write = self.write, None
        if write is not None:
            write(self.weight)
        return F.linear(x, self.weight)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), WritingLinear(), nn.Linear(64, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(step))


def plain_hash(steps: int) -> str:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    for step in range(steps):
        model(batch(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sha256(model.state_dict())


class Trained:
    """The model on a trainer."""

    def __init__(self, session: shardwell.Session) -> None:
        self.session = session
        self.model = build()
        for module in self.model:
            shardwell.fully_shard(module, session)
        shardwell.fully_shard(self.model, session)
        self.optimizer = shardwell.optim.AdamW(self.model.parameters(), **ADAMW)

    @property
    def writing(self) -> WritingLinear:
        return self.model[1]  # type: ignore[return-value]

    def backward(self) -> None:
        self.model(batch(self.session.step)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def hash(self) -> str:
        return sha256(shardwell.full_state_dict(self.model))


@contextmanager
def joined(address: str, run: str, transports: str = "shm") -> Iterator[Trained]:
    with shardwell.join(address, run=run, transfers=shardwell.TransferOptions(transports=transports)) as session:
        yield Trained(session)


@pytest.fixture(params=["shm", "grpc"])
def trained(cluster: shardwell.LocalCluster, run_name: str, request: pytest.FixtureRequest) -> Iterator[Trained]:
    with joined(cluster.address, run_name, request.param) as made:
        yield made


@pytest.fixture
def shared(cluster: shardwell.LocalCluster, run_name: str) -> Iterator[Trained]:
    with joined(cluster.address, run_name) as made:
        assert all(unit.own_bytes == 0 for unit in made.session.units)
        yield made


def add_in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1.0)


def add_to_data(weight: torch.Tensor) -> None:
    weight.data.add_(1.0)


def add_to_detached(weight: torch.Tensor) -> None:
    weight.detach().add_(1.0)


def write_one_element(weight: torch.Tensor) -> None:
    weight.data[-1, -1] = 7.0


# Writes.


@pytest.mark.parametrize("write", [add_in_place, add_to_data, add_to_detached, write_one_element])
def test_write_in_forward_raises_and_leaves_no_trace(shared: Trained, write: WeightWrite) -> None:
    shared.step()
    shared.writing.write = write
    with pytest.raises(shardwell.UsageError, match=r"parameter '1\.weight'.* was written in place"):
        shared.step()
    shared.optimizer.zero_grad()
    for _ in range(2):
        shared.step()
    assert shared.hash() == plain_hash(3)


def test_in_place_write_raises_the_same_error_on_every_transport(trained: Trained) -> None:
    trained.step()
    trained.writing.write = add_in_place
    with pytest.raises(shardwell.UsageError, match=r"parameter '1\.weight'"):
        trained.step()
    trained.optimizer.zero_grad()
    for _ in range(2):
        trained.step()
    assert trained.hash() == plain_hash(3)


@pytest.mark.parametrize("write", [add_in_place, add_to_data])
def test_work_item_computed_with_written_weights_is_discarded(shared: Trained, write: WeightWrite) -> None:
    for step in shared.session.steps(3):
        if step.number == 1:
            shared.writing.write = write
            with pytest.raises(shardwell.UsageError, match=r"parameter '1\.weight'"):
                for _ in step.batches(lambda number, _: batch(number)):
                    shared.backward()
        for _ in step.batches(lambda number, _: batch(number)):
            shared.backward()
        shared.optimizer.step()
        shared.optimizer.zero_grad()
    assert shared.hash() == plain_hash(3)


@pytest.mark.parametrize("write", [add_in_place, add_to_data])
def test_write_between_unshard_and_reshard_raises(shared: Trained, write: WeightWrite) -> None:
    shared.step()
    shared.writing.unshard()
    write(shared.writing.weight)
    with pytest.raises(shardwell.UsageError, match=r"parameter '1\.weight'"):
        shared.writing.reshard()
    for _ in range(2):
        shared.step()
    assert shared.hash() == plain_hash(3)


def test_writes_are_invisible_to_other_trainers(cluster: shardwell.LocalCluster, shared: Trained) -> None:
    shared.step()
    before = shared.hash()
    with joined(cluster.address, shared.session.run) as other:
        shared.writing.unshard()
        shared.writing.weight.data.fill_(float("nan"))
        assert other.hash() == before
        other.writing.unshard()
        assert bool(other.writing.weight.isfinite().all())
        other.writing.reshard()
        with pytest.raises(shardwell.UsageError):
            shared.writing.reshard()
        assert shared.hash() == before


def test_embedding_with_max_norm_raises(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with shardwell.join(
        cluster.address, run=run_name, transfers=shardwell.TransferOptions(transports="shm")
    ) as session:
        torch.manual_seed(0)
        model = nn.Embedding(100, 8, max_norm=0.1)
        before = sha256(model.state_dict())
        shardwell.fully_shard(model, session)
        for _ in range(2):
            with pytest.raises(shardwell.UsageError, match=r"parameter 'Embedding-0\.weight'"), torch.no_grad():
                model(torch.arange(100))
        assert sha256(shardwell.full_state_dict(model)) == before


# Versions.


def test_weights_can_be_read_between_the_end_of_the_work_and_the_commit(shared: Trained) -> None:
    for step in shared.session.steps(2):
        for _ in step.batches(lambda number, _: batch(number)):
            shared.backward()
        with torch.no_grad():
            outputs = [shared.model(batch(9)) for _ in range(2)]
        assert torch.equal(*outputs)
        shared.optimizer.step()
        shared.optimizer.zero_grad()
    assert shared.hash() == plain_hash(2)


@pytest.fixture
def evaluator(cluster: shardwell.LocalCluster, shared: Trained) -> Iterator[Trained]:
    """A second trainer of the run, without a rank."""
    with joined(cluster.address, shared.session.run) as made:
        assert made.session.num_ranks == 0
        yield made


def evaluate(trained: Trained) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = trained.model(batch(9))
    return result


@torch.enable_grad()
def overwrite(shared: Trained) -> None:
    """Commits a step and waits until the servers have made the next version."""
    shared.step()
    shared.hash()


def catch_up(evaluator: Trained) -> None:
    """Runs a step that the other trainers have committed."""
    evaluator.optimizer.step()


def test_weights_overwritten_during_use_are_detected(shared: Trained, evaluator: Trained) -> None:
    assert torch.equal(evaluate(evaluator), evaluate(shared))
    evaluator.writing.write = lambda _: overwrite(shared)
    with pytest.raises(shardwell.VersionGoneError, match="version 0 of unit 'WritingLinear-0' was overwritten"):
        evaluate(evaluator)
    catch_up(evaluator)
    assert torch.equal(evaluate(evaluator), evaluate(shared))


def test_kept_weights_are_not_used_for_another_version(shared: Trained, evaluator: Trained) -> None:
    evaluate(evaluator)
    overwrite(shared)
    for _ in range(2):
        with pytest.raises(shardwell.VersionGoneError):
            evaluate(evaluator)
    catch_up(evaluator)
    assert torch.equal(evaluate(evaluator), evaluate(shared))


def test_write_before_the_commit_is_detected_and_the_step_stays_committed(shared: Trained) -> None:
    shared.step()
    shared.backward()
    shared.optimizer.clip_grad_norm_(float("inf"))  # ends the work
    shared.writing.unshard()
    shared.writing.weight.data.fill_(0.0)
    with pytest.raises(shardwell.UsageError, match=r"parameter '1\.weight'"):
        shared.optimizer.step()
    assert shared.session.step == 2
    shared.optimizer.zero_grad()
    shared.step()
    assert shared.hash() == plain_hash(3)


# Leases.


@contextmanager
def silent_heartbeats(session: shardwell.Session) -> Iterator[None]:
    """A trainer whose heartbeats do not arrive, as if it was cut off from the coordinator."""
    heartbeats = session._membership._heartbeats

    def send(timeout_s: float) -> None:
        raise shardwell.UnavailableError("cut off")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeats, "send", send)
        yield


@pytest.mark.parametrize("place", ["forward", "between", "backward"])
def test_work_with_weights_that_are_overwritten_after_the_lease_ended_does_not_count(run_name: str, place: str) -> None:
    """Versions are checked at the end of a forward and of a backward. Another trainer commits the step before that."""
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=256, lease_s=1.0) as cluster,
        joined(cluster.address, run_name) as late,
        joined(cluster.address, run_name) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        computed = list[tuple[str, int]]()

        def lose_the_lease() -> None:
            if late.session.step != 1 or ("other", 1) in computed:
                return
            with silent_heartbeats(late.session):
                deadline = time.monotonic() + 30
                while ("other", 2) not in computed:  # the versions of step 1 are overwritten
                    assert time.monotonic() < deadline
                    time.sleep(0.05)

        def train(trained: Trained, name: str) -> str:
            for step in trained.session.steps(4):
                for data in step.batches(lambda number, _: batch(number)):
                    computed.append((name, step.number))
                    result = trained.model(data).square().sum()
                    if trained is late and place == "between":
                        lose_the_lease()
                    result.backward()
                trained.optimizer.step()
                trained.optimizer.zero_grad()
            return trained.hash()

        def before_the_last_layer(_: nn.Module, arguments: tuple[torch.Tensor]) -> None:
            if place == "forward":
                lose_the_lease()
            elif place == "backward" and arguments[0].requires_grad:
                arguments[0].register_hook(lambda _: lose_the_lease())

        late.model[2].register_forward_pre_hook(before_the_last_layer)
        others = threads.submit(train, other, "other")
        hashes = [train(late, "late"), others.result(60)]
        assert {("late", 1), ("other", 1)} <= set(computed)
        assert hashes == [plain_hash(4)] * 2
