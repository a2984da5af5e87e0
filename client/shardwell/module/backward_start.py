"""Before autograd runs a backward: nodes that will read a unit's weights get a hook that gathers the unit.

The hooks on the results of a forward (``hooks.py``) are enough for graphs that lead through those results.
Two kinds of nodes are reached in another way:

- Nodes that were made in a forward, and whose value left it otherwise: an auxiliary loss that was appended to a
  list, a feature that a hook on a submodule took.
- Nodes that were made outside of every forward while the unit was gathered, such as a penalty on its parameters.

They are found from the roots of the backward: the search ends at nodes that have a hook already, so in an ordinary
step it looks at the nodes of the loss function. What the search misses is safe: see "Version counters".

A backward searches only for the units of sessions whose forwards ran in the same thread: each thread numbers its
nodes from 0, so the number of another session's node says nothing about a node of this thread.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import graph

from shardwell.module.parameter import owner_of
from shardwell.module.usage import ForwardCall
from shardwell.module.version_counters import explained

if TYPE_CHECKING:
    from shardwell.module.unit import Unit
    from shardwell.module.units import Units

_RUN_BACKWARD = "_engine_run_backward"

_MAX_NODES = 4096
"""The search gives up after so many: it takes about a microsecond for each."""

_ALIASES = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Squeeze", "Unsqueeze")
_VIEWS = tuple(
    f"{name}Backward" for name in (*_ALIASES, "Select", "Slice", "Narrow", "Split", "Unbind", "AsStrided", "Alias")
)
"""Begin the names of nodes whose result is a view: what uses the view reads the parameter."""

_sharded: weakref.WeakSet[Units] = weakref.WeakSet()


def watch(units: Units) -> None:
    """From now on backwards gather these units where they need them."""
    _install()
    _sharded.add(units)


@functools.cache
def _install() -> None:
    """Wraps the function through which all of torch's Python code runs a backward, as ``torch.compiler`` does, too."""
    original = graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = list(_sharded)
        for units in sharded:
            hook_loose_nodes(units, t_outputs)
        try:
            return original(t_outputs, *args, **kwargs)
        except RuntimeError as error:
            explanation = explained(error, [unit for units in sharded for unit in units])
            if explanation is None:
                raise
            raise explanation from error

    skipped = torch.compiler.disable(run_backward, recursive=False)  # type: ignore[no-untyped-call]
    for module in (graph, torch.autograd):
        setattr(module, _RUN_BACKWARD, skipped)


def hook_loose_nodes(units: Units, roots: Iterable[Any]) -> None:
    """Has nodes that read a unit's weights, and would not be noticed, gather the unit before they run."""
    if not units.graphs.may_be_of_this_thread:
        return
    found = _search(units, roots)
    open_groups: dict[Unit, ForwardCall] = {}
    for number in sorted(found):
        node, readers = found[number]
        groups = {unit: open_groups.get(unit) or ForwardCall(unit, unit.generation, number) for unit in readers}
        open_groups = groups
        for call in groups.values():
            units.graphs.watch(node, number, call)


def _search(units: Units, roots: Iterable[Any]) -> dict[int, tuple[Any, list[Unit]]]:
    """Nodes without a hook that read weights, by number, with the units of these; hooks those of forward calls."""
    graphs = units.graphs
    nodes = {node: node._sequence_nr() for node in _reachable(roots, graphs.watched)}
    reads: dict[Any, list[Unit]] = {}
    found: dict[int, tuple[Any, list[Unit]]] = {}
    for node, number in sorted(nodes.items(), key=lambda item: item[1]):
        if _is_leaf(node):
            continue
        readers = {unit: None for child, _ in node.next_functions for unit in _read_by(child, reads, units)}
        if readers and node.name().startswith(_VIEWS):
            reads[node] = list(readers)
        if (call := graphs.calls.made(number)) is not None:
            graphs.watch(node, number, call)
        elif readers:
            found[number] = node, list(readers)
    return found


def _read_by(child: Any, reads: dict[Any, list[Unit]], units: Units) -> list[Unit]:
    """Units of which a node reads weights because of one of its inputs."""
    if child is None:
        return []
    if not _is_leaf(child):
        return reads.get(child, [])
    owner = owner_of(child.variable)
    return [owner.unit] if owner is not None and units.has(owner.unit) else []


def _is_leaf(node: Any) -> bool:
    """Whether a node stands for a tensor that no operation made."""
    return type(node).__name__ == "AccumulateGrad"


def _reachable(roots: Iterable[Any], watched: set[int]) -> Iterator[Any]:
    """The nodes of a backward up to those that are watched."""
    seen: set[Any] = set()
    waiting = [node for root in roots if (node := _node_of(root)) is not None]
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.pop()
        if node in seen or node._sequence_nr() in watched:
            continue
        seen.add(node)
        yield node
        waiting.extend(child for child, _ in node.next_functions if child is not None)


def _node_of(root: Any) -> Any:
    """The node of a tensor or of a ``GradientEdge``."""
    return root.grad_fn if isinstance(root, torch.Tensor) else root.node
