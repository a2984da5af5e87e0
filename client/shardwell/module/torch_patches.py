"""All changes to torch. They exist from the first ``fully_shard`` of a process until its last session is closed.

- Optimizers and gradient clipping raise for gradients that are on the shard servers: they would silently work with a
  part of the gradients. Freed parameters raise by themselves (``freed_parameter.py``). Gathered parameters do not, and
  torch sees an empty list if all gradients were pushed. The functions are therefore wrapped, under every name that
  torch has for them.
- Every backward begins with a search: see ``backward_entry.py``.
- ``Parameter.data`` notes that it was read: a write to its result counts in no version counter.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwell.module import hooks
from shardwell.module.parameters import refuse_clipping
from shardwell.module.unit import owner_of
from shardwell.module.units import Units
from shardwell_wire.errors import UsageError
from shardwell_wire.model.optimizers import OPTIMIZERS

_CLIPPING_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")

_DATA: Any = torch.Tensor.data

_watched: weakref.WeakSet[Units] = weakref.WeakSet()
"""Units whose gradients may be on the servers."""


_undo: list[Callable[[], None]] = []
"""Each reverts a change, in the order in which they were made. Empty while torch is unchanged."""


def watch(units: Units) -> None:
    """Makes torch check for the parameters and gradients of these units from now on."""
    if not _undo:
        _install()
    _watched.add(units)
    hooks.watch(units)


def unwatch(units: Units) -> None:
    """Ends the checks for these units, because the session is closed. Reverts all changes if there are no others."""
    _watched.discard(units)
    hooks.unwatch(units)
    if not _watched:
        while _undo:
            _undo.pop()()


def needs_closure(optimizer: type[Optimizer]) -> bool:
    """True if the optimizer's step evaluates the model itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _install() -> None:
    _undo.append(register_optimizer_step_pre_hook(_refuse_local_step).remove)
    for name in _CLIPPING_FUNCTIONS:
        original = getattr(clip_grad, name)
        checked = _checked(original, _check_parameters)
        for module in (clip_grad, utils):
            for alias in [alias for alias, value in vars(module).items() if value is original]:
                _change(module, alias, checked)
    # clip_grad.get_total_norm stays unchecked: clip_grad_norm_ of ordinary parameters without gradients calls it.
    _change(utils, "get_total_norm", _checked(utils.get_total_norm, _check_gradients))
    run_backward = hooks.searching(torch.autograd.graph._engine_run_backward)
    for module in (torch.autograd.graph, torch.autograd):  # torch imports the function under two names
        _change(module, "_engine_run_backward", run_backward)

    _change(nn.Parameter, "data", property(_get_data, _DATA.__set__, _DATA.__delete__))


def _change(place: Any, name: str, value: Any) -> None:
    """Changes an attribute of torch, to be reverted unless somebody else has changed it in the meantime."""
    is_inherited, original = name not in vars(place), getattr(place, name)
    setattr(place, name, value)

    def undo() -> None:
        if vars(place).get(name) is not value:
            return
        if is_inherited:
            delattr(place, name)
        else:
            setattr(place, name, original)

    _undo.append(undo)


def _get_data(parameter: torch.Tensor) -> torch.Tensor:
    data: torch.Tensor = _DATA.__get__(parameter)
    if (owner := owner_of(parameter)) is not None:
        owner.unit.note_data_read(owner.index)
    return data


def _refuse_local_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if getattr(optimizer, "updates_on_servers", False):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (owner := owner_of(parameter)) is not None:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() cannot update parameter {owner.name!r}, because its values are "
                    f"on the shard servers. Use {_replacement(type(optimizer))}",
                    parameter=owner.name,
                )


def _replacement(optimizer: type[Optimizer]) -> str:
    if optimizer.__name__.lower() in OPTIMIZERS:
        return f"shardwell.optim.{optimizer.__name__}"
    if needs_closure(optimizer):
        return "an optimizer of shardwell.optim: none of them evaluates the model several times in a step"
    return f"shardwell.ClientSide(parameters, {optimizer.__name__}, ...), or an optimizer of shardwell.optim"


def _checked(original: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns the function with a check of its first argument."""

    @functools.wraps(original)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return original(check(tensors), *args, **kwargs)

    return checked


def _check_parameters(parameters: torch.Tensor | Iterable[torch.Tensor]) -> Any:
    """Raises if a parameter is sharded; returns the argument, an iterator as a list."""
    found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in found:
        if (owner := owner_of(parameter)) is not None:
            refuse_clipping(owner)
    return found if found else parameters  # torch itself warns of an empty generator


def _check_gradients(gradients: torch.Tensor | Iterable[torch.Tensor]) -> Any:
    """Raises if there is no gradient, but some are on the servers; returns the argument, an iterator as a list."""
    found = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients)
    if not found:
        for units in _watched:
            for unit in units:
                if unit.pushed:
                    raise UsageError(
                        f"get_total_norm got no gradient: gradients of unit {unit.name!r} are on the shard servers. "
                        "optimizer.clip_grad_norm_(float('inf')) returns the norm of all gradients and clips nothing",
                        unit=unit.name,
                    )
    return found
