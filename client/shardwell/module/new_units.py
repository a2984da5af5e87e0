"""New units: how the parameters of a ``fully_shard`` call are divided among them, their names, and initial values.

A parameter that tensor parallelism splits is stored as one part per tensor-parallel rank. All other parameters are the
same on every tensor-parallel rank, and are stored and pushed once. The two kinds are in different units. A call of
``fully_shard`` makes ``NAME`` with the whole parameters, and ``NAME@tpK`` with the parts of tensor-parallel rank ``K``.

A parameter that several pipeline stages share, such as an embedding on the first stage and the head on the last, is a
unit of its own, which is named after the parameter. The trainers of all these stages declare, gather and push it.

``materialized`` gives modules on the meta device real parameters and buffers: the same objects in the same places,
without values. ``plan_values`` then decides where each value comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeGuard

import torch
from torch import nn
from torch.utils import swap_tensors

from shardwell.module.mixed_precision import is_split, local_box, local_part
from shardwell.module.parameter_store import InitialValues, NewValues
from shardwell.module.parameters import FoundParameter, Site, is_sharded
from shardwell.seeds import derive_seed
from shardwell_wire.errors import TiedParameterError, UsageError
from shardwell_wire.model.layout import UnitLayout

_ATTRIBUTE = "_shardwell_stage_ties"


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPlace:
    """The place of a trainer's units on the axes inside a replica of its run."""

    tp: int = 1
    """Size of the tensor axis."""
    pp: int = 1
    """Size of the pipeline axis."""
    tp_rank: int = 0
    pp_rank: int = 0
    cp: int = 1
    """Size of the context axis."""
    cp_rank: int = 0

    def require_unique(self, name: str | None, class_name: str) -> None:
        """Raises UsageError for a unit without a given name, if other pipeline stages may use the same default name."""
        if name is None and self.pp > 1:
            raise UsageError(
                f"the unit of {class_name} has no name, but this run has {self.pp} pipeline stages, over which the "
                "names of units and parameters must be unique: pass fully_shard(..., name=) with the module's name in "
                "the whole model, or use auto_wrap, which does so"
            )

    def root_name(self, name: str) -> str:
        """Returns the name of a stage's root unit, which ``auto_wrap`` names after the model's class."""
        return f"{name}:pp{self.pp_rank}" if self.pp > 1 else name

    def buffers_name(self, number: int | str) -> str:
        """Returns the name of a unit of buffers.

        Args:
            number: Number of such units that the trainer has declared before, or a name.
        """
        return f"buffers:pp{self.pp_rank}:{number}" if self.pp > 1 else f"buffers:{number}"


@dataclass(frozen=True, slots=True)
class NewUnit:
    """A unit that a ``fully_shard`` call is about to make."""

    layout: UnitLayout
    found: Sequence[FoundParameter]
    """Its parameters, in layout order."""


def plan_units(name: str, found: Sequence[FoundParameter], placement: str, place: GridPlace) -> list[NewUnit]:
    """Divides the parameters of one ``fully_shard`` call into units without empty ones.

    Without parameters that stages share, there are at most two units.

    Args:
        name: Name of the modules.
        found: All parameters.
        placement: Placement of the units, as in ``UnitLayout``.
        place: Place of the trainer in the grid.

    Raises:
        TiedParameterError: Stages that share a parameter belong to one trainer.
    """
    ties = {id(entry): tie for entry in found if place.pp > 1 and (tie := tie_of(entry.sites)) is not None}
    own = [entry for entry in found if id(entry) not in ties]
    units = _plan(name, own, placement, place, (place.pp_rank,))
    for entry in found:
        if (tie := ties.get(id(entry))) is not None:
            entry.names = list(tie.names)  # the same in all stages
            units += _plan(tie.names[0], [entry], placement, place, tie.pp_ranks(place.pp, place.pp_rank))
    return units


def _plan(
    name: str, found: Sequence[FoundParameter], placement: str, place: GridPlace, pp_ranks: tuple[int, ...]
) -> list[NewUnit]:
    """Returns a unit of the parameters that are whole, and one of those that tensor parallelism splits."""
    divided = [(name, 0, list(found))]
    if place.tp > 1:
        split = [entry for entry in found if is_split(entry.parameter)]
        whole = [entry for entry in found if not is_split(entry.parameter)]
        divided = [(name, 0, whole), (f"{name}@tp{place.tp_rank}", place.tp_rank, split)]
    return [
        NewUnit(
            UnitLayout(
                unit_name,
                tuple(entry.describe() for entry in entries),
                placement,
                tp_rank=tp_rank,
                pp_ranks=pp_ranks,
                cp=place.cp,
            ),
            entries,
        )
        for unit_name, tp_rank, entries in divided
        if entries
    ]


@dataclass(frozen=True, slots=True)
class StageTie:
    """A parameter that several stages hold."""

    names: tuple[str, ...]
    """Its names in the whole model, in the model's order."""
    stages: tuple[int, ...]
    """Indices of the stages, rising."""

    def pp_ranks(self, pp: int, own_pp_rank: int) -> tuple[int, ...]:
        """Returns the pipeline ranks of the stages, rising.

        Args:
            pp: Size of the pipeline axis. Stage ``s`` belongs to pipeline rank ``s % pp``.
            own_pp_rank: Pipeline rank of this trainer, which holds one of the stages.

        Raises:
            TiedParameterError: Two of the stages belong to one trainer.
        """
        ranks = tuple(sorted({stage % pp for stage in self.stages}))
        if len(ranks) < len(self.stages) or own_pp_rank not in ranks:
            raise self.refusal(pp)
        return ranks

    def check_holders(self, holders: Sequence[int]) -> None:
        """Raises TiedParameterError if two of the stages belong to one trainer.

        Args:
            holders: Pipeline rank of each stage.
        """
        if len({holders[stage] for stage in self.stages}) < len(self.stages):
            raise self.refusal(len(set(holders)))

    def refusal(self, pp: int | None = None) -> TiedParameterError:
        """Returns the error for a trainer that runs two of the stages.

        Args:
            pp: Size of the pipeline axis. None: not known.
        """
        return TiedParameterError(
            f"parameter {self.names[0]!r} is tied over the stages {', '.join(map(str, self.stages))}, of which one "
            f"trainer runs two{'' if pp is None else f' (pp={pp})'}: use the schedule 1F1B or GPipe, with which a "
            "trainer has one stage, or keep these layers in one stage with split_model(..., starts=)",
            parameter=self.names[0],
        )


def mark_ties(model: nn.Module, stages: Sequence[nn.Module]) -> list[StageTie]:
    """Finds the parameters that several stages share, and records them in the modules that hold them.

    Modules keep the record when tensor parallelism replaces their parameters.

    Args:
        model: The whole model.
        stages: The stages, whose parameters are the model's.
    """
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)
    holders: dict[int, list[tuple[int, Site]]] = {}
    for index, stage in enumerate(stages):
        for part in stage.modules():
            for attribute, parameter in part._parameters.items():
                if parameter is not None:
                    holders.setdefault(id(parameter), []).append((index, Site(part, attribute)))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties = []
    for key, found in holders.items():
        indices = tuple(sorted({index for index, _ in found}))
        if len(indices) > 1:
            ties.append(StageTie(tuple(names[key]), indices))
            for _, site in found:
                site.module.__dict__.setdefault(_ATTRIBUTE, {})[site.name] = ties[-1]
    return ties


def tie_of(sites: Iterable[Site]) -> StageTie | None:
    """Returns the tie of the parameter that modules hold. None: one stage holds it."""
    for site in sites:
        tie: StageTie | None = site.module.__dict__.get(_ATTRIBUTE, {}).get(site.name)
        if tie is not None:
            return tie
    return None


NAMES_IN_MODEL = "_shardwell_names_in_model"
"""Attribute of a pipeline stage: all names of each parameter and persistent buffer of the whole model, by each name."""

InitFunction = Callable[[nn.Module], object]
"""Initialises a module's own parameters and buffers in place."""


class ValueSource(Protocol):
    """Provides values for modules that are about to be sharded."""

    @property
    def init(self) -> InitFunction | None:
        """Initialises modules with buffers for which the source has no values; None: their ``reset_parameters``."""
        ...

    def unit_values(self, layout: UnitLayout, found: Sequence[FoundParameter], seed: int) -> InitialValues:
        """Returns the values of all parameters of a new unit.

        Args:
            layout: Layout of the unit.
            found: Its parameters. Of a parameter that tensor parallelism splits, the values of this process's part.
            seed: Seed of random values, the same in all trainers.

        Raises:
            UsageError: The source has no values for a parameter.
        """
        ...

    def fill(self, site: Site, tensor: torch.Tensor) -> bool:
        """Writes the value of a tensor that stays in the trainer: a buffer or an ignored parameter.

        Returns:
            False if the source has no value for the tensor.
        """
        ...


@dataclass(slots=True)
class Blanks:
    """Parameters and buffers that were on the meta device and have no values yet."""

    parameters: frozenset[int] = frozenset()
    """Indices of a unit's parameters. They have a device now, but no memory."""
    buffers: list[Site] = field(default_factory=list)
    """Buffers, whose memory has arbitrary content."""

    def __bool__(self) -> bool:
        return bool(self.parameters or self.buffers)


@contextmanager
def materialized(
    found: Sequence[FoundParameter], modules: Sequence[nn.Module], device: torch.device
) -> Iterator[Blanks]:
    """Moves tensors from the meta device to a device, and undoes the move if the block raises.

    Parameters stay the same objects, so ties, optimizers and lists that hold them stay valid.

    Args:
        found: Parameters of a future unit.
        modules: Their modules, whose buffers are moved too.
        device: The device to move to.

    Raises:
        UsageError: A parameter has a hook already, or a weak reference to it exists.
    """
    blank = [index for index, entry in enumerate(found) if entry.parameter.is_meta]
    swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
    sites = [(site, buffer) for site, buffer in _sites(modules, "_buffers") if buffer.is_meta]
    try:
        for index in blank:
            parameter = found[index].parameter
            real = _without_memory(found[index], device)
            _swap(parameter, real, found[index].names[0])
            swapped.append((parameter, real))
        _replace_buffers(sites, device)
        yield Blanks(frozenset(blank), [site for site, _ in sites])
    except BaseException:
        for site, buffer in sites:
            site.module._buffers[site.name] = buffer
        for parameter, real in swapped:
            _swap_contents(parameter, real)
        raise


def _without_memory(entry: FoundParameter, device: torch.device) -> nn.Parameter:
    """Returns a parameter of the same shape on a device; all elements share the memory of one."""
    parameter, local = entry.parameter, local_part(entry.parameter)
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UsageError(
            f"parameter {entry.names[0]!r} is on the meta device and has hooks, which fully_shard would remove: "
            "register them after fully_shard",
            parameter=entry.names[0],
        )
    values = torch.empty((), dtype=local.dtype, device=device).expand(local.shape)
    if not hasattr(parameter, "placements"):
        return nn.Parameter(values, parameter.requires_grad)
    real = nn.Parameter(_as_dtensor(values, parameter), parameter.requires_grad)
    vars(real).update(vars(parameter))
    return real


def _as_dtensor(local: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _swap(parameter: nn.Parameter, real: nn.Parameter, name: str) -> None:
    try:
        _swap_contents(parameter, real)
    except RuntimeError as error:
        raise UsageError(
            f"parameter {name!r} is on the meta device and cannot be given memory ({error}): call fully_shard before "
            "a graph refers to the parameter, or build the module on another device",
            parameter=name,
        ) from error


def _swap_contents(parameter: nn.Parameter, real: nn.Parameter) -> None:
    if hasattr(parameter, "placements"):
        swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
    else:  # swap_tensors refuses parameters with weak references. nn.LSTM has some, which must see the new content
        torch._C._swap_tensor_impl(parameter, real)


def _replace_buffers(sites: Sequence[tuple[Site, torch.Tensor]], device: torch.device) -> None:
    real: dict[int, torch.Tensor] = {}
    for site, buffer in sites:
        if id(buffer) not in real:
            real[id(buffer)] = torch.empty_like(buffer, device=device)
        site.module._buffers[site.name] = real[id(buffer)]


@dataclass(frozen=True, slots=True)
class PlannedValues:
    """How the units of one ``fully_shard`` call get their values."""

    units: Sequence[NewValues]
    """One entry per unit."""
    initialize_buffers: Callable[[], None]
    """Initialises blank buffers, if there is no unit."""


def plan_values(
    source: ValueSource | InitFunction | None,
    name: str,
    planned: Sequence[NewUnit],
    modules: Sequence[nn.Module],
    blanks: Blanks,
    seed: int,
) -> PlannedValues:
    """Decides where each parameter's values come from, and fills buffers for which the source has values.

    Args:
        source: None: parameters keep their values, and the modules' own ``reset_parameters`` initialise blank
            parameters. A function replaces ``reset_parameters``.
        name: Name of the ``fully_shard`` call's modules.
        planned: The units.
        modules: Modules of the units.
        blanks: Parameters and buffers without values.
        seed: Seed of random values.
    """
    found = [entry for unit in planned for entry in unit.found]
    buffers = [*_sites(modules, "_buffers")]
    filled = {site for site, buffer in buffers if source.fill(site, buffer)} if _is_source(source) else set()
    blank_buffers = [site for site in blanks.buffers if site not in filled]
    holders = dict.fromkeys(site.module for site in blank_buffers)
    function = None
    if _is_source(source):
        function = source.init
    elif source is None:
        holders = dict.fromkeys([found[index].sites[0].module for index in sorted(blanks.parameters)]) | holders
    elif not callable(source):
        raise UsageError(
            f"source={type(source).__name__}: expected shardwell.from_safetensors(model, path), "
            "shardwell.init.drawn(model), or a function. Load a state_dict by model.load_state_dict, before fully_shard"
        )
    else:
        function = source
        _require_blank(found, blanks)
        holders = dict.fromkeys(_outside_units(modules)) if blanks else {}
    initialize = partial(_initialize_all, _names(holders, name, found), function, seed)
    blank = [found[index] for index in sorted(blanks.parameters)]
    values, first = [], 0
    for unit in planned:
        own = range(first, first + len(unit.found))
        values.append(
            NewValues(
                source.unit_values(unit.layout, unit.found, seed) if _is_source(source) else None,
                frozenset(index - first for index in blanks.parameters if index in own),
                partial(_initialize_unit, initialize, blank, unit.found),
            )
        )
        first = own.stop
    return PlannedValues(values, initialize)


def fill_ignored(source: ValueSource | InitFunction | None, modules: Sequence[nn.Module]) -> None:
    """Makes a source write the parameters that stay in the trainer because they belong to no unit."""
    if not _is_source(source):
        return
    for site, parameter in _sites(modules, "_parameters"):
        if not is_sharded(parameter) and not parameter.is_meta:
            source.fill(site, parameter)


def _is_source(source: ValueSource | InitFunction | None) -> TypeGuard[ValueSource]:
    return hasattr(source, "unit_values")


def _sites(modules: Sequence[nn.Module], kind: str) -> Iterator[tuple[Site, torch.Tensor]]:
    for part in {part: None for module in modules for part in module.modules()}:
        for name, tensor in getattr(part, kind).items():
            if tensor is not None:
                yield Site(part, name), tensor


def _require_blank(found: Sequence[FoundParameter], blanks: Blanks) -> None:
    for index, entry in enumerate(found):
        if index not in blanks.parameters:
            raise UsageError(
                f"parameter {entry.names[0]!r} has values already, but a function as source= is only for modules on "
                "the meta device: call the function before fully_shard, and leave source= out",
                parameter=entry.names[0],
            )


def _outside_units(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yields all parts of modules that are not in an earlier unit, outer ones first."""
    for module in modules:
        yield module
        yield from _outside_units([child for child in module.children() if not hasattr(child, "_shardwell_sharding")])


def _names(modules: Iterable[nn.Module], name: str, found: Sequence[FoundParameter]) -> dict[nn.Module, str]:
    """Names modules uniquely in the model and, if possible, independently of how the model is cut into units."""
    by_id = {id(entry.parameter): entry.names[0] for entry in found}
    names = {}
    for number, module in enumerate(modules):
        first = next((by_id[id(item)] for item in module.parameters() if id(item) in by_id), f"{name}#{number}")
        names[module] = f"{first}/{type(module).__name__}"
    return names


def _initialize_unit(
    initialize: Callable[[], None], blank: Sequence[FoundParameter], own: Sequence[FoundParameter]
) -> None:
    """Initialises the blank parameters of one unit. Split parameters get their part of the whole parameter's values.

    Args:
        initialize: Initialises the modules of the ``fully_shard`` call.
        blank: Blank parameters of all units of the call.
        own: Parameters of the unit, which have memory.
    """
    own_ids = {id(entry.parameter) for entry in own}
    with _whole_parameters(
        [entry for entry in blank if id(entry.parameter) not in own_ids or hasattr(entry.parameter, "placements")]
    ) as wholes:
        initialize()
    with torch.no_grad():
        for entry, whole in wholes:
            if id(entry.parameter) in own_ids:
                local_part(entry.parameter).copy_(whole[local_box(entry.parameter).slices])


@contextmanager
def _whole_parameters(entries: Sequence[FoundParameter]) -> Iterator[list[tuple[FoundParameter, nn.Parameter]]]:
    """Replaces parameters in their modules by plain ones of the whole shape while the block runs; yields both.

    An init function then draws the same values for every grid, and finds memory for all parameters of its module.
    """
    wholes: list[tuple[FoundParameter, nn.Parameter]] = []
    for entry in entries:
        like = local_part(entry.parameter)
        whole = nn.Parameter(
            torch.empty(entry.parameter.shape, dtype=like.dtype, device=like.device), entry.parameter.requires_grad
        )
        wholes.append((entry, whole))
    try:
        for entry, whole in wholes:
            for site in entry.sites:
                site.module._parameters[site.name] = whole
        yield wholes
    finally:
        for entry, _ in wholes:
            for site in entry.sites:
                site.module._parameters[site.name] = entry.parameter


def _initialize_all(modules: Mapping[nn.Module, str], function: InitFunction | None, seed: int) -> None:
    """Initialises modules, inner ones first, each with its own seed."""
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
        "and no reset_parameters() to initialise them: pass fully_shard(..., source=) a function that initialises a "
        "module, shardwell.init.drawn(...) or shardwell.from_safetensors(...), the last two with init= for buffers; or "
        "build the module on another device",
        module=type(module).__name__,
    )
