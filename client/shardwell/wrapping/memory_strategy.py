"""Four levels of memory against time: what is computed again, gathered again, rounded and moved out of the way."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from shardwell.memory.allocator import keep_freed_memory, return_freed_memory
from shardwell.module.activation_offload import offload_activations
from shardwell.module.hooks import wrap_forward
from shardwell.module.strategy import BackwardPrefetch, ShardingStrategy
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.session.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """What ``auto_wrap(memory=...)`` sets. None leaves what ``join`` and ``fully_shard`` do otherwise."""

    strategy: ShardingStrategy | None = None
    """Of every unit."""
    reshard_after_forward: bool | None = None
    """Of every unit: True frees the unit around all others after its forward, too."""
    keep_bytes: int | None = None
    """Weights that may stay between their uses in a step."""
    prefetch_bytes: int | None = None
    """Weights that may be gathered ahead of their use."""
    backward_prefetch: BackwardPrefetch | None = None
    """When the next unit of a backward is gathered."""
    checkpoint_activations: bool = False
    """Compute the forward of each outermost unit within the model again in the backward, instead of saving its
    activations. Modules with batch normalisation are left alone: it would count its batch twice."""
    offload_to: str | os.PathLike[str] | None = None
    """Where the same units' activations wait for the backward; with checkpointing only their inputs. See
    ``offload_activations``."""
    offload_min_bytes: int = 1 << 20
    """Smaller activations stay."""
    keep_freed_memory: bool | None = None
    """Whether the C library keeps freed gradients and activations for the next ones, which is faster; of the whole
    process. See docs/memory.md."""
    gather_dtype: str | None = None
    """How 32-bit weights travel; lossy ones round what is computed with."""
    push_dtype: str | None = None
    """How 32-bit gradients travel; lossy ones round what is summed."""

    def of_units(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of ``fully_shard``, but for those whose subject it was told about."""
        if {"strategy", "reshard_after_forward"} & told.keys():
            return {}
        return {"strategy": self.strategy, "reshard_after_forward": self.reshard_after_forward}


class MemoryStrategy(enum.Enum):
    """How much time is given for memory. BASIC and STANDARD train to the same bits as plain PyTorch.

    AGGRESSIVE and EXTREME round weights and gradients to bfloat16 on their way, to pay for gathering more often;
    ``options(gather_dtype=None, push_dtype=None)`` makes them exact, too.
    """

    BASIC = enum.auto()
    """Weights stay from the forward to the backward; nothing is computed again."""
    STANDARD = enum.auto()
    """Weights are freed after the forward and gathered again; activations of units are computed again."""
    AGGRESSIVE = enum.auto()
    """Also the outermost unit is freed, nothing is kept, freed memory goes back to the system, weights and gradients
    travel as bfloat16, and what checkpoints keep on a GPU waits in host memory."""
    EXTREME = enum.auto()
    """As AGGRESSIVE, but what checkpoints keep waits in files, and no weights are gathered ahead."""

    def options(self, **overrides: Any) -> MemoryOptions:
        """What the strategy sets, with some of it replaced.

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
    """The options that a strategy stands for."""
    if isinstance(memory, MemoryStrategy):
        return memory.options()
    if not isinstance(memory, MemoryOptions):
        raise UsageError(f"memory={memory!r}: expected a MemoryStrategy, or its options(...)")
    return memory


def prepare_session(session: Session, options: MemoryOptions) -> None:
    """Sets what all units of a session share; before the first one is made.

    Raises:
        UsageError: A dtype is to change after units were made.
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


def save_less(modules: Sequence[nn.Module], options: MemoryOptions) -> None:
    """Has modules that became units compute again, and move, what they save for the backward."""
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    for module in modules:
        if id(module) in inside:
            continue
        if options.checkpoint_activations and can_compute_again(module):
            wrap_forward(module, _compute_again)
        if options.offload_to is not None:
            offload_activations(module, to=options.offload_to, min_bytes=options.offload_min_bytes)


def _compute_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a forward in a checkpoint that is given each argument once.

    What is offloaded comes back as new tensors. One that is query, key and value of an attention must be one tensor
    again, else the second forward takes another path than the first.
    """
    leaves, structure = tree_flatten((args, kwargs))
    once = {id(leaf): leaf for leaf in leaves}
    place = {key: number for number, key in enumerate(once)}
    places = [place[id(leaf)] for leaf in leaves]

    def run(*values: Any) -> Any:
        again, named = tree_unflatten([values[number] for number in places], structure)
        return forward(*again, **named)

    return checkpoint(run, *once.values(), use_reentrant=False)


def can_compute_again(module: nn.Module) -> bool:
    """Whether a second forward changes nothing: batch normalisation would count its batch twice."""
    return not any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats for part in module.modules()
    )
