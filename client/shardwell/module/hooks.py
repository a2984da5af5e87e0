"""The entry of every backward: hooks nodes that read a unit's weights and have no hook yet.

The hooks on the results of a forward (``hooks.py``) are enough for graphs that lead through these results. Two kinds
of nodes bypass the results:

- Nodes of a forward whose value left the forward in another way: an auxiliary loss that was appended to a list, a
  feature that a hook on a submodule took.
- Nodes that were made outside of every forward while the unit was gathered, such as a penalty on its parameters.

A search from the roots of the backward finds these nodes. The search ends at nodes that have a hook, so in an ordinary
step it visits only the nodes of the loss function. If the search misses a node, autograd's version check raises: see
Note: [Version counters].

A backward searches only for the units of sessions whose forwards ran in the same thread. See Note: [Node numbers].

Hooks around the forward of modules: they gather a unit before its forward, and find its autograd nodes afterwards.

See Note: [Node numbers] in ``graph_tracking.py`` for how the hooked nodes start and end a unit's backward.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwell.module.mixed_precision import (
    attribute_tensors,
    find_tensors,
    map_tensors,
    share_storage,
    warn_of_autocast,
)
from shardwell.module.parameters import FIRST_VERSION, FREED_VERSION
from shardwell.module.passes import NO_TASK, ThreadGuard, WatchedGraphs, backward_task
from shardwell.module.unit import ForwardCall, Unit, owner_of
from shardwell.module.units import Units
from shardwell_wire.errors import FreedParameterError, UsageError

_MAX_NODES = 4096
"""Limit of the search, which takes about a microsecond per node."""

_ALIASES = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Squeeze", "Unsqueeze")
_VIEWS = tuple(
    f"{name}Backward" for name in (*_ALIASES, "Select", "Slice", "Narrow", "Split", "Unbind", "AsStrided", "Alias")
)
"""Prefixes of the names of nodes whose result is a view: an operation on the view reads the parameter."""

_OTHER_VERSION = re.compile(r"is at version (\d+); expected version (\d+) instead")
_NO_MEMORY = ("out of bounds for storage of size 0", "its data is not allocated yet")
"""torch's errors for a tensor without memory, in operations that do not compare version counters."""

_ADVICE = (
    "Make the tensor a result of the forward (a return value, or an attribute of one of the unit's modules), call "
    "backward while the unit is gathered (after module.unshard() and before module.reshard()), or compute the tensor "
    "from a clone of the parameter"
)

_watched: weakref.WeakSet[Units] = weakref.WeakSet()


def watch(units: Units) -> None:
    """Makes all later backwards search for nodes that need these units, if torch runs them by ``searching``."""
    _watched.add(units)


def unwatch(units: Units) -> None:
    """Ends the searches for these units."""
    _watched.discard(units)


def searching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function through which torch runs a backward, with the search before it."""

    @functools.wraps(original)
    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        watched, entered = list(_watched), list[ThreadGuard]()
        try:
            for units in watched:
                if units.passes.graphs.made_by_this_thread:
                    units.passes.guard.enter_backward()
                    entered.append(units.passes.guard)
                    hook_loose_nodes(units, t_outputs)
            return original(t_outputs, *args, **kwargs)
        except BaseException as error:
            if backward_task() == NO_TASK:
                for units in watched:
                    if units.passes.guard.is_mine:
                        units.passes.end_failed_backward()
            explanation = _explain(error, [unit for units in watched for unit in units])
            if explanation is None:
                raise
            raise explanation from error
        finally:
            for guard in entered:
                guard.leave_backward()
            for units in watched:
                units.passes.guard.leave_at_end()

    # The compiler must not trace the search.
    return torch.compiler.disable(run_backward, recursive=False)  # type: ignore[no-any-return, no-untyped-call]


def hook_loose_nodes(units: Units, roots: Iterable[Any]) -> None:
    """Hooks the nodes that read a unit's weights and have no hook, so that the unit is gathered before they run.

    Called by the thread that has made the session's graphs.
    """
    graphs = units.passes.graphs
    found = _search(units, roots)
    # Consecutive nodes that read the same unit share one call, so the unit is gathered once for all of them.
    open_groups: dict[Unit, ForwardCall] = {}
    for number in sorted(found):
        node, readers = found[number]
        groups = {unit: open_groups.get(unit) or ForwardCall(unit, unit.generation, number) for unit in readers}
        open_groups = groups
        for call in groups.values():
            graphs.watch(node, number, call)


def _search(units: Units, roots: Iterable[Any]) -> dict[int, tuple[Any, list[Unit]]]:
    """Returns the nodes without a hook that read weights, by number, with the units that they read.

    Nodes that were made in a forward call are hooked immediately and not returned.
    """
    graphs = units.passes.graphs
    nodes = {node: node._sequence_nr() for node in _reachable(roots, graphs)}
    reads: dict[Any, list[Unit]] = {}
    found: dict[int, tuple[Any, list[Unit]]] = {}
    for node, number in sorted(nodes.items(), key=lambda item: item[1]):
        if _is_leaf(node):
            continue
        readers = {unit: None for child, _ in node.next_functions for unit in _read_by(child, reads, units)}
        if readers and node.name().startswith(_VIEWS):  # children have lower numbers, so their entries exist
            reads[node] = list(readers)
        if (call := graphs.calls.find(number)) is not None:
            graphs.watch(node, number, call)
        elif readers:
            found[number] = node, list(readers)
    return found


def _read_by(child: Any, reads: dict[Any, list[Unit]], units: Units) -> list[Unit]:
    """Returns the units whose weights a node reads through one of its inputs."""
    if child is None:
        return []
    if not _is_leaf(child):
        return reads.get(child, [])
    owner = owner_of(child.variable)
    return [owner.unit] if owner is not None and units.has(owner.unit) else []


def _is_leaf(node: Any) -> bool:
    """True if a node represents a leaf tensor, whose gradient is accumulated."""
    return type(node).__name__ == "AccumulateGrad"


def _reachable(roots: Iterable[Any], graphs: WatchedGraphs) -> Iterator[Any]:
    """Yields the nodes of a backward down to those that have a hook, or are older than all graphs with weights."""
    seen: set[Any] = set()
    waiting = [node for root in roots if (node := _node_of(root)) is not None]
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.pop()
        number = node._sequence_nr()
        if node in seen or number in graphs.watched or number < graphs.first_number:
            continue
        seen.add(node)
        yield node
        waiting.extend(child for child, _ in node.next_functions if child is not None)


def _node_of(root: Any) -> Any:
    """Returns the node of a tensor or of a ``GradientEdge``."""
    return root.grad_fn if isinstance(root, torch.Tensor) else root.node


def _explain(error: BaseException, units: Sequence[Unit]) -> UsageError | None:
    """Returns a clearer error if a backward failed because of sharded weights; None if for another reason."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if (found := _OTHER_VERSION.search(text)) is None:
        freed = any(phrase in text for phrase in _NO_MEMORY) and any(unit.needs_gather for unit in units)
        return _freed(None, None) if freed else None
    now, expected = int(found[1]), int(found[2])
    if now >= FREED_VERSION:
        for unit in units:
            for index, parameter in enumerate(unit.parameters):
                if parameter._version == now:
                    return _freed(unit.name, unit.layout.parameters[index].name)
        return _freed(None, None)
    if now >= FIRST_VERSION and expected >= FIRST_VERSION:
        return UsageError(
            "backward through a graph that was made before the last optimizer.step() or in another work item: the "
            "weights that the graph saved are gone; run the forward again"
        )
    return None


def _freed(unit: str | None, parameter: str | None) -> FreedParameterError:
    weights = (
        "weights of a sharded module, which are freed"
        if unit is None
        else f"parameter {parameter!r}, whose unit {unit!r} is freed"
    )
    return FreedParameterError(
        f"backward needs {weights}. A tensor that is not a result of the unit's forward was computed from the weights. "
        + _ADVICE,
        unit=unit,
        parameter=parameter,
    )


Wrapper = Callable[..., Any]
"""Called with a module's forward and its arguments; returns what the forward returns."""


def hook_modules(unit: Unit, units: Units) -> list[RemovableHandle]:
    """Adds the hooks to a unit's modules, and returns their handles."""
    hooks, handles = _Hooks(unit, units), []
    before, after = _outside_of_compilation(hooks.before_forward), _outside_of_compilation(hooks.after_forward)
    for module in unit.modules:
        # Prepended, so that the user's own pre-hooks find the parameters gathered. ``ForwardBackward.call``, around all
        # hooks, covers exceptions: always_call does not cover KeyboardInterrupt, nor an exception in a hook.
        handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    return handles


def _outside_of_compilation(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that ``torch.compile`` does not trace, and that costs little where nothing is compiled."""
    disabled = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    compiler: Callable[[], object] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    if compiler is None:  # an older torch
        return disabled  # type: ignore[no-any-return]

    def call(*args: Any) -> Any:
        # `disabled` sets up and restores the compiler's state, which takes as long as the rest of a hook.
        return hook(*args) if compiler() is None else disabled(*args)

    return torch._dynamo.decorators.skip(call)


class _Hooks:
    """The hooks of one unit."""

    def __init__(self, unit: Unit, units: Units) -> None:
        self._unit = unit
        self._passes = units.passes
        nested = {id(part) for other in units if other.modules != unit.modules for part in _parts(other)}
        self._own_parts = [part for part in _parts(unit) if id(part) not in nested and _may_keep_results(part)]

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
        calls = self._unit.usage.forward_calls
        if not calls:
            return output
        call, storage = calls.pop(), self._unit.storage
        results = find_tensors(output)
        for tensor in results:
            if share_storage(tensor, storage):
                output = self._copy_own_memory(output)
                results = find_tensors(output)
                break
        if torch.is_grad_enabled():
            # A module may also return a result through an argument that it changes, or through an attribute.
            results += find_tensors(*args, *kwargs.values())
            if self._own_parts:
                results += attribute_tensors(self._own_parts)
            self._watch(call, results)
        self._passes.post_forward(call)
        return output

    def _watch(self, call: ForwardCall, results: Sequence[torch.Tensor]) -> None:
        """Hooks every node that made a result, so that the node begins the call's backward.

        The node of a view's base is hooked too: an in-place operation on the view bypasses the view's own node.
        """
        nodes: dict[Any, None] = {}
        for tensor in results:
            nodes[tensor.grad_fn] = None
            if (base := tensor._base) is not None:
                nodes[base.grad_fn] = None
        nodes.pop(None, None)
        graphs = self._passes.graphs
        for node in nodes:
            if (number := node._sequence_nr()) >= call.first_node_number:
                call.has_backward = True
                graphs.watch(node, number, call)
            else:
                graphs.watch_input(node, number)

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
        return units.passes.call(run, args, kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        hooks.before_forward(module, args, kwargs)
        return hooks.after_forward(module, args, kwargs, original(*args, **kwargs))

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
