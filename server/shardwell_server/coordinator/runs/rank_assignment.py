"""Assigns logical ranks to trainers. Pure functions of names, hosts and requested ranks.

``assign_ranks`` assigns all ranks when a run starts. ``claim_ranks`` assigns ranks to a trainer that joins later.
``replicas.py`` chooses the trainers of the work items when some owners are gone.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from shardwell_wire.errors import DuplicateError
from shardwell_wire.topology import World

RankAssignments = dict[int, str]
"""Name of the trainer that owns each logical rank."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A trainer that joins a run."""

    name: str
    host: str = ""
    requested_rank: int | None = None
    process: str = ""
    """Process identity, see ``process_identity``. Empty: unknown."""


def natural_key(text: str) -> tuple[Any, ...]:
    """Sort key that compares numbers inside names by value: node7 < node8 < node66."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text))


def assign_ranks(world: World, applicants: Iterable[Applicant]) -> RankAssignments:
    """Assigns all ranks of a run that starts. The order of the applicants does not matter.

    Requested ranks are granted. Other trainers are placed by host and name, and trainers of one host share a tensor
    group where possible. With fewer trainers than ranks, each trainer, or each replica of ``tp * pp`` trainers, plays a
    block of data ranks of nearly equal size. With more, the last trainers get no rank.

    Args:
        world: The grid.
        applicants: Trainers with distinct names and distinct requested ranks. If there are fewer than ranks, their
            number is a multiple of ``tp * pp``, and ``requested_place`` of their requests is distinct.
    """
    ordered = sorted(applicants, key=_applicant_key)
    if len(ordered) < world.size:
        return _assign_blocks(world, ordered) if world.replica_size == 1 else _assign_replicas(world, ordered)
    return _assign_one_each(world, ordered)


def _applicant_key(applicant: Applicant) -> tuple[Any, ...]:
    rank = applicant.requested_rank
    return (math.inf if rank is None else rank, natural_key(applicant.host), natural_key(applicant.name))


def _assign_one_each(world: World, ordered: Sequence[Applicant]) -> RankAssignments:
    assigned = {at.requested_rank: at.name for at in ordered if at.requested_rank is not None}
    hosts = {at.name: at.host for at in ordered}
    waiting: dict[str, deque[str]] = {}
    for applicant in ordered:
        if applicant.requested_rank is None:
            waiting.setdefault(applicant.host, deque()).append(applicant.name)
    groups = [
        world.group(world.global_rank(dp_rank=dp_rank, pp_rank=pp_rank), "tp")
        for dp_rank in range(world.dp)
        for pp_rank in range(world.pp)
    ]
    # First fill every tensor group that a single host can fill. Then fill the rest from any host.
    for whole_only in (True, False):
        for group in groups:
            free = deque(rank for rank in group if rank not in assigned)
            neighbours = {hosts[assigned[rank]] for rank in group if rank in assigned}
            while free and (host := _host_for(len(free), waiting, neighbours, whole_only=whole_only)) is not None:
                for _ in range(min(len(free), len(waiting[host]))):
                    assigned[free.popleft()] = waiting[host].popleft()
    return assigned


def _host_for(
    count: int, waiting: Mapping[str, Collection[str]], neighbours: Collection[str], *, whole_only: bool
) -> str | None:
    """Returns the host whose waiting trainers should fill ``count`` free ranks of a group.

    Args:
        count: Number of free ranks.
        waiting: Waiting trainers by host.
        neighbours: Hosts of the group's assigned ranks.
        whole_only: If True, return only a host that can fill all free ranks and matches all neighbours.
    """
    if whole_only:
        fitting = (
            host for host, names in waiting.items() if len(names) >= count and all(at == host for at in neighbours)
        )
        return next(fitting, None)
    left = [host for host, names in waiting.items() if names]
    return max(left, key=lambda host: (host in neighbours, len(waiting[host])), default=None)


def _assign_blocks(world: World, ordered: Sequence[Applicant]) -> RankAssignments:
    blocks = _even_blocks(world.size, len(ordered))
    requested = {at.requested_rank: at.name for at in ordered if at.requested_rank is not None}
    requested_in_block = [[name for rank, name in requested.items() if rank in block] for block in blocks]
    others = deque(at.name for at in ordered if at.requested_rank is None)
    if all(len(names) <= 1 for names in requested_in_block):
        owners = [names[0] if names else others.popleft() for names in requested_in_block]
        return {rank: owner for owner, block in zip(owners, blocks, strict=True) for rank in block}
    # Two requested ranks fall into one block: keep the number of ranks per trainer, but not contiguous blocks.
    assigned = dict(requested)
    free = deque(rank for rank in range(world.size) if rank not in assigned)
    for applicant, block in zip(ordered, blocks, strict=True):
        for _ in range(len(block) - (applicant.requested_rank is not None)):
            assigned[free.popleft()] = applicant.name
    return assigned


def requested_place(world: World, trainer_count: int, rank: int) -> int:
    """Returns a number that is equal for requested ranks that one trainer plays, if replicas play several dp ranks.

    Args:
        world: The grid.
        trainer_count: Number of trainers with which the run starts.
        rank: A requested rank.
    """
    if world.replica_size == 1 or trainer_count >= world.size:
        return rank
    small, at = replace(world, dp=trainer_count // world.replica_size), world.coordinates(rank)
    replica = next(index for index, block in enumerate(_even_blocks(world.dp, small.dp)) if at.dp_rank in block)
    return small.global_rank(dp_rank=replica, tp_rank=at.tp_rank, pp_rank=at.pp_rank)


def _assign_replicas(world: World, ordered: Sequence[Applicant]) -> RankAssignments:
    """Assigns one rank of a smaller world to each trainer. Each of its dp ranks stands for a block of dp ranks."""
    small = replace(world, dp=len(ordered) // world.replica_size)
    placed = [
        at
        if at.requested_rank is None
        else replace(at, requested_rank=requested_place(world, len(ordered), at.requested_rank))
        for at in ordered
    ]
    assigned = _assign_one_each(small, sorted(placed, key=_applicant_key))
    return {
        rank: assigned[place]
        for replica, block in enumerate(_even_blocks(world.dp, small.dp))
        for dp_rank in block
        for rank, place in zip(world.replica_ranks(dp_rank), small.replica_ranks(replica), strict=True)
    }


def _even_blocks(size: int, count: int) -> list[range]:
    small, larger = divmod(size, count)
    starts = [index * small + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def claim_ranks(
    assigned: Mapping[int, str],
    live: Collection[str],
    applicant: Applicant,
    *,
    requested: Collection[int],
    expected: int = 1,
) -> RankAssignments:
    """Assigns ranks to a trainer that joins a run that has started. Only for worlds with ``tp = pp = 1``.

    A trainer that owned ranks before gets them back. Otherwise it takes ranks of gone trainers, at most its fair share.
    If there are none, it takes its fair share from trainers that play several ranks. Otherwise it gets no rank and is
    a spare.

    Args:
        assigned: Owner of every rank, live or gone.
        live: Names of the live trainers. May include the applicant.
        applicant: The trainer that joins.
        requested: Ranks that live trainers requested.
        expected: Number of trainers that the run expects. The fair share never assumes fewer.

    Returns:
        The changed entries of ``assigned`` and the entries that the applicant already owns.

    Raises:
        DuplicateError: A live trainer plays the requested rank, and either requested that rank or has no other.
    """
    name, wanted = applicant.name, applicant.requested_rank
    players = {*live, name}
    counts = Counter(owner for owner in assigned.values() if owner in players)
    own = {rank: owner for rank, owner in assigned.items() if owner == name}

    def take(rank: int) -> None:
        counts[assigned[rank]] -= 1
        counts[name] += 1
        own[rank] = name

    if wanted is not None and wanted not in own:
        owner = assigned[wanted]
        if owner in players and (wanted in requested or counts[owner] == 1):
            raise DuplicateError(
                f"rank {wanted} is played by trainer {owner!r}: request another rank, or none", trainer=owner
            )
        take(wanted)
    elif own:
        return own
    fair_share = -(-len(assigned) // max(len(players), expected))
    # First, ranks of gone trainers.
    for rank in sorted(rank for rank, owner in assigned.items() if owner not in players and rank not in own):
        if counts[name] < fair_share:
            take(rank)
    if counts[name] > (wanted is not None):
        return own
    # Otherwise, ranks of the busiest live trainers, until the numbers of ranks are balanced.
    while (surplus := _surplus_rank(assigned, own, counts, requested)) is not None:
        if counts[assigned[surplus]] <= counts[name] + 1:
            break
        take(surplus)
    return own


def _surplus_rank(
    assigned: Mapping[int, str], own: RankAssignments, counts: Counter[str], requested: Collection[int]
) -> int | None:
    """Returns the highest rank, not requested, of the trainer that plays the most ranks."""
    ranks = [rank for rank in assigned if rank not in own and rank not in requested]
    return max(ranks, key=lambda rank: (counts[assigned[rank]], rank), default=None)
