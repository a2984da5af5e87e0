"""All changes to torch. They exist from the first ``fully_shard`` of a process until its last session is closed.

- Optimizers and gradient clipping raise for gradients that are on the shard servers: they would silently work with a
  part of the gradients. Freed parameters raise by themselves (``parameters.py``). Gathered parameters do not, and
  torch sees an empty list if all gradients were pushed. The functions are therefore wrapped, under every name that
  torch has for them.
- Every backward begins with a search. See Note: [Search].
- Parametrizing a gathered parameter leaves its version counter as it is.
- ``Parameter.data`` notes that it was read: a write to its result counts in no version counter.

Note: [Search]
    The hooks on the results of a forward (``hooks.py``) are enough for graphs that lead through these results. Two
    kinds of nodes bypass the results:

    - Nodes of a forward whose value left the forward in another way: an auxiliary loss that was appended to a list, a
      feature that a hook on a submodule took.
    - Nodes that were made outside of every forward while the unit was gathered, such as a penalty on its parameters.

    A search from the roots of the backward finds these nodes. The search ends at nodes that have a hook, so in an
    ordinary step it visits only the nodes of the loss function. If the search misses a node, autograd's version check
    raises: see Note: [Version counters]. A backward searches only for the units of sessions whose forwards ran in the
    same thread: see Note: [Node numbers].
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad, parametrize
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwell.module.parameters import FIRST_VERSION, FREED_VERSION, refuse_clipping
from shardwell.module.passes import NO_TASK, ForwardBackward, Graphs, ThreadGuard, backward_task
from shardwell.module.unit import ForwardCall, Unit, owner_of
from shardwell_wire.errors import FreedParameterError, UsageError
from shardwell_wire.model.optimizers import OPTIMIZERS

_CLIPPING_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")

_DATA: Any = torch.Tensor.data

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

_LEAF = "AccumulateGrad"
"""Class of the node of a leaf tensor, whose gradient is accumulated."""

_watched: weakref.WeakSet[ForwardBackward] = weakref.WeakSet()
"""The passes of all sessions whose gradients may be on the servers."""

_undo: list[Callable[[], None]] = []
"""Each reverts a change, in the order in which they were made. Empty while torch is unchanged."""


def watch(passes: ForwardBackward) -> None:
    """Makes torch check for the parameters and gradients of a session's units from now on."""
    if not _undo:
        _install()
    _watched.add(passes)


def unwatch(passes: ForwardBackward) -> None:
    """Ends the checks, because the session is closed. Reverts all changes if there are no other sessions."""
    _watched.discard(passes)
    if not _watched:
        while _undo:
            _undo.pop()()


def needs_closure(optimizer: type[Optimizer]) -> bool:
    """True if the optimizer's step evaluates the model itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _install() -> None:
    _undo.append(register_optimizer_step_pre_hook(_refuse_local_step).remove)
    for name in _CLIPPING_FUNCTIONS:
        original = getattr(clip_grad, name)
        checked = _checked(original, _check_parameters)
        for module in (clip_grad, utils):
            for alias in [alias for alias, value in vars(module).items() if value is original]:
                _change(module, alias, checked)
    # clip_grad.get_total_norm stays unchecked: clip_grad_norm_ of ordinary parameters without gradients calls it.
    _change(utils, "get_total_norm", _checked(utils.get_total_norm, _check_gradients))
    run_backward = _searching(torch.autograd.graph._engine_run_backward)
    for module in (torch.autograd.graph, torch.autograd):  # torch imports the function under two names
        _change(module, "_engine_run_backward", run_backward)

    _change(nn.Parameter, "data", property(_get_data, _DATA.__set__, _DATA.__delete__))
    _change(parametrize.ParametrizationList, "__init__", _keeping_version(parametrize.ParametrizationList.__init__))


def _keeping_version(original: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor of a parametrization that does not count as a write.

    The constructor sets the parameter to the memory that it already has. This increments the version counter. PEFT
    parametrizes gathered parameters in each forward (``target_parameters``).
    """

    @functools.wraps(original)
    def construct(self: nn.Module, modules: Any, parameter: Any, *args: Any, **kwargs: Any) -> None:
        version = parameter._version if isinstance(parameter, torch.Tensor) else 0
        original(self, modules, parameter, *args, **kwargs)
        if owner_of(parameter) is not None:  # other memory is found by its address
            torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))

    return construct


def _change(place: Any, name: str, value: Any) -> None:
    """Changes an attribute of torch, to be reverted unless somebody else has changed it in the meantime."""
    is_inherited, original = name not in vars(place), getattr(place, name)
    setattr(place, name, value)

    def undo() -> None:
        if vars(place).get(name) is not value:
            return
        if is_inherited:
            delattr(place, name)
        else:
            setattr(place, name, original)

    _undo.append(undo)


def _get_data(parameter: torch.Tensor) -> torch.Tensor:
    data: torch.Tensor = _DATA.__get__(parameter)
    if (owner := owner_of(parameter)) is not None:
        owner.unit.note_data_read(owner.index)
    return data


def _refuse_local_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if getattr(optimizer, "updates_on_servers", False):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (owner := owner_of(parameter)) is not None:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() cannot update parameter {owner.name!r}, because its values are "
                    f"on the shard servers. Use {_replacement(type(optimizer))}",
                    parameter=owner.name,
                )


def _replacement(optimizer: type[Optimizer]) -> str:
    if optimizer.__name__.lower() in OPTIMIZERS:
        return f"shardwell.optim.{optimizer.__name__}"
    if needs_closure(optimizer):
        return "an optimizer of shardwell.optim: none of them evaluates the model several times in a step"
    return f"shardwell.ClientSide(parameters, {optimizer.__name__}, ...), or an optimizer of shardwell.optim"


def _checked(original: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns the function with a check of its first argument."""

    @functools.wraps(original)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return original(check(tensors), *args, **kwargs)

    return checked


def _check_parameters(parameters: torch.Tensor | Iterable[torch.Tensor]) -> Any:
    """Raises if a parameter is sharded; returns the argument, an iterator as a list."""
    found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in found:
        if (owner := owner_of(parameter)) is not None:
            refuse_clipping(owner)
    return found if found else parameters  # torch itself warns of an empty generator


def _check_gradients(gradients: torch.Tensor | Iterable[torch.Tensor]) -> Any:
    """Raises if there is no gradient, but some are on the servers; returns the argument, an iterator as a list."""
    found = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients)
    if not found:
        for passes in _watched:
            for unit in passes.units.values():
                if unit.pushed:
                    raise UsageError(
                        f"get_total_norm got no gradient: gradients of unit {unit.name!r} are on the shard servers. "
                        "optimizer.clip_grad_norm_(float('inf')) returns the norm of all gradients and clips nothing",
                        unit=unit.name,
                    )
    return found


def _searching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function through which torch runs a backward, with the search before it."""

    @functools.wraps(original)
    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        watched, entered = list(_watched), list[ThreadGuard]()
        this = threading.current_thread()
        try:
            for passes in watched:
                if passes.graphs.thread is this:  # see Note: [Node numbers]
                    passes.guard.enter()
                    passes.guard.num_backwards += 1
                    entered.append(passes.guard)
                    _hook_loose_nodes(passes, t_outputs)
            return original(t_outputs, *args, **kwargs)
        except BaseException as error:
            if backward_task() == NO_TASK:
                for passes in watched:
                    if passes.guard.is_mine:
                        passes.end_failed_backward()
            explanation = _explain(error, [unit for passes in watched for unit in passes.units.values()])
            if explanation is None:
                raise
            raise explanation from error
        finally:
            for guard in entered:
                guard.leave_backward()
            for passes in watched:
                if passes.guard.late:
                    passes.guard.leave_at_end()

    # The compiler must not trace the search.
    return torch.compiler.disable(run_backward, recursive=False)  # type: ignore[no-any-return, no-untyped-call]


def _hook_loose_nodes(passes: ForwardBackward, roots: Iterable[Any]) -> None:
    """Hooks the nodes that read a unit's weights and have no hook, so that the unit is gathered before they run.

    Called by the thread that has made the session's graphs. See Note: [Search].
    """
    graphs = passes.graphs
    reads: dict[Any, dict[Unit, None]] = {}
    """The units whose weights the result of a node shows: of nodes that make views."""
    open_groups: dict[Unit, ForwardCall] = {}
    for node, number in sorted(_reachable(roots, graphs).items(), key=itemgetter(1)):
        if type(node).__name__ == _LEAF:
            continue
        readers: dict[Unit, None] = {}
        for child, _ in node.next_functions:  # children have lower numbers, so their entries in `reads` exist
            if child in reads:
                readers |= reads[child]
            elif type(child).__name__ == _LEAF:
                owner = owner_of(child.variable)
                if owner is not None and passes.units.get(owner.unit.name) is owner.unit:
                    readers[owner.unit] = None
        if readers and node.name().startswith(_VIEWS):
            reads[node] = readers
        if (call := graphs.find(number)) is not None:
            graphs.watch(node, number, call)
        elif readers:
            # Consecutive nodes that read the same unit share one call, so the unit is gathered once for all of them.
            open_groups = {
                unit: open_groups.get(unit) or ForwardCall(unit, unit.generation, number) for unit in readers
            }
            for group in open_groups.values():
                graphs.watch(node, number, group)


def _reachable(roots: Iterable[Any], graphs: Graphs) -> dict[Any, int]:
    """Returns the nodes of a backward, down to those that have a hook or are older than all graphs with weights."""
    found: dict[Any, int] = {}
    waiting = list(roots)
    for position, root in enumerate(waiting):  # a root is a tensor or a `GradientEdge`
        waiting[position] = root.grad_fn if isinstance(root, torch.Tensor) else root.node
    watched, first_number = graphs.watched, graphs.first_number
    while waiting and len(found) < _MAX_NODES:
        node = waiting.pop()
        if node is None or node in found:
            continue
        number = node._sequence_nr()
        if number not in watched and number >= first_number:
            found[node] = number
            waiting.extend(map(itemgetter(0), node.next_functions))
    return found


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
                    return _freed(unit.name, unit.layout.parameters[index].shown_name)
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
