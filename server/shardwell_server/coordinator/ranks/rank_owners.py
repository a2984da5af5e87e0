"""The owners of a run's logical ranks, and the epochs of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from shardwell_server.coordinator.ranks.members import Member, Members
from shardwell_server.coordinator.ranks.rank_assignment import (
    Applicant,
    RankAssignments,
    Replica,
    assign_ranks,
    claim_place,
    claim_ranks,
    form_replica,
    replicas_of,
    requested_place,
)
from shardwell_server.coordinator.settings import RunSettings
from shardwell_wire.errors import DuplicateError


class RankOwners:
    """Which trainer owns each logical rank, live or gone. Empty until the run starts.

    Note: [Replica epochs]
        The trainers of a replica set up things together, such as a process group. These are void when a trainer is
        lost, and when another one takes its place. The replica gets a new epoch each time. All dp ranks that one
        replica owns have the same replica epoch. With ``tp = pp = 1`` there is nothing to set up, and all epochs are 0.

    Args:
        next_epoch: Returns a new epoch of the run, higher than all former ones.
    """

    def __init__(self, next_epoch: Callable[[], int]) -> None:
        self._next_epoch = next_epoch
        self.by_rank: RankAssignments = {}
        """Owner of each global rank. Only ``_set_owners`` changes it."""
        self._ranks: dict[str, list[int]] = {}
        self._replicas: list[Replica] = []
        self.replica_epochs: dict[int, int] = {}
        """Epoch of the replica that owns each dp rank."""

    def ranks_of(self, name: str) -> list[int]:
        """Returns the logical ranks that a trainer owns."""
        return list(self._ranks.get(name, ()))

    def owns_ranks(self, name: str) -> bool:
        """True if a trainer owns a logical rank."""
        return name in self._ranks

    def _set_owners(self, by_rank: RankAssignments) -> None:
        """Replaces the owners of all ranks, and what is derived from them."""
        self.by_rank, self._ranks, self._replicas = by_rank, {}, []
        for rank in sorted(by_rank):
            self._ranks.setdefault(by_rank[rank], []).append(rank)

    def replica_epoch_of(self, name: str, settings: RunSettings) -> int:
        """Returns the epoch of a trainer's replica. 0: the trainer owns no rank, or replicas have one trainer."""
        if settings.world.replica_size == 1 or name not in self._ranks:
            return 0
        return self.replica_epochs[settings.world.coordinates(self._ranks[name][0]).dp_rank]

    def replica_of(self, name: str, settings: RunSettings) -> Replica:
        """Returns the replica of a trainer. Empty: the trainer owns no rank."""
        if name not in self._ranks:
            return ()
        return self.replicas(settings)[settings.world.coordinates(self._ranks[name][0]).dp_rank]

    def position_of(self, name: str, settings: RunSettings) -> int | None:
        """Returns the position of a trainer in its replica, which stands for its tp rank and pp rank.

        None: the trainer owns no rank, and so has neither. With ``tp = pp = 1``, the position is always 0.
        """
        if settings.world.replica_size == 1:
            return 0
        return self.replica_of(name, settings).index(name) if name in self._ranks else None

    def replicas(self, settings: RunSettings) -> Sequence[Replica]:
        """Returns the replica that owns each dp rank. See Note: [Replicas] in ``replicas.py``."""
        if not self._replicas:
            self._replicas = replicas_of(settings.world, self.by_rank)
        return self._replicas

    def check_request(self, run: str, settings: RunSettings, applicant: Applicant, requested: Collection[int]) -> None:
        """Checks the requested rank of a trainer that joins before the run starts.

        Args:
            run: Name of the run.
            settings: Settings of the run.
            applicant: The trainer that joins.
            requested: Ranks that other trainers requested.

        Raises:
            DuplicateError: Another trainer requested the rank, or a rank that the same trainer would play.
        """
        if applicant.requested_rank is None:
            return
        world, count = settings.world, settings.min_trainers
        taken = {requested_place(world, count, rank) for rank in requested}
        if requested_place(world, count, applicant.requested_rank) in taken:
            raise DuplicateError(
                f"another trainer of run {run!r} already requested rank {applicant.requested_rank}: "
                "request a different rank for every trainer, or none",
                global_rank=applicant.requested_rank,
            )

    def start(self, settings: RunSettings, live: Collection[Member]) -> None:
        """Assigns all ranks, because the run starts."""
        self._set_owners(assign_ranks(settings.world, map(_applicant, live)))
        self.renew_replicas(settings, {member.name for member in live})

    def restore(self, by_rank: RankAssignments, replica_epochs: Mapping[int, int]) -> None:
        """Restores everything after a coordinator restart."""
        self._set_owners(by_rank)
        self.replica_epochs = dict(replica_epochs)

    def claim(
        self, settings: RunSettings, live: Mapping[str, Member], applicant: Applicant, requested: Collection[int]
    ) -> None:
        """Assigns ranks to a trainer that joins a run that has started.

        Args:
            settings: Settings of the run.
            live: Live trainers by name.
            applicant: The trainer that joins.
            requested: Ranks that live trainers requested.

        Raises:
            DuplicateError: A live trainer plays the requested rank.
        """
        if settings.world.replica_size == 1:
            claimed = claim_ranks(self.by_rank, live, applicant, requested=requested, expected=settings.min_trainers)
        else:
            hosts = {name: member.host for name, member in live.items()}
            claimed = claim_place(settings.world, self.by_rank, hosts, applicant)
        self._set_owners(self.by_rank | claimed)

    def place_spares(self, settings: RunSettings, members: Members) -> set[str]:
        """Gives spares the places of gone trainers. Spares that are left form replicas, if others own several dp ranks.

        A trainer whose lease has only expired keeps its place: it may come back with its model.

        Returns:
            Names of the trainers that now own ranks. Always empty if replicas have one trainer: spares stay spares.
        """
        if settings.world.replica_size == 1:
            return set()
        live = members.live
        present = {**live, **{member.name: member for member in members.expired}}
        spares = self._spares(live)
        for spare in spares:
            self.claim(settings, present, spare, ())
        while formed := form_replica(settings.world, self.by_rank, self._spares(live)):
            self._set_owners(self.by_rank | formed)
        placed = {spare.name for spare in spares} - {spare.name for spare in self._spares(live)}
        self.renew_replicas(settings, placed)
        return placed

    def _spares(self, live: Mapping[str, Member]) -> Sequence[Applicant]:
        return [Applicant(member.name, member.host) for name, member in live.items() if not self.owns_ranks(name)]

    def renew_replicas(self, settings: RunSettings, trainers: Collection[str]) -> set[str]:
        """Gives new epochs to the replicas of trainers that came or went. See Note: [Replica epochs].

        Returns:
            All trainers of these replicas.
        """
        if settings.world.replica_size == 1:
            return set()
        epochs: dict[Replica, int] = {}
        for dp_rank, replica in enumerate(self.replicas(settings)):
            if not set(replica).isdisjoint(trainers):
                if replica not in epochs:
                    epochs[replica] = self._next_epoch()
                self.replica_epochs[dp_rank] = epochs[replica]
        return {name for replica in epochs for name in replica}


def _applicant(member: Member) -> Applicant:
    return Applicant(member.name, member.host, member.requested_rank)
