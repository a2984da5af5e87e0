"""The class of a parameter while its unit is freed.

The parameter objects that the user made stay in their modules permanently. Optimizers, tied modules, parameter hooks
and modules that cache their weights (``nn.LSTM``) therefore keep working. Freeing a unit releases the memory and
changes the class of its parameters to a subclass of ``FreedParameter``. Torch functions that need values raise for
that class instead of reading released memory. The shape, the gradient, hooks and other metadata still work.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad

from shardwell_wire.errors import FreedParameterError, UsageError

OWNER_ATTRIBUTE = "_shardwell_owner"
"""Attribute of a sharded parameter that holds its ``ParameterOwner``."""

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
"""Torch functions that a freed parameter allows, because they neither read nor write values."""

_DEPENDS_ON_DTYPE: frozenset[Callable[..., Any]] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("dtype", "nbytes", "itemsize")]
    + [getattr(torch.Tensor, name) for name in ("element_size", "new_empty", "new_zeros", "new_ones", "new_full")]
    + [getattr(torch, name) for name in ("empty_like", "zeros_like", "ones_like", "full_like")]
)
"""Functions that use the dtype. A freed parameter has the dtype of the servers, also under mixed precision."""

_CLIP_FILE, _SCALER_FILE = clip_grad.__file__, grad_scaler.__file__
_PACKAGE = str(Path(__file__).parents[1])

USE_SHARDED_SCALER = (
    "torch.amp.GradScaler cannot check gradients that are on the shard servers: use shardwell.amp.GradScaler"
)

_WHERE_VALUES_ARE = (
    "Values are available during the forward of the unit's own modules, and between module.unshard() and "
    "module.reshard(); shardwell.full_state_dict(model) returns all of them. If another module's forward reads this "
    "parameter, give both modules to one fully_shard call"
)

_MAX_FRAMES = 60
"""Limit of the search for a caller. Torch's own frames above an error are fewer."""

_ADVICE = {
    "torch/nn/parallel/distributed.py": "do not wrap a sharded module in DistributedDataParallel: the servers take the "
    "mean of the trainers' gradients. For one replica per trainer use strategy=ShardingStrategy.NO_SHARD",
    "torch/distributed/fsdp/": "do not wrap a sharded module with torch's FSDP: shardwell.fully_shard replaces it",
    "torch/nn/init.py": "initialise before fully_shard, or pass an init function as fully_shard(..., source=function)",
    "torch/nn/utils/parametrizations.py": "parametrise modules before fully_shard",
    "torch/nn/utils/prune.py": "prune before fully_shard",
    "torch/export/": "export a plain model that was loaded from shardwell.full_state_dict(model)",
    "torch/optim/swa_utils.py": "set optimizer.ema_decay: the servers keep the average",
}
"""What to do instead, by a part of the path of the calling file."""


class ParameterOwner(Protocol):
    """The parameter's unit: the part that a freed parameter uses."""

    @property
    def name(self) -> str:
        """The parameter's name in the run."""
        ...

    @property
    def unit_name(self) -> str:
        """The unit's name."""
        ...

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the parameter on the servers."""
        ...

    @property
    def is_pushed(self) -> bool:
        """True if a gradient of the unit was pushed and not committed yet."""
        ...

    @property
    def hidden_gradient(self) -> str:
        """Where the gradient is that ``.grad`` does not show. Empty: ``.grad`` shows it, or there is none."""
        ...

    def note_gradient_read(self) -> bool:
        """Records that the script reads a hidden gradient. Returns True the first time for the model."""
        ...


def is_sharded(tensor: torch.Tensor) -> bool:
    """True if a tensor is a parameter of a unit, freed or not."""
    return hasattr(tensor, OWNER_ATTRIBUTE)


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
            # torch calls this method from C, so the frame above is the code that uses the parameter.
            _check_grad_access(args[0], writes=func != _GET_GRAD, frame=sys._getframe(1))
        with torch._C.DisableTorchFunctionSubclass():
            # Under mixed precision the placed tensor has the compute dtype, also while freed.
            if func in _DEPENDS_ON_DTYPE and args and isinstance(args[0], FreedParameter):
                args = (_with_stored_dtype(args[0]), *args[1:])
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        owner = _owner(self)
        shape = tuple(self.shape)
        return f"FreedParameter({owner.name!r}, shape={shape}, dtype={self.dtype}, unit={owner.unit_name!r})"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def full_tensor(self) -> NoReturn:
        """Always raises. In FSDP2, this method returns the values."""
        _raise_freed(FreedParameter.full_tensor, (self,), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _raise_freed(FreedParameter.__deepcopy__, (self,), {})

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _raise_freed(FreedParameter.__reduce_ex__, (self,), {})


@functools.cache
def freed_class(original: type[nn.Parameter]) -> type[nn.Parameter]:
    """Returns the class that parameters of a class have while freed."""
    return type(f"Freed{original.__name__}", (FreedParameter, original), {"__module__": __name__})


def _read_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    _check_script_access(parameter, writes=False)
    gradient: torch.Tensor | None = _GET_GRAD(parameter)
    return gradient


def _write_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    _check_script_access(parameter, writes=True)
    _SET_GRAD(parameter, gradient)


def _delete_grad(parameter: torch.Tensor) -> None:
    _check_script_access(parameter, writes=True)
    _DELETE_GRAD(parameter)


def _check_script_access(parameter: torch.Tensor, *, writes: bool) -> None:
    """Calls ``_check_grad_access`` unless Shardwell itself uses the gradient."""
    frame = sys._getframe(2)
    if is_sharded(parameter) and not frame.f_code.co_filename.startswith(_PACKAGE):
        _check_grad_access(parameter, writes=writes, frame=frame)


@functools.cache
def watched_parameter() -> type[nn.Parameter]:
    """Returns the class that gathered parameters have while ``.grad`` does not show their gradient."""
    members = {"__module__": __name__, "grad": property(_read_grad, _write_grad, _delete_grad)}
    return type(nn.Parameter.__name__, (nn.Parameter,), members)


def _owner(parameter: torch.Tensor) -> ParameterOwner:
    owner: ParameterOwner = getattr(parameter, OWNER_ATTRIBUTE)
    return owner


def _with_stored_dtype(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the parameter's shape and the dtype of the servers."""
    dtype = _owner(parameter).stored_dtype
    if parameter.dtype == dtype:
        return parameter
    return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)


def _raise_freed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    parameter = _first_freed([*args, *kwargs.values()])
    name, unit = ("?", "?") if parameter is None else (_owner(parameter).name, _owner(parameter).unit_name)
    function = _function_name(func)
    initial = "; set initial values before fully_shard, or with its source=" if _writes(function) else ""
    raise FreedParameterError(
        f"{function} needs the values of parameter {name!r}, but its unit {unit!r} is freed. "
        + (f"Do this instead: {advice}" if (advice := _advice()) else f"{_WHERE_VALUES_ARE}{initial}"),
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


def _check_grad_access(parameter: torch.Tensor, *, writes: bool, frame: FrameType) -> None:
    """Raises for code that would mistake the local gradients for all gradients."""
    owner, caller = _owner(parameter), frame.f_code
    if caller.co_filename == _CLIP_FILE:
        refuse_clipping(owner)
    if caller.co_filename == _SCALER_FILE:
        raise UsageError(USE_SHARDED_SCALER, parameter=owner.name)
    if not writes and caller.co_name != "zero_grad" and (place := owner.hidden_gradient) and owner.note_gradient_read():
        _warn_of_hidden_gradient(owner, place, frame)
    if owner.is_pushed and (writes or caller.co_name == "zero_grad"):
        raise UsageError(
            f"the gradient of {owner.name!r} was already pushed to the shard servers in this step, so setting .grad "
            "would not change it: call optimizer.zero_grad() to drop the step's gradients, or use "
            "module.set_requires_gradient_sync(False) to keep gradients in this process until the end of the step",
            parameter=owner.name,
        )


def _warn_of_hidden_gradient(owner: ParameterOwner, place: str, frame: FrameType) -> None:
    # Without a registry: Python would suppress the warning for a second model that the same line of code trains.
    warnings.warn_explicit(
        f"the .grad of parameter {owner.name!r} is None because its gradient {place}, so code that scales, masks or "
        "reads gradients between the backward and optimizer.step() has no effect on this model. "
        "optimizer.clip_grad_norm_ clips by the norm over all gradients and returns it; to change a gradient use "
        "parameter.register_hook or register_post_accumulate_grad_hook; set_requires_gradient_sync(False) keeps "
        "gradients in .grad until optimizer.step(), with mixed precision if the policy has "
        "keep_low_precision_grads=True",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )


def refuse_clipping(owner: ParameterOwner) -> NoReturn:
    """Raises because ``torch.nn.utils`` is asked to clip a sharded parameter's gradient."""
    if is_called_from("transformers/trainer.py"):
        raise UsageError(
            "Hugging Face's Trainer asks torch for the gradient norm in every step, even with max_grad_norm=0, but the "
            f"gradient of {owner.name!r} is pushed to the shard servers. Override two methods of the Trainer: "
            "_clip_grad_norm(self, model) returns self.optimizer.optimizer.clip_grad_norm_(self.args.max_grad_norm), "
            "and _get_grad_norm(self, model, grad_norm=None) returns grad_norm",
            parameter=owner.name,
        )
    raise UsageError(
        f"torch.nn.utils.clip_grad reads only gradients in this process, but the gradient of {owner.name!r} is pushed "
        "to the shard servers: call optimizer.clip_grad_norm_(max_norm), which clips by the norm over all gradients, "
        "or optimizer.clip_grad_value_(clip_value)",
        parameter=owner.name,
    )


def is_called_from(path: str) -> bool:
    """True if a file with this text in its path is among the callers."""
    return any(path in frame.f_code.co_filename for frame in _callers(sys._getframe(1)))


def _advice() -> str | None:
    """Returns what to do instead, for the nearest caller in ``_ADVICE``."""
    for frame in _callers(sys._getframe(1)):
        for path, text in _ADVICE.items():
            if path in frame.f_code.co_filename:
                return text
    return None


def _callers(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found
