"""Which trainer owns each logical rank, and which trainers compute a work item together.

``RankOwners`` has the owners of a run's ranks and the epochs of its replicas. The functions below it decide: they
assign all ranks when a run starts, give ranks or places to trainers that join later, and choose the replica that
computes each work item. They depend on names, hosts and requested ranks only.

Note: [Replicas]
    A replica is the ``cp x tp x pp`` trainers that compute one work item together, listed by cp, tp and pp rank.
    The owners of the ranks of one dp rank are a replica, and one replica may own several dp ranks. A trainer has the
    same place in every dp rank that it owns: its (cp, tp, pp) coordinate. It therefore belongs to one replica only,
    and a trainer that takes a place takes its ranks of all dp ranks that the replica owns. A replica is complete if all
    its trainers are present.

    In a world without ``cp``, ``tp`` and ``pp``, each trainer is a replica by itself, also a spare without ranks.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from shardwell_server.coordinator.ranks.members import Member, Members, tell
from shardwell_server.coordinator.rendezvous import REPLICA, Stores
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.signals import RunChanges
from shardwell_wire.errors import DuplicateError
from shardwell_wire.model.topology import World

Replica = tuple[str, ...]
"""Names of the trainers of one replica, ordered by cp rank, tp rank and pp rank."""

RankAssignments = dict[int, str]
"""Name of the trainer that owns each logical rank."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A trainer that joins a run."""

    name: str
    host: str = ""
    requested_rank: int | None = None
    process: str = ""
    """Process identity, see ``own_identity``. Empty: unknown."""


class RankOwners:
    """Which trainer owns each logical rank, live or gone. Empty until the run starts.

    Note: [Replica epochs]
        The trainers of a replica set up things together, such as a process group. These are void when a trainer is
        lost, and when another one takes its place. The replica gets a new epoch each time. All dp ranks that one
        replica owns have the same replica epoch. A replica of one trainer has nothing to set up, and its epoch stays 0.

    Args:
        changes: Gives replicas their epochs.
    """

    def __init__(self, settings: RunSettings, members: Members, changes: RunChanges) -> None:
        self._settings, self._world = settings, settings.world
        self.members, self.changes = members, changes
        self.by_rank: RankAssignments = {}
        """Owner of each global rank. Only ``_set_owners`` changes it."""
        self._ranks: dict[str, list[int]] = {}
        self._replicas: list[Replica] = []
        self.replica_epochs: dict[int, int] = {}
        """Epoch of the replica that owns each dp rank."""
        self.errors: dict[int, str] = {}
        """Why replicas have their epochs, by epoch: errors with which trainers of the replicas have left."""
        self.stores = Stores(REPLICA)
        """The stores in which the trainers of a replica meet, by replica epoch."""

    def ranks_of(self, name: str) -> list[int]:
        """Returns the logical ranks that a trainer owns."""
        return list(self._ranks.get(name, ()))

    def _set_owners(self, by_rank: RankAssignments) -> None:
        """Replaces the owners of all ranks, and what is derived from them."""
        self.by_rank, self._ranks, self._replicas = by_rank, {}, []
        for rank in sorted(by_rank):
            self._ranks.setdefault(by_rank[rank], []).append(rank)

    def replica_epoch_of(self, name: str) -> int:
        """Returns the epoch of a trainer's replica. 0: the trainer owns no rank, or replicas have one trainer."""
        if self._world.replica_size == 1 or name not in self._ranks:
            return 0
        return self.replica_epochs[self._world.coordinates(self._ranks[name][0]).dp_rank]

    def replica_of(self, name: str) -> Replica:
        """Returns the replica of a trainer. Empty: the trainer owns no rank."""
        if name not in self._ranks:
            return ()
        return self.replicas[self._world.coordinates(self._ranks[name][0]).dp_rank]

    def position_of(self, name: str) -> int | None:
        """Returns the position of a trainer in its replica, which stands for its ranks along cp, tp and pp.

        None: the trainer owns no rank, and so has none. In a replica of one trainer, the position is always 0.
        """
        if self._world.replica_size == 1:
            return 0
        return self.replica_of(name).index(name) if name in self._ranks else None

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replica that owns each dp rank, live or gone. See Note: [Replicas]."""
        if not self._replicas:
            self._replicas = replicas_of(self._world, self.by_rank)
        return self._replicas

    def is_waiting_spare(self, name: str) -> bool:
        """True if a trainer owns no rank and cannot compute until it does, because replicas have several trainers."""
        return self._world.replica_size > 1 and name not in self._ranks

    def missing_peers(self, name: str) -> list[str]:
        """Returns the trainers of a trainer's replica that are gone, or whose leases have expired."""
        if self._world.replica_size == 1:
            return []
        return [peer for peer in self.replica_of(name) if peer not in self.members.live]

    @property
    def has_waiting_replica(self) -> bool:
        """True if a replica waits for work, and can compute any item at once."""
        waiting = self.members.waiting_for_work
        return bool(waiting) and bool(waiting_replicas(self.replicas, waiting))

    @property
    def has_waiting_spare(self) -> bool:
        """True if a live trainer waits for a rank."""
        return bool(self.by_rank) and any(map(self.is_waiting_spare, self.members.live))

    def lowest_live_trainer(self, rank: int, preferred: Container[str] = ()) -> str | None:
        """Returns the live trainer that owns the lowest rank with the same ranks along cp, tp and pp as a rank.

        Prefers the given trainers, then those that are not behind. In a replica of one trainer, a spare is the last.
        """
        live, world = self.members.live, self._world
        lowest: dict[str, int] = {} if world.replica_size > 1 else dict.fromkeys(live, world.size)
        for peer in reversed(world.group(rank, "dp")):
            if (owner := self.by_rank.get(peer, "")) in live:
                lowest[owner] = peer

        def preference(name: str) -> tuple[Any, ...]:
            return name not in preferred, live[name].behind, lowest[name], natural_key(name)

        return min(lowest, key=preference, default=None)

    def check_request(self, applicant: Applicant) -> None:
        """Checks the requested rank of a trainer that joins before the run starts.

        Raises:
            DuplicateError: Another trainer requested the rank, or a rank that the same trainer would play.
        """
        if applicant.requested_rank is None:
            return
        count = self._settings.min_trainers
        taken = {requested_place(self._world, count, rank) for rank in self.members.requested_ranks}
        if requested_place(self._world, count, applicant.requested_rank) in taken:
            raise DuplicateError(
                f"another trainer of run {self.members.run!r} already requested rank {applicant.requested_rank}: "
                "request a different rank for every trainer, or none",
                global_rank=applicant.requested_rank,
            )

    def start(self) -> None:
        """Assigns all ranks, because the run starts."""
        live = self.members.live.values()
        applicants = [Applicant(at.name, at.host, at.requested_rank) for at in live]
        self._set_owners(assign_ranks(self._world, applicants))
        self._renew(self.members.live)

    def restore(self, by_rank: RankAssignments, replica_epochs: Mapping[int, int]) -> None:
        """Restores everything after a coordinator restart. The values in the stores of replicas are lost."""
        self._set_owners(by_rank)
        self.replica_epochs = dict(replica_epochs)
        self.stores.lost.update(replica_epochs.values())

    def claim(self, applicant: Applicant) -> None:
        """Assigns ranks to a trainer that joins a run that has started.

        Raises:
            DuplicateError: A live trainer plays the requested rank.
        """
        self._claim(applicant, self.members.live, self.members.requested_ranks)

    def _claim(self, applicant: Applicant, present: Mapping[str, Member], requested: Collection[int]) -> None:
        if self._world.replica_size == 1:
            expected = self._settings.min_trainers
            claimed = claim_ranks(self.by_rank, present, applicant, requested=requested, expected=expected)
        else:
            hosts = {name: member.host for name, member in present.items()}
            claimed = claim_place(self._world, self.by_rank, hosts, applicant)
        self._set_owners(self.by_rank | claimed)

    def place_spares(self, error: str = "") -> set[str]:
        """Gives spares the places of gone trainers. Spares that are left form replicas, if others own several dp ranks.

        A trainer whose lease has only expired keeps its place: it may come back with its model.

        Args:
            error: With which error a trainer has left whose place is free now. Empty: with none.

        Returns:
            Names of the trainers that now own ranks. Always empty if replicas have one trainer: spares stay spares.
        """
        if self._world.replica_size == 1:
            return set()
        present = {**self.members.live, **{member.name: member for member in self.members.expired}}
        spares = self._spares()
        for spare in spares:
            self._claim(spare, present, ())
        while formed := form_replica(self._world, self.by_rank, self._spares()):
            self._set_owners(self.by_rank | formed)
        placed = {spare.name for spare in spares} - {spare.name for spare in self._spares()}
        self.renew_replicas(placed, error)
        return placed

    def _spares(self) -> Sequence[Applicant]:
        live = self.members.live
        return [Applicant(member.name, member.host) for name, member in live.items() if name not in self._ranks]

    def renew_replicas(self, trainers: Collection[str], error: str = "") -> None:
        """Gives new epochs to the replicas of trainers that came or went, and tells their trainers.

        See Note: [Replica epochs].

        Args:
            error: The error with which one of them has left. Empty: none has.
        """
        renewed = self._renew(trainers)
        present = set(self.replica_epochs.values())
        if error:
            self.errors.update(dict.fromkeys(map(self.replica_epoch_of, renewed), error))
        self.errors = {epoch: error for epoch, error in self.errors.items() if epoch in present}
        self.stores.keep(self.replica_epochs.values())
        tell(self.members.by_name[name] for name in renewed if name in self.members.by_name)

    def _renew(self, trainers: Collection[str]) -> set[str]:
        """Returns all trainers of the replicas that have new epochs."""
        if self._world.replica_size == 1:
            return set()
        epochs: dict[Replica, int] = {}
        for dp_rank, replica in enumerate(self.replicas):
            if not set(replica).isdisjoint(trainers):
                if replica not in epochs:
                    epochs[replica] = self.changes.next_epoch()
                self.replica_epochs[dp_rank] = epochs[replica]
        return {name for replica in epochs for name in replica}


@lru_cache(maxsize=64)
def ranks_of_items(world: World) -> tuple[tuple[int, ...], ...]:
    """Returns the global ranks of each dp rank, ordered by cp rank, tp rank and pp rank."""
    return tuple(world.replica_ranks(dp_rank) for dp_rank in range(world.dp))


def replicas_of(world: World, assigned: Mapping[int, str]) -> list[Replica]:
    """Returns the replica that owns each dp rank, live or gone. ``assigned``: owner of every global rank."""
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

    Items that become vacant within the step go to waiting replicas, see ``SynchronousWork.lease_vacant_items``.

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
        # Nobody can take the items of trainers that are behind, so they compute their own.
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


def natural_key(text: str) -> tuple[Any, ...]:
    """Sort key that compares numbers inside names by value: node7 < node8 < node66."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text))


def assign_ranks(world: World, applicants: Iterable[Applicant]) -> RankAssignments:
    """Assigns all ranks of a run that starts. The order of the applicants does not matter.

    Requested ranks are granted. Other trainers are placed by host and name, and trainers of one host share a tensor
    group where possible. With fewer trainers than ranks, each trainer, or each replica of several trainers, plays a
    block of data ranks of nearly equal size. With more, the last trainers get no rank.

    Args:
        applicants: Trainers with distinct names and distinct requested ranks. If there are fewer than ranks, their
            number is a multiple of ``cp * tp * pp``, and ``requested_place`` of their requests is distinct.
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
        world.group(world.global_rank(dp_rank=dp_rank, cp_rank=cp_rank, pp_rank=pp_rank), "tp")
        for dp_rank in range(world.dp)
        for cp_rank in range(world.cp)
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
        trainer_count: Number of trainers with which the run starts.
    """
    if world.replica_size == 1 or trainer_count >= world.size:
        return rank
    small, at = replace(world, dp=trainer_count // world.replica_size), world.coordinates(rank)
    replica = next(index for index, block in enumerate(_even_blocks(world.dp, small.dp)) if at.dp_rank in block)
    return small.global_rank(dp_rank=replica, cp_rank=at.cp_rank, tp_rank=at.tp_rank, pp_rank=at.pp_rank)


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
    """Assigns ranks to a trainer that joins a run that has started. Only for replicas of one trainer.

    A trainer that owned ranks before gets them back. Otherwise it takes ranks of gone trainers, at most its fair share.
    If there are none, it takes its fair share from trainers that play several ranks. Otherwise it gets no rank and is
    a spare.

    Args:
        assigned: Owner of every rank, live or gone.
        live: Names of the live trainers. May include the applicant.
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


def claim_place(
    world: World, assigned: Mapping[int, str], hosts: Mapping[str, str], applicant: Applicant
) -> RankAssignments:
    """Assigns the ranks of one place to a trainer that joins a run that has started.

    A trainer that owned a place before gets it back. Otherwise it takes the place of a gone trainer: in the replica
    that lacks the fewest trainers, and among those where live trainers of its tensor group are on its host. If there is
    none, it gets no rank and is a spare.

    Args:
        assigned: Owner of every rank, live or gone.
        hosts: Host of each live trainer, by name. May include the applicant.

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
        # A trainer owns whole places, so the applicant takes all ranks of the former owner.
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
