"""Presets that save memory at the cost of time: recomputation, repeated gathers, lossy transfers and offloading."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from shardwell.memory.allocator import keep_freed_memory, return_freed_memory
from shardwell.module.activation_offload import offload_activations
from shardwell.module.hooks import keep_attribute, wrap_forward
from shardwell.module.sharded_module import sharding_of
from shardwell.module.strategy import BackwardPrefetch, ShardingStrategy
from shardwell.session.session import Session
from shardwell_wire.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """Settings of ``auto_wrap(memory=...)``. None keeps the setting of ``join`` or ``fully_shard``."""

    strategy: ShardingStrategy | None = None
    """Sharding strategy of every unit."""
    reshard_after_forward: bool | None = None
    """Whether units are freed after the forward. True also frees the outermost unit."""
    keep_bytes: int | None = None
    """Bytes of weights that may stay gathered between their uses in a step."""
    prefetch_bytes: int | None = None
    """Bytes of weights that may be gathered before they are used."""
    backward_prefetch: BackwardPrefetch | None = None
    """When the next unit of a backward is gathered."""
    checkpoint_activations: bool = False
    """Recompute the forward of each outermost unit inside the model in the backward, instead of saving activations.
    Does not apply to modules with batch normalisation, which would count a batch twice."""
    offload_to: str | os.PathLike[str] | None = None
    """Where activations of the same units are stored until the backward; with checkpointing, only their inputs. See
    ``offload_activations``."""
    offload_min_bytes: int = 1 << 20
    """Activations below this size are not offloaded."""
    keep_freed_memory: bool | None = None
    """Whether the C library keeps the memory of freed gradients and activations for reuse, which is faster. Applies to
    the whole process. See docs/memory.md."""
    gather_dtype: str | None = None
    """Wire dtype of fp32 weights. Lossy dtypes round the weights that trainers compute with."""
    push_dtype: str | None = None
    """Wire dtype of fp32 gradients. Lossy dtypes round the gradients before they are summed."""

    def unit_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments of ``fully_shard``, or none if ``given`` has an argument about the same subject."""
        if {"strategy", "reshard_after_forward"} & given.keys():
            return {}
        return {"strategy": self.strategy, "reshard_after_forward": self.reshard_after_forward}


class MemoryStrategy(enum.Enum):
    """How much memory to save at the cost of time. BASIC and STANDARD train to the same bits as plain PyTorch.

    AGGRESSIVE and EXTREME transfer weights and gradients as bfloat16, to make up for more gathers.
    ``options(gather_dtype=None, push_dtype=None)`` makes both exact.
    """

    BASIC = enum.auto()
    """Weights stay gathered from the forward to the backward. Nothing is recomputed."""
    STANDARD = enum.auto()
    """Weights are freed after the forward and gathered again. Activations of units are recomputed."""
    AGGRESSIVE = enum.auto()
    """As STANDARD. In addition, the outermost unit is freed, no weights stay gathered between uses, freed memory
    returns to the system, weights and gradients are transferred as bfloat16, and inputs of checkpoints are offloaded
    from the GPU to host memory."""
    EXTREME = enum.auto()
    """As AGGRESSIVE, but inputs of checkpoints are offloaded to files, and no weights are prefetched."""

    def options(self, **overrides: Any) -> MemoryOptions:
        """Returns the settings of the strategy, with overrides.

        Args:
            **overrides: Fields of ``MemoryOptions``.
        """
        try:
            return replace(_OPTIONS[self], **overrides)
        except TypeError as error:
            raise UsageError(f"{self}.options: {error}") from None


_AGGRESSIVE = MemoryOptions(
    strategy=ShardingStrategy.FULL_SHARD,
    reshard_after_forward=True,
    keep_bytes=0,
    checkpoint_activations=True,
    offload_to="cpu",
    keep_freed_memory=False,
    gather_dtype="bfloat16",
    push_dtype="bfloat16",
)
_OPTIONS = {
    MemoryStrategy.BASIC: MemoryOptions(strategy=ShardingStrategy.SHARD_GRAD_OP),
    MemoryStrategy.STANDARD: MemoryOptions(strategy=ShardingStrategy.FULL_SHARD, checkpoint_activations=True),
    MemoryStrategy.AGGRESSIVE: _AGGRESSIVE,
    MemoryStrategy.EXTREME: replace(
        _AGGRESSIVE, prefetch_bytes=0, backward_prefetch=BackwardPrefetch.NONE, offload_to="disk"
    ),
}


def resolve(memory: MemoryStrategy | MemoryOptions) -> MemoryOptions:
    """Returns the options of a strategy."""
    if isinstance(memory, MemoryStrategy):
        return memory.options()
    if not isinstance(memory, MemoryOptions):
        raise UsageError(f"memory={memory!r}: expected a MemoryStrategy, or its options(...)")
    return memory


def configure_session(session: Session, options: MemoryOptions) -> None:
    """Applies the settings that all units of a session share. Call it before the first unit is made.

    Raises:
        UsageError: The options change a wire dtype after units were made.
    """
    units = session.units
    if options.gather_dtype is not None or options.push_dtype is not None:
        session.store.set_wire_dtypes(options.gather_dtype, options.push_dtype)
    if options.keep_freed_memory:
        keep_freed_memory()
    elif options.keep_freed_memory is not None:
        return_freed_memory()
    units.set_limits(
        prefetch_bytes=options.prefetch_bytes,
        keep_bytes=options.keep_bytes,
        backward_prefetch=options.backward_prefetch,
    )


def wrap_activations(modules: Sequence[nn.Module], options: MemoryOptions) -> None:
    """Wraps the forward of modules that became units, to recompute or offload their activations."""
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    for module in modules:
        if id(module) in inside:
            continue
        restore = keep_attribute(module, "forward")
        if options.checkpoint_activations and supports_recomputation(module):
            wrap_forward(module, _recompute)
        if options.offload_to is not None:
            offload_activations(module, to=options.offload_to, min_bytes=options.offload_min_bytes)
        sharding_of(module).undo.append(restore)


def _recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a forward in a checkpoint that receives each distinct argument once.

    Offloaded tensors are restored as new tensors. A tensor that is query, key and value of an attention must be
    restored as one tensor; otherwise the second forward would take another path than the first.
    """
    leaves, structure = tree_flatten((args, kwargs))
    once = {id(leaf): leaf for leaf in leaves}
    position = {key: number for number, key in enumerate(once)}
    positions = [position[id(leaf)] for leaf in leaves]

    def run(*values: Any) -> Any:
        positional, named = tree_unflatten([values[number] for number in positions], structure)
        return forward(*positional, **named)

    return checkpoint(run, *once.values(), use_reentrant=False)


def supports_recomputation(module: nn.Module) -> bool:
    """Returns whether a second forward has no side effects. Batch normalisation would count a batch twice."""
    return not any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats for part in module.modules()
    )
