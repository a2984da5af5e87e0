"""Sharding options that a user sets per unit: how long weights stay in a trainer, and when they are gathered."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shardwell_wire.errors import UsageError


class ShardingStrategy(enum.Enum):
    """Where a unit's weights are between their uses. All strategies give the same bits.

    The names are FSDP1's. With every strategy, gradients and optimizer state are on the servers.
    """

    FULL_SHARD = enum.auto()
    """Freed after the forward, gathered again for the backward, freed after the backward. The root unit is kept from
    its forward to the backward right after it, unless ``reshard_after_forward=True``. In ``eval()``, and where
    no result needs a gradient, the root unit is freed too; a later backward gathers it again."""
    SHARD_GRAD_OP = enum.auto()
    """Kept from the forward to the end of the backward, so gathered once per forward. Freed after a forward that has
    no backward, and in ``eval()``; a later backward gathers the unit again."""
    NO_SHARD = enum.auto()
    """A replica: stays in the trainer from its first use on. After each commit the new version is fetched into the
    same memory in the background, so the unit is gathered once per step, however many forwards the step has."""
    HYBRID_SHARD = enum.auto()
    """One full copy per host in shared memory, which all trainers of the host read. Its shards are fetched from the
    servers of other hosts once per host and step. If the servers run on this host, their memory is the copy."""


class BackwardPrefetch(enum.StrEnum):
    """When a backward gathers the weights of the next unit. The names are FSDP1's.

    A list that was passed to ``set_modules_to_backward_prefetch`` has precedence for its unit.
    """

    PRE = "pre"
    """Before the current unit computes, so that the computation hides the gather. Gathers as many units ahead as
    ``prefetch_bytes`` allows."""
    POST = "post"
    """After the current unit is freed and before its gradients are pushed. Only the push hides the gather, and the
    weights of one unit are held at a time."""
    NONE = "none"
    """When the next unit needs its weights, after the gradients of the current unit were pushed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """How the gradients of a ``NO_SHARD`` unit are pushed. The names are those of ``DistributedDataParallel``."""

    bucket_bytes: int = 25 << 20
    """Bytes of complete gradients that trigger a push. The rest is pushed at the end of the unit's backward. A bucket
    holds gradients of one unit. Over shared memory, each unit is one bucket."""
    push_during_backward: bool = True
    """False: nothing is pushed before the whole backward has ended."""
    find_unused_parameters: bool = False
    """Log the names of parameters without a gradient in a work item, once per set of names. Parameters without a
    gradient always work, also if ranks differ."""
    static_graph: bool = False
    """Declares that the same parameters get a gradient in every work item. The declaration is only verified: the end
    of a work item raises ``UsageError`` if the parameters differ from those of this trainer's first work item."""
    gradient_as_bucket_view: bool = False
    """Must be False: gradients are never copied into a bucket, so there is no copy to save."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise UsageError(f"bucket_bytes={self.bucket_bytes!r}: expected at least 1")
        if self.gradient_as_bucket_view:
            raise UsageError(
                "gradient_as_bucket_view=True is not supported: gradients are passed to the transport as autograd "
                "made them and never copied into a bucket, so parameter.grad cannot be a view of one. Remove the "
                "argument"
            )


_CONTRADICTIONS = {
    (ShardingStrategy.FULL_SHARD, False): "frees the weights: use SHARD_GRAD_OP",
    (ShardingStrategy.SHARD_GRAD_OP, True): "keeps the weights: use FULL_SHARD",
    (ShardingStrategy.NO_SHARD, True): "keeps the weights: use FULL_SHARD",
}


def check_strategy(
    unit_name: str,
    strategy: ShardingStrategy | None,
    replica: ReplicaOptions | None,
    reshard_after_forward: bool | None,
) -> None:
    """Raises UsageError if the options of one unit are invalid or contradict each other."""
    if not isinstance(reshard_after_forward, bool | None):
        raise UsageError(
            f"unit {unit_name!r}: reshard_after_forward={reshard_after_forward!r}: expected True, False or None; "
            "FSDP2's number of ranks corresponds to ShardingStrategy.HYBRID_SHARD, one copy per host",
            unit=unit_name,
        )
    if strategy is not None and not isinstance(strategy, ShardingStrategy):
        names = ", ".join(str(member) for member in ShardingStrategy)
        raise UsageError(f"strategy={strategy!r}: expected one of {names}", unit=unit_name)
    if replica is not None and strategy is not ShardingStrategy.NO_SHARD:
        raise UsageError(
            f"unit {unit_name!r}: replica=... sets how a replica's gradients are pushed and needs "
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
