"""Copies of shards on this host: each version is fetched once, never mixed, and outlives the relay."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from shardwell.data_plane.host_copy import Fetch, HostCopies, HostCopy
from shardwell.transport.base import ShardAddress
from shardwell.transport.shared_vector import SegmentLocation, SharedVector
from shardwell_wire.errors import DeadlineError, UnavailableError, VersionGoneError
from shardwell_wire.host.shared_memory import HEAD_BYTES
from shardwell_wire.model.layout import BLOCK_BYTES, Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import shard_pb2

SIZE = 2 * BLOCK_BYTES
ADDRESS = ShardAddress(RunIdentity("r", "id"), UnitLayout("u", (Parameter("p", (SIZE // 4,), "float32"),)), 0, SIZE)


def filling(byte: bytes, calls: list[bytes] | None = None) -> Fetch:
    def fetch(target: memoryview, _: int | None) -> None:
        if calls is not None:
            calls.append(byte)
        target[:] = byte * len(target)

    return fetch


def failing(target: memoryview, _: int | None) -> None:
    target[:10] = b"x" * 10
    raise UnavailableError("the server is gone")


def content(copy: HostCopy, version: int) -> bytes:
    target = bytearray(SIZE)
    assert copy.copy_to(version, memoryview(target)) == version
    assert len(set(target)) == 1, "the bytes mix two versions"
    return bytes(target[:1])


def test_each_version_is_fetched_once() -> None:
    common, calls, together = HostCopies(), list[bytes](), threading.Barrier(8)
    copy = HostCopy(ADDRESS, common)

    def fetch(number: int) -> bytes:
        together.wait(10)
        copy.fetch(0, filling(bytes([number]), calls))
        return content(copy, 0)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(fetch, range(8)))
    assert set(found) == set(calls) and len(calls) == 1
    assert common.hit_bytes == 7 * SIZE


def test_failed_fetch_shows_no_version_and_is_retried() -> None:
    copy = HostCopy(ADDRESS, HostCopies())
    vector = SharedVector("u", [copy.location])
    copy.fetch(0, filling(b"a"))
    assert vector.shows(0)
    with pytest.raises(UnavailableError):
        copy.fetch(1, failing)
    assert not vector.shows(0) and not vector.shows(1)
    with pytest.raises(VersionGoneError):
        copy.fetch(0, filling(b"a"))
    copy.fetch(1, filling(b"b"))
    assert vector.shows(1) and content(copy, 1) == b"b"
    vector.bytes[0] = 0
    assert content(copy, 1) == b"b", "writes of a trainer are private"
    with pytest.raises(VersionGoneError, match="version 0 of unit 'u' was replaced"):
        copy.copy_to(0, memoryview(bytearray(SIZE)))


def relayed(answers: list[shard_pb2.ReadRelayedResponse]) -> tuple[HostCopy, HostCopy, HostCopies]:
    """Returns a copy at a relay, the relay's own view of it, and what copies have in common."""
    common, source = HostCopies(), HostCopy(ADDRESS, HostCopies())
    relay: Any = SimpleNamespace(
        address="relay:1", is_lost=False, read=lambda *_, **options: answers.pop(0) if answers else None
    )
    at = SegmentLocation("file", 0, SIZE, source.location.open)
    return HostCopy(ADDRESS, common, relay, at), source, common


def test_answers_of_the_relay_are_counted_once() -> None:
    copy, source, common = relayed(
        [
            shard_pb2.ReadRelayedResponse(),
            shard_pb2.ReadRelayedResponse(present=True, received_bytes=SIZE),
            shard_pb2.ReadRelayedResponse(present=True),
        ]
    )
    with pytest.raises(DeadlineError, match="not at the relay relay:1 yet"):
        copy.await_relay(3, 0.0)
    source.fetch(3, filling(b"a"))
    assert copy.await_relay(3, 0.0) == copy.await_relay(3, 0.0) == 3
    assert common.hit_bytes == SIZE
    assert content(copy, 3) == b"a"


def test_copy_keeps_its_version_and_its_address_without_the_relay() -> None:
    copy, source, _ = relayed([])
    source.fetch(3, filling(b"a"))
    copy.vector = vector = SharedVector("u", [copy.location])
    address = vector.bytes.data_ptr()
    copy.leave_relay()
    assert not copy.is_relayed and vector.shows(3) and vector.bytes.data_ptr() == address
    source.fetch(4, filling(b"c"))
    assert vector.shows(3) and content(copy, 3) == b"a", "the relay changes nothing any more"
    copy.fetch(4, filling(b"b"))
    assert vector.shows(4) and bytes(vector.bytes.tolist()) == b"b" * SIZE
    copy.leave_relay()
    assert content(copy, 4) == b"b"
    assert len(vector.bytes) == SIZE and HEAD_BYTES == BLOCK_BYTES
