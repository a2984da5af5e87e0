"""Clipping by ``torch.nn.utils`` sees only gradients that are left here: an error instead of a norm of nothing.

Freed parameters speak up themselves (``parameter.py``). Gathered ones are ordinary parameters, and a list of
gradients that were all pushed is empty, so torch's functions are wrapped, under every name torch has for them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from shardwell.module.parameter import owner_of, refuse_clipping
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.module.units import Units

_TAKE_PARAMETERS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")

_sharded: weakref.WeakSet[Units] = weakref.WeakSet()
"""Whose gradients may be on the servers."""


def watch(units: Units) -> None:
    """From now on clipping without the gradients that these units have pushed raises."""
    _install()
    _sharded.add(units)


def unwatch(units: Units) -> None:
    """These units have no more gradients on the servers: their session is closed."""
    _sharded.discard(units)


@functools.cache
def _install() -> None:
    for name in _TAKE_PARAMETERS:
        original = getattr(clip_grad, name)
        checked = _checked(original, _check_parameters)
        for module in (clip_grad, utils):
            for alias in [alias for alias, value in vars(module).items() if value is original]:
                setattr(module, alias, checked)
    # Not the one in clip_grad: clip_grad_norm_ of ordinary parameters without gradients calls that.
    utils.get_total_norm = _checked(utils.get_total_norm, _check_gradients)


def _checked(original: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function with its first argument checked."""

    @functools.wraps(original)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return original(check(tensors), *args, **kwargs)

    return checked


def _check_parameters(parameters: torch.Tensor | Iterable[torch.Tensor]) -> Any:
    """What was passed, an iterator as a list; raises if a parameter is sharded."""
    found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in found:
        if (owner := owner_of(parameter)) is not None:
            refuse_clipping(owner)
    return found if found else parameters  # torch warns of an empty generator itself


def _check_gradients(gradients: torch.Tensor | Iterable[torch.Tensor]) -> Any:
    """What was passed, an iterator as a list; raises if there is none here but some on the servers."""
    found = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients)
    if not found:
        for units in _sharded:
            for unit in units:
                if unit.pushed:
                    raise UsageError(
                        f"get_total_norm got no gradient: those of unit {unit.name!r} went to the shard servers. "
                        "optimizer.clip_grad_norm_(float('inf')) returns the norm over all and clips nothing",
                        unit=unit.name,
                    )
    return found
