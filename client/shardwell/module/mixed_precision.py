"""Mixed precision: the dtype that a unit computes in, and the dtype in which its gradients are summed.

The servers store and update the master values. A trainer gathers them in another dtype: ``Precision`` has the layout
of the flat vector in that dtype, and converts the gradients. Inputs and outputs of modules are cast by separate hooks,
which also work for a module without parameters of its own.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwell.module.tensors import map_tensors
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import PARAMETER_ITEM_SIZES, UnitLayout

_DTYPES = {getattr(torch, name) for name in PARAMETER_ITEM_SIZES}


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes of ``fully_shard(..., mp_policy=...)``. The first four fields are FSDP2's.

    The values on the servers, which optimizers and ``full_state_dict`` use, keep the dtype that the parameters had
    before ``fully_shard``.

    Raises:
        UsageError: A dtype is not float32, float64, bfloat16 or float16.
    """

    param_dtype: torch.dtype | None = None
    """Dtype of parameters in forward and backward. None: the dtype in which they are stored."""
    reduce_dtype: torch.dtype | None = None
    """Dtype to which gradients are cast before a push, and in which the gradients of several backwards are summed
    before a push. None: the dtype in which the parameters are stored. The servers always sum in float32;
    ``push_dtype`` sets the dtype on the wire."""
    output_dtype: torch.dtype | None = None
    """Dtype to which floating-point results of the forward are cast. None: no cast."""
    cast_forward_inputs: bool = True
    """Whether floating-point tensors in the forward's arguments are cast to ``param_dtype``."""
    buffer_dtype: torch.dtype | None = None
    """Dtype to which ``fully_shard`` casts floating-point buffers. None: no cast."""
    keep_low_precision_grads: bool = False
    """Whether gradients that are accumulated over several backwards stay in ``parameter.grad`` in autograd's dtype.
    This takes less memory and rounds every sum."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            if (dtype := getattr(self, name)) is not None and dtype not in _DTYPES:
                known = ", ".join(f"torch.{known}" for known in PARAMETER_ITEM_SIZES)
                raise UsageError(f"MixedPrecisionPolicy({name}={dtype!r}): expected one of {known}, or None")


AS_STORED = MixedPrecisionPolicy()
"""No mixed precision."""


class Precision:
    """Converts the dtypes of one unit's parameters and gradients.

    Args:
        policy: The dtypes that the user chose.
        stored: The unit's layout on the servers.
    """

    def __init__(self, policy: MixedPrecisionPolicy, stored: UnitLayout) -> None:
        self._stored_dtypes: list[torch.dtype] = [getattr(torch, parameter.dtype) for parameter in stored.parameters]
        self._reduce_dtype = policy.reduce_dtype
        self.layout = stored if policy.param_dtype is None else layout_in(stored, policy.param_dtype)
        """Layout of the flat vector in this process."""
        self.casts = self.layout != stored
        """True if ``layout`` differs from the layout on the servers."""
        self.sums_apart = not policy.keep_low_precision_grads and (self.casts or policy.reduce_dtype is not None)
        """True if gradients of several backwards are summed in another dtype than autograd's."""
        self.sums: dict[int, torch.Tensor] = {}
        """Separate sums, by parameter index."""

    def stored_dtype(self, index: int) -> torch.dtype:
        """Returns the dtype of a parameter on the servers."""
        return self._stored_dtypes[index]

    def accumulate(self, index: int, gradient: torch.Tensor) -> bool:
        """Adds a gradient to a separate sum, as FSDP2 does, if the sum has another dtype.

        Returns:
            False if the gradient stays in ``parameter.grad``.
        """
        dtype = self._reduce_dtype or self._stored_dtypes[index]
        if not self.sums_apart or gradient.dtype == dtype:
            return False
        if index in self.sums:
            self.sums[index] += gradient
        else:
            self.sums[index] = gradient.to(dtype)
        return True

    def finish(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the gradient to push, in the dtype of the servers: the separate sum plus the latest gradient."""
        total = self.sums.pop(index, None)
        if gradient is not None:
            if total is None:
                total = gradient if self._reduce_dtype is None else gradient.to(self._reduce_dtype)
            else:  # in the dtype of the sum
                total += gradient
        if total is None or total.dtype == self._stored_dtypes[index]:
            return total
        return total.to(self._stored_dtypes[index])

    def divide(self, divisor: int) -> None:
        """Divides the separate sums."""
        for total in self.sums.values():
            total.div_(divisor)

    def drop(self, indices: Iterable[int] | None = None) -> None:
        """Drops the separate sums of all or some parameters."""
        for index in list(self.sums) if indices is None else indices:
            self.sums.pop(index, None)


def layout_in(layout: UnitLayout, dtype: torch.dtype) -> UnitLayout:
    """Returns the layout of the same parameters in another dtype. All sharded parameters are floating-point."""
    name = str(dtype).removeprefix("torch.")
    return UnitLayout(layout.unit, tuple(replace(parameter, dtype=name) for parameter in layout.parameters))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in a value's lists, tuples, dicts and dataclasses."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(value, cast)


def attach_casts(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> list[RemovableHandle]:
    """Makes modules cast their inputs and outputs. Called after the unit's own hooks were added.

    Inputs are then cast outside of the unit's forward call, and the casts' backward runs after the unit's.

    Returns:
        Handles of the hooks.
    """
    casts, handles = _Casts(policy), []
    for module in modules:
        if casts.input_dtype is not None:
            before = torch.compiler.disable(casts.before_forward)  # type: ignore[no-untyped-call]
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        if policy.output_dtype is not None:
            after = torch.compiler.disable(casts.after_forward)  # type: ignore[no-untyped-call]
            handles.append(module.register_forward_hook(after))
    return handles


def casting_method(method: Callable[..., Any], policy: MixedPrecisionPolicy) -> Callable[..., Any]:
    """Returns a method with the casts of inputs and outputs that the forward has."""
    casts = _Casts(policy)

    @functools.wraps(method)
    def casting(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = casts.inputs(args, kwargs)
        return casts.output(method(*args, **kwargs))

    return casting


class _Casts:
    """The casts of arguments and results that one policy makes."""

    def __init__(self, policy: MixedPrecisionPolicy) -> None:
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.input_dtype is None:
            return args, kwargs
        return cast_floats(args, self.input_dtype), cast_floats(kwargs, self.input_dtype)

    def output(self, output: Any) -> Any:
        return output if self.output_dtype is None else cast_floats(output, self.output_dtype)

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.inputs(args, kwargs)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self.output(output)


def cast_buffers(modules: Sequence[nn.Module], dtype: torch.dtype, is_sharded: Callable[[nn.Module], bool]) -> None:
    """Casts the floating-point buffers of modules, but not those of sharded modules inside them."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
        cast_buffers([child for child in module.children() if not is_sharded(child)], dtype, is_sharded)


def warn_of_autocast(layout: UnitLayout, device_type: str) -> None:
    """Warns once per process if autograd is about to save cast copies of a unit's weights."""
    if not torch.is_autocast_enabled(device_type) or not torch.is_grad_enabled():
        return
    if any(parameter.dtype == "float32" for parameter in layout.parameters):
        _warn_of_autocast_once(torch.get_autocast_dtype(device_type))


@functools.cache
def _warn_of_autocast_once(dtype: torch.dtype) -> None:
    warnings.warn(
        f"a sharded module runs under torch.autocast: autograd keeps a {dtype} copy of every weight until the "
        "backward, which freeing parameters does not free. Instead of autocast, use "
        f"fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype={dtype}))",
        UserWarning,
        stacklevel=2,
    )
