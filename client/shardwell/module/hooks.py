"""When a unit is gathered and freed: hooks on modules and on autograd's nodes.

Note: Nodes and their numbers
    Autograd numbers its nodes as they are made, and a backward always runs the highest number that is
    ready. So the backward of a forward call begins at a node that made one of its results, and is
    over when any node with a lower number than the call's first runs. Hooks on result nodes are
    therefore enough. Unlike hooks on tensors they survive in-place operations, and nothing is done to
    inputs: an alias of an input would change what ``is`` says and the order in which gradients add up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwell.module.mixed_precision import warn_of_autocast
from shardwell.module.tensors import attribute_tensors, find_tensors, map_tensors, share_storage
from shardwell.module.usage import ForwardCall
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.module.unit import Unit
    from shardwell.module.units import Units

NO_TASK = -1
"""No backward is running."""


def backward_task() -> int:
    """The id of the backward that runs in this thread, or ``NO_TASK``; nested ones have their own."""
    return torch._C._current_graph_task_id()


def attach(unit: Unit, units: Units) -> None:
    """Hooks a unit's modules."""
    hooks = _Hooks(unit, units)
    for module in unit.modules:
        before = torch.compiler.disable(hooks.before_forward)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(hooks.after_forward)  # type: ignore[no-untyped-call]
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)


class _Hooks:
    """The hooks of one unit."""

    def __init__(self, unit: Unit, units: Units) -> None:
        self._unit = unit
        self._units = units
        others = {id(part) for other in units if other is not unit for part in _parts(other)}
        self._own_parts = [part for part in _parts(unit) if id(part) not in others and _may_keep_results(part)]

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        warn_of_autocast(self._unit.precision.layout, self._unit.device_type)
        self._units.enter_forward(self._unit)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        calls = self._unit.usage.forward_calls
        call = calls.pop() if calls else None
        if call is not None and output is not None:
            output = self._copy_own_memory(output)
        if call is not None and torch.is_grad_enabled():
            # A module may also hand out a result by changing an argument or keeping an attribute.
            self._watch(call, [*find_tensors(output, args, kwargs), *attribute_tensors(self._own_parts)])
        if call is not None:
            self._units.leave_forward(call)
        return output

    def _watch(self, call: ForwardCall, results: Sequence[torch.Tensor]) -> None:
        """Has every node that made a result begin the call's backward.

        The node of a view's base is one of them: an in-place operation on the view goes around the view's own.
        """
        nodes = {tensor.grad_fn for tensor in results}
        nodes |= {tensor._base.grad_fn for tensor in results if tensor._base is not None}
        for node in nodes:
            if node is None:
                continue
            if (number := node._sequence_nr()) >= call.first_node_number:
                call.has_backward = True
                self._units.graphs.watch(node, number, call)
            else:
                self._units.graphs.watch_input(node, number)

    def _copy_own_memory(self, output: Any) -> Any:
        """Copies outputs that are parameters or views of them, whose memory is about to go."""
        storage = self._unit.storage
        found = [tensor for tensor in find_tensors(output) if share_storage(tensor, storage)]
        if not found:
            return output
        output = map_tensors(output, lambda tensor: tensor.clone() if share_storage(tensor, storage) else tensor)
        if any(share_storage(tensor, storage) for tensor in find_tensors(output)):
            raise UsageError(
                f"the forward of unit {self._unit.name!r} returns a view of its parameters inside an object that is no "
                "list, tuple, dict or dataclass; return a clone of the view",
                unit=self._unit.name,
            )
        return output


def _parts(unit: Unit) -> Iterator[nn.Module]:
    return (part for module in unit.modules for part in module.modules())


def _may_keep_results(module: nn.Module) -> bool:
    """Whether a module may keep a result as an attribute: those of torch do not, and most modules are those."""
    return not type(module).__module__.startswith("torch.nn.")


def hooked_method(unit: Unit, units: Units, module: nn.Module, method_name: str) -> Callable[..., Any]:
    """A method of a module with the unit's hooks before and after it."""
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
