"""Which trainer plays which logical rank. Pure functions of names, hosts and wishes.

``assign`` settles the rank assignments when a run starts, ``claim`` those of a trainer that comes later, and
``distribute`` says who computes a step's work items, also of rank assignments whose owners are gone.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardwell_wire.errors import DuplicateError
from shardwell_wire.topology import World

RankAssignments = dict[int, str]
"""Owner of each logical rank."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A trainer that wants to play."""

    name: str
    host: str = ""
    requested_rank: int | None = None


def natural_key(text: str) -> tuple[Any, ...]:
    """Sorts numbers inside names by value: node7 < node8 < node66."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text))


def assign(world: World, applicants: Iterable[Applicant]) -> RankAssignments:
    """Rank assignments for a run that starts. The order of the applicants does not matter.

    Requested ranks are honoured. Otherwise trainers sit by host and name, those of one host in one
    tensor group where possible. Fewer trainers than ranks: each plays a block of data ranks, as
    even as possible. More: the last ones get nothing.

    Args:
        world: The grid; fewer trainers than ranks only with ``tp == pp == 1``.
        applicants: With different names and different requested ranks.
    """
    ordered = sorted(applicants, key=_applicant_key)
    if len(ordered) < world.size:
        return _assign_blocks(world, ordered)
    return _assign_one_each(world, ordered)


def _applicant_key(applicant: Applicant) -> tuple[Any, ...]:
    wish = applicant.requested_rank
    return (math.inf if wish is None else wish, natural_key(applicant.host), natural_key(applicant.name))


def _assign_one_each(world: World, ordered: Sequence[Applicant]) -> RankAssignments:
    rank_assignments = {at.requested_rank: at.name for at in ordered if at.requested_rank is not None}
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
    # First every group that one host can fill alone, then what is left.
    for whole_only in (True, False):
        for group in groups:
            free = deque(rank for rank in group if rank not in rank_assignments)
            neighbours = {hosts[rank_assignments[rank]] for rank in group if rank in rank_assignments}
            while free and (host := _host_for(len(free), waiting, neighbours, whole_only=whole_only)) is not None:
                for _ in range(min(len(free), len(waiting[host]))):
                    rank_assignments[free.popleft()] = waiting[host].popleft()
    return rank_assignments


def _host_for(
    count: int, waiting: Mapping[str, Collection[str]], neighbours: Collection[str], *, whole_only: bool
) -> str | None:
    """The host whose trainers shall fill ``count`` free ranks of a group beside its ``neighbours``."""
    if whole_only:
        fitting = (
            host for host, names in waiting.items() if len(names) >= count and all(at == host for at in neighbours)
        )
        return next(fitting, None)
    left = [host for host, names in waiting.items() if names]
    return max(left, key=lambda host: (host in neighbours, len(waiting[host])), default=None)


def _assign_blocks(world: World, ordered: Sequence[Applicant]) -> RankAssignments:
    blocks = _even_blocks(world.size, len(ordered))
    wishes = {at.requested_rank: at.name for at in ordered if at.requested_rank is not None}
    wanted_by = [[name for rank, name in wishes.items() if rank in block] for block in blocks]
    others = deque(at.name for at in ordered if at.requested_rank is None)
    if all(len(names) <= 1 for names in wanted_by):
        owners = [names[0] if names else others.popleft() for names in wanted_by]
        return {rank: owner for owner, block in zip(owners, blocks, strict=True) for rank in block}
    # Two wishes in one block: everybody gets as many ranks as before, but not in one piece.
    rank_assignments = dict(wishes)
    free = deque(rank for rank in range(world.size) if rank not in rank_assignments)
    for applicant, block in zip(ordered, blocks, strict=True):
        for _ in range(len(block) - (applicant.requested_rank is not None)):
            rank_assignments[free.popleft()] = applicant.name
    return rank_assignments


def _even_blocks(size: int, count: int) -> list[range]:
    small, larger = divmod(size, count)
    starts = [index * small + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def claim(
    rank_assignments: Mapping[int, str],
    live: Collection[str],
    applicant: Applicant,
    *,
    pinned: Collection[int],
    expected: int = 1,
    shared: bool = True,
) -> RankAssignments:
    """The rank assignments that a trainer gets when it comes to a run that has started.

    Its former rank assignments if it had some; else those of trainers that are gone, at most its fair share;
    else its fair share from trainers that play several ranks; else none: it is a spare.

    Args:
        rank assignments: Owner of every rank, gone or not.
        live: Names of the live trainers, with or without the applicant.
        applicant: The trainer that comes.
        pinned: Ranks that live trainers have asked for themselves.
        expected: Trainers that the run counts on; while fewer are there, shares are as if all were.
        shared: Whether one trainer may play several ranks.

    Returns:
        The changed entries of ``rank assignments`` and those that are the applicant's already.

    Raises:
        DuplicateError: A live trainer plays the requested rank, and that one only or by its own wish.
    """
    name, wish = applicant.name, applicant.requested_rank
    players = {*live, name}
    held = Counter(owner for owner in rank_assignments.values() if owner in players)
    mine = {rank: owner for rank, owner in rank_assignments.items() if owner == name}

    def take(rank: int) -> None:
        held[rank_assignments[rank]] -= 1
        held[name] += 1
        mine[rank] = name

    if wish is not None and wish not in mine:
        owner = rank_assignments[wish]
        if owner in players and (wish in pinned or held[owner] == 1):
            raise DuplicateError(
                f"rank {wish} is played by trainer {owner!r}: ask for another one, or for none", trainer=owner
            )
        take(wish)
    elif mine:
        return mine
    fair = -(-len(rank_assignments) // max(len(players), expected)) if shared else 1
    for rank in sorted(rank for rank, owner in rank_assignments.items() if owner not in players and rank not in mine):
        if held[name] < fair:
            take(rank)
    if held[name] > (wish is not None):
        return mine
    while (surplus := _surplus_rank(rank_assignments, mine, held, pinned)) is not None and held[
        rank_assignments[surplus]
    ] > held[name] + 1:
        take(surplus)
    return mine


def _surplus_rank(
    rank_assignments: Mapping[int, str], mine: RankAssignments, held: Counter[str], pinned: Collection[int]
) -> int | None:
    """A rank of the trainer that plays the most; its highest one that it did not ask for."""
    ranks = [rank for rank in rank_assignments if rank not in mine and rank not in pinned]
    return max(ranks, key=lambda rank: (held[rank_assignments[rank]], rank), default=None)


def distribute(
    rank_assignments: Mapping[int, str], players: Collection[str], accepts: Callable[[str], bool]
) -> dict[int, str | None]:
    """Who computes each rank's item of a step.

    Args:
        rank assignments: Owner of every rank.
        players: Names of the live trainers.
        accepts: Whether a live trainer computes ranks that are not its own.

    Returns:
        The owner where it is live, else the live trainer with the fewest items (of those, the one
        with the lowest own rank), else None.
    """
    items: dict[int, str | None] = {
        rank: owner if owner in players else None for rank, owner in sorted(rank_assignments.items())
    }
    load = Counter({name: 0 for name in players if accepts(name)})
    lowest: dict[str, int] = {}
    for rank, owner in sorted(rank_assignments.items()):
        if owner in players:
            lowest.setdefault(owner, rank)
            if owner in load:
                load[owner] += 1
    for rank, holder in items.items():
        if holder is None and load:
            stand_in = min(
                load, key=lambda name: (load[name], lowest.get(name, len(rank_assignments)), natural_key(name))
            )
            items[rank] = stand_in
            load[stand_in] += 1
    return items
