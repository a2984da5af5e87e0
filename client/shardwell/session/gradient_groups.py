"""Forms the groups of trainers that add gradients together, on this host or on several hosts."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from shardwell.data_plane.gradient_sums import GradientSums
from shardwell.data_plane.node_exchange import NodeExchange
from shardwell.data_plane.node_group import CONNECTED, MemberGoneError, Outcome
from shardwell.data_plane.peer_exchange import PeerExchange
from shardwell.data_plane.peer_links import Listener, connect
from shardwell.data_plane.pushes import Pushes
from shardwell.data_plane.shared_gradients import SharedGradients
from shardwell.session.config import JoinConfig
from shardwell.session.membership import Membership
from shardwell.session.process_groups import CONNECT_LIMIT_S, RENDEZVOUS_LIMIT_S, NodeMembers, key_of, meet
from shardwell.transport.route_stats import ALLREDUCE, HIERARCHICAL
from shardwell_wire.errors import ShardwellError, UnavailableError
from shardwell_wire.sum_order import SumOrder
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_PAUSE_S = 0.02
"""Pause between two questions for an address that another member publishes."""


@dataclass(frozen=True, slots=True)
class RankOwner:
    """The trainer that plays one logical data rank and no other."""

    dp_rank: int
    trainer: str
    epoch: int
    host: str


class GradientGroups:
    """Forms groups from the trainers that were members of the run when this trainer joined.

    Args:
        membership: The membership of this trainer. The world has ``tp = pp = 1``.
        config: Options of the trainer.
        pushes: Pushes gradients and sums.
    """

    def __init__(self, membership: Membership, config: JoinConfig, pushes: Pushes) -> None:
        self._membership, self._config, self._pushes = membership, config, pushes
        self.order = SumOrder(config.world.dp, config.reduction_groups)
        """The run's order of additions."""
        self.owners = self._find_owners()
        """The trainers that play one rank each, by rank. Empty: this trainer plays several."""

    def form_on_host(self) -> GradientSums | None:
        """Connects this trainer with the others of its largest reduction group that is complete on this host.

        Returns:
            None if no reduction group is complete, or if not all of its trainers could be connected. The reason is
            logged, and all of them get None.
        """
        return self._form(
            HIERARCHICAL, f"on host {self._config.host!r}", complete_group(self.order, self._on_host(), self._own)
        )

    def form_across_hosts(self) -> GradientSums | None:
        """Connects this trainer with the others of its largest reduction group that is complete, on any hosts.

        Returns:
            None if no reduction group is complete, or if this trainer could not reach all of its trainers. The reason
            is logged.
        """
        return self._form(ALLREDUCE, "of the run", complete_group(self.order, self.owners, self._own))

    def _form(self, route: str, where: str, members: Sequence[RankOwner]) -> GradientSums | None:
        if not members:
            logger.info("gradient group: no other trainers %s complete a reduction group with this one", where)
            return None
        ranks = tuple(owner.dp_rank for owner in members)
        named = NodeMembers(key_of((self._membership.identity, route, members)), ranks, ranks.index(self._own))
        connect_members = self._connect_node if route == HIERARCHICAL else self._connect_peers
        try:
            exchange = connect_members(named, members)
        except (ShardwellError, MemberGoneError, OSError) as error:
            reason = str(error).partition("\n")[0]
            logger.warning("gradient group: every trainer %s pushes its own gradients: %s", where, reason)
            return None
        logger.info("gradient group: logical ranks %s add their gradients (%s)", list(ranks), route)
        return GradientSums(route, exchange, ranks, named.position, self.order, self._pushes)

    @property
    def _own(self) -> int:
        return self._membership.rank_assignments[0].coordinates.dp_rank

    def _on_host(self) -> list[RankOwner]:
        return [owner for owner in self.owners if owner.host == self._config.host]

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

    # ---- on this host ----

    def _connect_node(self, named: NodeMembers, _: Sequence[RankOwner]) -> NodeExchange:
        rendezvous, folder = meet(named)
        try:
            memory = SharedGradients(folder.path, named.position, len(named.global_ranks))
            if rendezvous.decide(CONNECTED, 0, CONNECT_LIMIT_S) is not Outcome.EXCHANGE:
                raise UnavailableError("not all trainers of the node could be connected")
        except BaseException:
            rendezvous.close()
            raise
        return NodeExchange(rendezvous, memory)

    # ---- across hosts ----

    def _connect_peers(self, named: NodeMembers, members: Sequence[RankOwner]) -> PeerExchange:
        deadline = time.monotonic() + RENDEZVOUS_LIMIT_S
        position, size = named.position, len(members)
        host = _own_address(self._membership.coordinator_address)
        listener = Listener(host, position, size)
        with ExitStack() as opened:
            opened.callback(listener.close)
            name = "gradients-{}"
            self._publish(
                name.format(named.global_ranks[position]), f"{named.key} {listener.secret.hex()} {listener.port} {host}"
            )
            connected: dict[int, socket.socket] = {}
            unused = opened.enter_context(ExitStack())
            for other in range(position):
                at = self._await_address(name.format(named.global_ranks[other]), named.key, deadline)
                connected[other] = connect(at.host, at.port, at.secret, position, deadline)
                unused.callback(connected[other].close)
            connected |= listener.accept_all(deadline)
            unused.pop_all()
        return PeerExchange(
            connected,
            position,
            find_lost=self._lost_finder(members),
            wait_limit_s=self._config.waits.wait_limit_s,
        )

    def _exchange_address(self, name: str, address: str | None) -> str:
        request = coordinator_pb2.ExchangeAddressRequest(
            context=self._membership.context(0), trainer=self._membership.trainer, name=name, address=address
        )
        response: coordinator_pb2.ExchangeAddressResponse = self._membership.call("ExchangeAddress", request)
        return response.address

    def _publish(self, name: str, address: str) -> None:
        self._exchange_address(name, address)

    def _await_address(self, name: str, key: str, deadline: float) -> _PeerAddress:
        """Waits until a member of the group has published its address.

        Raises:
            UnavailableError: It has not until the deadline. It may have other options than this trainer.
        """
        while True:
            fields = self._exchange_address(name, None).split(" ")
            if len(fields) == 4 and fields[0] == key:
                return _PeerAddress(fields[3], int(fields[2]), bytes.fromhex(fields[1]))
            if time.monotonic() > deadline:
                rank = name.rpartition("-")[2]
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


@dataclass(frozen=True, slots=True)
class _PeerAddress:
    """Where a member accepts connections."""

    host: str
    port: int
    secret: bytes


def complete_group(order: SumOrder, owners: Iterable[RankOwner], dp_rank: int) -> tuple[RankOwner, ...]:
    """Returns the owners of the largest reduction group of a rank of which all ranks have owners. Empty: none."""
    by_rank = {owner.dp_rank: owner for owner in owners}
    complete = [group for group in order.groups_of(dp_rank) if len(group) > 1 and by_rank.keys() >= set(group)]
    return tuple(by_rank[rank] for rank in complete[-1]) if complete else ()


def _own_address(coordinator: str) -> str:
    """Returns the address of this host from which the coordinator is reached."""
    host, _, port = coordinator.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return own
