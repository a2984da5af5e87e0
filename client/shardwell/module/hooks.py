"""Hooks around the forward of modules: they gather a unit before its forward, and find its autograd nodes afterwards.

See Note: [Node numbers] in ``graph_tracking.py`` for how the hooked nodes start and end a unit's backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwell.module.mixed_precision import warn_of_autocast
from shardwell.module.tensors import attribute_tensors, find_tensors, map_tensors, share_storage
from shardwell.module.unit import ForwardCall, Unit
from shardwell.module.units import Units
from shardwell_wire.errors import UsageError

Wrapper = Callable[..., Any]
"""Called with a module's forward and its arguments; returns what the forward returns."""


def hook_modules(unit: Unit, units: Units) -> list[RemovableHandle]:
    """Adds the hooks to a unit's modules, and returns their handles."""
    hooks, handles = _Hooks(unit, units), []
    for module in unit.modules:
        before = torch.compiler.disable(hooks.before_forward)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(hooks.after_forward)  # type: ignore[no-untyped-call]
        # Prepended, so that the user's own pre-hooks find the parameters gathered. always_call covers exceptions.
        handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
    return handles


class _Hooks:
    """The hooks of one unit."""

    def __init__(self, unit: Unit, units: Units) -> None:
        self._unit = unit
        self._passes = units.passes
        nested = {id(part) for other in units if other.modules != unit.modules for part in _parts(other)}
        self._own_parts = [part for part in _parts(unit) if id(part) not in nested and _may_keep_results(part)]

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        warn_of_autocast(self._unit.precision.layout, self._unit.device_type)
        self._passes.pre_forward(self._unit)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        calls = self._unit.usage.forward_calls
        call = calls.pop() if calls else None
        if call is not None and output is not None:
            output = self._copy_own_memory(output)
        if call is not None and torch.is_grad_enabled():
            # A module may also return a result through an argument that it changes, or through an attribute.
            self._watch(call, [*find_tensors(output, args, kwargs), *attribute_tensors(self._own_parts)])
        if call is not None:
            self._passes.post_forward(call)
        return output

    def _watch(self, call: ForwardCall, results: Sequence[torch.Tensor]) -> None:
        """Hooks every node that made a result, so that the node begins the call's backward.

        The node of a view's base is hooked too: an in-place operation on the view bypasses the view's own node.
        """
        nodes = {tensor.grad_fn for tensor in results}
        nodes |= {tensor._base.grad_fn for tensor in results if tensor._base is not None}
        for node in nodes:
            if node is None:
                continue
            if (number := node._sequence_nr()) >= call.first_node_number:
                call.has_backward = True
                self._passes.graphs.watch(node, number, call)
            else:
                self._passes.graphs.watch_input(node, number)

    def _copy_own_memory(self, output: Any) -> Any:
        """Copies outputs that are parameters or views of them, because their memory is about to be released."""
        storage = self._unit.storage
        found = [tensor for tensor in find_tensors(output) if share_storage(tensor, storage)]
        if not found:
            return output
        output = map_tensors(output, lambda tensor: tensor.clone() if share_storage(tensor, storage) else tensor)
        if any(share_storage(tensor, storage) for tensor in find_tensors(output)):
            raise UsageError(
                f"the forward of unit {self._unit.name!r} returns a view of its parameters inside an object that is "
                "not a list, tuple, dict or dataclass: return a clone of the view",
                unit=self._unit.name,
            )
        return output


def _parts(unit: Unit) -> Iterator[nn.Module]:
    return (part for module in unit.modules for part in module.modules())


def _may_keep_results(module: nn.Module) -> bool:
    """True if a module may keep a result as an attribute. Torch's own modules do not."""
    return not type(module).__module__.startswith("torch.nn.")


def hooked_method(unit: Unit, units: Units, module: nn.Module, method_name: str) -> Callable[..., Any]:
    """Returns a method of a module with the unit's hooks around it."""
    hooks, original = _Hooks(unit, units), getattr(module, method_name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            hooks.before_forward(module, args, kwargs)
            output = original(*args, **kwargs)
        finally:
            output = hooks.after_forward(module, args, kwargs, output)
        return output

    return method


def keep_attribute(module: nn.Module, name: str) -> Callable[[], None]:
    """Returns a function that gives an instance attribute of a module its present value again, or removes it."""
    attributes, is_set = vars(module), name in vars(module)
    value = attributes.get(name)

    def restore() -> None:
        if is_set:
            attributes[name] = value
        else:
            attributes.pop(name, None)

    return restore


class WrappedForward:
    """Value of a module's ``forward`` attribute. An object and not a closure, so that it is copied with its module.

    Args:
        forward: The original forward.
        wrapper: Calls ``forward``.
    """

    def __init__(self, forward: Callable[..., Any], wrapper: Wrapper) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._wrapper = forward, wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(self._forward, *args, **kwargs)


def wrap_forward(module: nn.Module, wrapper: Wrapper) -> None:
    """Wraps the module's forward, including its earlier wrappers."""
    _exclude_from_compilation()
    module.forward = WrappedForward(module.forward, wrapper)


@functools.cache
def _exclude_from_compilation() -> None:
    """Makes ``torch.compile`` compile the wrapped forward and not the wrapper.

    Not done at import, because it imports the compiler, which takes seconds.
    """
    exclude = torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
    WrappedForward.__call__ = exclude(WrappedForward.__call__)  # type: ignore[method-assign]
