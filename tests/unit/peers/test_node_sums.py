"""Gradients that the members of a node add: every shard is pushed once, with the bits of the run's order."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from shardwell.data_plane.push import Pushes
from shardwell.data_plane.shard import RemoteShard, RemoteUnit, Wire
from shardwell.data_plane.transfers import TrafficStats
from shardwell.peers.gradient_sums import GradientSums
from shardwell.peers.host_folder import HostFolder
from shardwell.peers.node_exchange import NodeExchange, SharedGradients
from shardwell.peers.node_group import NodeRendezvous
from shardwell.transport.route_stats import HIERARCHICAL
from shardwell_wire.model.layout import BLOCK_BYTES, Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.sum_order import Scratch, SumOrder
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.transports import FakeStream, StreamedServer, part_header

LAYOUT = UnitLayout(
    "u", (Parameter("a", (3001,), "float32"), Parameter("b", (7,), "float64"), Parameter("c", (4999,), "float32"))
)
CUTS = ((0, BLOCK_BYTES), (BLOCK_BYTES, 5 * BLOCK_BYTES), (5 * BLOCK_BYTES, LAYOUT.size_bytes))
SHORT_S, LONG_S = 0.2, 60.0


@dataclass
class Attempt:
    """A work item."""

    is_over: bool = False
    summed: list[tuple[int, ...]] = field(default_factory=list)
    spoiled: bool = False

    def note_summed(self, dp_ranks: Sequence[int]) -> None:
        self.summed.append(tuple(dp_ranks))

    def spoil(self) -> None:
        self.is_over = self.spoiled = True


class Server(FakeStream):
    """Keeps the pushes of one member."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[tuple[shard_pb2.ReduceScatterHeader, bytes]] = []

    def push_stream(self, header: shard_pb2.ReduceScatterHeader, pieces: Sequence[memoryview], **_: Any) -> Any:
        self.pushed.append((header, b"".join(pieces)))
        return shard_pb2.ReduceScatterResponse()


class Member:
    """A trainer of the node, with its own connection to the servers."""

    def __init__(self, sums: GradientSums, pushes: Pushes, rank: int) -> None:
        self.sums, self.pushes, self.rank, self.server = sums, pushes, rank, Server()
        server: Any = StreamedServer(self.server)
        wire, run = Wire(wait_limit_s=5), RunIdentity("r", "id-of-r")
        self.unit = RemoteUnit(0, LAYOUT, tuple(RemoteShard(run, LAYOUT, server, *cut, wire) for cut in CUTS))
        self.attempt = Attempt()

    def push(self, version: int, gradients: Mapping[int, torch.Tensor], *, unit: RemoteUnit | None = None) -> None:
        this_round = self.sums.start_round(version)
        context = common_pb2.RequestContext(run="r", step=version, epoch=10 + self.rank)
        header = part_header(context=context, dp_rank=self.rank)
        own = sorted(gradients.items())
        if this_round is None:
            self.pushes.push(unit or self.unit, header, own)
        else:
            self.sums.push(this_round, unit or self.unit, header, own, self.attempt, lambda _: False)
        self.pushes.drain()

    def close(self) -> None:
        self.sums.close()
        self.pushes.close()


MakeMembers = Callable[..., list[Member]]


@pytest.fixture
def make() -> Iterator[MakeMembers]:
    """Creates the members of a group."""
    made: list[Member] = []

    def make_members(dp_ranks: Sequence[int], order: SumOrder, *, patience_s: float = LONG_S) -> list[Member]:
        key = uuid.uuid4().hex

        def connect(position: int) -> Member:
            folder = HostFolder(key)
            rendezvous = NodeRendezvous(folder, position, len(dp_ranks))
            assert rendezvous.meet(LONG_S)
            memory = SharedGradients(folder.path, position, len(dp_ranks))
            pushes = Pushes(TrafficStats(), push_bytes=1 << 30)
            exchange = NodeExchange(rendezvous, memory, patience_s=patience_s)
            sums = GradientSums(HIERARCHICAL, exchange, dp_ranks, position, order, pushes)
            return Member(sums, pushes, dp_ranks[position])

        with ThreadPoolExecutor(len(dp_ranks)) as threads:
            made.extend(threads.map(connect, range(len(dp_ranks))))
        return made

    yield make_members
    for member in made:
        member.close()


def gradients(rank: int, version: int = 0, indices: Sequence[int] = (0, 1, 2)) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * version + rank)
    return {
        index: torch.randn(at.numel, generator=generator).to(getattr(torch, at.dtype))
        for index, at in enumerate(LAYOUT.parameters)
        if index in indices
    }


def all_push(
    members: Sequence[Member],
    version: int,
    own: Mapping[int, Mapping[int, torch.Tensor]],
    units: Sequence[RemoteUnit] | None = None,
) -> None:
    """Every member pushes its gradients of its unit, or of the one given for it."""
    with ThreadPoolExecutor(len(members)) as threads:
        started = [
            threads.submit(member.push, version, own[member.rank], unit=units[position] if units else None)
            for position, member in enumerate(members)
        ]
        for push in started:
            push.result(LONG_S)


def sums_of(own: Mapping[int, Mapping[int, torch.Tensor]], order: SumOrder) -> dict[int, torch.Tensor]:
    found = {}
    for index in sorted({index for each in own.values() for index in each}):
        terms = [(rank, each[index]) for rank, each in sorted(own.items()) if index in each]
        found[index] = order.add(terms, torch.empty_like(terms[0][1]), Scratch()).clone()
    return found


def streams(flats: Mapping[int, torch.Tensor]) -> dict[int, bytes]:
    """Returns the stream of each shard, by its first byte."""
    return {
        start: b"".join(
            flats[at.parameter_index][at.start_element : at.stop_element].numpy().tobytes()
            for at in LAYOUT.packed_segments(tuple(flats), start, stop)
        )
        for start, stop in CUTS
    }


def pushed_by(member: Member) -> dict[int, bytes]:
    """Returns what a member has pushed, by the first byte of the shard, and forgets it."""
    found = {header.start_bytes: data for header, data in member.server.pushed}
    assert len(found) == len(member.server.pushed)
    member.server.pushed.clear()
    return found


@pytest.mark.parametrize(("dp_ranks", "groups"), [((0, 1), ()), ((4, 5, 6, 7), (2, 2, 2)), ((0, 1, 2), (3, 2))])
def test_every_shard_is_pushed_once_with_the_sum(
    make: MakeMembers, dp_ranks: tuple[int, ...], groups: tuple[int, ...]
) -> None:
    order = SumOrder({(): 2, (2, 2, 2): 8, (3, 2): 6}[groups], groups)
    members = make(dp_ranks, order)
    for version in range(5):
        own = {rank: gradients(rank, version) for rank in dp_ranks}
        all_push(members, version, own)
        summed = [[(at.dp_rank, at.epoch) for at in h.summed] for member in members for h, _ in member.server.pushed]
        assert summed == [[(rank, 10 + rank) for rank in dp_ranks]] * len(CUTS)
        found = [pushed_by(member) for member in members]
        assert sum(map(len, found)) == len(CUTS)
        assert {start: data for each in found for start, data in each.items()} == streams(sums_of(own, order))
    assert all(member.attempt.summed == [dp_ranks] * 5 for member in members)


def test_members_take_turns_from_unit_to_unit(make: MakeMembers) -> None:
    members = make((0, 1), SumOrder(2))
    counts = []
    for number in range(2):
        own = {rank: gradients(rank, number) for rank in range(2)}
        all_push(members, 0, own, [replace(member.unit, index=number) for member in members])
        counts.append([len(pushed_by(member)) for member in members])
    assert counts == [[2, 1], [1, 2]]


def test_parameters_without_a_gradient_on_some_ranks(make: MakeMembers) -> None:
    order = SumOrder(2)
    members = make((0, 1), order)
    own = {0: gradients(0, indices=(0,)), 1: gradients(1, indices=(0, 2))}
    all_push(members, 0, own)
    assert {tuple(header.parameter_indices) for member in members for header, _ in member.server.pushed} == {(0, 2)}
    found = {start: data for member in members for start, data in pushed_by(member).items()}
    assert found == streams(sums_of(own, order))


def test_members_with_different_units_push_their_own_gradients(make: MakeMembers) -> None:
    first, second = make((0, 1), SumOrder(2))
    own = {rank: gradients(rank) for rank in range(2)}
    all_push([first, second], 0, own, [first.unit, replace(second.unit, index=1)])
    assert (pushed_by(first), pushed_by(second)) == (streams(own[0]), streams(own[1]))
    all_push([first, second], 1, own)
    assert len(pushed_by(first)) + len(pushed_by(second)) == len(CUTS), "they add again in the next step"
    assert not (first.attempt.spoiled or second.attempt.spoiled)


def test_members_with_different_cuts_push_their_own_gradients(make: MakeMembers) -> None:
    """One of them does not know yet that the unit has moved."""
    members = make((0, 1), SumOrder(2))
    own = {rank: gradients(rank) for rank in range(2)}
    whole = replace(members[1].unit, shards=members[1].unit.shards[:1])
    all_push(members, 0, own, [members[0].unit, whole])
    assert pushed_by(members[0]) == streams(own[0])
    assert list(pushed_by(members[1])) == [0]
    assert [member.attempt.summed for member in members] == [[], []]


def test_late_member_is_not_waited_for(make: MakeMembers) -> None:
    first, second = make((0, 1), SumOrder(2), patience_s=SHORT_S)
    first.push(0, gradients(0))
    assert pushed_by(first) == streams(gradients(0))
    second.push(0, gradients(1))
    assert pushed_by(second) == streams(gradients(1))


def test_skipped_step_keeps_no_member_waiting(make: MakeMembers) -> None:
    first, second = make((0, 1), SumOrder(2))
    second.sums.skip(0)
    first.push(0, gradients(0))
    second.push(0, gradients(1))
    assert (pushed_by(first), pushed_by(second)) == (streams(gradients(0)), streams(gradients(1)))
    assert first.sums.active and second.sums.active


def test_lost_member_spoils_the_attempt_that_waits_for_it(make: MakeMembers) -> None:
    first, second = make((0, 1), SumOrder(2))
    own = {rank: gradients(rank) for rank in range(2)}
    all_push([first, second], 0, own)
    pushed_by(first)
    second.close()
    first.push(0, own[0])
    assert first.attempt.spoiled and not first.sums.active
    assert not pushed_by(first), "the attempt is over"
    first.push(1, own[0])
    assert pushed_by(first) == streams(own[0])


def test_gradients_of_an_attempt_that_is_over_are_dropped(make: MakeMembers) -> None:
    first, second = make((0, 1), SumOrder(2))
    second.attempt.is_over = True
    all_push([first, second], 0, {rank: gradients(rank) for rank in range(2)})
    assert (pushed_by(first), pushed_by(second)) == (streams(gradients(0)), {})


def test_slots_grow_and_are_reused(make: MakeMembers) -> None:
    small = UnitLayout("v", (Parameter("a", (5,), "float32"),))
    members = make((0, 1), SumOrder(2))
    for round_number, layout in enumerate((small, LAYOUT, small, LAYOUT, LAYOUT)):
        values = torch.full((layout.parameters[0].numel,), float(round_number + 1))
        own = {rank: {0: values * (rank + 1)} for rank in range(2)}
        all_push(members, 0, own, [unit_of(member, layout) for member in members])
        data = b"".join(data for member in members for _, data in sorted(pushed_by(member).items()))
        assert set(torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()) == {3.0 * (round_number + 1)}


def unit_of(member: Member, layout: UnitLayout) -> RemoteUnit:
    if layout == LAYOUT:
        return member.unit
    shard = RemoteShard(
        RunIdentity("r", "id-of-r"),
        layout,
        member.unit.shards[0].server,
        0,
        layout.size_bytes,
        Wire(wait_limit_s=5),
    )
    return RemoteUnit(0, layout, (shard,))
