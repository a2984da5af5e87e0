"""Coordinators that share their state in a real etcd: one leads, and what another one writes changes nothing."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardwell_server.coordinator.storage.etcd_store import EtcdClient, EtcdStore, Leader, find_leader, put, try_to_lead
from shardwell_server.coordinator.storage.records import SCHEMA_VERSION, Change, Delete, Put
from shardwell_wire.errors import ConflictError, UnavailableError
from shardwell_wire.host.server_folders import own_identity
from shardwell_wire.v1 import etcd_pb2
from tests.support.etcd import etcd_cluster

pytestmark = pytest.mark.etcd

LARGE = [Put("units", [("r", index, b"x" * 30_000, True) for index in range(100)])]
"""Changes that do not fit one transaction."""
OLD = [Put("units", [("r", 0, b"old", False)])]


class Shared:
    """Names in one etcd that several coordinators share."""

    def __init__(self, address: str) -> None:
        self.address, self.prefix = address, f"/{uuid.uuid4().hex}"

    def client(self) -> EtcdClient:
        return EtcdClient([self.address])

    def try_to_lead(self, name: str = "host:1", lease_s: int = 60) -> EtcdStore | None:
        return try_to_lead(self.client(), self.prefix, name, lease_s)

    def lead(self, lease_s: int = 60) -> EtcdStore:
        store = self.try_to_lead(lease_s=lease_s)
        assert store is not None
        return store

    def end_lease(self) -> None:
        """Ends the leadership as etcd does when a lease is not renewed."""
        with closing(self.client()) as client:
            found = find_leader(client, self.prefix)
            assert found is not None
            client.revoke(found.lease)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as (member,):
        yield member.address


@pytest.fixture
def shared(etcd: str) -> Shared:
    return Shared(etcd)


def fact(value: int) -> list[Change]:
    return [Put("facts", [("f", value)])]


def test_one_coordinator_leads_and_the_next_has_a_higher_term(shared: Shared) -> None:
    with closing(shared.lead()) as first:
        assert shared.try_to_lead() is None
        found = find_leader(shared.client(), shared.prefix)
        assert found is not None
        assert found == Leader("host:1", first.term, own_identity(), found.lease)
        first.write(fact(1))
    with closing(shared.lead()) as second:
        assert (first.term, second.term) == (1, 2)
        assert second.rows("facts", "f") == [("f", 1)]


def test_stale_coordinator_changes_nothing_and_must_stop(shared: Shared) -> None:
    with closing(shared.lead()) as stale:
        stale.write(fact(1))
        shared.end_lease()
        with closing(shared.lead()) as leader:
            for changes in (fact(2), LARGE):
                with pytest.raises(
                    UnavailableError, match=r"this coordinator leads no longer.*it stops; start it again"
                ):
                    stale.write(changes)
            assert stale.lost is not None
            leader.write(fact(3))
    with closing(shared.lead()) as third:
        assert third.rows("facts", "f") == [("f", 3)]
        assert third.rows("units") == []


def test_end_of_the_lease_is_noticed_without_a_write(shared: Shared) -> None:
    with closing(shared.lead(lease_s=2)) as store:
        noticed = threading.Event()
        store.when_lost = noticed.set
        shared.end_lease()
        assert noticed.wait(60)
        assert "its lease has ended" in str(store.lost)


def test_coordinator_that_cannot_reach_etcd_stops_when_its_lease_is_over(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path) as (member,), closing(Shared(member.address).lead(lease_s=2)) as store:
        store.write(fact(1))
        member.kill()
        with pytest.raises(UnavailableError, match="has not renewed its lease for 2 s"):
            store.write(fact(2))


class Interrupted(EtcdClient):
    """A client whose transactions do not arrive, are refused, or whose answers are lost."""

    lose: Callable[[int], str] = staticmethod(lambda _: "")
    """Says what happens to the n-th transaction: ``request`` or ``answer`` is lost, ``refuse``, or nothing."""
    count = 0

    def transact(self, request: Any) -> Any:
        self.count += 1
        what = self.lose(self.count)
        if what == "request":
            raise UnavailableError("lost on the way")
        if what == "refuse":
            raise ConflictError("etcdserver: mvcc: database space exceeded")
        answer = super().transact(request)
        if what == "answer":
            raise UnavailableError("the answer is lost")
        return answer


def lead_interrupted(shared: Shared) -> tuple[EtcdStore, Interrupted]:
    client = Interrupted([shared.address])
    store = try_to_lead(client, shared.prefix, "host:1", lease_s=60)
    assert store is not None
    client.count = 0
    return store, client


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_write_without_an_answer_is_made_once(shared: Shared, lost: str) -> None:
    store, client = lead_interrupted(shared)
    client.lose = lambda count: lost if count in (1, 2, 4) else ""
    with closing(store):
        store.write(fact(1))
        store.write(LARGE)
        store.write(fact(2))
    with closing(shared.lead()) as after:
        assert after.rows("facts", "f") == [("f", 2)]
        assert after.rows("units") == LARGE[0].rows


def test_coordinator_without_an_answer_to_its_first_transaction_leads(shared: Shared) -> None:
    client = Interrupted([shared.address])
    client.lose = lambda count: "answer" if count == 1 else ""
    store = try_to_lead(client, shared.prefix, "host:1", lease_s=60)
    assert store is not None
    with closing(store):
        store.write(fact(1))


def test_refused_write_changes_nothing_and_can_be_repeated(shared: Shared) -> None:
    store, client = lead_interrupted(shared)
    with closing(store):
        for changes, accepted in ((fact(1), 0), (LARGE, 1)):
            client.count = 0
            client.lose = lambda count, accepted=accepted: "refuse" if count > accepted else ""
            with pytest.raises(UnavailableError, match="space exceeded: this request changed nothing"):
                store.write(changes)
            assert store.rows("units") == store.rows("facts", "f") == []
        client.lose = lambda count: ""
        store.write([*fact(2), *LARGE])
    with closing(shared.lead()) as after:
        assert after.rows("facts", "f") == [("f", 2)]
        assert after.rows("units") == LARGE[0].rows


def test_death_during_a_large_write_leaves_all_of_it_or_nothing(shared: Shared) -> None:
    with closing(shared.lead()) as store:
        store.write(OLD)
    outcomes = []
    for last in range(1, 100):
        store, client = lead_interrupted(shared)
        client.lose = lambda count, last=last: "refuse" if count > last else ""
        with closing(store):
            try:
                store.write(LARGE)
            except UnavailableError:
                finished = False
            else:
                finished = True
        with closing(shared.lead()) as after:
            rows = after.rows("units")
            outcomes.append(rows == LARGE[0].rows)
            assert outcomes[-1] or rows == OLD[0].rows
            assert not list(after._etcd.scan(f"{shared.prefix}/pending".encode()))
            after.write([Delete("units", [("r",)]), *OLD])
        if finished:
            break
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) >= 3, "the list, before its length is set"
    assert outcomes.count(True) >= 4, "and the transactions after that"


def test_state_of_the_previous_schema_version_is_read_and_written_as_this_one(shared: Shared) -> None:
    shared.lead().close()
    key = f"{shared.prefix}/schema".encode()
    with closing(shared.client()) as client:
        client.transact(etcd_pb2.EtcdTxnRequest(success=[put(key, b"19")]))
        with closing(shared.lead()):
            assert (found := client.get(key)) is not None and int(found.value) == SCHEMA_VERSION


def test_state_of_another_schema_version_is_rejected(shared: Shared) -> None:
    shared.lead().close()
    with closing(shared.client()) as client:
        client.transact(etcd_pb2.EtcdTxnRequest(success=[put(f"{shared.prefix}/schema".encode(), b"99")]))
    with pytest.raises(ConflictError, match=f"has schema version 99, expected {SCHEMA_VERSION}"):
        shared.try_to_lead()
