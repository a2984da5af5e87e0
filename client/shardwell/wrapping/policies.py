"""Policies that choose which modules of a model become units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from shardwell.module.guards import has_forward
from shardwell.wrapping.candidates import Candidates
from shardwell_wire.errors import UsageError

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
    ``nn.ModuleList`` of a transformer. Modules outside the blocks, such as embeddings and heads, become units if they
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
        return [*blocks, *_innermost(large)]

    def blocks(self) -> list[nn.Module]:
        """Returns the blocks, in the model's order."""
        return _named_blocks(self.model) or _repeated_blocks(self.model)


def _named_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of the classes in ``_no_split_modules``."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names and has_forward(module)]


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    blocks: dict[int, nn.Module] = {}
    for block in _outermost_repeated(model, set()):
        blocks[id(block)] = block
    return list(blocks.values())


def _outermost_repeated(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    children = [child for child in module.children() if id(child) not in seen]
    seen.update(map(id, children))
    repeated = _repeated_classes(children) if isinstance(module, _CONTAINERS) else set()
    for child in children:
        if type(child) in repeated:
            yield child
        else:
            yield from _outermost_repeated(child, seen)


def _repeated_classes(modules: Sequence[nn.Module]) -> set[type[nn.Module]]:
    can_be_units = [module for module in modules if has_forward(module) and any(True for _ in module.parameters())]
    counts = Counter(type(module) for module in can_be_units if not isinstance(module, _CONTAINERS))
    return {kind for kind, count in counts.items() if count > 1}


def _contains_any(module: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    wanted = {id(block) for block in blocks}
    return any(id(part) in wanted and part is not module for part in module.modules())


def _innermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the modules that contain no other of the modules."""
    return [module for module in modules if not _contains_any(module, modules)]
