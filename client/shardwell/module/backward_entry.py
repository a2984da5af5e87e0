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
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from shardwell.module.graph_tracking import NO_TASK, WatchedGraphs, backward_task
from shardwell.module.thread_guard import ThreadGuard
from shardwell.module.unit import ForwardCall, Unit, owner_of
from shardwell.module.unit_parameters import FIRST_VERSION, FREED_VERSION
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
