"""Mixed precision: which dtype a unit computes in, and which one its gradients are summed in.

The servers keep and update what was sharded, the master values. A trainer gathers them as another dtype:
``Precision`` says how one unit's flat vector lies then, and what becomes of the gradients that autograd makes in
that dtype. Casts of what goes into and comes out of modules are hooks of their own, so they work for a module
that has no parameters of its own too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwell.module.tensors import map_tensors
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import PARAMETER_ITEM_SIZES, UnitLayout

_DTYPES = {getattr(torch, name) for name in PARAMETER_ITEM_SIZES}


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """What ``fully_shard(..., mp_policy=...)`` computes in; the first four fields are FSDP2's.

    The values on the servers, and what optimizers and ``full_state_dict`` see, keep the dtype that the
    parameters had before ``fully_shard``.

    Raises:
        UsageError: A dtype is none of float32, float64, bfloat16 and float16.
    """

    param_dtype: torch.dtype | None = None
    """Of parameters in forward and backward. None: as they are stored."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are cast to before they are pushed, and summed in where several backwards come before a
    push. None: the dtype in which the parameters are stored. The servers sum in fp32 either way; how many bytes
    travel is ``push_dtype``'s matter."""
    output_dtype: torch.dtype | None = None
    """What floating-point results of the forward are cast to. None: as they are."""
    cast_forward_inputs: bool = True
    """Whether floating-point tensors in the forward's arguments are cast to ``param_dtype``."""
    buffer_dtype: torch.dtype | None = None
    """What floating-point buffers are cast to by ``fully_shard``. None: as they are."""
    keep_low_precision_grads: bool = False
    """Whether gradients that are kept here over several backwards stay in ``parameter.grad`` as autograd made
    them, which takes less memory and rounds every sum."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            if (dtype := getattr(self, name)) is not None and dtype not in _DTYPES:
                known = ", ".join(f"torch.{known}" for known in PARAMETER_ITEM_SIZES)
                raise UsageError(f"MixedPrecisionPolicy({name}={dtype!r}): expected one of {known}, or None")


AS_STORED = MixedPrecisionPolicy()
"""No mixed precision."""


class Precision:
    """How one unit's parameters and gradients change their dtype.

    Args:
        policy: What the user chose.
        stored: The unit's layout on the servers.
    """

    def __init__(self, policy: MixedPrecisionPolicy, stored: UnitLayout) -> None:
        self._stored_dtypes: list[torch.dtype] = [getattr(torch, parameter.dtype) for parameter in stored.parameters]
        self._reduce_dtype = policy.reduce_dtype
        self.layout = stored if policy.param_dtype is None else layout_in(stored, policy.param_dtype)
        """Of the flat vector here."""
        self.casts = self.layout != stored
        """Whether it differs from that on the servers."""
        self.sums_apart = not policy.keep_low_precision_grads and (self.casts or policy.reduce_dtype is not None)
        """Whether gradients of several backwards are summed in another dtype than they come in."""
        self._sums: dict[int, torch.Tensor] = {}

    def stored_dtype(self, index: int) -> torch.dtype:
        """Of a parameter on the servers."""
        return self._stored_dtypes[index]

    def put_by(self, index: int, gradient: torch.Tensor) -> bool:
        """Adds a gradient to the sum kept here, as FSDP2 does, if that is of another dtype.

        Returns:
            Whether it did; else the gradient stays in ``parameter.grad``.
        """
        dtype = self._reduce_dtype or self._stored_dtypes[index]
        if not self.sums_apart or gradient.dtype == dtype:
            return False
        if index in self._sums:
            self._sums[index] += gradient
        else:
            self._sums[index] = gradient.to(dtype)
        return True

    @property
    def has_put_by(self) -> bool:
        """Whether there are such sums."""
        return bool(self._sums)

    def finish(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What is to be pushed, in the dtype of the servers: what was put by and the gradient that came last."""
        total = self._sums.pop(index, None)
        if gradient is not None:
            if total is None:
                total = gradient if self._reduce_dtype is None else gradient.to(self._reduce_dtype)
            else:
                total += gradient
        if total is None or total.dtype == self._stored_dtypes[index]:
            return total
        return total.to(self._stored_dtypes[index])

    def drop(self, indices: Iterable[int] | None = None) -> None:
        """Forgets what was put by of all or some parameters."""
        for index in list(self._sums) if indices is None else indices:
            self._sums.pop(index, None)


def layout_in(layout: UnitLayout, dtype: torch.dtype) -> UnitLayout:
    """The same parameters in another dtype, aligned anew. All that can be sharded are floating-point."""
    name = str(dtype).removeprefix("torch.")
    return UnitLayout(layout.unit, tuple(replace(parameter, dtype=name) for parameter in layout.parameters))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """A value with the floating-point tensors in its lists, tuples, dicts and dataclasses cast."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(value, cast)


def attach_casts(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> None:
    """Has modules cast what goes in and comes out; after the unit's own hooks are attached.

    So inputs are cast outside of the unit's forward call: the casts' backward comes when the unit's is over.
    """
    casts = _Casts(policy)
    for module in modules:
        if casts.input_dtype is not None:
            before = torch.compiler.disable(casts.before_forward)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        if policy.output_dtype is not None:
            after = torch.compiler.disable(casts.after_forward)  # type: ignore[no-untyped-call]
            module.register_forward_hook(after)


def casting_method(method: Callable[..., Any], policy: MixedPrecisionPolicy) -> Callable[..., Any]:
    """A method that casts what goes in and comes out as the forward does."""
    casts = _Casts(policy)

    @functools.wraps(method)
    def casting(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = casts.inputs(args, kwargs)
        return casts.output(method(*args, **kwargs))

    return casting


class _Casts:
    """What one policy does to arguments and results."""

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
    """Casts the floating-point buffers of modules, but not of those inside them that are sharded by themselves."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
        cast_buffers([child for child in module.children() if not is_sharded(child)], dtype, is_sharded)


def warn_of_autocast(layout: UnitLayout, device_type: str) -> None:
    """Warns, once per process, if autograd is about to keep cast copies of a unit's weights."""
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
