"""``session.report()`` on real runs: each test provokes a bottleneck, which takes most of the step by construction."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.training import training
from shardwell.transport.shm_transport import GradientBuffers
from shardwell.transport.socket_transport import SocketTransport
from shardwell_server.coordinator.storage.durable_state import Storage
from shardwell_wire import fault_points
from tests.support.cluster import join_options

STEPS = 3
SLOW_S = 0.5
"""Length of a provoked wait. The rest of a step takes milliseconds."""

SEVERE = (shardwell.Severity.HIGH, shardwell.Severity.CRITICAL)


def net(session: shardwell.Session) -> Any:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 1))
    for layer in (model[0], model[2]):
        shardwell.fully_shard(layer, session)
    return shardwell.fully_shard(model, session)


def inputs(step: int, dp_rank: int) -> torch.Tensor:
    return torch.randn(8, 50, generator=torch.Generator().manual_seed(100 * step + dp_rank))


def train(
    session: shardwell.Session,
    *,
    batch: Callable[[int, int], torch.Tensor] = inputs,
    in_batch: Callable[[], None] = lambda: None,
    after_commit: Callable[[], None] = lambda: None,
    clip: bool = False,
    steps: int = STEPS,
) -> shardwell.PerformanceReport:
    model = net(session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for step in session.steps(steps):
        for x in step.batches(batch):
            model(x).square().mean().backward()
            session.count(tokens=x.numel())
            in_batch()
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        after_commit()
    return session.report()


def pause() -> None:
    time.sleep(SLOW_S)


@contextmanager
def slow_each_time(point: str) -> Iterator[None]:
    """Delays this process each time that it reaches a fault point."""
    with ExitStack() as stack:
        for nth in range(1, 200):
            stack.enter_context(fault_points.armed(point, "delay", nth=nth, delay_s=SLOW_S))
        yield


@pytest.fixture
def join(cluster: shardwell.LocalCluster, run_name: str) -> Iterator[Callable[..., shardwell.Session]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            shardwell.join(cluster.address, run=run_name, **join_options(wait_limit_s=60, **options))
        )


@pytest.fixture
def in_process(run_name: str) -> Iterator[Callable[..., shardwell.Session]]:
    with shardwell.testing.in_process_cluster(), ExitStack() as stack:
        yield lambda **options: stack.enter_context(shardwell.join(run=run_name, **join_options(**options)))


@pytest.fixture
def slow_server(run_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., shardwell.Session]]:
    """Joins a run on two servers, of which the second is slow each time that it reaches a fault point."""
    with ExitStack() as stack:

        def join(point: str, **options: Any) -> shardwell.Session:
            where = {"server": "shard-1"}
            faults = [
                fault_points.Fault(point=point, action="delay", nth=nth, where=where, delay_s=SLOW_S)
                for nth in range(1, 20)
            ]
            for name, value in fault_points.environment(*faults).items():
                monkeypatch.setenv(name, value)
            cluster = stack.enter_context(shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096))
            monkeypatch.delenv(fault_points.VARIABLE)
            return stack.enter_context(
                shardwell.join(cluster.address, run=run_name, **join_options(wait_limit_s=60, **options))
            )

        yield join


def worst(report: shardwell.PerformanceReport) -> shardwell.Bottleneck:
    """Returns the worst bottleneck, which must take most of the time."""
    assert report.bottlenecks, str(report)
    found = report.bottlenecks[0]
    assert found.severity in SEVERE, str(report)
    assert f"{found.severity.name.lower()}: " in str(report)
    return found


def test_slow_network_is_found(join: Callable[..., shardwell.Session], monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_stream = SocketTransport.fetch_stream

    def slow(*args: Any, **options: Any) -> int:
        pause()
        return fetch_stream(*args, **options)

    monkeypatch.setattr(SocketTransport, "fetch_stream", slow)
    found = worst(train(join(transports="socket")))
    assert found.kind == shardwell.StepPart.GATHER_WAIT
    assert "TransferOptions(transports='shm,socket')" in found.advice


@pytest.mark.parametrize("transports", ["shm,socket", "socket"])
def test_slow_updates_are_found_and_the_server_is_named(
    slow_server: Callable[..., shardwell.Session], transports: str
) -> None:
    found = worst(train(slow_server("server.update.before", transports=transports)))
    assert found.kind == shardwell.StepPart.UPDATE_WAIT
    assert "server 'shard-1'" in found.finding and "server 'shard-1'" in found.advice


def test_slow_pushes_are_found(join: Callable[..., shardwell.Session]) -> None:
    session = join(transports="socket")
    with slow_each_time("client.push.before"):
        found = worst(train(session))
    assert found.kind == shardwell.StepPart.PUSH


def test_slow_copies_of_gradients_are_found(
    join: Callable[..., shardwell.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = GradientBuffers.acquire_free

    def slow(*args: Any) -> Any:
        pause()
        return acquire(*args)

    monkeypatch.setattr(GradientBuffers, "acquire_free", slow)
    assert worst(train(join())).kind == shardwell.StepPart.PUSH


def train_ranks(
    cluster: shardwell.LocalCluster, run_name: str, batches: Sequence[Callable[[int, int], torch.Tensor]], *, steps: int
) -> list[shardwell.PerformanceReport]:
    """Trains with one trainer per rank, named after its rank, and returns their reports.

    Args:
        batches: What makes the batches of each rank.
    """
    reports: dict[int, shardwell.PerformanceReport] = {}

    def run(rank: int) -> None:
        world = shardwell.World(dp=len(batches))
        options = join_options(wait_limit_s=60, world=world, trainer=f"trainer-{rank}", global_rank=rank)
        with shardwell.join(cluster.address, run=run_name, **options) as session:
            reports[rank] = train(session, batch=batches[rank], steps=steps)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return [reports[rank] for rank in range(len(batches))]


def slow_inputs(step: int, dp_rank: int) -> torch.Tensor:
    pause()
    return inputs(step, dp_rank)


def test_slow_rank_is_named_by_the_others_and_told_by_its_own_report(
    cluster: shardwell.LocalCluster, run_name: str
) -> None:
    quick, slow = train_ranks(cluster, run_name, [inputs, slow_inputs], steps=STEPS)
    found = worst(quick)
    assert found.kind == "straggler"
    assert "rank 1 (trainer 'trainer-1')" in found.finding
    own = next(each for each in slow.bottlenecks if each.kind == "straggler")
    assert own.severity in SEVERE
    assert "the other trainers wait for this one" in own.finding


def test_nobody_is_named_if_other_ranks_are_slow_in_turn(cluster: shardwell.LocalCluster, run_name: str) -> None:
    def slow_in_turn(step: int, dp_rank: int) -> torch.Tensor:
        return (slow_inputs if dp_rank == 1 + step % 3 else inputs)(step, dp_rank)

    report, *_ = train_ranks(cluster, run_name, [slow_in_turn] * 4, steps=4)
    found = worst(report)
    assert found.kind == shardwell.StepPart.FINISH_WAIT
    assert "different ones finish last" in found.finding


def test_slow_commit_records_are_found(
    in_process: Callable[..., shardwell.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_commit = Storage.save_commit

    async def slow(*args: Any, **options: Any) -> None:
        pause()
        await save_commit(*args, **options)

    monkeypatch.setattr(Storage, "save_commit", slow)
    found = worst(train(in_process()))
    assert found.kind == shardwell.StepPart.COMMIT_WAIT
    assert "faster disk" in found.advice


@pytest.mark.parametrize("clip", [False, True], ids=["commit", "norm"])
def test_slow_servers_that_delay_a_commit_are_found(slow_server: Callable[..., shardwell.Session], clip: bool) -> None:
    found = worst(train(slow_server("server.prepare.after"), clip=clip))
    assert found.kind == shardwell.StepPart.COMMIT_WAIT
    assert "shard servers" in found.advice


def test_slow_batches_are_found(join: Callable[..., shardwell.Session]) -> None:
    assert worst(train(join(), batch=slow_inputs)).kind == shardwell.StepPart.DATA


def test_work_between_the_steps_is_found(join: Callable[..., shardwell.Session]) -> None:
    assert worst(train(join(), after_commit=pause)).kind == shardwell.StepPart.BETWEEN_STEPS


def test_pipeline_bubble_is_found(join: Callable[..., shardwell.Session]) -> None:
    session = join()

    def wait_for_micro_batch() -> None:
        pause()
        session.monitor.add(shardwell.StepPart.PIPELINE_BUBBLE, SLOW_S)

    assert worst(train(session, in_batch=wait_for_micro_batch)).kind == shardwell.StepPart.PIPELINE_BUBBLE


def test_slow_optimizer_on_the_trainer_is_found(join: Callable[..., shardwell.Session]) -> None:
    class SlowSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            pause()
            return super().step(closure)

    session = join()
    model = net(session)
    optimizer = shardwell.ClientSide(model.parameters(), SlowSGD, lr=0.1)
    for step in session.steps(STEPS):
        for x in step.batches(inputs):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert worst(session.report()).kind == shardwell.StepPart.OPTIMIZER


def test_lack_of_memory_is_found(join: Callable[..., shardwell.Session], monkeypatch: pytest.MonkeyPatch) -> None:
    session = join(transports="socket", prefetch_bytes=0)  # no idle buffers
    train(session)
    monkeypatch.setattr(training, "psutil", SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=0)))
    (found,) = [each for each in session.report().bottlenecks if each.kind == "memory"]
    assert found.severity is shardwell.Severity.CRITICAL


@pytest.mark.parametrize("transport", ["shm", "socket", "grpc"])
def test_bytes_tokens_and_memory_of_a_step(join: Callable[..., shardwell.Session], transport: str) -> None:
    session = join(transports=transport if transport != "shm" else "shm,socket")
    report = train(session)
    assert len(report.steps) == STEPS - 1, "the first step is not measured"
    assert [step.step for step in report.steps] == list(range(1, STEPS))
    sizes = [unit.layout.size_bytes for unit in session.units]
    gradient_bytes = 4 * sum(parameter.numel for unit in session.units for parameter in unit.layout.parameters)
    gathered = sum(sizes) + sum(sizes[:2])  # the root is gathered once, the others for forward and backward
    for step in report.steps:
        assert step.sent_bytes == {transport: gradient_bytes}
        assert step.tokens == 8 * 50
        assert sum(step.parts.values()) == pytest.approx(step.duration_s)
        if transport == "shm":
            assert step.in_place_bytes == sum(sizes), "weights that are read in place stay gathered"
            assert sum(step.received_bytes.values()) == step.peak_gathered_bytes == step.freed_bytes == 0
        else:
            assert step.in_place_bytes == 0
            assert step.received_bytes == {transport: gathered}
            assert step.freed_bytes == gathered
            assert max(sizes) <= step.peak_gathered_bytes <= sum(sizes)
    assert report.tokens_per_s == pytest.approx(400 / report.step_s)
    assert json.loads(json.dumps(report.to_dict()))["model_bytes"] == sum(sizes)


def test_bytes_of_closed_connections_count(join: Callable[..., shardwell.Session]) -> None:
    session = join(transports="socket")
    train(session)
    servers = session.store.servers
    before = servers.moved_bytes()
    assert before["socket"][0] > 0
    servers.retire(servers._present)
    assert servers.moved_bytes() == before


def test_samples_of_a_dataset_are_counted(join: Callable[..., shardwell.Session]) -> None:
    session = join()
    model = net(session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for step in session.steps(STEPS):
        for x in step.batches(torch.ones(64, 50), batch_size=4):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [step.samples for step in session.report().steps] == [4] * (STEPS - 1)
    assert session.report().samples_per_s > 0


def test_plain_loop_is_measured(join: Callable[..., shardwell.Session]) -> None:
    session = join()
    model = net(session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        assert len(session.report().steps) == max(0, number - 1)
        model(inputs(number, 0)).square().mean().backward()
        pause()
        optimizer.step()
        optimizer.zero_grad()
    report = session.report(last=1)
    assert [step.step for step in report.steps] == [STEPS - 1]
    assert report.parts[shardwell.StepPart.COMPUTE] >= SLOW_S
    assert report.parts[shardwell.StepPart.BETWEEN_STEPS] == 0.0


def test_report_of_no_steps_is_rejected(join: Callable[..., shardwell.Session]) -> None:
    with pytest.raises(shardwell.UsageError, match="expected at least 1"):
        join().report(last=0)
