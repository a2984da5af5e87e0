"""Checks of the arguments of ``fully_shard``, and of uses of a sharded module that would silently go wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from shardwell.module.mixed_precision import local_part
from shardwell.module.parameters import has_parts
from shardwell.module.unit import Unit
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import PARAMETER_ITEM_SIZES

_TORCHS_SHARDING = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


RUNS_IN_PART = "_shardwell_runs_in_part"
"""Attribute of modules around the layers of a pipeline stage: their forward may end in the middle."""


def has_forward(module: nn.Module) -> bool:
    """True if a module can be called; containers such as ``nn.ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


# Before sharding.


def check_session(session: object) -> None:
    """Raises UsageError unless an object is a session."""
    if not hasattr(session, "units"):
        raise UsageError(f"session={session!r}: expected the session that shardwell.join(...) returned")


def check_batch_norm(modules: Sequence[nn.Module], session: object) -> None:
    """Raises UsageError for SyncBatchNorm if the run has several data ranks."""
    world = getattr(session, "world", None)
    if world is None or world.dp == 1:
        return
    for module in modules:
        for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
            if isinstance(part, nn.SyncBatchNorm):
                which = f"submodule {name!r}" if name else "the module"
                raise UsageError(
                    f"{which} is a SyncBatchNorm, which would normalise with the batch of one data rank only, though "
                    f"the run has {world.dp}: any trainer may compute a work item, so no process group spans the data "
                    "ranks. Use BatchNorm with a larger batch per rank, a norm that does not depend on the batch "
                    "(GroupNorm, LayerNorm), or World(dp=1)"
                )


def check_modules(modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]) -> None:
    """Raises UsageError for modules that cannot be sharded."""
    for module in modules:
        kind = type(module).__name__
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"expected a module, got {kind}: fully_shard takes one module or several, auto_wrap a model"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{kind} cannot be sharded because its forward is compiled: shard the module it was made from"
            )
        if not has_forward(module):
            raise UsageError(
                f"{kind} has no forward, so nothing would gather its parameters: shard the modules in it, for part in "
                "model.children(): shardwell.auto_wrap(part, session). If the module has parameters of its own, give "
                "its class a forward, such as one of its other methods, and after sharding call "
                "shardwell.register_forward_method(model, name) for each method that is called"
            )
        if RUNS_IN_PART in vars(module):
            raise UsageError(
                f"the forward of {kind} is divided over pipeline stages, so nothing would free its parameters: shard "
                "the layers in it, then the stage"
            )
        if hasattr(module, "_shardwell_sharding"):
            raise UsageError(
                f"{kind} is sharded already: call fully_shard or auto_wrap once for each module. "
                "set_sharding_strategy and the module's other setters change its options; for another run or session "
                "construct the model again"
            )
        _refuse_foreign_parts(module, ignored)
    if not modules or len({id(module) for module in modules}) != len(modules):
        raise UsageError(f"fully_shard needs different modules, got {[type(module).__name__ for module in modules]}")


def _refuse_foreign_parts(module: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Raises for parts with parameters that are scripted, traced, or in torch's DDP or FSDP, compared by names."""
    ignored_ids = {id(parameter) for parameter in ignored}
    for name, part in module.named_modules():
        torchs = {base.__name__ for base in type(part).__mro__ if base.__module__.startswith("torch.")}
        holds, is_scripted = torchs & _TORCHS_SHARDING, isinstance(part, torch.jit.ScriptModule)
        if not (holds or is_scripted) or all(id(parameter) in ignored_ids for parameter in part.parameters()):
            continue
        if holds:
            raise UsageError(
                f"{type(part).__name__} holds its parameters itself (torch's {', '.join(holds)}): "
                "give fully_shard the module without this wrapper, or pass the parameters as ignored_params"
            )
        raise UsageError(
            f"{type(module).__name__} has a scripted or traced submodule {name!r} ({part.original_name}), whose "
            "compiled code cannot use parameters that are gathered and freed: replace it by the module it was "
            "made from, or pass its parameters as ignored_params, which keeps them in this trainer"
        )


def check_ignored(ignored: Collection[object]) -> None:
    """Raises UsageError for ``ignored_params`` that are not parameters."""
    for item in ignored:
        if not isinstance(item, nn.Parameter):
            raise UsageError(
                f"ignored_params has {item!r}: expected parameters, such as {{model.get_parameter('head.weight')}}"
            )


def check_parameters(named_parameters: Sequence[tuple[str, nn.Parameter]], meta_device: torch.device) -> None:
    """Raises UsageError for parameters that cannot be in one unit.

    Args:
        named_parameters: The parameters of the unit.
        meta_device: Target device of parameters that are on the meta device.
    """
    for name, parameter in named_parameters:
        if is_lazy(parameter):
            raise UsageError(f"parameter {name!r} has no shape yet: run the lazy module once before fully_shard")
        if parameter.is_inference() or parameter.layout is not torch.strided:
            raise UsageError(
                f"parameter {name!r} is an inference or sparse tensor: replace it by an ordinary parameter before "
                "fully_shard"
            )
        if has_parts(local_part(parameter)):
            raise UsageError(
                f"parameter {name!r} is a {type(parameter).__name__}, whose values are in several tensors. It must be "
                "frozen (requires_grad_(False)), on a device other than meta, and not split by tensor parallelism. Or "
                "pass it to fully_shard as one of ignored_params, which keeps it in this trainer",
                parameter=name,
            )
        if parameter.requires_grad and str(parameter.dtype).removeprefix("torch.") not in PARAMETER_ITEM_SIZES:
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype}, which no optimizer updates: freeze it before fully_shard "
                f"with requires_grad_(False), or give it one of the dtypes {', '.join(PARAMETER_ITEM_SIZES)}",
                parameter=name,
            )
    devices = {str(meta_device if item.is_meta else item.device): name for name, item in named_parameters}
    if len(devices) > 1:
        raise UsageError(f"parameters of one unit must be on one device, got {devices}; shard the modules separately")


# After sharding.


def guard_state_dict(module: nn.Module) -> list[RemovableHandle]:
    """Makes ``state_dict`` and ``load_state_dict`` of a sharded module raise. Returns the handles of the hooks."""
    return [
        module.register_state_dict_pre_hook(_refuse_state_dict),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_refuse_load),  # type: ignore[no-untyped-call]
    ]


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # with keep_vars, the caller wants only the parameter objects, as full_state_dict does
        raise UsageError(
            "state_dict() of a sharded module has no values to return: use shardwell.full_state_dict(model), or "
            "shardwell.save_safetensors(model, folder), which does not hold all values at once"
        )


def _refuse_load(module: nn.Module, *args: object) -> None:
    raise UsageError(
        "load_state_dict() of a sharded module would change nothing on the shard servers: load before fully_shard, or "
        "call fully_shard(..., source=shardwell.from_safetensors(model, path)) in a new run"
    )


def refuse_copy(module: nn.Module) -> NoReturn:
    """Raises for copies and pickles of a sharded module."""
    raise UsageError(
        f"{type(module).__name__} cannot be copied or pickled because its parameters are on the shard servers. Copy "
        "before fully_shard, or load shardwell.full_state_dict(model) into another model. For a moving average of the "
        "weights set optimizer.ema_decay = 0.999: the servers keep the average"
    )


def refuse_zero_grad_after_push(units: Sequence[Unit]) -> None:
    """Raises UsageError if gradients of this step are on the servers, where dropping the local ones has no effect."""
    for unit in units:
        if unit.pushed:
            raise UsageError(
                f"the gradient of unit {unit.name!r} was already pushed to the shard servers in this step: call "
                "optimizer.zero_grad(), which withdraws the gradient",
                unit=unit.name,
            )


@contextmanager
def hidden_parameters(units: Sequence[Unit], function: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Removes the units' parameters from their modules while ``Module._apply`` converts the other tensors.

    Raises:
        UsageError: The conversion would change the dtype or device of a unit's parameters.
    """
    for unit in units:
        for index, parameter in enumerate(unit.parameters):
            dtype = unit.precision.stored_dtypes[index]
            probe = function(torch.empty(0, dtype=dtype, device=parameter.device))
            if (probe.dtype, probe.device) != (dtype, parameter.device):
                raise UsageError(
                    f"unit {unit.name!r} is {dtype} on {parameter.device} and cannot become {probe.dtype} "
                    f"on {probe.device} after fully_shard: convert or move the module first. To compute in another "
                    "dtype pass fully_shard(..., mp_policy=shardwell.MixedPrecisionPolicy(param_dtype=...))",
                    unit=unit.name,
                )
    sites = [
        (site, parameter)
        for unit in units
        for parameter, sites in zip(unit.parameters, unit.sites, strict=True)
        for site in sites
    ]
    for site, _ in sites:
        site.module._parameters[site.name] = None
    try:
        yield
    finally:
        for site, parameter in sites:
            setattr(site.module, site.name, parameter)  # setattr, because nn.LSTM overrides __setattr__
