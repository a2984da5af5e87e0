"""Where the values of a new unit come from: its parameters, its modules, or a source beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeGuard, cast

import torch
from torch import nn

from shardwell.module.collect import FoundParameter, Site
from shardwell.module.meta import Blanks
from shardwell.module.parameter import owner_of
from shardwell.module.store import InitialValues
from shardwell.seeds import derive_seed
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import Segment, UnitLayout
from shardwell_wire.v1 import initialization_pb2

InitFunction = Callable[[nn.Module], object]
"""Gives values to the parameters and buffers that a module holds itself, in place."""


@dataclass(frozen=True, slots=True)
class Naming:
    """What values that are a function of names and seed depend on."""

    seed: int
    """Of the run and the pipeline stage."""
    prefix: str
    """Begins every name in the session; values do not depend on it."""


class ValueSource(Protocol):
    """Has values for modules that are about to be sharded."""

    @property
    def init(self) -> InitFunction | None:
        """What initialises modules with buffers that it has no values for; None: their ``reset_parameters``."""
        ...

    def unit_values(self, layout: UnitLayout, found: Sequence[FoundParameter], naming: Naming) -> InitialValues:
        """The values of all parameters of a new unit.

        Raises:
            UsageError: It has none for one of them.
        """
        ...

    def fill(self, site: Site, tensor: torch.Tensor) -> bool:
        """Writes the value of what stays in the trainer, a buffer or an ignored parameter; False if it has none."""
        ...


@dataclass(frozen=True, slots=True)
class FlatValues:
    """Initial values that lie in a unit's flat vector in this process's memory.

    Args:
        flat: All of it. [size_bytes]
    """

    flat: memoryview

    @property
    def draws(self) -> Mapping[int, initialization_pb2.ParameterDraw]:
        """None."""
        return {}

    def read(self, segment: Segment) -> Iterator[memoryview]:
        """See ``InitialValues.read``."""
        yield self.flat[segment.start_bytes : segment.stop_bytes]


@dataclass(frozen=True, slots=True)
class NewValues:
    """What a new unit needs to get its values.

    Args:
        elsewhere: The values, unless they are in the parameters or computed by ``initialize``.
        blank: The parameters without values, by index.
        initialize: Gives values to blank parameters, once they have memory, and to blank buffers.
    """

    elsewhere: InitialValues | None = None
    blank: frozenset[int] = frozenset()
    initialize: Callable[[], None] = lambda: None


def plan_values(
    source: ValueSource | InitFunction | None,
    layout: UnitLayout,
    found: Sequence[FoundParameter],
    modules: Sequence[nn.Module],
    blanks: Blanks,
    naming: Naming,
) -> NewValues:
    """Decides where each parameter's values come from, and fills buffers for which the source has values.

    Args:
        source: None: parameters keep the values they hold; the modules' own ``reset_parameters`` makes those of
            blank ones. A function does so instead of ``reset_parameters``.
        layout: Of the unit.
        found: Its parameters.
        modules: Their modules.
        blanks: What has no values.
        naming: What random values depend on.
    """
    filled = _fill_buffers(source, modules) if _is_source(source) else set()
    blank_buffers = [site for site in blanks.buffers if (id(site.module), site.name) not in filled]
    holders = dict.fromkeys(site.module for site in blank_buffers)
    values, function = None, None
    if _is_source(source):
        function = source.init
        values = source.unit_values(layout, found, naming) if found else None
    elif source is None:
        holders = dict.fromkeys([found[index].sites[0].module for index in sorted(blanks.parameters)]) | holders
    else:
        function = cast(InitFunction, source)
        _require_blank(found, blanks)
        holders = dict.fromkeys(_outside_units(modules)) if blanks else {}
    names = _names(holders, layout, found, naming)
    return NewValues(values, blanks.parameters, partial(_initialize_all, names, function, naming.seed))


def fill_ignored(source: ValueSource | InitFunction | None, modules: Sequence[nn.Module]) -> None:
    """Has a source write the parameters that stay in the trainer because they are in no unit."""
    if not _is_source(source):
        return
    for site, parameter in _sites(modules, "_parameters"):
        if owner_of(parameter) is None and not parameter.is_meta:
            source.fill(site, parameter)


def _is_source(source: ValueSource | InitFunction | None) -> TypeGuard[ValueSource]:
    return hasattr(source, "unit_values")


def _fill_buffers(source: ValueSource, modules: Sequence[nn.Module]) -> set[tuple[int, str]]:
    """Returns which: by the module's id and the buffer's name there."""
    return {(id(site.module), site.name) for site, buffer in _sites(modules, "_buffers") if source.fill(site, buffer)}


def _sites(modules: Sequence[nn.Module], kind: str) -> Iterator[tuple[Site, torch.Tensor]]:
    for part in {part: None for module in modules for part in module.modules()}:
        for name, tensor in getattr(part, kind).items():
            if tensor is not None:
                yield Site(part, name), tensor


def _require_blank(found: Sequence[FoundParameter], blanks: Blanks) -> None:
    for index, entry in enumerate(found):
        if index not in blanks.parameters:
            raise UsageError(
                f"parameter {entry.names[0]!r} has values already, and a function as source is for modules on the meta "
                "device: call it before fully_shard, without source=",
                parameter=entry.names[0],
            )


def _outside_units(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """All parts of modules but those inside units that were made before, outer ones first."""
    for module in modules:
        yield module
        yield from _outside_units([child for child in module.children() if not hasattr(child, "_shardwell_sharding")])


def _names(
    modules: Iterable[nn.Module], layout: UnitLayout, found: Sequence[FoundParameter], naming: Naming
) -> dict[nn.Module, str]:
    """Something that tells a module from others in the model, and does not depend on how units are cut if possible."""
    by_id = {id(entry.parameter): entry.names[0].removeprefix(naming.prefix) for entry in found}
    names = {}
    for number, module in enumerate(modules):
        fallback = f"{layout.unit.removeprefix(naming.prefix)}#{number}"
        first = next((by_id[id(item)] for item in module.parameters() if id(item) in by_id), fallback)
        names[module] = f"{first}/{type(module).__name__}"
    return names


def _initialize_all(modules: Mapping[nn.Module, str], function: InitFunction | None, seed: int) -> None:
    """Initialises modules, inner ones first; each begins with random numbers of its own."""
    for module, name in reversed(list(modules.items())):
        _initialize(module, function or _own_function(module, name), derive_seed(seed, "initial", name))


def _initialize(module: nn.Module, function: InitFunction, seed: int) -> None:
    tensors = (*module._parameters.values(), *module._buffers.values())
    devices = {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        function(module)


def _own_function(module: nn.Module, name: str) -> InitFunction:
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, method, None)):
            return lambda module: getattr(module, method)()
    blank = [name for name, tensor in (*module._parameters.items(), *module._buffers.items()) if tensor is not None]
    raise UsageError(
        f"{type(module).__name__} ({name.rpartition('/')[0]!r}) has {', '.join(map(repr, blank))} on the meta device "
        "and no reset_parameters() to give them values: pass fully_shard(..., source=) a function that initialises a "
        "module, shardwell.init.drawn(...) or shardwell.from_safetensors(...), the last two with init= for buffers; or "
        "build the module on another device",
        module=type(module).__name__,
    )
