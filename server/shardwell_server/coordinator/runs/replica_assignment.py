"""Places in replicas for trainers that join a started run with ``tp * pp > 1``. Pure functions of names and hosts.

A trainer's place is its (tp, pp) coordinate in a replica. A trainer that takes a place takes its ranks of all dp ranks
that the replica owns, so a replica stays together. See Note: [Replicas] in ``replicas.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwell_server.coordinator.runs.rank_assignment import Applicant, RankAssignments, assign_ranks, natural_key
from shardwell_server.coordinator.runs.replicas import Replica, ranks_of_items, replicas_of
from shardwell_wire.errors import DuplicateError
from shardwell_wire.topology import World


def claim_place(
    world: World, assigned: Mapping[int, str], hosts: Mapping[str, str], applicant: Applicant
) -> RankAssignments:
    """Assigns the ranks of one place to a trainer that joins a run that has started.

    A trainer that owned a place before gets it back. Otherwise it takes the place of a gone trainer: in the replica
    that lacks the fewest trainers, and among those where live trainers of its tensor group are on its host. If there is
    none, it gets no rank and is a spare.

    Args:
        world: The grid.
        assigned: Owner of every rank, live or gone.
        hosts: Host of each live trainer, by name. May include the applicant.
        applicant: The trainer that joins.

    Returns:
        The changed entries of ``assigned`` and the entries that the applicant already owns.

    Raises:
        DuplicateError: A live trainer plays the requested rank, or the applicant owns another place.
    """
    name, wanted = applicant.name, applicant.requested_rank
    own = {rank: owner for rank, owner in assigned.items() if owner == name}
    if wanted is not None and wanted not in own:
        owner = assigned[wanted]
        if own or owner in hosts:
            whose = f"trainer {name!r} owns rank {min(own)}" if own else f"rank {wanted} is played by {owner!r}"
            raise DuplicateError(f"{whose}: request another rank than {wanted}, or none", trainer=owner)
        return {rank: name for rank, each in assigned.items() if each == owner}
    if own:
        return own
    free = {rank: owner for rank, owner in sorted(assigned.items()) if owner not in hosts}
    if not free:
        return {}
    missing = Counter(world.coordinates(rank).dp_rank for rank in free)

    def preference(rank: int) -> tuple[int, bool, int]:
        neighbours = {hosts[assigned[each]] for each in world.group(rank, "tp") if assigned[each] in hosts}
        return missing[world.coordinates(rank).dp_rank], applicant.host not in neighbours, rank

    former = free[min(free, key=preference)]
    return {rank: name for rank, owner in free.items() if owner == former}


def form_replica(world: World, assigned: Mapping[int, str], spares: Sequence[Applicant]) -> RankAssignments:
    """Forms a new replica of spares, which takes dp ranks from replicas that own several.

    Args:
        world: The grid.
        assigned: Owner of every rank.
        spares: Live trainers without ranks.

    Returns:
        The changed entries of ``assigned``. Empty: there are too few spares, or all replicas own about as many dp
        ranks.
    """
    if len(spares) < world.replica_size:
        return {}
    replicas, new = replicas_of(world, assigned), ("",) * world.replica_size
    counts = Counter(replicas)
    while True:
        busiest = max(range(world.dp), key=lambda dp_rank: (counts[replicas[dp_rank]], dp_rank))
        if counts[replicas[busiest]] <= counts[new] + 1:
            break
        counts[replicas[busiest]] -= 1
        counts[new] += 1
        replicas[busiest] = new
    taken = [ranks for ranks, replica in zip(ranks_of_items(world), replicas, strict=True) if replica == new]
    members = _replica_of(world, spares) if taken else new
    return {rank: name for ranks in taken for rank, name in zip(ranks, members, strict=True)}


def _replica_of(world: World, spares: Sequence[Applicant]) -> Replica:
    chosen = sorted(spares, key=lambda at: (natural_key(at.host), natural_key(at.name)))[: world.replica_size]
    one = replace(world, dp=1)
    assigned = assign_ranks(one, [Applicant(at.name, at.host) for at in chosen])
    return replicas_of(one, assigned)[0]
