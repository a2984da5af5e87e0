"""``unwrap``: makes a sharded model an ordinary one again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from shardwell.memory.allocator import trim
from shardwell.module.gradients import with_gradients
from shardwell.module.sharded_module import ShardedModule, make_plain, sharding_of
from shardwell.module.unit import Unit
from shardwell.session.session import settle
from shardwell_wire.errors import UsageError

Model = TypeVar("Model", bound=nn.Module)


def unwrap(module: Model, *, device: torch.device | str | None = None) -> Model:
    """Makes a sharded model an ordinary module again, which holds the committed values.

    Reverts ``auto_wrap`` and ``fully_shard`` in place: the parameter objects stay in their modules and become ordinary
    parameters with memory of their own, in the dtype of the servers. The modules get their classes back, and lose the
    hooks, the wrapped forwards of ``memory=`` and the methods of ``register_forward_method``. Tied parameters stay
    tied, and buffers keep their values. The model can be evaluated, copied, saved, exported and compiled, also after
    the session is closed.

    Units are gathered one after another: beside the model itself, the memory of one unit is needed. A model that
    tensor parallelism splits stays split: its parameters stay ``DTensor`` objects, for the same mesh. Of a pipeline,
    each trainer unwraps its own stages.

    The run is not changed. To go on training in the same session, wrap the model again in the same way: its parameters
    then get the run's values, and what was written to them is lost. Optimizers of the model can be used again.

    Args:
        module: A sharded module, or a model with sharded modules inside.
        device: The device to move the model to. None: parameters stay on the device on which they compute.

    Returns:
        The argument.

    Raises:
        UsageError: No part of the module is sharded; a unit also has modules elsewhere; or the model is in the middle
            of a step.
        ShardwellError: The values cannot be gathered. The units before the failed one are ordinary already; the call
            can be repeated.
    """
    parts = [part for part in module.modules() if isinstance(part, ShardedModule)]
    if not parts:
        raise UsageError(f"{type(module).__name__} has no sharded module: there is nothing to unwrap")
    sharded = {unit: sharding_of(part).units for part in parts for unit in sharding_of(part).own_units}
    sharded = {unit: units for unit, units in sharded.items() if units.has(unit)}  # a repeated call finds the others
    _check_complete(module, sharded)
    settle(parameter for unit in sharded for parameter in unit.parameters[:1])
    for unit in sharded:
        _check_idle(unit)
    for unit, units in sharded.items():
        unit.detach_parameters(device)
        units.remove(unit)
        trim()  # transfers fragment the heap, which would add up over the units
    for part in parts:
        sharding_of(part).units.forget_module(part)
        make_plain(part)
    return module if device is None else module.to(device)


def _check_complete(module: nn.Module, units: Iterable[Unit]) -> None:
    """Raises UsageError if a unit has modules outside the given one."""
    inside = {id(part) for part in module.modules()}
    for unit in units:
        outside = [type(part).__name__ for part in unit.modules if id(part) not in inside]
        if outside:
            raise UsageError(
                f"unit {unit.name!r} also has the modules {', '.join(outside)}, which are outside "
                f"{type(module).__name__}: unwrap a module that contains all modules of the unit",
                unit=unit.name,
            )


def _check_idle(unit: Unit) -> None:
    """Raises UsageError if a unit is in use, or has gradients that are not committed."""
    if unit.usage or unit.pushed or with_gradients([unit]):
        raise UsageError(
            f"unit {unit.name!r} is in the middle of a step: call unwrap after optimizer.step(), or after "
            "optimizer.zero_grad() to drop the step's gradients",
            unit=unit.name,
        )
