"""Policies choose which modules of a model become units; presets save memory at the cost of time.

``Candidates`` are the modules that can become units, and ``Ties`` the parameters that they share. The presets recompute
activations, gather again, round what is transferred, and offload.
"""

from __future__ import annotations

import enum
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, overload, runtime_checkable

from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from shardwell.memory.buffers import keep_freed_memory, return_freed_memory
from shardwell.module.fully_shard import ShardedModule, sharding_of
from shardwell.module.guards import RUNS_IN_PART, has_forward
from shardwell.module.hooks import keep_attribute, wrap_forward
from shardwell.module.mixed_precision import local_part
from shardwell.module.strategy import BackwardPrefetch, ShardingStrategy
from shardwell.module.unit import owner_of
from shardwell.session.session import Session
from shardwell.wrapping.activation_offload import offload_activations
from shardwell_wire.errors import UsageError

_READS_CHILDREN = (nn.MultiheadAttention,)
"""Modules whose forward reads the parameters of their children without calling the children."""


class Candidates(Sequence[nn.Module]):
    """Modules inside a model that can become units. Every module comes after all modules inside it.

    Args:
        ignored: Parameters that no unit takes.
    """

    def __init__(self, modules: Sequence[nn.Module], ignored: Collection[nn.Parameter] = ()) -> None:
        self._modules = modules
        self._ignored = {id(parameter) for parameter in ignored}

    def __len__(self) -> int:
        return len(self._modules)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        return self._modules[index]

    def sizes(self, module: nn.Module) -> dict[int, int]:
        """Returns the number of elements of each parameter of a module that a unit could take, by ``id``."""
        return {
            id(parameter): local_part(parameter).numel()
            for parameter in module.parameters()
            if id(parameter) not in self._ignored and owner_of(parameter) is None
        }

    def num_parameters(self, module: nn.Module) -> int:
        """Returns the number of elements of the parameters of a module that a unit could take."""
        return sum(self.sizes(module).values())


def named_candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules inside a model that have a forward and are not sharded, with their names.

    Every module comes after all modules inside it.
    """
    for name, module in _inner_first(model, "", {id(model)}):
        if has_forward(module) and not isinstance(module, ShardedModule) and RUNS_IN_PART not in vars(module):
            yield name, module


def _inner_first(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if id(child) not in seen:
            seen.add(id(child))
            full_name = f"{name}.{child_name}" if name else child_name
            if not isinstance(child, _READS_CHILDREN):
                yield from _inner_first(child, full_name, seen)
            yield full_name, child


class Ties:
    """Parameters that several modules of a model hold.

    Args:
        model: The whole model.
        ignored: Parameters that do not count.
    """

    def __init__(self, model: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
        self._ignored = {id(parameter) for parameter in ignored}
        self._holders = self._count([model], once=True)
        self._paths = self._count([model], once=False)
        self._paths_to = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))

    def lead_outside(self, modules: Sequence[nn.Module]) -> bool:
        """Returns whether a parameter of the modules is also held by a module outside them."""
        inside = self._count(modules, once=True)
        return any(self._holders[parameter] > count for parameter, count in inside.items())

    def shared_outside(self, modules: Sequence[nn.Module], taken: Collection[int] = ()) -> bool:
        """Returns whether a module inside the modules is also inside another module of the model.

        Modules whose parameters are all in ``taken``, a collection of ids, do not count.
        """
        within: Counter[int] = Counter()
        for module in modules:
            for parameter, count in self._count([module], once=False).items():
                within[parameter] += count * self._paths_to[id(module)]
        return any(self._paths[parameter] > count for parameter, count in within.items() if parameter not in taken)

    def _count(self, modules: Sequence[nn.Module], *, once: bool) -> Counter[int]:
        """Counts the places that hold each parameter, by ``id``.

        If ``once``, a module that is in several places counts once.
        """
        parts: list[nn.Module] = [part for module in modules for _, part in module.named_modules(remove_duplicate=once)]
        held = dict.fromkeys(parts) if once else parts
        return Counter(
            id(parameter)
            for part in held
            for parameter in part._parameters.values()
            if parameter is not None and id(parameter) not in self._ignored
        )


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MIN_NUM_PARAMS = 1 << 20
"""Smallest size of units in a model without repeated blocks. Waiting for smaller units costs more than their memory."""


class WrapPolicy(Protocol):
    """Chooses the modules that become units."""

    def choose(self, candidates: Candidates) -> Collection[nn.Module]:
        """Returns the candidates that become units.

        Args:
            candidates: A sequence of modules inside the model. Every module comes after all modules inside it.
        """
        ...


@runtime_checkable
class GroupPolicy(WrapPolicy, Protocol):
    """A policy that can also put several modules into one unit."""

    def group(self, modules: Sequence[nn.Module]) -> Mapping[str, Sequence[nn.Module]]:
        """Returns sets of modules that form one unit, by the name of the unit. They are then no longer candidates.

        Args:
            modules: The candidates, and modules that share parameters with other modules.
        """
        ...


@dataclass(frozen=True)
class NoWrapPolicy:
    """Makes the whole model one unit."""

    def choose(self, candidates: Candidates) -> Collection[nn.Module]:
        return []


@dataclass(frozen=True)
class ModuleTypePolicy:
    """Makes every module of the given types a unit, such as ``{TransformerBlock}``.

    Args:
        module_types: Classes of modules. Subclasses count.
    """

    module_types: Collection[type[nn.Module]]

    def __post_init__(self) -> None:
        kinds = self.module_types
        if not (
            isinstance(kinds, Collection)
            and kinds
            and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)
        ):
            raise UsageError(
                f"ModuleTypePolicy({kinds!r}): expected classes of modules, such as ModuleTypePolicy({{Block}})"
            )

    def choose(self, candidates: Candidates) -> Collection[nn.Module]:
        return [module for module in candidates if isinstance(module, tuple(self.module_types))]


@dataclass(frozen=True)
class CustomPolicy:
    """Makes units of the modules that a function selects.

    Args:
        function: Called with modules of the model, possibly more than once. Returns False or None for no unit, True for
            a unit of this module, or a name. All modules with the same name form one unit, such as an embedding and the
            head that is tied to it.
    """

    function: Callable[[nn.Module], bool | str | None]

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise UsageError(
                f"CustomPolicy({self.function!r}): expected a function of a module; ModuleTypePolicy takes classes"
            )

    def group(self, modules: Sequence[nn.Module]) -> Mapping[str, Sequence[nn.Module]]:
        groups: dict[str, list[nn.Module]] = {}
        for module in modules:
            if isinstance(name := self.function(module), str) and name:
                groups.setdefault(name, []).append(module)
        return groups

    def choose(self, candidates: Candidates) -> Collection[nn.Module]:
        return [module for module in candidates if self.function(module)]


@dataclass(frozen=True)
class SizePolicy:
    """Makes every module a unit that has enough parameters outside of inner units.

    Parameters of smaller modules belong to the unit around them. Ignored parameters do not count.

    Args:
        min_num_params: Smallest number of elements of a unit.
    """

    min_num_params: int

    def __post_init__(self) -> None:
        if not isinstance(self.min_num_params, int | float) or self.min_num_params < 1:
            raise UsageError(f"SizePolicy(min_num_params={self.min_num_params!r}): expected a number, at least 1")

    def choose(self, candidates: Candidates) -> Collection[nn.Module]:
        chosen: list[nn.Module] = []
        taken: set[int] = set()
        for module in candidates:
            left = {key: size for key, size in candidates.sizes(module).items() if key not in taken}
            if sum(left.values()) >= self.min_num_params:
                chosen.append(module)
                taken.update(left)
        return chosen


@dataclass(frozen=True)
class BlockPolicy:
    """Makes every block of a model a unit, and every module outside the blocks that is at least as large.

    Blocks are the modules that the model itself names in ``_no_split_modules``, as Hugging Face's models do. In other
    models, they are the outermost modules whose class occurs several times in one container, such as the layers in the
    ``nn.ModuleList`` of a transformer. Modules without submodules, such as two embeddings in an ``nn.ModuleDict``, and
    modules with less than a tenth of the largest block's parameters are no blocks if there are others. Modules outside
    the blocks, such as embeddings and heads, become units if they
    are at least as large as the largest block. In a model without blocks, modules with a million parameters become
    units.

    Args:
        model: The whole model.
    """

    model: nn.Module

    def choose(self, candidates: Candidates) -> Collection[nn.Module]:
        found, size = {id(block) for block in self.blocks()}, candidates.num_parameters
        blocks = [module for module in candidates if id(module) in found]
        limit = max(map(size, blocks), default=_MIN_NUM_PARAMS)
        around = {id(module) for module in self.model.modules() if _contains_any(module, blocks)}
        inside = {id(part) for block in blocks for part in block.modules()}
        beside = [module for module in candidates if id(module) not in around | inside]
        large = [module for module in beside if size(module) >= limit]
        return [*blocks, *(module for module in large if not _contains_any(module, large))]

    def blocks(self) -> list[nn.Module]:
        """Returns the blocks, in the model's order."""
        modules = list(self.model.modules())
        names = {name for module in modules for name in getattr(module, "_no_split_modules", None) or ()}
        named = [module for module in modules if type(module).__name__ in names and has_forward(module)]
        if named:
            return named
        for leaves in (False, True):
            if found := list(dict.fromkeys(_outermost_repeated(self.model, set(), leaves=leaves))):
                return _without_small_classes(found)
        return []


def _outermost_repeated(module: nn.Module, seen: set[int], *, leaves: bool) -> Iterator[nn.Module]:
    children = [child for child in module.children() if id(child) not in seen]
    seen.update(map(id, children))
    repeated = _repeated_classes(children, leaves=leaves) if isinstance(module, _CONTAINERS) else set()
    for child in children:
        if type(child) in repeated:
            yield child
        else:
            yield from _outermost_repeated(child, seen, leaves=leaves)


def _without_small_classes(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    sizes: dict[type[nn.Module], int] = {}
    for block in blocks:
        size = sum(local_part(parameter).numel() for parameter in block.parameters())
        sizes[type(block)] = max(sizes.get(type(block), 0), size)
    return [block for block in blocks if 10 * sizes[type(block)] >= max(sizes.values())]


def _repeated_classes(modules: Sequence[nn.Module], *, leaves: bool) -> set[type[nn.Module]]:
    can_be_units = [
        module
        for module in modules
        if has_forward(module)
        and any(True for _ in module.parameters())
        and (leaves or any(True for _ in module.children()))
    ]
    counts = Counter(type(module) for module in can_be_units if not isinstance(module, _CONTAINERS))
    return {kind for kind, count in counts.items() if count > 1}


def _contains_any(module: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    wanted = {id(block) for block in blocks}
    return any(id(part) in wanted and part is not module for part in module.modules())


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
