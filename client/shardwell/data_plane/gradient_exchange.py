"""How trainers show each other the gradient of a unit, before each of them adds some shards of it.

Note: [Rounds of an exchange]
    A round exchanges the gradients of one unit. It takes place for all members or for none: a member adds its shards
    only if the gradients of all members are there, and all members see that alike. If a round does not take place, each
    member pushes its own gradient to all shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwell.data_plane.node_group import Round
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell_wire.layout import Segment


class Shown(Protocol):
    """The gradient of one unit that one member shows to the others, or the part of it that this trainer adds."""

    @property
    def epoch(self) -> int:
        """Epoch of the lease on the member's work item."""
        ...

    @property
    def lease_proof(self) -> bytes:
        """Proves this lease to shard servers. Zeros: the cluster has no key."""
        ...

    @property
    def attempt(self) -> int:
        """Attempt at the work item."""
        ...

    @property
    def cuts(self) -> int:
        """Identifies how the unit is cut into shards. Members with different cuts cannot share the work."""
        ...

    @property
    def indices(self) -> tuple[int, ...]:
        """Parameters that have a gradient, by rising index."""
        ...

    def part(self, segment: Segment) -> torch.Tensor | None:
        """Returns the gradient of a segment. None: its parameter has none. [numel]"""
        ...


@dataclass(frozen=True, slots=True)
class WholeGradient:
    """The whole gradient of one unit. A ``Shown``."""

    epoch: int
    lease_proof: bytes
    attempt: int
    cuts: int
    flats: Mapping[int, torch.Tensor]
    """Flattened gradients by parameter index. Each [numel]."""

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(sorted(self.flats))

    def part(self, segment: Segment) -> torch.Tensor | None:
        flat = self.flats.get(segment.parameter_index)
        return None if flat is None else flat[segment.start_element : segment.stop_element]


class Exchange(Protocol):
    """One member's view of the exchange. See Note: [Rounds of an exchange].

    ``collect`` and ``end_round`` are called by the thread that adds, ``leave`` by any thread, and the other methods by
    the training thread.
    """

    @property
    def active(self) -> bool:
        """False if this trainer has left the group for good."""
        ...

    def start_round(self, version: int) -> Round | None:
        """Starts the next round of a version. None: this trainer pushes its own gradient."""
        ...

    def offer(
        self,
        this_round: Round,
        unit: RemoteUnit,
        own: WholeGradient,
        copied: Callable[[], None],
        sent: Callable[[], None],
    ) -> None:
        """Starts to show this trainer's gradient to the others. Does not wait.

        Args:
            this_round: The result of ``start_round``.
            unit: The unit.
            own: The gradient.
            copied: Waits until the gradient is complete.
            sent: Called once, in any thread, when the gradient is not read any more by this method's work.
        """
        ...

    def collect(
        self, this_round: Round, unit: RemoteUnit, own: WholeGradient, is_over: Callable[[], bool]
    ) -> Sequence[Shown] | None:
        """Waits for the gradients of all members; returns them in the order of the members.

        Args:
            this_round: The round that was offered.
            unit: The unit.
            own: This trainer's gradient, which is complete.
            is_over: Returns True if the gradient does not count any more.

        Returns:
            None: the round does not take place. Otherwise valid until ``end_round``.

        Raises:
            Exception: A member is gone. It is unknown whether the round takes place for the others.
        """
        ...

    def end_round(self, this_round: Round) -> None:
        """Called when the gradients of a round are not read any more."""
        ...

    def finish_version(self, version: int) -> None:
        """Called when all gradients of a version are offered. The other members expect no more."""
        ...

    def skip(self, version: int) -> None:
        """Pushes own gradients for the rest of a version. The other members do not wait for this trainer."""
        ...

    def leave(self, reason: BaseException | str) -> None:
        """Leaves the group for good."""
        ...

    def stop(self) -> None:
        """Leaves the group at the end of the session. ``collect`` returns or raises soon."""
        ...

    def close(self) -> None:
        """Releases memory and connections. Called after ``stop``, when ``collect`` is not called any more."""
        ...


def adder_of(unit: RemoteUnit, number: int, num_members: int) -> int:
    """Returns the member that adds and pushes a shard. The members take turns, also from unit to unit."""
    return (unit.index * len(unit.shards) + number) % num_members


def cuts_of(unit: RemoteUnit) -> int:
    """Returns a number that differs for different ranges of shards, with the bits of a positive int64."""
    return hash(tuple((shard.start_bytes, shard.stop_bytes) for shard in unit.shards)) & ((1 << 62) - 1)
