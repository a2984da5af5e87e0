"""Hooks around the forward of modules: they gather a unit before its forward, and find its autograd nodes afterwards.

See Note: [Node numbers] in ``passes.py`` for how the hooked nodes start and end a unit's backward. ``torch_patches.py``
finds the nodes that these hooks miss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwell.module.mixed_precision import (
    attribute_tensors,
    find_argument_tensors,
    find_tensors,
    map_tensors,
    share_storage,
    warn_of_autocast,
)
from shardwell.module.passes import ForwardBackward
from shardwell.module.unit import Unit
from shardwell_wire.errors import UsageError

_has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage
_ask_compiler: Callable[[], object] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
"""Returns what compiles the frames of this thread; None: nothing does. An older torch lacks the function."""
_active_compiler: Callable[[], object] = _ask_compiler or (lambda: None)


def hook_modules(unit: Unit, passes: ForwardBackward) -> list[RemovableHandle]:
    """Adds the hooks to a unit's modules, and returns their handles."""
    hooks, handles = _Hooks(unit, passes), []
    for module in unit.modules:
        # Prepended, so that the user's own pre-hooks find the parameters gathered. ``ShardedModule._call_impl``, around
        # all hooks, covers exceptions: always_call does not cover KeyboardInterrupt, nor an exception in a hook.
        handles.append(module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(hooks.after, with_kwargs=True))
    return handles


def hook_module(module: nn.Module, unit: Unit, passes: ForwardBackward) -> list[RemovableHandle]:
    """Adds a unit's hooks to a module that is sharded with another unit, and returns their handles.

    They run inside that unit's hooks, so that calls end in the reverse order of their begin.
    """
    hooks = _Hooks(unit, passes)
    return [
        module.register_forward_pre_hook(hooks.before, with_kwargs=True),
        module.register_forward_hook(hooks.after, prepend=True, with_kwargs=True),
    ]


def hooked_method(unit: Unit, passes: ForwardBackward, module: nn.Module, method_name: str) -> Callable[..., Any]:
    """Returns a method of a module with the unit's hooks around it."""
    hooks, original = _Hooks(unit, passes), getattr(module, method_name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return passes.call(run, args, kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        hooks.before_forward(module, args, kwargs)
        return hooks.after_forward(module, args, kwargs, original(*args, **kwargs))

    return method


class _Hooks:
    """The hooks of one unit."""

    def __init__(self, unit: Unit, passes: ForwardBackward) -> None:
        self._unit = unit
        self._passes = passes
        nested = {
            id(part) for other in passes.units.values() if other.modules != unit.modules for part in _parts(other)
        }
        self._own_parts = [part for part in _parts(unit) if id(part) not in nested]
        # Torch's own modules do not keep results as attributes.
        self._own_parts = [part for part in self._own_parts if not type(part).__module__.startswith("torch.nn.")]
        self._disabled_before = torch.compiler.disable(self.before_forward)  # type: ignore[no-untyped-call]
        self._disabled_after = torch.compiler.disable(self.after_forward)  # type: ignore[no-untyped-call]
        self.before, self.after = self._disabled_before, self._disabled_after
        """The hooks to register: ``torch.compile`` does not trace them."""
        if _ask_compiler is not None:
            # The disabled functions set up and restore the compiler's state, which takes as long as the rest of a hook.
            # The hooks therefore call them only while something is compiled.
            _exclude_hooks_from_compilation()
            self.before, self.after = self.before_forward, self.after_forward

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _active_compiler() is not None:
            self._disabled_before(module, args, kwargs)
            return
        unit = self._unit
        if torch._C._get_tracing_state():
            raise UsageError(
                f"torch.jit.trace of unit {unit.name!r}: the traced module would contain weights that are freed, or "
                "those of one step. Trace a plain model that was loaded from shardwell.full_state_dict(model)",
                unit=unit.name,
            )
        if torch.is_autocast_enabled(unit.device_type):
            warn_of_autocast(unit.precision.layout, unit.device_type)
        self._passes.pre_forward(unit)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if _active_compiler() is not None:
            return self._disabled_after(module, args, kwargs, output)
        unit, passes = self._unit, self._passes
        calls = unit.usage.forward_calls
        if not calls:
            return output
        call, storage = calls.pop(), unit.storage
        results = [output] if type(output) is torch.Tensor else find_tensors(output)
        for tensor in results:
            # The same test as in `share_storage`, written out to save a call per tensor.
            if (
                tensor.layout is torch.strided
                and _has_storage(tensor)
                and tensor.untyped_storage()._cdata == storage._cdata
            ):
                output = self._copy_own_memory(output)
                results = find_tensors(output)
                break
        if torch.is_grad_enabled():
            # A module may also return a result through an argument that it changes, or through an attribute.
            is_tensor = len(args) == 1 and type(args[0]) is torch.Tensor and not kwargs
            results += args if is_tensor else find_argument_tensors((*args, *kwargs.values()))
            if self._own_parts:
                results += attribute_tensors(self._own_parts)
            # Every node that made a result is hooked, so that the node begins the call's backward. The node of a view's
            # base is hooked too: an in-place operation on the view bypasses the view's own node.
            nodes: dict[Any, None] = {}
            for tensor in results:
                nodes[tensor.grad_fn] = None
                if (base := tensor._base) is not None:
                    nodes[base.grad_fn] = None
            nodes.pop(None, None)
            graphs, first_number = passes.graphs, call.first_node_number
            for node in nodes:
                if (number := node._sequence_nr()) >= first_number:
                    call.has_backward = True
                    graphs.watch(node, number, call)
                elif number not in graphs.watched:
                    graphs.watch_input(node, number)
        passes.post_forward(call)
        return output

    def _copy_own_memory(self, output: Any) -> Any:
        """Copies outputs that are parameters or views of them, because their memory is about to be released."""
        storage = self._unit.storage
        output = map_tensors(output, lambda tensor: tensor.clone() if share_storage(tensor, storage) else tensor)
        if any(share_storage(tensor, storage) for tensor in find_tensors(output)):
            raise UsageError(
                f"the forward of unit {self._unit.name!r} returns a view of its parameters inside an object that is "
                "not a list, tuple, dict or dataclass: return a clone of the view",
                unit=self._unit.name,
            )
        return output


@functools.cache
def _exclude_hooks_from_compilation() -> None:
    """Makes ``torch.compile`` run the hooks as they are. Not done at import: it imports the compiler (seconds)."""
    for hook in (_Hooks.before_forward, _Hooks.after_forward):
        torch._dynamo.decorators.skip(hook)


def _parts(unit: Unit) -> Iterator[nn.Module]:
    return (part for module in unit.modules for part in module.modules())


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


Wrapper = Callable[..., Any]
"""Called with a module's forward and its arguments; returns what the forward returns."""


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
