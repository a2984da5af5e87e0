"""Decides over which route the gradient of each unit travels.

Note: [Choice of a route]
    With ``gradient_reduction="adaptive"``, a trainer chooses the route whose busiest network link carries the fewest
    bytes. The choice depends only on the size of a unit, on its servers, and on the hosts of the trainers, so all
    trainers of a run choose alike. If they do not, for example while a unit moves, they push their own gradients.

    The rule assumes links of equal speed, and shard servers on hosts of their own. For each route, it counts the bytes
    that leave or reach the busiest host, in multiples of the unit's size. A tie goes to the route with fewer hops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwell.data_plane.gradient_sums import GradientSums
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.session.gradient_groups import RankOwner, complete_group
from shardwell.transport.route_stats import ALLREDUCE, DIRECT, HIERARCHICAL, ROUTES
from shardwell_wire.sum_order import SumOrder

SMALL_UNIT_BYTES = 256 << 10
"""Smaller units are pushed directly: messages and not bytes determine how long they take."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The route of a unit."""

    route: str
    reason: str


class FixedRoute:
    """The same route for all units.

    Args:
        route: The route.
    """

    def __init__(self, route: str) -> None:
        self._choice = Choice(route, f"gradient_reduction={route!r}")

    def choose(self, unit: RemoteUnit) -> Choice:
        """Returns the route of a unit."""
        return self._choice


class AdaptiveRoute:
    """Chooses by the bytes on the busiest link. See Note: [Choice of a route].

    Args:
        order: The run's order of additions.
        owners: The trainers that play one rank each.
        across_hosts: Whether ALLREDUCE may be chosen.
    """

    def __init__(self, order: SumOrder, owners: Sequence[RankOwner], *, across_hosts: bool = True) -> None:
        self._order, self._across_hosts = order, across_hosts
        self._all_own = len(owners) == order.dp
        self._per_host = Counter(owner.host for owner in owners)
        sums = set[tuple[str, int]]()
        for owner in owners:
            on_host = [other for other in owners if other.host == owner.host]
            first, *_ = complete_group(order, on_host, owner.dp_rank) or (owner,)
            sums.add((owner.host, first.dp_rank))
        self._node_sums = Counter(host for host, _ in sums)
        """Number of gradients and sums that each host pushes with HIERARCHICAL."""

    def choose(self, unit: RemoteUnit) -> Choice:
        """Returns the route of a unit, with a reason that names the loads."""
        if not self._all_own:
            return Choice(DIRECT, f"not each of the {self._order.dp} data ranks had a trainer of its own")
        if unit.layout.size_bytes < SMALL_UNIT_BYTES:
            return Choice(DIRECT, f"smaller than {SMALL_UNIT_BYTES >> 10} KiB")
        loads = self._loads(_largest_share(unit))
        route = min(loads, key=lambda name: (round(loads[name], 9), ROUTES.index(name)))
        listed = ", ".join(f"{name} {load:.2f}" for name, load in loads.items())
        return Choice(route, f"copies of the unit on the busiest link: {listed}")

    def _loads(self, server_share: float) -> Mapping[str, float]:
        """Returns the load of the busiest link with each route, in multiples of the unit's size.

        Args:
            server_share: Largest part of the unit that one host of shard servers owns.
        """
        dp, node_sums = self._order.dp, self._node_sums
        loads = {DIRECT: max(*self._per_host.values(), dp * server_share)}
        if sum(node_sums.values()) < dp:
            loads[HIERARCHICAL] = max(*node_sums.values(), sum(node_sums.values()) * server_share)
        if dp > 1 and self._across_hosts:
            # Each trainer sends 1/dp to each trainer of another host, and 1/dp to the servers.
            leaving = [count * (dp - count + 1) / dp for count in self._per_host.values()]
            loads[ALLREDUCE] = max(*leaving, server_share)
        return loads


def _largest_share(unit: RemoteUnit) -> float:
    owned = Counter[str]()
    for shard in unit.shards:
        owned[shard.server.address.rpartition(":")[0]] += shard.stop_bytes - shard.start_bytes
    return max(owned.values()) / unit.layout.size_bytes


@dataclass(slots=True)
class GradientRoutes:
    """The route of each unit, and the groups that add gradients."""

    rule: FixedRoute | AdaptiveRoute
    groups: Mapping[str, GradientSums]
    """The groups that could be formed, by route."""
    choices: dict[int, tuple[str, Choice]] = field(default_factory=dict)
    """Name of the unit and its choice, by the unit's index."""

    def choose(self, unit: RemoteUnit) -> GradientSums | None:
        """Returns the group that adds the gradients of a unit. None: this trainer pushes its own."""
        _, choice = self.choices.get(unit.index) or self._note(unit, self.rule.choose(unit))
        group = self.groups.get(choice.route)
        return group if group is not None and group.active else None

    def _note(self, unit: RemoteUnit, choice: Choice) -> tuple[str, Choice]:
        self.choices[unit.index] = unit.layout.unit, choice
        return self.choices[unit.index]

    @property
    def active(self) -> bool:
        """False if this trainer pushes its own gradients for good."""
        return any(group.active for group in self.groups.values())

    def for_each(self, action: Callable[[GradientSums], None]) -> None:
        """Calls a function with each group."""
        for group in self.groups.values():
            action(group)

    def describe(self) -> dict[str, dict[str, str]]:
        """Returns route and reason of each unit that has been pushed, by its name.

        A route whose group this trainer has left, or could not form, is ``direct``.
        """
        found = {}
        for name, choice in self.choices.values():
            group = self.groups.get(choice.route)
            if choice.route == DIRECT or (group is not None and group.active):
                found[name] = {"route": choice.route, "reason": choice.reason}
            else:
                found[name] = {"route": DIRECT, "reason": f"no group of trainers for {choice.route}; {choice.reason}"}
        return found
