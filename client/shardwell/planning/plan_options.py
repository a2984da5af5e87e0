"""Options of ``shardwell plan``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from shardwell.module.strategy import BackwardPrefetch, ShardingStrategy, check_strategy
from shardwell.parallel.pipeline import SchedulePlan
from shardwell_wire.encoding.wire_dtypes import GATHER_NAMES, PUSH_NAMES
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.optimizers import OPTIMIZERS, OptimizerSpec
from shardwell_wire.model.topology import World

OPTIMIZER_CHOICES: dict[str, tuple[OptimizerSpec, tuple[str, ...]]] = {
    **{name: (spec, ()) for name, spec in sorted(OPTIMIZERS.items())},
    **{
        f"{name}-{tensor.enabled_by}": (spec, (tensor.enabled_by,))
        for name, spec in sorted(OPTIMIZERS.items())
        for tensor in spec.state
        if tensor.enabled_by
    },
}
"""Optimizers by the name that a plan uses, such as ``sgd``, or ``sgd-momentum`` for the state that momentum enables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The run to plan. Fields with the name of an option of ``join`` or ``MemoryOptions`` mean the same."""

    world: World = field(default_factory=World)
    """The grid of logical ranks. Each rank has its own trainer."""
    num_servers: int = 1
    """Number of shard servers. All have the same memory, and each has its own link."""
    ranks_per_host: int = 1
    """Data-parallel ranks whose trainers share a host, its link and its cache."""
    bandwidth: float = 1e9 / 8
    """Bytes per second in each direction of the link of every trainer host and every server."""
    same_host: bool = False
    """Whether trainers read weights in the memory of servers on their host."""
    optimizer: str = "adamw"
    """A key of ``OPTIMIZER_CHOICES``."""
    min_shard_bytes: int = 2 << 20
    """Same as the coordinator's option of this name."""
    activation_bytes: int | None = None
    """Activations that autograd saves in one work item; None: recorded from an example call, if there is one."""

    gather_dtype: str = "float32"
    push_dtype: str = "float32"
    prefetch_bytes: int = 128 << 20
    push_bytes: int = 64 << 20
    keep_bytes: int | None = None
    host_cache_bytes: int = 0
    delta_cache_bytes: int = 0
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE

    strategy: ShardingStrategy | None = None
    reshard_after_forward: bool | None = None
    checkpoint_activations: bool = False
    offload_to: str | os.PathLike[str] | None = None
    offload_min_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_CHOICES:
            raise UsageError(f"optimizer={self.optimizer!r}: expected one of {', '.join(OPTIMIZER_CHOICES)}")
        if self.num_servers < 1 or self.bandwidth <= 0:
            raise UsageError(
                f"num_servers={self.num_servers}, bandwidth={self.bandwidth}: expected at least 1 server and a "
                "positive number of bytes per second"
            )
        if not 1 <= self.ranks_per_host <= self.world.dp:
            raise UsageError(
                f"ranks_per_host={self.ranks_per_host}: expected 1 to dp={self.world.dp}, the data-parallel ranks"
            )
        for name, known in (("gather_dtype", GATHER_NAMES), ("push_dtype", PUSH_NAMES)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")
        check_strategy("(planned)", self.strategy, None, self.reshard_after_forward)

    @property
    def reads_servers(self) -> bool:
        """True if weights are read in the servers' memory, which needs a lossless ``gather_dtype``."""
        return self.same_host and self.gather_dtype == "float32"

    @property
    def streams_gradients(self) -> bool:
        """False if gradients are copied to shared memory at once: none are in flight, and they are never rounded."""
        return not (self.same_host and self.push_dtype == "float32")

    def state_bytes(self, layout: UnitLayout) -> int:
        """Returns the bytes of optimizer state for a unit."""
        spec, enabled = OPTIMIZER_CHOICES[self.optimizer]
        return spec.state_bytes(layout, enabled)


@dataclass(frozen=True, kw_only=True, slots=True)
class DivisionOptions:
    """How a training script divides its model: the arguments of the functions of ``shardwell.parallel``."""

    schedule: str | None = None
    """One of ``shardwell.parallel.SCHEDULES``. None: ``1F1B`` if ``pp`` is above 1."""
    num_micro_batches: int | None = None
    """Micro-batches per work item. None: ``pp``."""
    stages_per_trainer: int | None = None
    """As in ``SchedulePlan``."""
    split_by: Literal["layers", "cost"] = "layers"
    """As in ``split_model``."""
    vocabulary: bool = True
    sequence_parallel: bool = False
    loss_parallel: bool = False
    fused_by_head: bool = False
    """These four as in ``plan_tensor_parallel``."""

    def schedule_plan(self, world: World) -> SchedulePlan | None:
        """Returns the schedule of a world; None if ``pp`` is 1 and no schedule is given.

        Raises:
            UsageError: The schedule does not work with these numbers.
        """
        if world.pp == 1 and self.schedule is None and self.num_micro_batches is None:
            return None
        return SchedulePlan(
            schedule=self.schedule or "1F1B",
            pp=world.pp,
            num_micro_batches=world.pp if self.num_micro_batches is None else self.num_micro_batches,
            stages_per_trainer=self.stages_per_trainer,
        )
