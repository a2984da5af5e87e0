"""Gradients that trainers show each other over TCP: every member sees the same, or none adds anything."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shardwell.data_plane.shard import RemoteShard, RemoteUnit, Wire
from shardwell.peers.node_group import MemberGoneError
from shardwell.peers.peer_exchange import Listener, PeerExchange, WholeGradient, connect, cuts_of
from shardwell_wire.errors import UnavailableError
from shardwell_wire.model.layout import BLOCK_BYTES, Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.security.tokens import PROOF_BYTES
from tests.support.transports import FakeStream, StreamedServer

LAYOUT = UnitLayout("u", (Parameter("a", (3001,), "float32"), Parameter("b", (7,), "float64")))
CUTS = ((0, BLOCK_BYTES), (BLOCK_BYTES, 2 * BLOCK_BYTES), (2 * BLOCK_BYTES, LAYOUT.size_bytes))
LONG_S = 60.0


def unit(index: int = 0, cuts: Sequence[tuple[int, int]] = CUTS) -> RemoteUnit:
    server: Any = StreamedServer(FakeStream())
    run = RunIdentity("r", "id-of-r")
    return RemoteUnit(
        index, LAYOUT, tuple(RemoteShard(run, LAYOUT, server, *cut, Wire(wait_limit_s=5)) for cut in cuts)
    )


def gradient(of: RemoteUnit, rank: int, indices: Sequence[int] = (0, 1)) -> WholeGradient:
    generator = torch.Generator().manual_seed(rank)
    flats = {
        index: torch.randn(at.numel, generator=generator).to(getattr(torch, at.dtype))
        for index, at in enumerate(LAYOUT.parameters)
        if index in indices
    }
    return WholeGradient(
        epoch=10 + rank, lease_proof=bytes([rank] * PROOF_BYTES), attempt=0, cuts=cuts_of(of), flats=flats
    )


def connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


MakeMembers = Callable[..., list[PeerExchange]]


@pytest.fixture
def make() -> Iterator[MakeMembers]:
    """Connects the members of a group."""
    made: list[PeerExchange] = []

    def make_members(size: int, *, find_lost: Callable[[], str] = lambda: "") -> list[PeerExchange]:
        links: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one):
                links[one][other], links[other][one] = connected_pair()
        made.extend(
            PeerExchange(connected, position, find_lost=find_lost, wait_limit_s=LONG_S)
            for position, connected in enumerate(links)
        )
        return made

    yield make_members
    for member in made:
        member.stop()
    for member in made:
        member.close()


def offer(member: PeerExchange, of: RemoteUnit, own: WholeGradient, version: int = 0) -> Any:
    this_round = member.start_round(version)
    assert this_round is not None
    member.offer(this_round, of, own, lambda: None, lambda: None)
    return this_round


def collect(member: PeerExchange, this_round: Any, of: RemoteUnit, own: WholeGradient) -> Any:
    return member.collect(this_round, of, own, lambda: False)


def parts(shown: Any, of: RemoteUnit, numbers: Sequence[int]) -> Mapping[tuple[int, int], list[float] | None]:
    return {
        (at.parameter_index, at.start_element): None if (part := shown.part(at)) is None else part.tolist()
        for number in numbers
        for at in of.shards[number].segments_of((0, 1))
    }


@pytest.mark.parametrize("size", [2, 3])
def test_every_member_sees_the_gradients_of_all_for_its_shards(make: MakeMembers, size: int) -> None:
    members, of = make(size), unit()
    for version in range(3):
        own = [gradient(of, rank, (0, 1) if rank else (0,)) for rank in range(size)]
        rounds = [offer(member, of, own[rank], version) for rank, member in enumerate(members)]
        for rank, member in enumerate(members):
            shown = collect(member, rounds[rank], of, own[rank])
            numbers = [number for number in range(3) if number % size == rank]
            assert [parts(one, of, numbers) for one in shown] == [parts(one, of, numbers) for one in own]
            assert [(one.epoch, one.lease_proof[0], one.attempt, one.indices) for one in shown] == [
                (10 + other, other, 0, (0, 1) if other else (0,)) for other in range(size)
            ]


@pytest.mark.parametrize("differing", [unit(1), unit(0, CUTS[:1])], ids=["unit", "cuts"])
def test_no_member_adds_if_one_has_another_unit(make: MakeMembers, differing: RemoteUnit) -> None:
    members = make(3)
    units = [unit(), unit(), differing]
    own = [gradient(of, rank) for rank, of in enumerate(units)]
    rounds = [offer(member, units[rank], own[rank]) for rank, member in enumerate(members)]
    assert [collect(member, rounds[rank], units[rank], own[rank]) for rank, member in enumerate(members)] == [None] * 3
    rounds = [offer(member, unit(), gradient(unit(), rank)) for rank, member in enumerate(members)]
    shown = [collect(member, rounds[rank], unit(), gradient(unit(), rank)) for rank, member in enumerate(members)]
    assert all(len(one) == 3 for one in shown), "the next round of the step takes place"


def test_finished_member_is_not_waited_for(make: MakeMembers) -> None:
    members, of = make(3), unit()
    own = [gradient(of, rank) for rank in range(3)]
    first = [offer(member, of, own[rank]) for rank, member in enumerate(members)]
    members[2].finish_version(0)
    second = [offer(member, of, own[rank]) for rank, member in enumerate(members[:2])]
    assert all(collect(member, first[rank], of, own[rank]) for rank, member in enumerate(members))
    assert [collect(member, second[rank], of, own[rank]) for rank, member in enumerate(members[:2])] == [None, None]
    assert members[2].start_round(0) is None
    third = [offer(member, of, own[rank], 1) for rank, member in enumerate(members)]
    assert all(collect(member, third[rank], of, own[rank]) for rank, member in enumerate(members))


def test_group_ends_after_three_steps_without_agreement(make: MakeMembers) -> None:
    (first, second), of = make(2), unit()
    for version in range(3):
        assert first.active
        second.finish_version(version)
        assert collect(first, offer(first, of, gradient(of, 0), version), of, gradient(of, 0)) is None
    assert not first.active and first.start_round(3) is None


def test_trainer_that_leaves_completes_its_rounds(make: MakeMembers) -> None:
    (first, second), of = make(2), unit()
    own = [gradient(of, rank) for rank in range(2)]
    rounds = [offer(first, of, own[0]), offer(second, of, own[1])]
    second.leave("a test")
    assert len(collect(first, rounds[0], of, own[0])) == len(collect(second, rounds[1], of, own[1])) == 2
    if (later := first.start_round(1)) is not None:  # the news has not arrived yet
        first.offer(later, of, own[0], lambda: None, lambda: None)
        assert collect(first, later, of, own[0]) is None
    assert not first.active, "the group is useless without the other member"


def test_lost_connection_leaves_the_outcome_unknown(make: MakeMembers) -> None:
    (first, second), of = make(2), unit()
    this_round = offer(first, of, gradient(of, 0))
    second._links[0].abort()
    with pytest.raises(MemberGoneError, match="member 1 of 2 is gone: "):
        collect(first, this_round, of, gradient(of, 0))
    assert first.start_round(1) is None and not first.active


def test_member_without_a_lease_is_not_waited_for(make: MakeMembers) -> None:
    """A stopped process keeps its connections."""
    first, _ = make(2, find_lost=lambda: "trainer 'b' of rank 1 has lost its membership")
    of = unit()
    with pytest.raises(MemberGoneError, match="trainer 'b' of rank 1 has lost its membership"):
        collect(first, offer(first, of, gradient(of, 0)), of, gradient(of, 0))


def test_waiting_ends_when_the_attempt_is_over(make: MakeMembers) -> None:
    (first, _), of = make(2), unit()
    over = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        own = gradient(of, 0)
        waiting = threads.submit(first.collect, offer(first, of, own), of, own, over.is_set)
        over.set()
        first.finish_version(0)
        assert waiting.result(LONG_S) is None


def test_gradient_is_released_when_all_members_have_it(make: MakeMembers) -> None:
    members, of = make(3), unit()
    sent = threading.Event()
    this_round = members[0].start_round(0)
    assert this_round is not None
    members[0].offer(this_round, of, gradient(of, 0), lambda: None, sent.set)
    assert sent.wait(LONG_S)


def test_damaged_frame_ends_the_connection(make: MakeMembers) -> None:
    (first, second), of = make(2), unit()
    this_round = offer(first, of, gradient(of, 0))
    second._links[0]._socket.sendall((8).to_bytes(8, "little") + bytes(16))
    with pytest.raises(MemberGoneError, match="a frame of another trainer has a wrong checksum"):
        collect(first, this_round, of, gradient(of, 0))


def test_member_at_a_later_step_is_not_waited_for(make: MakeMembers) -> None:
    (first, second), of = make(2), unit()
    own = [gradient(of, rank) for rank in range(2)]
    early, late = offer(first, of, own[0], 0), offer(second, of, own[1], 1)
    assert collect(first, early, of, own[0]) is None
    assert len(collect(first, offer(first, of, own[0], 1), of, own[0])) == len(collect(second, late, of, own[1])) == 2


def test_listener_accepts_members_only() -> None:
    listener, deadline = Listener("127.0.0.1", 0, 2), time.monotonic() + LONG_S
    address = listener.address
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(listener.connect_all, lambda _: address, deadline)
        with pytest.raises(UnavailableError):
            connect(address._replace(secret=bytes(len(address.secret))), 1, deadline)
        with pytest.raises(UnavailableError):
            connect(address, 2, deadline)
        own = connect(address, 1, deadline)
        (found,) = accepted.result(LONG_S).items()
    assert found[0] == 1
    for end in (own, found[1]):
        end.close()
    with pytest.raises(UnavailableError, match=r"members \[1\] have not connected"):
        listener.connect_all(lambda _: address, time.monotonic())
    listener.close()


def test_copies_of_one_unit_are_distributed_from_unit_to_unit(make: MakeMembers) -> None:
    members = make(2)
    counts = []
    for index in range(2):
        of = unit(index)
        own = [gradient(of, rank) for rank in range(2)]
        rounds = [offer(member, of, own[rank]) for rank, member in enumerate(members)]
        shown = [collect(member, rounds[rank], of, own[rank]) for rank, member in enumerate(members)]
        counts.append([len({start for _, start in shown[rank][1 - rank].parts}) for rank in range(2)])
    assert counts[0] != counts[1]
