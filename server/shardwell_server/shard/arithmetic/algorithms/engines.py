"""Runs the arithmetic of each optimizer on the parts of parameters in a shard.

Uses torch's kernels and functions where torch has them, in the variants whose bits do not depend on how a parameter is
cut. torch's optimizer classes are not used: creating the first one imports torch's compiler, which costs every server
seconds of CPU time.

Note: [Failed updates]
    A committed update is repeated until it succeeds, and must be applied exactly once. An engine therefore either
    finishes a part and marks it as done, or leaves its values and state unchanged. Fused kernels allocate nothing and
    run as one call, which fails before it changes anything. All other algorithms consist of many torch operations,
    each of which may run out of memory. They work on slices, and restore a slice from a copy if they fail: the copies
    are small and stay in the cache. ``Engine.missing`` allocates the state in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim._adafactor import adafactor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adamax import adamax
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from shardwell_server.shard.arithmetic.algorithms.lamb import lamb
from shardwell_server.shard.arithmetic.algorithms.lion import lion
from shardwell_wire import fault_points
from shardwell_wire.layout import BLOCK_BYTES
from shardwell_wire.optimizers import OPTIMIZERS, StateShape, StateTensor

Settings = Mapping[str, Any]
"""Hyper-parameters as torch's functions take them."""
State = dict[str, Tensor]
"""Optimizer state of one part, by torch's names."""

SLICE_BYTES = 256 * BLOCK_BYTES
"""Size of the slices in which element-wise algorithms update the values of a part."""

_WORKSPACE_TENSORS = 4
"""Temporary tensors of the size of the values that an algorithm on whole tensors may allocate at once."""


@dataclass(slots=True)
class Part:
    """A parameter with a gradient in this step, or the part of it in a shard."""

    number: int
    """Index of the part in its shard."""
    values: Tensor
    gradient: Tensor
    """Same shape as ``values``."""
    state: State
    """Includes everything that ``Engine.missing`` allocated."""
    fresh: frozenset[str] = frozenset()
    """Names of the state tensors that this update creates."""
    done_elements: int = 0
    """Number of leading elements that are updated, for engines that work on slices."""
    done: bool = False
    """True if values and state belong to the next version."""


class Engine:
    """Runs one optimizer. The state is stored with the parts, not in the engine.

    Args:
        name: Name in the table of optimizers, which describes the state.
        function: Updates values in place. Takes lists of values, of gradients and of each state tensor, in the table's
            order, and the settings.
        **options: Options that select a variant of ``function``.
    """

    def __init__(self, name: str, function: Callable[..., None], **options: Any) -> None:
        self.name, spec = name, OPTIMIZERS[name]
        self._function, self._options = function, options
        self._state = {tensor.name: tensor for tensor in spec.state}
        self._scalars = [tensor.name for tensor in spec.state if tensor.shape is StateShape.SCALAR]
        self._initializers, self._whole_tensors = spec.initializers, spec.needs_whole_tensors

    def missing(self, values: Tensor, state: Mapping[str, Tensor], settings: Settings) -> State:
        """Allocates the state tensors that the next update of a part needs and ``state`` does not have."""
        made = {
            name: _allocate(tensor, values, settings)
            for name, tensor in self._state.items()
            if name not in state and _is_enabled(tensor, settings)
        }
        return {name: tensor for name, tensor in made.items() if tensor is not None}

    def initializers(self, settings: Settings) -> dict[str, Any]:
        """Returns the settings that determine the initial values of state."""
        return {name: settings[name] for name in self._initializers}

    def workspace_bytes(self, values: Tensor, state: Mapping[str, Tensor]) -> int:
        """Returns the temporary memory of an update of one part. The memory of a few slices counts as 0."""
        if not self._whole_tensors:
            return 0
        return _WORKSPACE_TENSORS * values.nbytes + sum(tensor.nbytes for tensor in (values, *state.values()))

    def update(self, parts: Sequence[Part], settings: Settings) -> None:
        """Updates values and state in place. After an error, call it again with the parts that are not done."""
        for part in parts:
            if self._whole_tensors:
                self._update(part, part.values, part.gradient, part.state, settings)
            else:
                self._update_in_slices(part, settings)
            part.done = True

    def _update_in_slices(self, part: Part, settings: Settings) -> None:
        values, gradient = part.values.view(-1), part.gradient.view(-1)
        scalars = [name for name in self._scalars if name in part.state]
        tensors = {name: tensor.view(-1) for name, tensor in part.state.items() if name not in scalars}
        step = max(1, SLICE_BYTES // values.element_size())
        while part.done_elements < values.numel():
            here = slice(part.done_elements, min(values.numel(), part.done_elements + step))
            # Every slice starts from the same scalars. The scalars of the last slice are stored.
            state = {name: part.state[name].clone() for name in scalars}
            state |= {name: tensor[here] for name, tensor in tensors.items()}
            self._update(part, values[here], gradient[here], state, settings)
            if here.stop == values.numel():
                part.state |= {name: state[name] for name in scalars}
            part.done_elements = here.stop
            fault_points.reach("server.update.middle")

    def _update(self, part: Part, values: Tensor, gradient: Tensor, state: State, settings: Settings) -> None:
        """Updates some values and their state. Restores both if it fails."""
        before = [(tensor, tensor.clone()) for tensor in (values, *state.values())]
        try:
            self._call(part, values, gradient, state, settings)
        except BaseException:
            for tensor, copy in before:
                tensor.copy_(copy)
            raise

    def _call(self, part: Part, values: Tensor, gradient: Tensor, state: State, settings: Settings) -> None:
        lists = [[state.get(name)] if _is_enabled(tensor, settings) else [] for name, tensor in self._state.items()]
        chosen = {name: value for name, value in settings.items() if name not in self._initializers}
        self._function([values], [gradient], *lists, **self._options, **chosen)


class _AdamKernel(Engine):
    """torch's fused Adam or AdamW, for all parts at once. The kernel expects that steps are already counted."""

    def update(self, parts: Sequence[Part], settings: Settings) -> None:
        # Not in place: if the kernel fails, the parts keep their old step counts.
        steps = torch._foreach_add([part.state["step"] for part in parts], 1)
        lists = [
            [part.state[name] for part in parts] if _is_enabled(tensor, settings) else []
            for name, tensor in self._state.items()
            if name != "step"
        ]
        values, gradients = [part.values for part in parts], [part.gradient for part in parts]
        self._function(values, gradients, *lists, list(steps), **settings)
        for part, step in zip(parts, steps, strict=True):
            part.state["step"], part.done = step, True


class _Sgd(Engine):
    """torch's fused SGD.

    The kernel requires that all parts of a call have a momentum buffer already, or none has. It leaves all but the last
    few elements of 16-bit parameters unchanged (torch 2.13, CPU), so these take the plain loop.
    """

    def update(self, parts: Sequence[Part], settings: Settings) -> None:
        wide = [part for part in parts if part.values.element_size() > 2]
        for is_first_step in (False, True):
            alike = [part for part in wide if ("momentum_buffer" in part.fresh) == is_first_step]
            if alike:
                _sgd_kernel(alike, settings, is_first_step=is_first_step)
        super().update([part for part in parts if part.values.element_size() <= 2], settings)

    def _call(self, part: Part, values: Tensor, gradient: Tensor, state: State, settings: Settings) -> None:
        momentum = state.get("momentum_buffer")
        buffers = [None if "momentum_buffer" in part.fresh else momentum]
        sgd([values], [gradient], buffers, foreach=False, fused=False, **settings)
        if momentum is not None and buffers[0] is not None:
            momentum.copy_(buffers[0])


def _sgd_kernel(parts: Sequence[Part], settings: Settings, *, is_first_step: bool) -> None:
    buffers = [part.state["momentum_buffer"] for part in parts] if settings["momentum"] else []
    values, gradients = [part.values for part in parts], [part.gradient for part in parts]
    torch._fused_sgd_(values, gradients, buffers, is_first_step=bool(buffers) and is_first_step, **settings)
    for part in parts:
        part.done = True


def _muon(*lists: list[Tensor], **settings: Any) -> None:
    from torch.optim._muon import muon  # the oldest supported torch lacks this module

    muon(*lists, has_complex=False, **settings)


def _is_enabled(tensor: StateTensor, settings: Settings) -> bool:
    return not tensor.enabled_by or bool(settings[tensor.enabled_by])


def _allocate(tensor: StateTensor, values: Tensor, settings: Settings) -> Tensor | None:
    """Allocates a state tensor for a part; None if a parameter of this shape has no such tensor.

    Writes to all of the memory, because the system provides pages only then.
    """
    initial = settings[tensor.initial] if isinstance(tensor.initial, str) else tensor.initial
    match tensor.shape:
        case StateShape.SCALAR:
            return torch.tensor(initial)
        case StateShape.ROWS:
            return values.new_zeros(*values.shape[:-1], 1) if values.ndim > 1 else None
        case StateShape.COLUMNS:
            return values.new_zeros(*values.shape[:-2], 1, values.shape[-1]) if values.ndim > 1 else None
        case StateShape.VECTOR:
            return torch.zeros_like(values) if values.ndim <= 1 else None
    return torch.full_like(values, initial) if initial else torch.zeros_like(values)


# With `foreach=False` torch processes parameters one by one.
_ENGINES: tuple[Engine, ...] = (
    _Sgd("sgd", sgd),
    _AdamKernel("adam", torch._fused_adam_),
    _AdamKernel("adamw", torch._fused_adamw_),
    Engine("nadam", nadam, foreach=False),
    Engine("radam", radam, foreach=False),
    Engine("adamax", adamax, foreach=False),
    Engine("rmsprop", rmsprop, foreach=False),
    Engine("adagrad", adagrad, foreach=False, fused=False),
    Engine("adadelta", adadelta, foreach=False),
    Engine("lion", lion),
    Engine("lamb", lamb),
    Engine("adafactor", adafactor, foreach=False),
    Engine("muon", _muon),
)
ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in _ENGINES}
"""The engine of every optimizer in the table."""


def torch_settings(algorithm: str, hyperparameters: Mapping[str, float]) -> dict[str, Any]:
    """Converts the hyper-parameters of a group to the arguments of torch's functions."""
    values: dict[str, Any] = {
        each.name: bool(value) if each.is_flag else int(value) if each.is_integer else value
        for each in OPTIMIZERS[algorithm].hyperparameters
        for value in (hyperparameters[each.name],)
    }
    if algorithm == "muon":
        values["ns_coefficients"] = tuple(values.pop(name) for name in ("ns_a", "ns_b", "ns_c"))
        values["adjust_lr_fn"] = "match_rms_adamw" if values.pop("match_rms_adamw") else "original"
    return values
