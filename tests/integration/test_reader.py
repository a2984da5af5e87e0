"""``shardwell.attach``: models that follow a run's weights during training."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.data_plane.shard import RemoteShard
from shardwell.transport import server_connection
from shardwell.transport.service_client import CoordinatorClient
from shardwell.weights import pinned_version
from shardwell.weights.pinned_version import UnitReader
from shardwell.weights.stored_parameters import PlacedUnit
from shardwell_wire.errors import (
    ConflictError,
    DeadlineError,
    NotFoundError,
    RunDeletedError,
    StepStateError,
    UnavailableError,
    UsageError,
    VersionGoneError,
)
from shardwell_wire.v1 import coordinator_pb2
from tests.support.background_training import BackgroundTraining
from tests.support.cluster import wait_until

TRANSPORTS = (("shm", "socket"), ("socket",), ("grpc",))


class Frozen(nn.Linear):
    """A layer that is not trained."""


class Model(nn.Module):
    """A model with a frozen part, statistics and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(300, 300, bias=False), nn.Linear(300, 300)
        self.leave.weight = self.enter.weight
        self.frozen, self.norm = Frozen(300, 300), nn.BatchNorm1d(300)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.frozen(self.enter(x))))


class Training(BackgroundTraining):
    """A run that trains the model."""

    model, units, width = Model, {Frozen, nn.BatchNorm1d}, 300

    def assert_state(self, step: int, got: dict[str, torch.Tensor]) -> None:
        expected = self.states[step]
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


@pytest.fixture(params=TRANSPORTS, ids="+".join)
def _transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_version, "TRANSPORT_NAMES", request.param)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def rounded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a state as it arrives in bfloat16. Buffers are not rounded."""
    parameters = {name for name, _ in Model().named_parameters(remove_duplicate=False)}
    return {name: value.bfloat16().float() if name in parameters else value for name, value in state.items()}


@pytest.mark.usefixtures("_transports")
def test_a_model_follows_in_16_bits(cluster: shardwell.LocalCluster, request: pytest.FixtureRequest) -> None:
    """Each state is that of one version, rounded once, and the same with deltas and without."""
    training, deltas, whole = Training(cluster.address), Model(), Model()
    with (
        training.in_background(),
        shardwell.attach(cluster.address, training.run, gather_dtype="bfloat16", delta_cache_bytes=1 << 30) as reader,
        shardwell.attach(cluster.address, training.run, gather_dtype="bfloat16") as plain,
    ):
        for _ in range(6):
            for model, source in ((deltas, reader), (whole, plain)):
                version = source.follow(model)
                training.wait_for(version)
                expected = rounded(training.states[version])
                assert all(torch.equal(value, expected[name]) for name, value in state_of(model).items())
            training.wait_for(training.step + 2)
        stats = reader.stats()
    if "shm" in request.node.name:
        return  # most versions are read in the servers' memory
    assert stats["delta_ratio"] < 0.95
    assert stats["delta_cache_bytes"] > 0
    assert stats["received_bytes"] < plain.stats()["received_bytes"]


def test_readers_that_follow_at_different_intervals_get_deltas(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_version, "TRANSPORT_NAMES", ("socket",))
    training, models = Training(cluster.address), (Model(), Model())
    with (
        training.in_background(),
        shardwell.attach(cluster.address, training.run, gather_dtype="bfloat16", delta_cache_bytes=1 << 30) as often,
        shardwell.attach(cluster.address, training.run, gather_dtype="bfloat16", delta_cache_bytes=1 << 30) as rarely,
    ):
        for number in range(7):
            version = training.pause()
            for model, reader in zip(models, (often, rarely) if number % 3 == 0 else (often,), strict=False):
                assert reader.follow(model) == version
                expected = rounded(training.states[version])
                assert all(torch.equal(value, expected[name]) for name, value in state_of(model).items())
            training.resume()
            training.wait_for(version + 1)
        assert often.stats()["delta_ratio"] < 0.95
        assert rarely.stats()["delta_stream_bytes"] > 0


@pytest.mark.parametrize("options", [{"gather_dtype": "topk-1%"}, {"delta_cache_bytes": -1}])
def test_invalid_options_of_a_reader_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        shardwell.attach("nowhere:1", "run", **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_transports")
def test_models_follow_a_run_that_trains(cluster: shardwell.LocalCluster) -> None:
    """Two readers follow the run. Every state that they load is the state of exactly one version."""
    training = Training(cluster.address)
    loaded: list[tuple[int, dict[str, torch.Tensor]]] = []

    def follow() -> None:
        model = Model()
        with shardwell.attach(cluster.address, run=training.run) as reader:
            for _ in range(15):
                loaded.append((reader.follow(model), state_of(model)))

    with training.in_background():
        threads = [threading.Thread(target=follow) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        training.wait_for(max(version for version, _ in loaded))
    assert len(loaded) == 30 and len({version for version, _ in loaded}) > 5
    for version, state in loaded:
        training.assert_state(version, state)


def test_later_calls_read_changed_units_only(cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = UnitReader.read

    def recording(units: UnitReader, unit: PlacedUnit, ranges: None) -> Callable[[], torch.Tensor]:
        read.append(unit.layout.unit)
        return original(units, unit, ranges)

    monkeypatch.setattr(UnitReader, "read", recording)
    training, model = Training(cluster.address), Model()
    with training.in_background(), shardwell.attach(cluster.address, run=training.run) as reader:
        version = reader.follow(model)
        assert "frozen" in read and len(read) == 4  # three units of parameters, and the statistics
        read.clear()
        assert reader.wait_for(version + 2, timeout_s=20.0) >= version + 2
        version = training.pause()
        assert reader.follow(model) == version and len(read) == 3 and "frozen" not in read
        training.assert_state(version, state_of(model))
        read.clear()
        assert reader.follow(model) == version == reader.version and not read
        other = Model().to(torch.float64)
        assert reader.follow(other, cast=True) == version and len(read) == 4
        assert torch.equal(other.enter.weight.float(), model.enter.weight)


def test_a_failed_call_leaves_the_model_at_one_version(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, model = Training(cluster.address), Model()
    with training.in_background(), shardwell.attach(cluster.address, run=training.run) as reader:
        version = reader.follow(model)
        reader.wait_for(version + 1, timeout_s=20.0)
        original, calls = UnitReader.read, []

        def evicted(units: UnitReader, unit: PlacedUnit, ranges: None) -> Callable[[], torch.Tensor]:
            calls.append(unit)
            if len(calls) % 2 == 0:
                raise VersionGoneError("evicted", newest=units.version)
            return original(units, unit, ranges)

        with monkeypatch.context() as patch, pytest.raises(VersionGoneError, match="evicted"):
            patch.setattr(UnitReader, "read", evicted)
            patch.setattr(reader, "_timeout_s", 2.0)
            reader.follow(model)
        training.assert_state(version, state_of(model))
        version = reader.follow(model)
        training.wait_for(version)
        training.assert_state(version, state_of(model))


def test_pinned_version_stays_while_training_goes_on(cluster: shardwell.LocalCluster) -> None:
    training = Training(cluster.address)
    with training.in_background(), shardwell.attach(cluster.address, run=training.run) as reader:
        with reader.pin() as pinned:
            reader.wait_for(pinned.version + 3, timeout_s=20.0)
            got = dict(pinned.values())
        with pytest.raises(DeadlineError):
            reader.wait_for(10**6, timeout_s=0.1)
    expected = training.states[pinned.version]
    assert sorted(got) == sorted(set(expected) - {"leave.weight"})
    assert all(torch.equal(expected[name], value) for name, value in got.items())


def test_a_model_that_does_not_fit_is_refused(cluster: shardwell.LocalCluster) -> None:
    training = Training(cluster.address)
    with training.in_background(), shardwell.attach(cluster.address, run=training.run) as reader:
        other = Model()
        other.extra, other.frozen = nn.Linear(2, 2), nn.Linear(300, 200)  # type: ignore[assignment]
        del other.norm
        before = state_of(other)
        with pytest.raises(UsageError) as caught:
            reader.follow(other)
        assert "the model lacks 'norm.weight'" in str(caught.value)
        assert "the run lacks 'extra.weight', 'extra.bias'" in str(caught.value)
        assert "'frozen.weight' is of shape (300, 300) in the run, (200, 300) in the model" in str(caught.value)
        assert all(torch.equal(before[name], value) for name, value in state_of(other).items())
        with pytest.raises(UsageError, match="pass cast=True to convert"):
            reader.follow(copy.deepcopy(Model()).to(torch.bfloat16))
        renamed = nn.ModuleDict({"whole": Model()})
        skip = {"frozen.weight", "frozen.bias"}
        with pytest.raises(UsageError, match=r"the run lacks .whole\.frozen\.weight"):
            reader.follow(renamed, rename=lambda name: None if name in skip else f"whole.{name}")
        version = reader.follow(renamed, rename=lambda name: f"whole.{name}")
        training.wait_for(version)
        training.assert_state(version, state_of(renamed["whole"]))
        with torch.device("meta"):
            meta = Model()
        with pytest.raises(UsageError, match="not on meta"):
            reader.follow(meta)


def test_two_tensors_of_the_run_for_one_parameter_are_refused(cluster: shardwell.LocalCluster) -> None:
    """As after stages that were built by hand, each with a copy of a tied weight."""
    apart, tied = (nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, False)}) for _ in range(2))
    tied["head"].weight = tied["embedding"].weight  # type: ignore[assignment]
    run = uuid.uuid4().hex
    with shardwell.join(cluster.address, run=run) as session:
        for name in apart:
            shardwell.fully_shard(apart[name], session, name=name)
        with shardwell.attach(cluster.address, run=run) as reader:
            before = state_of(tied)
            with pytest.raises(UsageError, match=r"'embedding.weight' and 'head.weight' are one tensor in the model"):
                reader.follow(tied)
            assert all(torch.equal(before[name], value) for name, value in state_of(tied).items())


def test_errors_of_attach(cluster: shardwell.LocalCluster) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        shardwell.attach(cluster.address, run="nothing")
    with pytest.raises(UnavailableError):
        shardwell.attach("localhost:1", run="gpt")
    with pytest.raises(UsageError, match="timeout_s"):
        shardwell.attach(cluster.address, run="gpt", timeout_s=0.0)
    with shardwell.join(cluster.address, run="new"), closing(CoordinatorClient(cluster.address)) as coordinator:
        with pytest.raises(StepStateError, match="no units yet"):
            shardwell.attach(cluster.address, run="new", hold_s=60.0)
        request = coordinator_pb2.ListReadersRequest(run="new")
        assert not coordinator.call("ListReaders", request).readers, "it would hold a run with max_reader_lag"


def test_a_pin_that_waits_ends_when_another_thread_closes_its_reader(cluster: shardwell.LocalCluster) -> None:
    training = Training(cluster.address)
    with training.in_background(), ThreadPoolExecutor(1) as threads:
        reader = shardwell.attach(cluster.address, training.run, timeout_s=3600.0)
        with reader:
            pinning = threads.submit(lambda: reader.pin(1_000_000).__enter__())
            wait_until(lambda: bool(reader._connections._servers), "requests to the servers")
        assert isinstance(pinning.exception(60.0), UnavailableError)


def test_a_reader_of_a_deleted_run_says_so(cluster: shardwell.LocalCluster) -> None:
    first = Training(cluster.address)
    with first.in_background():
        reader = shardwell.attach(cluster.address, run=first.run, timeout_s=1.0)
    with reader:
        delete(cluster, first.run)
        with pytest.raises(NotFoundError, match="does not exist"):
            reader.follow(Model())
        with Training(cluster.address, first.run).in_background(), pytest.raises(RunDeletedError, match="attach again"):
            reader.follow(Model())


def delete(cluster: shardwell.LocalCluster, run: str) -> None:
    from shardwell.command.cli import main

    assert main(["delete-run", run, "--force", "--address", cluster.address]) == 0


def test_reader_transports_are_those_of_trainers() -> None:
    assert pinned_version.TRANSPORT_NAMES == server_connection.TRANSPORT_NAMES


def test_only_run_of_a_cluster_needs_no_name() -> None:
    with shardwell.LocalCluster(num_shards=1) as cluster:
        with pytest.raises(NotFoundError, match="the cluster has no run: start the training first"):
            shardwell.attach(cluster.address)
        with shardwell.join(cluster.address, run="one") as session:
            shardwell.auto_wrap(nn.Linear(4, 4), session)
            with shardwell.attach(cluster.address) as reader:
                assert reader.run == "one"
            with (
                shardwell.join(cluster.address, run="two"),
                pytest.raises(UsageError, match=r"has 2 runs: pass attach\(run=\), such as 'one', 'two'"),
            ):
                shardwell.attach(cluster.address)


def test_a_session_that_a_new_process_does_not_know_is_opened_again(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, fetch, first = Training(cluster.address), RemoteShard.fetch, threading.Lock()
    used, rejected = list[RemoteShard](), list[RemoteShard]()

    def reject_once(shard: RemoteShard, *arguments: Any, **options: Any) -> None:
        if first.acquire(blocking=False):  # shards are read concurrently
            rejected.append(shard)
            shared: Any = shard.server.transports.shared
            shared.session_id += "x"  # as at a new process, which has no session
            shared.locate(shard.address, None, timeout_s=20.0)
        fetch(shard, *arguments, **options)
        used.append(shard)

    with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
        monkeypatch.setattr(RemoteShard, "fetch", reject_once)
        version, state = reader.read()
        lost = rejected[0]
        servers = [
            each.server
            for each in used
            if each.address.layout == lost.address.layout and each.start_bytes == lost.start_bytes
        ]
        assert servers and lost.server not in servers
        training.wait_for(version)
        assert all(torch.equal(value, training.states[version][name]) for name, value in state.items())


def test_another_conflict_is_not_repeated(cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(cluster.address)

    def reject(shard: RemoteShard, *_: Any, **__: Any) -> int:
        raise ConflictError("this server has a backup of the shard")

    with training.in_background(), shardwell.attach(cluster.address, training.run) as reader:
        monkeypatch.setattr(RemoteShard, "fetch", reject)
        with pytest.raises(ConflictError, match="has a backup"):
            reader.read()


def test_a_reader_that_is_closed_asks_for_no_units(
    cluster: shardwell.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(cluster.address)
    with training.in_background():
        reader = shardwell.attach(cluster.address, training.run)
        call, sent = reader._coordinator.call, list[Any]()

        def recorded(rpc_name: str, request: Any, **options: Any) -> Any:
            answer = call(rpc_name, request, **options)
            sent.append((request, answer))
            return answer

        monkeypatch.setattr(reader._coordinator, "call", recorded)
        reader.close()
    ((request, answer),) = sent
    assert request.reader.leaving
    assert not answer.units
