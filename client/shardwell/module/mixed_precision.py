"""Mixed precision: the dtype that a unit computes in, and the dtype in which its gradients are summed.

The servers store and update the master values. A trainer gathers them in another dtype: ``Precision`` has the layout
of the flat vector in that dtype, and the dtypes of the gradients. Inputs and outputs of modules are cast by separate
hooks, which also work for a module without parameters of its own. The second half of the file finds tensors in nested
values, and the local part of a ``DTensor``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import PARAMETER_ITEM_SIZES, Box, UnitLayout

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
    """The dtypes of one unit's parameters and gradients.

    Args:
        policy: The dtypes that the user chose.
        stored: The unit's layout on the servers.
    """

    def __init__(self, policy: MixedPrecisionPolicy, stored: UnitLayout) -> None:
        self.stored_dtypes: list[torch.dtype] = [getattr(torch, parameter.dtype) for parameter in stored.parameters]
        """Dtypes of the parameters on the servers."""
        self.reduce_dtype = policy.reduce_dtype
        """Dtype to which a gradient is cast before a push. None: that of the servers."""
        self.layout = stored if policy.param_dtype is None else layout_in(stored, policy.param_dtype)
        """Layout of the flat vector in this process."""
        self.casts = self.layout != stored
        """True if ``layout`` differs from the layout on the servers."""
        self.sums_apart = not policy.keep_low_precision_grads and (self.casts or policy.reduce_dtype is not None)
        """True if gradients of several backwards are summed in another dtype than autograd's."""


def layout_in(layout: UnitLayout, dtype: torch.dtype) -> UnitLayout:
    """Returns the layout of the same parameters in another dtype. Parameters that no optimizer updates keep theirs."""
    name = str(dtype).removeprefix("torch.")
    parameters = (replace(each, dtype=name) if each.is_trainable else each for each in layout.parameters)
    return UnitLayout(layout.unit, tuple(parameters))


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


_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, nn.Module, type)


_MAX_ITEMS = 1024
"""Number of items of one container, and of containers, in which ``find_argument_tensors`` looks."""


def find_tensors(*values: Any) -> list[torch.Tensor]:
    """Returns all tensors in values: in containers of any kind and in attributes of objects, but not in modules."""
    found: list[torch.Tensor] = []
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            _find(values[position:], found)
            break
        found.append(value)
    return found


def find_argument_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Returns tensors in arguments, as ``find_tensors`` does, but looks neither into lazy mappings nor far into large
    objects. The search before a backward finds the nodes of tensors that are left out (``torch_patches.py``).
    """
    found: list[torch.Tensor] = []
    seen, waiting = set[int](), deque([values])  # breadth first: the rest of a large object comes last
    while waiting and len(seen) <= _MAX_ITEMS:
        for value in itertools.islice(waiting.popleft(), _MAX_ITEMS):
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif not isinstance(value, _LEAVES) and id(value) not in seen:
                seen.add(id(value))
                if isinstance(value, dict) or not isinstance(value, Mapping):
                    waiting.append(_items(value))
    return found


def _find(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    seen, open_values = set[int](), [iter(values)]  # no recursion: a linked list is deeper than Python's stack
    while open_values:
        for value in open_values[-1]:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif type(value) is tuple:  # the most frequent container, and a cycle has another one in it
                open_values.append(iter(value))
                break
            elif not isinstance(value, _LEAVES) and id(value) not in seen:
                seen.add(id(value))
                open_values.append(iter(_items(value)))
                break
        else:
            open_values.pop()


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    slots = (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))
    return itertools.chain(getattr(value, "__dict__", {}).values(), slots)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copies a value and replaces each tensor. A part in which no tensor changes stays the same object.

    Enters lists, tuples, named tuples, dicts and dataclasses, and no other objects.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: new for key, old in value.items() if (new := map_tensors(old, function)) is not old}
        return _copy_with(value, changed) if changed else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {key: new for key, old in fields.items() if (new := map_tensors(old, function)) is not old}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _copy_with(mapping: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    if dataclasses.is_dataclass(mapping):
        return dataclasses.replace(mapping, **changed)
    copied = mapping.copy()
    copied.update(changed)
    return copied


def attribute_tensors(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Returns tensors that modules store as plain attributes, such as an auxiliary loss."""
    return [value for module in modules for value in module.__dict__.values() if isinstance(value, torch.Tensor)]


def share_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """True if a tensor's memory is the storage."""
    if tensor.layout is not torch.strided or not torch._C._has_storage(tensor):
        return False
    same: bool = tensor.untyped_storage()._cdata == storage._cdata
    return same


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the shard of a ``DTensor`` that this process holds; any other tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def set_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Sets the dtype of a ``DTensor`` to that of its new local part. Any other tensor has the dtype already."""
    if tensor.dtype != dtype:
        typed: Any = torch.empty_like(tensor.detach(), dtype=dtype)
        tensor.data = typed  # does not change DTensor's own attributes
        cast(Any, tensor)._spec = typed._spec


def is_split(tensor: torch.Tensor) -> bool:
    """True for a ``DTensor`` of which this process holds a part."""
    sharded: Any = tensor
    return hasattr(tensor, "placements") and any(
        not (placement.is_replicate() or placement.is_partial()) and sharded.device_mesh.size(axis) > 1
        for axis, placement in enumerate(sharded.placements)
    )


def local_box(tensor: torch.Tensor) -> Box:
    """Returns the part of a tensor that this process holds: of a ``DTensor`` its shard, otherwise the whole tensor."""
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "placements"):
        return Box(shape, (0,) * len(shape), shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    local, offsets = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return Box(shape, tuple(offsets), tuple(local))
