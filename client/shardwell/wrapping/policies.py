"""Which modules of a model a user wants to be units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from shardwell.wrapping.candidates import Candidates
from shardwell_wire.errors import UsageError


class WrapPolicy(Protocol):
    """Chooses the modules that become units."""

    def choose(self, candidates: Candidates) -> Collection[nn.Module]:
        """Some of the candidates.

        Args:
            candidates: The modules inside the model that can be units, each after all modules inside it; a sequence.
        """
        ...


@runtime_checkable
class GroupPolicy(WrapPolicy, Protocol):
    """Chooses also several modules that form one unit together."""

    def group(self, modules: Sequence[nn.Module]) -> Mapping[str, Sequence[nn.Module]]:
        """Some of the modules, by the name of their unit. They are no candidates then.

        Args:
            modules: As ``choose`` gets, and those that share parameters with others.
        """
        ...


@dataclass(frozen=True)
class NoWrapPolicy:
    """One unit for the whole model."""

    def choose(self, candidates: Candidates) -> Collection[nn.Module]:
        return []


@dataclass(frozen=True)
class ModuleTypePolicy:
    """A unit for every module of some types, such as ``{TransformerBlock}``.

    Args:
        module_types: The types; subclasses count.
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
    """A unit for every module for which a function says so.

    Args:
        function: Called with modules of the model, some twice. False or None: no unit. True: a unit of its own. A
            string: one unit of that name for all modules for which the function returns it, such as an embedding
            and the head that is tied to it.
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
    """A unit for every module with enough parameters that are in no inner unit.

    Parameters of smaller modules go to the unit around them. Ignored ones do not count.

    Args:
        min_num_params: Number of elements.
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
