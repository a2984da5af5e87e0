"""Gradients that trainers add before they push them: by which trainers, of which units and work items.

Note: [Choice of a route]
    With ``gradient_reduction="adaptive"``, a trainer chooses the route whose busiest network link carries the fewest
    bytes. The choice depends only on the size of a unit, on its servers, and on the hosts of the trainers, so all
    trainers of a run choose alike. If they do not, for example while a unit moves, they push their own gradients.

    The rule assumes links of equal speed, and shard servers on hosts of their own. For each route, it counts the bytes
    that leave or reach the busiest host, in multiples of the unit's size. A tie goes to the route with fewer hops.

    Trainers without a relay send their own gradients with HIERARCHICAL. Each trainer therefore publishes whether it has
    one with the address at which it exchanges gradients. If no exchange can be formed, HIERARCHICAL is the only
    alternative, and is used as soon as there is a relay.

Note: [Sums among trainers]
    The trainers of a reduction group show each other the gradient of a unit. Each of them adds the gradients of all
    members, in the order of the run, for its shards of the unit, and pushes the sum as the contribution of all members.
    The members thus push one gradient together instead of one each, with the bits that the servers would have computed.
    If the members do not agree on a round, each of them pushes its own gradient to all shards. See Note: [Rounds of an
    exchange].

    A sum is void when one of its ranks starts another attempt, because a gradient cannot be taken out of it. See Note:
    [Sums of items] in ``coordinator/steps/step.py``. Later attempts push their own gradients.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from shardwell.data_plane.push import Excuse, Pushes
from shardwell.data_plane.shard import RelayedPush, RemoteShard, RemoteUnit
from shardwell.grid.replica import RENDEZVOUS_LIMIT_S, NodeMembers, address_towards, key_of
from shardwell.membership.membership import Membership
from shardwell.memory.buffers import BufferPool
from shardwell.options import ADAPTIVE, JoinConfig
from shardwell.peers.node_group import MemberGoneError, Round
from shardwell.peers.peer_exchange import (
    Listener,
    PeerAddress,
    PeerExchange,
    Shown,
    WholeGradient,
    adder_of,
    after,
    cuts_of,
)
from shardwell.step.step_state import ItemAttempt, StepState, WorkItemState
from shardwell.store.host_relay import HostRelay
from shardwell.transport.base import ALLREDUCE, DIRECT, HIERARCHICAL, ROUTES, PartHeader
from shardwell_wire.errors import ShardwellError, StaleEpochError, UnavailableError, UsageError
from shardwell_wire.model.sum_order import Scratch, SumOrder
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_PAUSE_S = 0.02
"""Pause between two questions for an address that another member publishes."""


class RankOwner(NamedTuple):
    """The trainer that plays one logical data rank and no other."""

    dp_rank: int
    trainer: str
    epoch: int
    host: str


class GradientGroups:
    """Forms groups from the trainers that were members of the run when this trainer joined.

    Args:
        membership: The membership of this trainer. Each replica has one trainer.
        config: Options of the trainer.
        pushes: Pushes gradients and sums.
    """

    def __init__(self, membership: Membership, config: JoinConfig, pushes: Pushes) -> None:
        self._membership, self._config, self._pushes = membership, config, pushes
        self.order = SumOrder(config.world.dp, config.reduction_groups)
        """The run's order of additions."""
        self.owners = self._find_owners()
        """The trainers that play one rank each, by rank. Empty: this trainer plays several."""
        self.relayed = frozenset(owner.dp_rank for owner in self.owners)
        """Ranks whose trainers have a relay, as far as it is known. See Note: [Choice of a route]."""

    def ranks_on_host(self) -> tuple[int, ...]:
        """Returns the ranks of this trainer's largest reduction group that is complete on this host. Empty: none is."""
        if not self.owners:
            return ()
        on_host = [owner for owner in self.owners if owner.host == self._config.host]
        return tuple(owner.dp_rank for owner in complete_group(self.order, on_host, self._own))

    def form_across_hosts(self, *, has_relay: bool) -> GradientSums | None:
        """Connects this trainer with the others of its largest reduction group that is complete, on any hosts.

        Args:
            has_relay: Whether this trainer has a relay. The others learn it, as this one does in ``relayed``.

        Returns:
            None if no reduction group is complete, or if this trainer could not reach all of its trainers. The reason
            is logged.
        """
        members = complete_group(self.order, self.owners, self._own) if self.owners else ()
        if not members:
            logger.info("gradient group: no other trainers of the run complete a reduction group with this one")
            return None
        ranks = tuple(owner.dp_rank for owner in members)
        named = NodeMembers(key_of((self._membership.identity, ALLREDUCE, members)), ranks, ranks.index(self._own))
        try:
            exchange = self._connect_peers(named, members, has_relay=has_relay)
        except (ShardwellError, MemberGoneError, OSError) as error:
            reason = str(error).partition("\n")[0]
            logger.warning("gradient group: every trainer of the run pushes its own gradients: %s", reason)
            return None
        logger.info("gradient group: logical ranks %s add their gradients (%s)", list(ranks), ALLREDUCE)
        return GradientSums(exchange, ranks, named.position, self.order, self._pushes)

    @property
    def _own(self) -> int:
        return self._membership.rank_assignments[0].coordinates.dp_rank

    def _find_owners(self) -> tuple[RankOwner, ...]:
        if len(self._membership.rank_assignments) != 1:
            count = len(self._membership.rank_assignments)
            logger.info("gradient group: this trainer plays %d logical ranks and adds no gradients", count)
            return ()
        found = (
            RankOwner(trainer.global_ranks[0], trainer.trainer, trainer.epoch, trainer.host)
            for trainer in self._describe().trainers
            if trainer.live and len(trainer.global_ranks) == 1
        )
        return tuple(sorted(found, key=lambda owner: owner.dp_rank))

    def _describe(self) -> coordinator_pb2.DescribeRunResponse:
        request = coordinator_pb2.DescribeRunRequest(run=self._membership.run)
        response: coordinator_pb2.DescribeRunResponse = self._membership.call("DescribeRun", request)
        return response

    # ---- across hosts ----

    def _connect_peers(self, named: NodeMembers, members: Sequence[RankOwner], *, has_relay: bool) -> PeerExchange:
        deadline, ranks = time.monotonic() + RENDEZVOUS_LIMIT_S, named.global_ranks
        listener = Listener(address_towards(self._membership.coordinator_address), named.position, len(members))
        with closing(listener):
            host, port, secret = listener.address
            own = f"{named.key} {secret.hex()} {port} {host} {'relay' if has_relay else 'none'}"
            self._exchange_address(f"gradients-{ranks[named.position]}", own)
            connected = listener.connect_all(
                lambda other: self._await_address(ranks[other], named.key, deadline)[0], deadline
            )
            # All members have published theirs by now: the others have connected to this one.
            found = {rank: self._await_address(rank, named.key, deadline)[1] for rank in ranks}
            self.relayed = frozenset(owner.dp_rank for owner in self.owners if found.get(owner.dp_rank, True))
        find_lost, wait_limit_s = self._lost_finder(members), self._config.waits.wait_limit_s
        return PeerExchange(connected, named.position, find_lost=find_lost, wait_limit_s=wait_limit_s)

    def _exchange_address(self, name: str, address: str | None) -> str:
        request = coordinator_pb2.ExchangeAddressRequest(
            context=self._membership.context(0), trainer=self._membership.trainer, name=name, address=address
        )
        response: coordinator_pb2.ExchangeAddressResponse = self._membership.call("ExchangeAddress", request)
        return response.address

    def _await_address(self, rank: int, key: str, deadline: float) -> tuple[PeerAddress, bool]:
        """Waits until a member of the group has published its address, and whether it has a relay.

        Raises:
            UnavailableError: It has not until the deadline. It may have other options than this trainer.
        """
        while True:
            fields = self._exchange_address(f"gradients-{rank}", None).split(" ")
            if len(fields) == 5 and fields[0] == key:
                return PeerAddress(fields[3], int(fields[2]), bytes.fromhex(fields[1])), fields[4] == "relay"
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the trainer of rank {rank} has published no address within {RENDEZVOUS_LIMIT_S:.0f} s: all "
                    "trainers of a run must join with the same gradient_reduction"
                )
            time.sleep(_PAUSE_S)

    def _lost_finder(self, members: Sequence[RankOwner]) -> Callable[[], str]:
        """Returns a function that names a member whose membership has ended. Empty: there is none, or nobody knows."""

        def find_lost() -> str:
            try:
                described = self._describe()
            except ShardwellError as error:
                logger.info("the coordinator does not say which trainers are members: %s", error)
                return ""
            present = {(trainer.trainer, trainer.epoch) for trainer in described.trainers if trainer.live}
            gone = [owner for owner in members if (owner.trainer, owner.epoch) not in present]
            return f"trainer {gone[0].trainer!r} of rank {gone[0].dp_rank} has lost its membership" if gone else ""

        return find_lost


def complete_group(order: SumOrder, owners: Iterable[RankOwner], dp_rank: int) -> tuple[RankOwner, ...]:
    """Returns the owners of the largest reduction group of a rank of which all ranks have owners. Empty: none."""
    by_rank = {owner.dp_rank: owner for owner in owners}
    complete = [group for group in order.groups_of(dp_rank) if len(group) > 1 and by_rank.keys() >= set(group)]
    return tuple(by_rank[rank] for rank in complete[-1]) if complete else ()


SMALL_UNIT_BYTES = 256 << 10
"""Smaller units are pushed directly: messages and not bytes determine how long they take."""


class Choice(NamedTuple):
    """The route of a unit."""

    route: str
    reason: str


class AdaptiveRoute:
    """Chooses by the bytes on the busiest link. See Note: [Choice of a route].

    Args:
        order: The run's order of additions.
        owners: The trainers that play one rank each.
        relayed: The ranks whose trainers have a relay. None: all.
        across_hosts: Whether ALLREDUCE may be chosen.
    """

    def __init__(
        self,
        order: SumOrder,
        owners: Sequence[RankOwner],
        *,
        relayed: frozenset[int] | None = None,
        across_hosts: bool = True,
    ) -> None:
        self._order, self._across_hosts = order, across_hosts
        self._all_own = len(owners) == order.dp
        self._per_host = Counter(owner.host for owner in owners)
        sums = set[tuple[str, int]]()
        for owner in owners:
            on_host = [
                other
                for other in owners
                if other.host == owner.host and (relayed is None or {owner.dp_rank, other.dp_rank} <= relayed)
            ]
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
        owned = Counter[str]()
        for shard in unit.shards:
            owned[shard.server.address.rpartition(":")[0]] += shard.size_bytes
        loads = self._loads(max(owned.values()) / unit.layout.size_bytes)
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


_CLOSE_LIMIT_S = 5.0
_IDLE_BYTES = 64 << 20
_SLICE_NUMEL = 1 << 17
"""Elements that are added together, while they are in the cache."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A gradient that is about to be added to those of the other members."""

    this_round: Round
    unit: RemoteUnit
    header: PartHeader
    own: WholeGradient
    copied: Callable[[], None]
    """Waits until ``own`` is complete."""
    item: ItemAttempt
    excuse: Excuse
    release: Callable[[], None]
    """Called when the gradient is pushed or dropped, and when it is shown to all members."""
    started_s: float
    generation: int

    @property
    def size_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.own.flats.values())


class GradientSums:
    """Adds gradients with the other members of a group. Called by the training thread. See Note: [Sums among trainers].

    Args:
        exchange: Shows the members each other's gradients. Closed with this object.
        dp_ranks: Data ranks of the members, in ascending order: a reduction group of the run.
        position: Index of this trainer in ``dp_ranks``.
        order: The run's order of additions.
        pushes: Pushes gradients and sums.
    """

    def __init__(
        self, exchange: PeerExchange, dp_ranks: Sequence[int], position: int, order: SumOrder, pushes: Pushes
    ) -> None:
        self.exchange = exchange
        self._dp_ranks, self._position, self._order, self._pushes = tuple(dp_ranks), position, order, pushes
        self._generation = 0
        """Rises when the gradients in flight become void."""
        self._buffers = BufferPool(_IDLE_BYTES)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"shardwell-{ALLREDUCE}", daemon=True)
        self._thread.start()

    def push(
        self,
        this_round: Round,
        unit: RemoteUnit,
        header: PartHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        item: ItemAttempt,
        excuse: Excuse,
    ) -> None:
        """Starts to add a gradient to those of the other members, and to push the sum.

        Waits while more than ``push_bytes`` are in flight. Raises the error of an earlier push that failed.

        Args:
            this_round: The result of ``start_round``.
            unit: The unit.
            header: Header of the push of this trainer's own gradient. See ``RemoteShard.prepare_push``.
            gradients: ``(parameter index, gradient)`` by rising index, of 32 or 64 bits. The caller must not change
                them afterwards.
            item: The work item that the gradient belongs to.
            excuse: See ``Pushes.push``.
        """
        started_s = time.perf_counter()
        flats, copied = self._pushes.start_copies(gradients)
        context, attempt = header.common.context, header.common.attempt
        own = WholeGradient(context.epoch, context.lease_proof, attempt, cuts_of(unit), flats)
        release = after(2, self._pushes.hold(sum(flat.nbytes for flat in flats.values())))
        self.exchange.offer(this_round, unit, own, copied, release)
        self._jobs.put(_Job(this_round, unit, header, own, copied, item, excuse, release, started_s, self._generation))

    def abandon(self, version: int) -> None:
        """Drops the gradients in flight, whose attempts are over, and skips the rest of the version."""
        self._generation += 1
        self.exchange.finish_version(version)

    def close(self) -> None:
        """Leaves the group and releases its memory and connections."""
        self._generation += 1
        self.exchange.stop()
        self._jobs.put(None)
        self._thread.join(_CLOSE_LIMIT_S)
        self.exchange.close()

    # ---- in the thread of this object ----

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._run(job)
            except BaseException as error:  # the training thread raises it
                self._pushes.fail(error)
                job.release()
            del job  # releases the gradients before the next job is awaited

    def _run(self, job: _Job) -> None:
        job.copied()
        shown = None
        try:
            shown = self.exchange.collect(job.this_round, job.unit, job.own, partial(self._is_over, job))
        except Exception as error:
            self._void(job, error)
        # All members see the same gradients, so all of them decide alike.
        if shown is not None and len({(one.attempt, one.cuts) for one in shown}) == 1:
            self._push_sums(job, shown)
            return
        if self._is_over(job):
            job.release()
            return
        done = self._counting(job, DIRECT, job.size_bytes, job.release)
        self._pushes.push_held(job.unit, job.header, job.own.flats, job.excuse, done)

    def _is_over(self, job: _Job) -> bool:
        return job.item.is_over or job.generation != self._generation

    def _void(self, job: _Job, error: BaseException) -> None:
        """Leaves the group. Other members may count on this one, so only a new attempt is right for all."""
        self.exchange.leave(error)
        job.item.spoil()

    def _push_sums(self, job: _Job, shown: Sequence[Shown]) -> None:
        """Adds the gradients of all members for this member's shards, and starts to push the sums."""
        try:
            job.item.note_summed(self._dp_ranks)
            size, numbers = len(self._dp_ranks), range(len(job.unit.shards))
            own = [number for number in numbers if adder_of(job.unit, number, size) == self._position]
            sums = {number: self._sum(job.unit.shards[number], shown) for number in own}
        except Exception as error:
            self._void(job, error)
            job.release()
            return
        header = replace(
            job.header,
            summed=[
                shard_pb2.SummedRank(dp_rank=dp_rank, epoch=one.epoch, lease_proof=one.lease_proof)
                for dp_rank, one in zip(self._dp_ranks, shown, strict=True)
            ],
        )
        indices = _indices(shown)
        pushed_bytes = sum(
            segment.size_bytes for number in sums for segment in job.unit.shards[number].segments_of(indices)
        )
        done = self._counting(job, ALLREDUCE, pushed_bytes, partial(self._end, job, sums))
        self._pushes.push_sums(job.unit, header, indices, sums, job.excuse, done)

    def _counting(self, job: _Job, route: str, pushed_bytes: int, done: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that counts a pushed gradient and calls ``done``."""
        peer_bytes = 0 if route == DIRECT else job.size_bytes - self._kept_bytes(job)

        def when_pushed() -> None:
            seconds = time.perf_counter() - job.started_s
            self._pushes.stats.routes.add(route, pushed_bytes=pushed_bytes, peer_bytes=peer_bytes, seconds=seconds)
            done()

        return when_pushed

    def _kept_bytes(self, job: _Job) -> int:
        """Returns the bytes of this trainer's gradient that this trainer adds itself."""
        size, shards = len(self._dp_ranks), enumerate(job.unit.shards)
        own = [shard for number, shard in shards if adder_of(job.unit, number, size) == self._position]
        return sum(segment.size_bytes for shard in own for segment in shard.segments_of(job.own.indices))

    def _end(self, job: _Job, sums: Mapping[int, torch.Tensor]) -> None:
        for buffer in sums.values():
            self._buffers.release(buffer)
        job.release()

    def _sum(self, shard: RemoteShard, shown: Sequence[Shown]) -> torch.Tensor:
        """Returns the sum of all members' gradients, laid out like the shard. uint8. [stop_bytes - start_bytes]"""
        buffer, scratch = self._buffers.acquire(shard.size_bytes), Scratch()
        for segment in shard.segments_of(_indices(shown)):
            terms = [
                (dp_rank, part)
                for dp_rank, one in zip(self._dp_ranks, shown, strict=True)
                if (part := one.part(segment)) is not None
            ]
            place = buffer[segment.start_bytes - shard.start_bytes : segment.stop_bytes - shard.start_bytes]
            out = place.view(terms[0][1].dtype)
            for start in range(0, out.numel(), _SLICE_NUMEL):
                here = slice(start, start + _SLICE_NUMEL)
                total = self._order.add([(rank, term[here]) for rank, term in terms], out[here], scratch)
                if len(terms) == 1:
                    out[here].copy_(total)
        return buffer


def _indices(shown: Sequence[Shown]) -> tuple[int, ...]:
    """Returns the parameters that have a gradient in any of them, by rising index."""
    return tuple(sorted(set[int]().union(*(one.indices for one in shown))))


class ItemSums:
    """Hands gradients to the relay or to ``GradientSums`` if the other trainers are expected to do the same.

    They do so in the first attempt at their own items, which ``step.batches`` yields: it can yield them again when a
    sum is void. Gradients of a unit that is pushed in several parts are added on the servers, because the parts of each
    rank are added first.

    Args:
        membership: The membership of this trainer. Each replica has one trainer.
        state: State of the step in flight.
        config: Options of the trainer.
        pushes: Pushes gradients and sums.
        relay: The relay of this host, if it is found.

    Raises:
        UsageError: The trainers of a cluster with TLS are to send each other gradients.
    """

    def __init__(
        self, membership: Membership, state: StepState, config: JoinConfig, pushes: Pushes, relay: HostRelay
    ) -> None:
        self._membership, self._state, self._pushes = membership, state, pushes
        self._reduction = reduction = config.transfers.gradient_reduction
        uses_tls = membership.credentials.tls is not None
        if uses_tls and reduction == ALLREDUCE:
            raise UsageError(
                f"gradient_reduction={ALLREDUCE!r} in a cluster with TLS: the connections between trainers are not "
                f"encrypted. Use {HIERARCHICAL!r} or {DIRECT!r}"
            )
        self._config, self._host_relay = config, relay
        groups = GradientGroups(membership, config, pushes)
        self._relay: HostRelay | None = None
        """Adds gradients with the trainers of this host. None: they complete no reduction group."""
        if reduction in (HIERARCHICAL, ADAPTIVE):
            self._enter_relay(groups)
        self._group: GradientSums | None = None
        """Adds gradients with trainers of other hosts. None: no group could be formed."""
        if reduction in (ALLREDUCE, ADAPTIVE) and not uses_tls:
            self._group = groups.form_across_hosts(has_relay=self._is_usable(HIERARCHICAL))
        self._adaptive: AdaptiveRoute | None = None
        if reduction == ADAPTIVE:
            across = self._group is not None
            self._adaptive = AdaptiveRoute(groups.order, groups.owners, relayed=groups.relayed, across_hosts=across)
        self._choices: dict[int, tuple[str, Choice]] = {}
        """Name of the unit and its route, by the unit's index."""
        self.node_summed_bytes = 0
        """Bytes of gradients of other trainers of this host in sums that count for this trainer."""
        self._summing = threading.Lock()
        """Protects ``node_summed_bytes``."""
        self._skipped = -1
        """The last step in which the relay knows that this trainer pushes its own gradients."""
        self._in_parts: set[int] = set()
        """Units that were pushed in several parts."""

    def _enter_relay(self, groups: GradientGroups) -> None:
        """Goes to the relay with the trainers of this host, if they complete a reduction group."""
        self._host_relay.enter_group(groups.ranks_on_host())
        if self._host_relay.group:
            self._relay = self._host_relay
            self._relay.find()  # now: the other trainers' first gradients wait for this trainer's
        else:
            self._relay = None
            logger.info("gradient group: no other trainers on this host complete a reduction group with this one")

    @property
    def active(self) -> bool:
        """False if this trainer pushes its own gradients for good."""
        return self._relay is not None or (self._group is not None and self._group.exchange.active)

    def describe(self) -> dict[str, dict[str, str]]:
        """Returns route and reason of each unit that has been pushed, by its name.

        A route whose group this trainer has left, or could not form, is ``direct``.
        """
        found = {}
        for name, choice in self._choices.values():
            if self._is_usable(choice.route):
                found[name] = {"route": choice.route, "reason": choice.reason}
            else:
                found[name] = {"route": DIRECT, "reason": f"no group of trainers for {choice.route}; {choice.reason}"}
        return found

    def _choose(self, unit: RemoteUnit) -> str:
        """Returns the route of a unit that can be used now."""
        if unit.index not in self._choices:
            fixed = Choice(self._reduction, f"gradient_reduction={self._reduction!r}")
            choice = fixed if self._adaptive is None else self._adaptive.choose(unit)
            self._choices[unit.index] = unit.layout.unit, choice
        route = self._choices[unit.index][1].route
        return route if self._is_usable(route) else DIRECT

    def _is_usable(self, route: str) -> bool:
        if route == HIERARCHICAL:
            return self._relay is not None and self._relay.find() is not None
        return route == DIRECT or (self._group is not None and self._group.exchange.active)

    def allows_part(self, current: WorkItemState, unit: RemoteUnit) -> bool:
        """Called before a part is pushed; returns False if it must not be, because the item has to be restarted."""
        if current.parts[unit.index]:
            self._in_parts.add(unit.index)
            if unit.index in current.shared_units:
                logger.info(
                    "unit %r is pushed in several parts: its gradients are added on the servers from now on, and the "
                    "work of rank %d is computed again; call set_requires_gradient_sync(False) before all but the last "
                    "backward",
                    unit.layout.unit,
                    current.item.global_rank,
                )
                current.spoil(current.key)
                self.skip()
                return False
        return True

    def push(
        self,
        current: WorkItemState,
        unit: RemoteUnit,
        header: PartHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        excuse: Excuse,
    ) -> bool:
        """Starts to add the gradients to those of the other trainers; returns False if this trainer pushes its own."""
        if not self._is_first_attempt(current):
            self.skip()
            return False
        if header.part or header.dropped_indices or unit.index in self._in_parts or not _can_be_summed(unit, gradients):
            return False
        if (route := self._choose(unit)) == DIRECT:
            return False
        attempt = ItemAttempt(current, current.key)
        if route == HIERARCHICAL:
            return self._push_relayed(current, unit, header, gradients, attempt, excuse)
        group = self._group
        if group is None or (this_round := group.exchange.start_round(self._state.number)) is None:
            return False

        def excuse_sum(error: BaseException) -> bool:
            if isinstance(error, StaleEpochError):
                attempt.spoil()  # a rank of the sum has another attempt, possibly not this trainer's
            return excuse(error)

        current.shared_units.add(unit.index)
        group.push(this_round, unit, header, gradients, attempt, excuse_sum)
        return True

    def _push_relayed(
        self,
        current: WorkItemState,
        unit: RemoteUnit,
        header: PartHeader,
        gradients: Sequence[tuple[int, torch.Tensor]],
        attempt: ItemAttempt,
        excuse: Excuse,
    ) -> bool:
        """Starts to push gradients through the relay; returns False if this trainer pushes them to the servers."""
        if any(shard.server.copies_gradients for shard in unit.shards):
            return False  # gradients go to a server of this host through shared memory
        relay = self._relay.for_gradients(unit) if self._relay is not None else None
        if relay is None or self._skipped >= self._state.number:
            return False
        current.shared_units.add(unit.index)
        via = RelayedPush(relay, partial(self._note_sum, attempt), attempt.spoil)
        self._pushes.push(unit, header, gradients, excuse, route=HIERARCHICAL, via=via)
        return True

    def _note_sum(self, attempt: ItemAttempt, ranks: Sequence[int], pushed_bytes: int) -> None:
        attempt.note_summed(ranks)
        with self._summing:
            self.node_summed_bytes += (len(ranks) - 1) * pushed_bytes

    def _skip_relay(self, step: int) -> None:
        """Tells the relay that this trainer pushes its own gradients until the end of a step."""
        if self._relay is not None and self._skipped < step:
            self._skipped = step
            self._relay.skip(step)

    def _is_first_attempt(self, current: WorkItemState) -> bool:
        ranks, item = self._membership.rank_assignments, current.item  # a spare has no rank
        is_own = bool(ranks) and item.global_rank == ranks[0].coordinates.global_rank
        return is_own and not item.attempt and not current.is_twin and self._state.in_batches

    def finish_item(self) -> None:
        """Called when all gradients of a work item are pushed. The other trainers expect no more in this step."""
        if self._group is not None:
            self._group.exchange.finish_version(self._state.number)

    def skip(self) -> None:
        """Pushes own gradients for the rest of the step. The other trainers do not wait for this one."""
        self._skip_relay(self._state.number)
        if self._group is not None:
            self._group.exchange.finish_version(self._state.number)

    def abandon(self) -> None:
        """Drops the gradients in flight, whose attempts are over, and skips the rest of the step."""
        self._skip_relay(self._state.number)
        if self._group is not None:
            self._group.abandon(self._state.number)

    def rejoin(self) -> None:
        """Called when this trainer has joined the run again, maybe with another rank.

        It leaves the trainers of other hosts for good, and goes to the relay again after this step.
        """
        self._skipped = -1  # the run may have been rolled back
        self.abandon()
        if self._group is not None:
            self._group.exchange.leave("this trainer has joined the run again")
        if self._reduction in (HIERARCHICAL, ADAPTIVE):
            ranks = [at.coordinates.dp_rank for at in self._membership.rank_assignments]
            # A member of the group that is away for a moment does not end it.
            if len(ranks) != 1 or self._relay is None or ranks[0] not in self._relay.group:
                self._enter_relay(GradientGroups(self._membership, self._config, self._pushes))
            else:
                self._relay.enter_group(self._relay.group)

    def close(self) -> None:
        """See ``GradientSums.close``."""
        if self._group is not None:
            self._group.close()


def _can_be_summed(unit: RemoteUnit, gradients: Sequence[tuple[int, torch.Tensor]]) -> bool:
    """True if gradients of one trainer of each replica are added in their own dtype."""
    # Servers add 16-bit gradients in float32 and round once.
    has_wide = bool(gradients) and all(gradient.element_size() >= 4 for _, gradient in gradients)
    return has_wide and unit.layout.contributors_per_item == 1
