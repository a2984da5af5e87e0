"""What a parameter is while its unit is freed.

The parameter objects that the user made stay in their modules for good, so optimizers, tied modules,
parameter hooks and modules that cache their weights (``nn.LSTM``) keep working. Freeing a unit takes
the memory and changes the class of its parameters to a subclass of ``FreedParameter``, whose torch
functions raise: without that, a stray access would read memory that is gone. What needs no values,
such as the shape, the gradient and hooks, still works.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad

from shardwell.module.callers import advice, called_from
from shardwell_wire.errors import FreedParameterError, UsageError

if TYPE_CHECKING:
    from shardwell.module.unit import Unit

_OWNER = "_shardwell_owner"

_READABLE = (
    *("shape", "ndim", "nbytes", "itemsize", "names", "dtype", "device", "layout", "output_nr", "_version"),
    *("requires_grad", "is_leaf", "grad", "grad_fn", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *("is_sparse", "is_quantized", "is_nested", "is_meta", "is_cpu", "is_cuda", "is_mkldnn", "is_mps", "is_xpu"),
)
_WRITABLE = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "stride", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device"),
    *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
)
_FUNCTIONS = (
    *("numel", "is_floating_point", "is_complex", "is_inference", "is_same_size", "get_device"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)

_GRAD: Any = torch.Tensor.grad
_GET_GRAD, _SET_GRAD, _DELETE_GRAD = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__
_GRAD_ACCESS = frozenset([_GET_GRAD, _SET_GRAD, _DELETE_GRAD])

_NEEDS_NO_VALUES: frozenset[Callable[..., Any]] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _READABLE if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name).__set__ for name in _WRITABLE]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)]
    + [_DELETE_GRAD, torch.autograd.grad, torch.autograd.backward]
)
"""What torch may do with a parameter whose memory is gone: it reads and writes no values."""

_TELLS_DTYPE: frozenset[Callable[..., Any]] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("dtype", "nbytes", "itemsize")]
    + [getattr(torch.Tensor, name) for name in ("element_size", "new_empty", "new_zeros", "new_ones", "new_full")]
    + [getattr(torch, name) for name in ("empty_like", "zeros_like", "ones_like", "full_like")]
)
"""What depends on the dtype: that of a freed parameter is the servers', also where another is computed in."""

_CLIP_FILE, _SCALER_FILE = clip_grad.__file__, grad_scaler.__file__

USE_SHARDED_SCALER = (
    "torch.amp.GradScaler sees no gradients that are on the shard servers: use shardwell.amp.GradScaler"
)

_WHERE_VALUES_ARE = (
    "Values are there during the forward of the unit's own modules and between module.unshard() and module.reshard(); "
    "shardwell.full_state_dict(model) returns all of them. If another module's forward reads this parameter, give both "
    "modules to one fully_shard call"
)


@dataclass(frozen=True, slots=True)
class Owner:
    """To which unit a parameter belongs."""

    unit: Unit
    index: int
    """Of the parameter in the unit's layout."""

    @property
    def name(self) -> str:
        """The parameter's name in the run."""
        return self.unit.layout.parameters[self.index].name


def owner_of(tensor: torch.Tensor) -> Owner | None:
    """The unit that holds a parameter, freed or not; None for any other tensor."""
    owner: Owner | None = getattr(tensor, _OWNER, None)
    return owner


def adopt(parameter: nn.Parameter, unit: Unit, index: int) -> None:
    """Makes a parameter the unit's."""
    setattr(parameter, _OWNER, Owner(unit, index))


class FreedParameter(torch.Tensor):
    """A parameter whose values are on the servers only."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _NEEDS_NO_VALUES:
            _raise_freed(func, args, kwargs or {})
        if func in _GRAD_ACCESS:
            _check_grad_access(args[0], writes=func != _GET_GRAD, caller=sys._getframe(1).f_code)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _TELLS_DTYPE and args and isinstance(args[0], FreedParameter):
                args = (_as_stored(args[0]), *args[1:])
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        owner: Owner = getattr(self, _OWNER)
        shape = tuple(self.shape)
        return f"FreedParameter({owner.name!r}, shape={shape}, dtype={self.dtype}, unit={owner.unit.name!r})"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def full_tensor(self) -> NoReturn:
        """FSDP2's way to the values."""
        _raise_freed(FreedParameter.full_tensor, (self,), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _raise_freed(FreedParameter.__deepcopy__, (self,), {})

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _raise_freed(FreedParameter.__reduce_ex__, (self,), {})


@functools.cache
def freed_class(original: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class to give to a parameter of some class while it is freed."""
    return type(f"Freed{original.__name__}", (FreedParameter, original), {"__module__": __name__})


def _as_stored(parameter: torch.Tensor) -> torch.Tensor:
    """Something of the shape and dtype that a freed parameter has on the servers."""
    owner: Owner = getattr(parameter, _OWNER)
    dtype = owner.unit.precision.stored_dtype(owner.index)
    if parameter.dtype == dtype:
        return parameter
    return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)


def _raise_freed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    parameter = _first_freed([*args, *kwargs.values()])
    owner = owner_of(parameter) if parameter is not None else None
    name, unit = (owner.name, owner.unit.name) if owner else ("?", "?")
    function = _function_name(func)
    initial = "; initial values are set before fully_shard, or by its source=" if _writes(function) else ""
    raise FreedParameterError(
        f"{function} needs the values of parameter {name!r}, but its unit {unit!r} is freed. "
        + (f"Here: {instead}" if (instead := advice()) else f"{_WHERE_VALUES_ARE}{initial}"),
        unit=unit,
        parameter=name,
    )


def _first_freed(values: Sequence[Any]) -> FreedParameter | None:
    for value in values:
        if isinstance(value, FreedParameter):
            return value
        if isinstance(value, (list, tuple)) and (found := _first_freed(value)) is not None:
            return found
    return None


def _function_name(func: Callable[..., Any]) -> str:
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return f"Tensor.{getattr(func.__self__, '__name__', 'attribute')}"  # type: ignore[attr-defined]
    return str(getattr(func, "__name__", func))


def _writes(function: str) -> bool:
    return function.endswith("_") and not function.endswith("__")


def _check_grad_access(parameter: torch.Tensor, *, writes: bool, caller: CodeType) -> None:
    """Raises for code that would take the gradients that are left here for all of them."""
    owner = owner_of(parameter)
    assert owner is not None
    if caller.co_filename == _CLIP_FILE:
        refuse_clipping(owner)
    if caller.co_filename == _SCALER_FILE:
        raise UsageError(USE_SHARDED_SCALER, parameter=owner.name)
    if owner.unit.pushed and not writes and caller.co_name != "zero_grad":
        _warn_of_pushed_gradient()
    if owner.unit.pushed and (writes or caller.co_name == "zero_grad"):
        raise UsageError(
            f"the gradient of {owner.name!r} was pushed to the shard servers in this step already, so setting .grad "
            "here would not change it: call optimizer.zero_grad() to drop the step's gradients, or use "
            "module.set_requires_gradient_sync(False) to keep them here until the end of the step",
            parameter=owner.name,
        )


@functools.cache
def _warn_of_pushed_gradient() -> None:
    warnings.warn(
        "the .grad of a parameter is read whose gradient was pushed to the shard servers: it is None here. "
        "optimizer.clip_grad_norm_ clips by the norm over all gradients and returns it; to change a gradient use "
        "parameter.register_hook or register_post_accumulate_grad_hook; set_requires_gradient_sync(False) keeps "
        "gradients here until optimizer.step()",
        UserWarning,
        stacklevel=5,
    )


def refuse_clipping(owner: Owner) -> NoReturn:
    """Raises for ``torch.nn.utils`` clipping a sharded parameter's gradient."""
    if called_from("transformers/trainer.py"):
        raise UsageError(
            "Hugging Face's Trainer asks torch for the gradient norm in every step, also with max_grad_norm=0, but the "
            f"gradient of {owner.name!r} goes to the shard servers. Override two methods of the Trainer: "
            "_clip_grad_norm(self, model) returns self.optimizer.clip_grad_norm_(self.args.max_grad_norm), and "
            "_get_grad_norm(self, model, grad_norm=None) returns grad_norm",
            parameter=owner.name,
        )
    raise UsageError(
        f"torch.nn.utils.clip_grad sees only gradients that are left here, but that of {owner.name!r} goes to the "
        "shard servers: call optimizer.clip_grad_norm_(max_norm), which clips by the norm over all of them, or "
        "optimizer.clip_grad_value_(clip_value)",
        parameter=owner.name,
    )
