"""Buffers in a training loop, against real servers and plain PyTorch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell.weights.pinned_version import pinned_version
from tests.support.buffer_trainer import LR, Net, batch, plain_state, state_hash, train
from tests.support.cluster import join_options

STEPS = 3
BIG_ROWS = 720_000
"""Rows of 24 bytes: more than one message can carry."""


def join(cluster: shardwell.LocalCluster, run: str, dp: int = 2, **options: object) -> shardwell.Session:
    options = {"world": shardwell.World(dp=dp), "min_trainers": 1, "wait_limit_s": 60, **options}
    return shardwell.join(cluster.address, run=run, **join_options(**options))


def exported(cluster: shardwell.LocalCluster, run: str) -> Mapping[str, torch.Tensor]:
    with (
        closing(CoordinatorClient(cluster.address)) as coordinator,
        pinned_version(coordinator, run, timeout_s=20.0) as held,
    ):
        return dict(held.values())


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_large_buffers_travel_on_every_transport_and_reach_a_joining_trainer(
    cluster: shardwell.LocalCluster, run_name: str, transport: str
) -> None:
    expected = state_hash(plain_state(1, STEPS, queue_rows=BIG_ROWS))
    with join(cluster, run_name, dp=1, transports=transport) as session:
        train(session, steps=STEPS - 1, queue_rows=BIG_ROWS)
    with join(cluster, run_name, dp=1, transports=transport) as session:
        state = train(session, steps=STEPS, queue_rows=BIG_ROWS, constants_seed=1)
    assert state_hash(state) == expected
    values = exported(cluster, run_name)
    assert state_hash(values) == expected


def test_other_trainers_read_changed_buffers(cluster: shardwell.LocalCluster, run_name: str) -> None:
    building, states = threading.Lock(), {}

    def work(rank: int) -> None:
        with join(cluster, run_name, min_trainers=2, global_rank=rank, transports="socket") as session:
            with building:  # both trainers use the generator of this process
                model = Net(20_000, constants_seed=rank)
            shardwell.fully_shard(model, session)
            optimizer = shardwell.optim.SGD(model.parameters(), lr=LR)
            for step in session.steps(STEPS):
                for inputs in step.batches(batch):
                    model(inputs).backward()
                optimizer.step()
                optimizer.zero_grad()
            states[rank] = state_hash(shardwell.full_state_dict(model))

    with ThreadPoolExecutor(2) as trainers:
        for done in [trainers.submit(work, rank) for rank in range(2)]:
            done.result()
    assert set(states.values()) == {state_hash(plain_state(2, STEPS, queue_rows=20_000))}


def test_client_side_optimizer_does_not_change_buffers(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with join(cluster, run_name) as session:
        model = shardwell.fully_shard(Net(), session)
        optimizer = shardwell.ClientSide(model.parameters(), torch.optim.SGD, lr=LR, fused=True)
        for step in session.steps(STEPS):
            for inputs in step.batches(batch):
                model(inputs).backward()
            optimizer.step()
        assert state_hash(shardwell.full_state_dict(model)) == state_hash(plain_state(2, STEPS))


def test_step_without_gradients_keeps_buffer_changes(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with join(cluster, run_name) as session:
        model = shardwell.fully_shard(Net(), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.0)
        for step in session.steps(2):
            for inputs in step.batches(batch):
                model(inputs).backward()
            optimizer.zero_grad()
            optimizer.step()
        assert model.calls == 2
    plain = Net()
    for step in range(2):
        plain(batch(step, 0))
    values = exported(cluster, run_name)
    for name, value in plain.named_buffers():
        assert torch.equal(values[name].nan_to_num(7.0), value.nan_to_num(7.0)), name


def test_skipped_step_keeps_buffer_changes(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with join(cluster, run_name, dp=1) as session:
        model = shardwell.fully_shard(Net(), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=LR)
        scaler = shardwell.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in session.steps(1):
            loss = model(batch(step.number, 0))
            scaler.scale(loss * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.skipped
        assert exported(cluster, run_name)["calls"] == 1


def test_failed_item_is_restarted_with_the_committed_buffers(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with join(cluster, run_name) as session:
        model = shardwell.fully_shard(Net(), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=LR)
        failures = iter([True, False, True])
        for step in session.steps(STEPS):
            while True:
                try:
                    for inputs in step.batches(batch):
                        model(inputs).backward()
                        if next(failures, False):
                            raise ZeroDivisionError
                    break
                except ZeroDivisionError:
                    optimizer.zero_grad()
            optimizer.step()
        assert state_hash(shardwell.full_state_dict(model)) == state_hash(plain_state(2, STEPS))


def test_buffers_not_read_after_a_commit_are_read_before_the_next_item(
    cluster: shardwell.LocalCluster, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: object) -> None:
        raise shardwell.UnavailableError("test: the server is away")

    with join(cluster, run_name) as session:
        model = shardwell.fully_shard(Net(), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=LR)

        def train() -> None:
            for step in session.steps(STEPS):
                for inputs in step.batches(batch):
                    model(inputs).backward()
                session._training.buffers._source = None  # simulates values that another trainer has pushed
                optimizer.step()

        with monkeypatch.context() as patch, pytest.raises(shardwell.UnavailableError, match="is away"):
            patch.setattr(session.store.buffers, "read", unavailable)
            train()
        assert session.step == 1, "the step is committed in spite of the error"
        train()
        assert state_hash(shardwell.full_state_dict(model)) == state_hash(plain_state(2, STEPS))


def test_auto_wrap_keeps_the_models_buffer_names(cluster: shardwell.LocalCluster, run_name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
            self.bare = nn.BatchNorm1d(4, affine=False)
            self.register_buffer("top", torch.zeros(2))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                inputs = block(inputs)
            self.top.add_(1)
            result: torch.Tensor = self.bare(inputs)
            return result

    with join(cluster, run_name, dp=1) as session:
        model = shardwell.auto_wrap(Model(), session, shardwell.ModuleTypePolicy({nn.Sequential}))
        optimizer = shardwell.optim.SGD(model.parameters(), lr=LR)
        for _ in session.steps(2):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        state = shardwell.full_state_dict(model)
        assert state["top"].tolist() == [2.0, 2.0]
    values = exported(cluster, run_name)
    assert values.keys() == state.keys()
    assert all(torch.equal(values[name], value) for name, value in state.items())


def _quantized() -> nn.Module:
    """Returns a model for quantization-aware training. Its first forward resizes the buffers of all observers."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    prepared: nn.Module = quantization.prepare_qat(model)
    return prepared


def _train_quantized(session: shardwell.Session, steps: int) -> Mapping[str, torch.Tensor]:
    model = shardwell.auto_wrap(_quantized(), session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=LR)
    for step in session.steps(steps):
        for inputs in step.batches(lambda item, rank: batch(item, rank)[:, :4]):
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return shardwell.full_state_dict(model)


def _plain_quantized(steps: int) -> Mapping[str, torch.Tensor]:
    """Returns the state of plain PyTorch with two data ranks, of which rank 0 keeps its buffers."""
    model = _quantized()
    for step in range(steps):
        items = [copy.deepcopy(model) for _ in range(2)]
        for rank, item in enumerate(items):
            item(batch(step, rank)[:, :4]).square().mean().backward()
        model = items[0]
        for parameter, other in zip(model.parameters(), items[1].parameters(), strict=True):
            assert parameter.grad is not None and other.grad is not None
            parameter.grad = (parameter.grad + other.grad) / 2
        torch.optim.SGD(model.parameters(), lr=LR, fused=True).step()
        model.zero_grad()
    return model.state_dict()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_observers_keep_their_shapes(cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path) -> None:
    expected = [state_hash(_plain_quantized(steps)) for steps in range(5)]
    with join(cluster, run_name) as session:
        assert state_hash(_train_quantized(session, 2)) == expected[2]
    with join(cluster, run_name, checkpoint_dir=str(tmp_path)) as session:
        assert state_hash(_train_quantized(session, 3)) == expected[3]
        url = session.save_checkpoint(wait=True)
    model = _quantized()
    with shardwell.attach(cluster.address, run=run_name) as reader:
        reader.follow(model)
    for state in (model.state_dict(), exported(cluster, run_name), shardwell.open_checkpoint(url).state_dict()):
        assert state_hash(state) == expected[3]
    with join(cluster, f"{run_name}-resumed", resume=url) as session:
        assert state_hash(_train_quantized(session, 4)) == expected[4]


class Counted(nn.Module):
    """Gives a buffer its shape in the first forward, and registers another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("low", torch.zeros(0))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "count"):
            self.low = torch.full((3,), -1.0)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.count += 1
        return self.linear(batch)


def test_buffers_of_the_first_step_have_names_in_the_model(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    with join(cluster, run_name, dp=1, checkpoint_dir=str(tmp_path)) as session:
        model = nn.Sequential(Counted(), nn.Linear(4, 2))
        shardwell.fully_shard(model[0], session)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=LR)
        for step in session.steps(2):
            for item in step.batches(lambda step, rank: torch.ones(1, 4)):
                model(item).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoint = shardwell.open_checkpoint(session.save_checkpoint(wait=True))
        with shardwell.attach(cluster.address, run=run_name) as reader:
            _, live = reader.read()
        for state in (live, checkpoint.state_dict(), shardwell.full_state_dict(model)):
            assert {"0.low", "0.count"} < state.keys() and state["0.low"].tolist() == [-1.0] * 3
            assert state["0.count"].item() == 2
    with join(cluster, f"{run_name}-other-units", dp=1, resume=checkpoint.url, rewrap=True) as session:
        model = nn.Sequential(Counted(), nn.Linear(4, 2))
        shardwell.auto_wrap(model, session, shardwell.NoWrapPolicy())
        shardwell.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(shardwell.UsageError, match="needs the units and the tensor and pipeline axes"):
            for item in next(session.steps(3)).batches(lambda step, rank: torch.ones(1, 4)):
                model(item).sum().backward()


def test_sync_batch_norm_is_rejected_with_several_data_ranks(cluster: shardwell.LocalCluster, run_name: str) -> None:
    def synced() -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    with join(cluster, run_name) as session:
        message = "submodule '1' is a SyncBatchNorm, which would normalise with the batch of one data rank only"
        with pytest.raises(shardwell.UsageError, match=message):
            shardwell.fully_shard(synced(), session)
        with pytest.raises(shardwell.UsageError, match=message):
            shardwell.auto_wrap(synced(), session)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        shardwell.fully_shard(model[0], session)
        shardwell.fully_shard(model, session)
        model[1] = nn.SyncBatchNorm(4, affine=False)
        with pytest.raises(shardwell.UsageError, match=message):
            shardwell.optim.SGD(model[0].parameters(), lr=LR)
    with join(cluster, f"{run_name}-alone", dp=1) as session:
        shardwell.fully_shard(synced(), session)
