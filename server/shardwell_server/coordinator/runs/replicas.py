"""Replicas of a run: which trainers compute a work item together. Pure functions of names.

Note: [Replicas]
    A replica is the ``tp x pp`` trainers that compute one work item together. Its *team* lists them by tp rank and pp
    rank. The owners of the ranks of one dp rank are a team, and one team may own several dp ranks. A trainer has the
    same place in every dp rank that it owns, so it belongs to one team only. A team is complete if all its trainers are
    present.

    With ``tp = pp = 1``, each trainer is a team by itself, also a spare without ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache

from shardwell_server.coordinator.runs.rank_assignment import natural_key
from shardwell_wire.topology import World

Team = tuple[str, ...]
"""Names of the trainers of one replica, ordered by tp rank and then by pp rank."""


@lru_cache(maxsize=64)
def ranks_of_items(world: World) -> tuple[tuple[int, ...], ...]:
    """Returns the global ranks of each dp rank, ordered by tp rank and then by pp rank."""
    return tuple(world.replica_ranks(dp_rank) for dp_rank in range(world.dp))


def teams_of(world: World, assigned: Mapping[int, str]) -> list[Team]:
    """Returns the team that owns each dp rank, live or gone.

    Args:
        world: The grid.
        assigned: Owner of every global rank.
    """
    return [tuple(assigned[rank] for rank in ranks) for ranks in ranks_of_items(world)]


def complete_teams(teams: Iterable[Team], present: Set[str]) -> list[Team]:
    """Returns the different teams whose trainers are all present, in the order of their first dp rank."""
    return [team for team in dict.fromkeys(teams) if present >= set(team)]


def waiting_teams(teams: Sequence[Team], waiting: Collection[str]) -> list[Team]:
    """Returns the teams that can take over an item at once: all their trainers wait for work.

    Args:
        teams: The team that owns each dp rank.
        waiting: Names of the waiting trainers, in order of arrival.

    Returns:
        With one trainer per team: the waiting trainers, spares first. Otherwise the teams in the order of the dp ranks.
    """
    if len(teams[0]) > 1:
        return complete_teams(teams, set(waiting))
    owners = {name for (name,) in teams}
    return [(name,) for name in sorted(waiting, key=lambda name: name in owners)]


def distribute_items(
    teams: Sequence[Team],
    live: Set[str],
    accepts: Callable[[str], bool],
    *,
    expired: Set[str] = frozenset(),
    behind: Set[str] = frozenset(),
) -> list[Team | None]:
    """Chooses the team that computes each dp rank's work item when a step starts.

    Items that become vacant within the step go to waiting teams, see ``Run.lease_vacant_items``.

    Args:
        teams: The team that owns each dp rank.
        live: Names of the live trainers.
        accepts: Returns True if a live trainer computes work items of other trainers' ranks.
        expired: Names of the trainers whose leases expired and were not revoked.
        behind: Names of the live trainers that count as absent if another team accepts work.

    Returns:
        The owning team of each dp rank if it is complete. Otherwise the complete, accepting team with the fewest items;
        among equals, the owner of the lowest dp rank. If no team accepts: the owning team if its absent trainers'
        leases have only expired, None if one of them is gone.
    """
    present = live - behind
    if not any(all(map(accepts, team)) for team in candidates(teams, present)):
        present = live
    chosen: list[Team | None] = [team if present >= set(team) else None for team in teams]
    load = Counter({team: 0 for team in candidates(teams, present) if all(map(accepts, team))})
    first: dict[Team, int] = {}
    for dp_rank, team in enumerate(chosen):
        if team is not None:
            first.setdefault(team, dp_rank)
            if team in load:
                load[team] += 1
    reachable = present | expired
    for dp_rank, team in enumerate(teams):
        if chosen[dp_rank] is None and load:
            substitute = min(
                load, key=lambda team: (load[team], first.get(team, len(teams)), [natural_key(name) for name in team])
            )
            chosen[dp_rank] = substitute
            load[substitute] += 1
        elif chosen[dp_rank] is None and reachable >= set(team):
            chosen[dp_rank] = team
    return chosen


def candidates(teams: Sequence[Team], present: Set[str]) -> list[Team]:
    """Returns the complete teams, which may compute other teams' items. With one trainer per team, spares are teams."""
    if len(teams[0]) > 1:
        return complete_teams(teams, present)
    return [(name,) for name in present]
