"""Errors for what would silently go wrong with parameters that live elsewhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwell.module import backward_start, clip_guards
from shardwell.module.parameter import owner_of
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.module.unit import Unit
    from shardwell.module.units import Units


_TORCHS_SHARDING = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def install(units: Units) -> None:
    """Has torch's own optimizers and gradient clipping raise for sharded parameters.

    Nothing in torch changes before the first ``fully_shard``.
    """
    _install_step_hook()
    clip_guards.watch(units)
    backward_start.watch(units)


@functools.cache
def _install_step_hook() -> None:
    register_optimizer_step_pre_hook(_refuse_local_step)


def _refuse_local_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    from shardwell.optim import ShardedOptimizer

    if isinstance(optimizer, ShardedOptimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (owner := owner_of(parameter)) is not None:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() can not update parameter {owner.name!r}: it lives on the shard "
                    f"servers. Use {_instead_of(type(optimizer))}",
                    parameter=owner.name,
                )


def _instead_of(optimizer: type[Optimizer]) -> str:
    from shardwell import optim

    if optimizer.__name__ in optim.__all__:
        return f"shardwell.optim.{optimizer.__name__}"
    if needs_closure(optimizer):
        return "an optimizer of shardwell.optim: none evaluates the model several times in a step"
    return f"shardwell.ClientSide(parameters, {optimizer.__name__}, ...), or an optimizer of shardwell.optim"


def needs_closure(optimizer: type[Optimizer]) -> bool:
    """Whether the optimizer's step evaluates the model itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; containers such as ``nn.ModuleList`` can not."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def check_session(session: object) -> None:
    """Raises UsageError for what ``shardwell.join`` did not return."""
    if not hasattr(session, "units"):
        raise UsageError(f"session={session!r}: expected the session that shardwell.join(...) returned")


def check_batch_norm(modules: Sequence[nn.Module], session: object) -> None:
    """Raises UsageError for SyncBatchNorm where the run has several data ranks."""
    world = getattr(session, "world", None)
    if world is None or world.dp == 1:
        return
    for module in modules:
        for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
            if isinstance(part, nn.SyncBatchNorm):
                which = f"submodule {name!r}" if name else "the module"
                raise UsageError(
                    f"{which} is a SyncBatchNorm, which would normalise with the batch of one data rank only, "
                    f"though the run has {world.dp}: work items are computed one by one, each by whichever "
                    "trainer is there, so no process group spans them. Use BatchNorm with a larger batch per rank, a "
                    "norm that does not depend on the batch (GroupNorm, LayerNorm), or World(dp=1)"
                )


def check_modules(modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]) -> None:
    """Raises UsageError for modules that can not be sharded."""
    for module in modules:
        kind = _kind(module)
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"expected a module, got {kind}: fully_shard takes one module or several, auto_wrap a model"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"{kind} can not be sharded: its forward is compiled; shard the module it was made from")
        if not has_forward(module):
            raise UsageError(f"{kind} has no forward, so nothing says when it is used: shard the modules in it")
        if hasattr(module, "_shardwell_sharding"):
            raise UsageError(
                f"{kind} is sharded already: call fully_shard or auto_wrap once for each module. set_sharding_strategy "
                "and its other setters change how it is kept; for another run or session make the model anew"
            )
        _refuse_torchs_sharding(module, ignored)
        _refuse_scripted_parts(module, ignored)
    if not modules or len({id(module) for module in modules}) != len(modules):
        raise UsageError(f"fully_shard needs different modules, got {[type(module).__name__ for module in modules]}")


def _refuse_torchs_sharding(module: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Raises for parameters that torch's DDP or FSDP hold; none of them is there unless it was imported."""
    left_alone = {id(parameter) for parameter in ignored}
    for part in module.modules():
        held = {base.__name__ for base in type(part).__mro__ if base.__module__.startswith("torch.")} & _TORCHS_SHARDING
        if held and any(id(parameter) not in left_alone for parameter in part.parameters()):
            raise UsageError(
                f"{type(part).__name__} holds its parameters itself (torch's {', '.join(held)}): give fully_shard the "
                "module that was wrapped, without it, or these parameters as ignored_params"
            )


def _refuse_scripted_parts(module: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Raises for scripted and traced submodules with parameters: their compiled code takes no freed parameter."""
    left_alone = {id(parameter) for parameter in ignored}
    for name, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            continue
        if any(id(parameter) not in left_alone for parameter in part.parameters()):
            raise UsageError(
                f"{_kind(module)} has a scripted or traced submodule {name!r} ({part.original_name}), whose compiled "
                "code cannot use parameters that are gathered and freed: put the module there that it was made from, "
                "or pass its parameters as ignored_params, which keeps them in this trainer"
            )


def check_ignored(ignored: Collection[object]) -> None:
    """Raises UsageError for ``ignored_params`` that are no parameters."""
    for item in ignored:
        if not isinstance(item, nn.Parameter):
            raise UsageError(
                f"ignored_params has {item!r}: expected parameters, such as {{model.get_parameter('head.weight')}}"
            )


def _kind(module: object) -> str:
    """The class as the user knows it."""
    kind = type(module)
    return (kind.__bases__[-1] if hasattr(module, "_shardwell_sharding") else kind).__name__


def check_parameters(named_parameters: Sequence[tuple[str, nn.Parameter]], meta_device: torch.device) -> None:
    """Raises UsageError for parameters that can not be in one unit; those on the meta device go to ``meta_device``."""
    for name, parameter in named_parameters:
        if is_lazy(parameter):
            raise UsageError(f"parameter {name!r} has no shape yet: run the lazy module once before fully_shard")
        if parameter.is_inference() or parameter.layout is not torch.strided:
            raise UsageError(f"parameter {name!r} is an inference or sparse tensor: make it an ordinary one first")
    devices = {str(meta_device if item.is_meta else item.device): name for name, item in named_parameters}
    if len(devices) > 1:
        raise UsageError(f"parameters of one unit must be on one device, got {devices}; shard the modules separately")


def guard_state_dict(module: nn.Module) -> None:
    """Has a sharded module's ``state_dict`` and ``load_state_dict`` raise."""
    module.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_refuse_load)  # type: ignore[no-untyped-call]


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # else only the parameter objects are asked for, as full_state_dict does
        raise UsageError(
            "state_dict() of a sharded module has no values to return: use shardwell.full_state_dict(model), or "
            "shardwell.save_safetensors(model, folder), which does not hold them all"
        )


def _refuse_load(module: nn.Module, *args: object) -> None:
    raise UsageError(
        "load_state_dict() of a sharded module would change nothing on the shard servers: load before fully_shard, or "
        "call fully_shard(..., source=shardwell.from_safetensors(model, path)), in a run that has no values yet"
    )


def refuse_copy(module: nn.Module) -> NoReturn:
    """Raises for copies and pickles of a sharded module."""
    raise UsageError(
        f"{_kind(module)} can not be copied or pickled: its parameters live on the shard servers. Copy before "
        "fully_shard, or load shardwell.full_state_dict(model) into another model; a moving average of the weights is "
        "kept by the servers: optimizer.ema_decay = 0.999"
    )


def refuse_zero_grad_after_push(units: Sequence[Unit]) -> None:
    """Raises where dropping the local gradients would leave some on the servers."""
    for unit in units:
        if unit.pushed:
            raise UsageError(
                f"the gradient of unit {unit.name!r} was pushed to the shard servers in this step already: call "
                "optimizer.zero_grad(), which withdraws it",
                unit=unit.name,
            )


@contextmanager
def converted(units: Sequence[Unit], function: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Hides units' parameters while ``Module._apply`` converts what else there is.

    Raises:
        UsageError: The conversion would change the parameters' dtype or device.
    """
    for unit in units:
        for index, parameter in enumerate(unit.parameters):
            dtype = unit.precision.stored_dtype(index)
            probe = function(torch.empty(0, dtype=dtype, device=parameter.device))
            if (probe.dtype, probe.device) != (dtype, parameter.device):
                raise UsageError(
                    f"unit {unit.name!r} is {dtype} on {parameter.device} and can not become {probe.dtype} "
                    f"on {probe.device} after fully_shard: convert or move the module before it. To compute in another "
                    "dtype pass fully_shard(..., mp_policy=shardwell.MixedPrecisionPolicy(param_dtype=...))",
                    unit=unit.name,
                )
    places = [(site, parameter) for unit in units for parameter, sites in _placed(unit) for site in sites]
    for site, _ in places:
        site.module._parameters[site.name] = None
    try:
        yield
    finally:
        for site, parameter in places:
            setattr(site.module, site.name, parameter)  # which nn.LSTM notices


def _placed(unit: Unit) -> Iterator[tuple[nn.Parameter, Sequence[Any]]]:
    return zip(unit.parameters, unit.sites, strict=True)
