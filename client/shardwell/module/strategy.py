"""How long weights stay in a trainer and when they are gathered: what a user chooses, and which choices contradict."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.module.unit import Unit


class ShardingStrategy(enum.Enum):
    """Where a unit's weights are between their uses. The results are the same bits with each.

    The names are FSDP1's. Gradients and optimizer state are on the servers with every one of them.
    """

    FULL_SHARD = enum.auto()
    """Freed after the forward, gathered again for the backward, freed after that. The unit around all others is kept
    from its forward to its backward, which follows at once, unless ``reshard_after_forward=True``. It is freed, too, in
    ``eval()`` and where no result needs a gradient: a backward gathers it again."""
    SHARD_GRAD_OP = enum.auto()
    """Kept from the forward to the end of the backward; gathered once per forward. Freed after a forward that has no
    backward, and in ``eval()``: a backward gathers it again."""
    NO_SHARD = enum.auto()
    """A replica: stays in the trainer from its first use on. After each commit the new version is fetched into the
    same memory in the background, so it is gathered once per step, however many forwards there are."""
    HYBRID_SHARD = enum.auto()
    """One full copy per host, in shared memory, which the trainers of the host read: its shards are fetched from
    servers of other hosts once per host and step. Where the servers are on this host their memory is the copy."""


class BackwardPrefetch(enum.StrEnum):
    """When, in a backward, the weights of the next unit are gathered. The names are FSDP1's.

    A list given to ``set_modules_to_backward_prefetch`` has precedence for its unit.
    """

    PRE = "pre"
    """Before the current unit computes, so that the gather hides behind that; as many units ahead as ``prefetch_bytes``
    allows."""
    POST = "post"
    """When the current unit has computed and is freed, before its gradients are pushed: the gather hides behind that
    only, and the weights of one unit are held at a time."""
    NONE = "none"
    """When the next unit needs them, after the gradients of the current one were handed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """How the gradients of a ``NO_SHARD`` unit travel: what ``DistributedDataParallel`` is told."""

    bucket_bytes: int = 25 << 20
    """Gradients are pushed whenever so many are complete, and at the end of the unit's backward. A bucket holds
    gradients of one unit. Where gradients go through shared memory each unit is one bucket."""
    push_during_backward: bool = True
    """False: nothing is pushed before the whole backward is over."""
    find_unused_parameters: bool = False
    """Log the names of parameters that get no gradient in a work item, once for each set of names. Parameters
    without a gradient always work, also when ranks differ."""
    static_graph: bool = False
    """The same parameters get a gradient in every work item. This is verified: the end of a work item raises
    ``UsageError`` if they differ from those of this trainer's first one. Nothing relies on it."""
    gradient_as_bucket_view: bool = False
    """Refused if True: a gradient is handed over, never copied into a bucket, so there is no copy to save."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise UsageError(f"bucket_bytes={self.bucket_bytes!r}: expected at least 1")
        if self.gradient_as_bucket_view:
            raise UsageError(
                "gradient_as_bucket_view=True: gradients are handed over to the transport as autograd made them and "
                "never copied into a bucket, so parameter.grad cannot be a view of one and there is no copy to save. "
                "Leave it out"
            )


_CONTRADICTIONS = {
    (ShardingStrategy.FULL_SHARD, False): "frees them: use SHARD_GRAD_OP",
    (ShardingStrategy.SHARD_GRAD_OP, True): "keeps them: use FULL_SHARD",
    (ShardingStrategy.NO_SHARD, True): "keeps them: use FULL_SHARD",
}


@dataclass(slots=True)
class UnitSettings:
    """What a user has chosen for one unit. None leaves the choice to ``Units``."""

    strategy: ShardingStrategy | None = None
    replica: ReplicaOptions = field(default_factory=ReplicaOptions)
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    forward_prefetch: tuple[Unit, ...] | None = None
    backward_prefetch: tuple[Unit, ...] | None = None


def check_strategy(
    unit_name: str,
    strategy: ShardingStrategy | None,
    replica: ReplicaOptions | None,
    reshard_after_forward: bool | None,
) -> None:
    """Raises UsageError for choices for one unit that can not all be met."""
    if not isinstance(reshard_after_forward, bool | None):
        raise UsageError(
            f"unit {unit_name!r}: reshard_after_forward={reshard_after_forward!r}: expected True, False or None; "
            "FSDP2's number of ranks is ShardingStrategy.HYBRID_SHARD here, one copy per host",
            unit=unit_name,
        )
    if strategy is not None and not isinstance(strategy, ShardingStrategy):
        names = ", ".join(str(known) for known in ShardingStrategy)
        raise UsageError(f"strategy={strategy!r}: expected one of {names}", unit=unit_name)
    if replica is not None and strategy is not ShardingStrategy.NO_SHARD:
        raise UsageError(
            f"unit {unit_name!r}: replica=... says how a replica's gradients travel and needs "
            f"strategy=ShardingStrategy.NO_SHARD, got {strategy}",
            unit=unit_name,
        )
    if strategy is None or reshard_after_forward is None:
        return
    if (advice := _CONTRADICTIONS.get((strategy, reshard_after_forward))) is not None:
        raise UsageError(
            f"unit {unit_name!r}: reshard_after_forward={reshard_after_forward} contradicts {strategy}, which after a "
            f"forward {advice}, or leave the choice to the strategy with reshard_after_forward=None",
            unit=unit_name,
        )
