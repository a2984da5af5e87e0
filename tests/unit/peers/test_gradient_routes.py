"""The route of a unit depends on its size, its servers and the hosts of the trainers only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwell.data_plane.shard import RemoteUnit
from shardwell.store.sums import SMALL_UNIT_BYTES, AdaptiveRoute, RankOwner, complete_group
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.sum_order import SumOrder


def owners(*hosts: str) -> list[RankOwner]:
    return [RankOwner(rank, f"trainer-{rank}", rank + 1, host) for rank, host in enumerate(hosts)]


def unit(num_servers: int, numel: int = SMALL_UNIT_BYTES // 4) -> RemoteUnit:
    """Returns a unit whose servers have a host each."""
    layout = UnitLayout("u", (Parameter("a", (numel,), "float32"),))
    part = layout.size_bytes // num_servers
    shards: Any = tuple(
        SimpleNamespace(size_bytes=part, server=SimpleNamespace(address=f"s{number}:1"))
        for number in range(num_servers)
    )
    return RemoteUnit(0, layout, shards)


@pytest.mark.parametrize(
    ("hosts", "groups", "num_servers", "route", "loads"),
    [
        # One trainer per host: the link of the only server is the narrowest.
        ("ab", (), 1, "allreduce", "direct 2.00, allreduce 1.00"),
        # With a server per trainer, no route relieves the links of the trainers.
        ("abcd", (), 4, "direct", "direct 1.00, allreduce 1.00"),
        # All trainers on one host: their sum leaves it once, through shared memory.
        ("aa", (), 2, "hierarchical", "direct 2.00, hierarchical 1.00, allreduce 1.00"),
        # Two nodes with a complete group each, and few servers or many.
        ("aabb", (2, 2), 1, "allreduce", "direct 4.00, hierarchical 2.00, allreduce 1.50"),
        ("aabb", (2, 2), 2, "hierarchical", "direct 2.00, hierarchical 1.00, allreduce 1.50"),
        # No node has a complete group.
        ("abab", (2, 2), 1, "allreduce", "direct 4.00, allreduce 1.50"),
    ],
)
def test_busiest_link_decides(hosts: str, groups: tuple[int, ...], num_servers: int, route: str, loads: str) -> None:
    choice = AdaptiveRoute(SumOrder(len(hosts), groups), owners(*hosts)).choose(unit(num_servers))
    assert (choice.route, choice.reason) == (route, f"copies of the unit on the busiest link: {loads}")


@pytest.mark.parametrize(
    ("hosts", "groups", "relayed", "loads"),
    [
        ("aa", (), (), "direct 2.00, allreduce 1.00"),
        ("aabb", (2, 2), (2, 3), "direct 2.00, hierarchical 2.00, allreduce 1.50"),
        ("aabb", (2, 2), (0, 1, 2, 3), "direct 2.00, hierarchical 1.00, allreduce 1.50"),
    ],
)
def test_hosts_without_a_relay_push_every_gradient(
    hosts: str, groups: tuple[int, ...], relayed: tuple[int, ...], loads: str
) -> None:
    rule = AdaptiveRoute(SumOrder(len(hosts), groups), owners(*hosts), relayed=frozenset(relayed))
    choice = rule.choose(unit(2))
    assert choice.reason == f"copies of the unit on the busiest link: {loads}"
    assert choice.route == ("hierarchical" if len(relayed) == 4 else "allreduce")


def test_small_units_and_incomplete_runs_are_direct() -> None:
    rule = AdaptiveRoute(SumOrder(2), owners("a", "b"))
    small = rule.choose(unit(1, SMALL_UNIT_BYTES // 4 - 1024))
    assert (small.route, small.reason) == ("direct", "smaller than 256 KiB")
    incomplete = AdaptiveRoute(SumOrder(3), owners("a", "b")).choose(unit(1))
    assert (incomplete.route, incomplete.reason) == ("direct", "not each of the 3 data ranks had a trainer of its own")


def test_largest_complete_group_counts() -> None:
    order, four = SumOrder(8, (2, 2, 2)), owners("a", "a", "a", "a", "b", "b")
    assert [owner.dp_rank for owner in complete_group(order, four, 0)] == [0, 1, 2, 3]
    assert [owner.dp_rank for owner in complete_group(order, four, 5)] == [4, 5]
    assert complete_group(order, four, 7) == ()
