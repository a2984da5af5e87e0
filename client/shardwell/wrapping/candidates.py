"""Modules of a model that can become units, their sizes, and the parameters that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import overload

from torch import nn

from shardwell.module.guards import has_forward
from shardwell.module.sharded_module import ShardedModule
from shardwell.module.tensors import local_part
from shardwell.module.unit import owner_of

_READS_CHILDREN = (nn.MultiheadAttention,)
"""Modules whose forward reads the parameters of their children without calling the children."""


class Candidates(Sequence[nn.Module]):
    """Modules inside a model that can become units. Every module comes after all modules inside it.

    Args:
        modules: The candidates.
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
        if has_forward(module) and not isinstance(module, ShardedModule):
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
