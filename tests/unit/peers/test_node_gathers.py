"""Tests of gathers shared by the members of a node: each byte is correct and fetched once, also if members fail."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from shardwell.data_plane.fetch import Fetches
from shardwell.data_plane.shard import RemoteShard, RemoteUnit, Wire
from shardwell.data_plane.transfers import TrafficStats
from shardwell.memory.device_copies import Exchange
from shardwell.module.mixed_precision import layout_in
from shardwell.peers.host_folder import HostFolder
from shardwell.peers.node_group import MAX_FAILURES, NodeGathers, NodeGroup, NodeRendezvous
from shardwell.transport.base import Place
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CapacityError, UnavailableError
from shardwell_wire.model.layout import BLOCK_BYTES, Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from tests.support.cluster import wait_until
from tests.support.transports import FakeStream, StreamedServer

LAYOUT = UnitLayout(
    "u",
    (
        Parameter("a", (3001,), "float32"),
        Parameter("b", (7,), "float32"),
        Parameter("c", (0,), "float32"),
        Parameter("d", (4999,), "float32"),
    ),
)
SHORT_S, LONG_S = 0.2, 60.0


class Server(FakeStream):
    """A fake transport that returns the values of each version, counts received bytes, and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None

    def fetch_stream(self, request: Any, place: Place, **_: float) -> int:
        if self.error:
            raise self.error
        target = place(request.version, None)
        target[:] = bytes_of(request.version)[request.start_bytes : request.stop_bytes].numpy().tobytes()
        return int(request.version)

    @property
    def received_bytes(self) -> int:
        return self._counter.received_bytes


def bytes_of(version: int) -> torch.Tensor:
    """Returns the flat vector of a version. [LAYOUT.size_bytes]"""
    generator = torch.Generator().manual_seed(version)
    return torch.randn(LAYOUT.size_bytes // 4, generator=generator).view(torch.uint8)


@dataclass
class Vector:
    """A flat vector on the CPU."""

    layout: UnitLayout = LAYOUT
    device_type: str = "cpu"
    exchanged: bool = False
    bytes: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = torch.zeros(self.layout.size_bytes, dtype=torch.uint8)

    def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
        self.exchanged = True
        exchange(self.bytes)

    def parameter(self, index: int) -> torch.Tensor:
        spec, start = self.layout.parameters[index], self.layout.starts[index]
        return self.bytes[start : start + spec.size_bytes].view(getattr(torch, spec.dtype))


class Member:
    """A trainer of the node, with its own server."""

    def __init__(self, group: NodeGroup, patience_s: float, wire: Wire) -> None:
        self.server, self.fetches = Server(), Fetches(TrafficStats())
        server: Any = StreamedServer(self.server)
        cuts = ((0, 2 * BLOCK_BYTES), (2 * BLOCK_BYTES, 5 * BLOCK_BYTES), (5 * BLOCK_BYTES, LAYOUT.size_bytes))
        self.unit = RemoteUnit(
            0, LAYOUT, tuple(RemoteShard(RunIdentity("r", "id-of-r"), LAYOUT, server, *cut, wire) for cut in cuts)
        )
        self.gathers = NodeGathers(group, self.fetches, patience_s=patience_s)

    def gather(self, version: int, *, index: int = 0, vector: Vector | None = None) -> Vector:
        """Gathers a unit, and checks its bytes if they have the stored dtypes."""
        vector = vector or Vector()
        unit = replace(self.unit, index=index)
        target = memory_at(vector.bytes.data_ptr(), vector.bytes.numel(), vector.bytes)
        assert self.gathers.gather(unit, version, target, vector.layout, vector).result(LONG_S) == version
        if vector.layout == LAYOUT:
            assert torch.equal(vector.bytes, bytes_of(version))
        return vector

    def close(self) -> None:
        self.fetches.close()
        self.gathers.close()


MakeMembers = Callable[..., list[Member]]


@pytest.fixture
def make() -> Iterator[MakeMembers]:
    """Creates the members of a group, connected over gloo."""
    made: list[Member] = []

    def make_members(size: int, *, patience_s: float = LONG_S) -> list[Member]:
        key = uuid.uuid4().hex

        def connect(rank: int) -> NodeGroup:
            folder = HostFolder(key)
            rendezvous = NodeRendezvous(folder, rank, size)
            assert rendezvous.meet(LONG_S)
            return NodeGroup(rendezvous, "gloo", FileStore(str(folder.path / "store"), size), rank=rank, size=size)

        with ThreadPoolExecutor(size) as threads:
            groups = list(threads.map(connect, range(size)))
        made.extend(Member(group, patience_s, Wire(wait_limit_s=5)) for group in groups)
        return made

    yield make_members
    for member in made:
        member.close()


def all_do(members: list[Member], action: Callable[[Member], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(action, members))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_byte_is_fetched_by_one_member(make: MakeMembers, size: int) -> None:
    members, num_versions = make(size), 3
    for version in range(num_versions):
        assert all(vector.exchanged for vector in all_do(members, lambda member: member.gather(version)))  # noqa: B023
    received = [member.server.received_bytes for member in members]
    assert sum(received) == num_versions * LAYOUT.size_bytes
    assert max(received) - min(received) < num_versions * 64 * size
    for member, own in zip(members, received, strict=True):
        assert member.gathers.shared_bytes == num_versions * LAYOUT.size_bytes - own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [2, 3])
def test_other_dtypes_are_exchanged_after_the_cast(make: MakeMembers, size: int, dtype: torch.dtype) -> None:
    members, layout = make(size), layout_in(LAYOUT, dtype)
    stored = Vector()
    stored.bytes = bytes_of(1)
    for vector in all_do(members, lambda member: member.gather(1, vector=Vector(layout))):
        assert vector.exchanged
        for index in range(len(layout.parameters)):
            assert torch.equal(vector.parameter(index), stored.parameter(index).to(dtype))
    assert sum(member.server.received_bytes for member in members) == LAYOUT.size_bytes


def test_different_units_are_fetched_whole_until_the_next_version(
    make: MakeMembers, caplog: pytest.LogCaptureFixture
) -> None:
    members = make(2)
    with caplog.at_level(logging.WARNING):
        vectors = all_do(members, lambda member: member.gather(0, index=members.index(member)))
        # Later units of the version are fetched whole, and no member waits.
        vectors += [member.gather(0) for member in members for _ in range(2)]
    assert not any(vector.exchanged for vector in vectors)
    assert [record.message for record in caplog.records] == [
        "node group: gather 0 of step 0 was cancelled: the trainers of this node asked for different units, or one did "
        "not arrive within 60 s; each of them fetches whole units for the rest of the step"
    ] * 2
    assert all(vector.exchanged for vector in all_do(members, lambda member: member.gather(1)))


def test_group_is_disabled_after_consecutive_cancelled_rounds(
    make: MakeMembers, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make(2, patience_s=SHORT_S)
    with caplog.at_level(logging.WARNING):
        for version in range(MAX_FAILURES + 1):
            first.gather(version)
    assert len(caplog.records) == MAX_FAILURES
    assert "this trainer fetches whole units from now on: in 3 consecutive steps its trainers asked" in caplog.text
    assert not second.gather(MAX_FAILURES + 1).exchanged
    assert "member 0 of 2 is gone" in caplog.text


def test_separate_cancelled_rounds_do_not_disable_the_group(make: MakeMembers) -> None:
    members = make(2, patience_s=SHORT_S)
    for version in range(0, 3 * MAX_FAILURES, 3):
        members[0].gather(version)
    for member in members:
        member.gathers._patience_s = LONG_S
    assert all(vector.exchanged for vector in all_do(members, lambda member: member.gather(99)))


def test_gather_after_a_member_left_fetches_the_whole_unit(make: MakeMembers) -> None:
    first, second = make(2)
    second.close()
    assert not first.gather(0).exchanged
    assert first.server.received_bytes == LAYOUT.size_bytes + LAYOUT.size_bytes // 2 // 64 * 64


def test_failed_fetch_raises_only_for_its_member(make: MakeMembers) -> None:
    members = make(2)
    members[1].server.error = CapacityError("no")

    def gather(member: Member) -> bool:
        if member is members[0]:
            return member.gather(0).exchanged
        with pytest.raises(CapacityError, match="no"):
            member.gather(0)
        return False

    assert all_do(members, gather) == [False, False]
    members[1].server.error = None
    assert all(vector.exchanged for vector in all_do(members, lambda member: member.gather(1)))


def test_death_during_an_exchange_leaves_no_wrong_byte(make: MakeMembers, caplog: pytest.LogCaptureFixture) -> None:
    members = make(2)
    gone = threading.Event()

    class Dying(Vector):
        def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
            members[1].gathers._group.close()  # also closes its connections
            gone.set()
            raise RuntimeError("dead")

    class Surviving(Vector):
        def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
            self.bytes.fill_(255)  # an aborted collective may leave undefined bytes
            assert gone.wait(LONG_S)
            exchange(self.bytes)

    with caplog.at_level(logging.WARNING):
        all_do(members, lambda member: member.gather(0, vector=(Surviving, Dying)[members.index(member)]()))
        assert not any(member.gather(1).exchanged for member in members)
    assert len(caplog.records) == 2, "each member logs one line"


def test_unexpected_error_of_an_exchange_falls_back_to_whole_units(
    make: MakeMembers, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Vector):
        def complete(self, start_bytes: int, stop_bytes: int, exchange: Exchange, limit_s: float) -> None:
            raise AssertionError

    members = make(2)
    vectors = all_do(members, lambda member: member.gather(0, vector=Broken()))
    assert not any(vector.exchanged for vector in vectors)
    assert caplog.messages == ["node group: this trainer fetches whole units from now on: AssertionError"] * 2


def test_only_the_training_thread_counts_waiting_time(make: MakeMembers) -> None:
    member, _ = make(2, patience_s=SHORT_S)
    vector, fetched = Vector(), threading.Event()
    target = memory_at(vector.bytes.data_ptr(), vector.bytes.numel(), vector.bytes)
    fetches, member.server.fetch_stream = (
        member.server.fetch_stream,
        lambda *arguments, **options: (  # type: ignore[method-assign]
            fetched.wait(LONG_S) and fetches(*arguments, **options)
        ),
    )
    future = member.gathers.gather(member.unit, 0, target, LAYOUT, vector)
    fetched.set()
    wait([future], LONG_S)
    assert future.exception() is None and member.gathers._rounds._num_failures == 1
    assert member.fetches.stats.gather_wait_s == 0.0


def test_units_that_cannot_be_shared_are_fetched_whole(make: MakeMembers) -> None:
    member, _ = make(2)
    assert not member.gather(0, vector=Vector(device_type="cuda")).exchanged
    assert member.server.received_bytes == LAYOUT.size_bytes
    tiny = UnitLayout("t", (Parameter("a", (3,), "float32"),))
    assert member.gathers._group.part(tiny.size_bytes) is None, "64 bytes cannot be split between two members"


def test_close_fails_gathers_in_flight(make: MakeMembers) -> None:
    member, _ = make(2)
    vector = Vector()
    target = memory_at(vector.bytes.data_ptr(), vector.bytes.numel(), vector.bytes)
    future = member.gathers.gather(member.unit, 0, target, LAYOUT, vector)
    wait_until(lambda: member.server.received_bytes > 0, "the fetch of the part, after which the member waits")
    member.close()
    with pytest.raises(UnavailableError, match="the session was closed"):
        future.result(LONG_S)
