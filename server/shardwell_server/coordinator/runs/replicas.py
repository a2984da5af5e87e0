"""Replicas of a run: which trainers compute a work item together. Pure functions of names.

Note: [Replicas]
    A replica is the ``tp x pp`` trainers that compute one work item together, listed by tp rank and then by pp rank.
    The owners of the ranks of one dp rank are a replica, and one replica may own several dp ranks. A trainer has the
    same place in every dp rank that it owns, so it belongs to one replica only. A replica is complete if all its
    trainers are present.

    With ``tp = pp = 1``, each trainer is a replica by itself, also a spare without ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache

from shardwell_server.coordinator.runs.rank_assignment import natural_key
from shardwell_wire.topology import World

Replica = tuple[str, ...]
"""Names of the trainers of one replica, ordered by tp rank and then by pp rank."""


@lru_cache(maxsize=64)
def ranks_of_items(world: World) -> tuple[tuple[int, ...], ...]:
    """Returns the global ranks of each dp rank, ordered by tp rank and then by pp rank."""
    return tuple(world.replica_ranks(dp_rank) for dp_rank in range(world.dp))


def replicas_of(world: World, assigned: Mapping[int, str]) -> list[Replica]:
    """Returns the replica that owns each dp rank, live or gone.

    Args:
        world: The grid.
        assigned: Owner of every global rank.
    """
    return [tuple(assigned[rank] for rank in ranks) for ranks in ranks_of_items(world)]


def complete_replicas(replicas: Iterable[Replica], present: Set[str]) -> list[Replica]:
    """Returns the different replicas whose trainers are all present, in the order of their first dp rank."""
    return [replica for replica in dict.fromkeys(replicas) if present >= set(replica)]


def waiting_replicas(replicas: Sequence[Replica], waiting: Collection[str]) -> list[Replica]:
    """Returns the replicas that can take over an item at once: all their trainers wait for work.

    Args:
        replicas: The replica that owns each dp rank.
        waiting: Names of the waiting trainers, in order of arrival.

    Returns:
        With one trainer per replica: the waiting trainers, spares first. Otherwise the replicas in the order of the dp
        ranks.
    """
    if len(replicas[0]) > 1:
        return complete_replicas(replicas, set(waiting))
    owners = {name for (name,) in replicas}
    return [(name,) for name in sorted(waiting, key=lambda name: name in owners)]


def distribute_items(
    replicas: Sequence[Replica],
    live: Set[str],
    accepts: Callable[[str], bool],
    *,
    expired: Set[str] = frozenset(),
    behind: Set[str] = frozenset(),
) -> list[Replica | None]:
    """Chooses the replica that computes each dp rank's work item when a step starts.

    Items that become vacant within the step go to waiting replicas, see ``Run.lease_vacant_items``.

    Args:
        replicas: The replica that owns each dp rank.
        live: Names of the live trainers.
        accepts: Returns True if a live trainer computes work items of other trainers' ranks.
        expired: Names of the trainers whose leases expired and were not revoked.
        behind: Names of the live trainers that count as absent if another replica accepts work.

    Returns:
        The owning replica of each dp rank if it is complete. Otherwise the complete, accepting replica with the fewest
        items; among equals, the owner of the lowest dp rank. If no replica accepts: the owning replica if its absent
        trainers' leases have only expired, None if one of them is gone.
    """
    present = live - behind
    if not any(all(map(accepts, replica)) for replica in candidates(replicas, present)):
        present = live
    chosen: list[Replica | None] = [replica if present >= set(replica) else None for replica in replicas]
    load = Counter({replica: 0 for replica in candidates(replicas, present) if all(map(accepts, replica))})
    first: dict[Replica, int] = {}
    for dp_rank, replica in enumerate(chosen):
        if replica is not None:
            first.setdefault(replica, dp_rank)
            if replica in load:
                load[replica] += 1
    reachable = present | expired
    for dp_rank, replica in enumerate(replicas):
        if chosen[dp_rank] is None and load:
            substitute = min(
                load,
                key=lambda replica: (
                    load[replica],
                    first.get(replica, len(replicas)),
                    [natural_key(name) for name in replica],
                ),
            )
            chosen[dp_rank] = substitute
            load[substitute] += 1
        elif chosen[dp_rank] is None and reachable >= set(replica):
            chosen[dp_rank] = replica
    return chosen


def candidates(replicas: Sequence[Replica], present: Set[str]) -> list[Replica]:
    """Returns the complete replicas, which may compute other replicas' items.

    With one trainer per replica, spares are replicas.
    """
    if len(replicas[0]) > 1:
        return complete_replicas(replicas, present)
    return [(name,) for name in present]
