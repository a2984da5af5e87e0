"""Options of ``shardwell plan``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from shardwell.module.strategy import BackwardPrefetch, ShardingStrategy, check_strategy
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

    def state_bytes(self, layout: UnitLayout) -> int:
        """Returns the bytes of optimizer state for a unit."""
        spec, enabled = OPTIMIZER_CHOICES[self.optimizer]
        return spec.state_bytes(layout, enabled)
