"""What runs each algorithm: torch's own kernels and functions where it has them, told to use those in which no cut
changes a bit.

They are called without torch's optimizer classes, whose first instance imports torch's compiler: seconds of CPU time
in the life of every server.

Note: an update that fails. A committed update is repeated until it succeeds, and it must be applied exactly once. An
engine therefore either finishes a part and marks it, or leaves its values and state as they were. Kernels allocate
nothing and run as one call, which fails before it changes anything. Everything else is made of many torch operations,
each of which may find no memory: it runs on a copy-back basis, slice by slice, so that the copies stay small and in
the cache. State is allocated before, by ``Engine.missing``.
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

from shardwell_server.hyperparameters import FLAGS
from shardwell_server.shard.arithmetic.algorithms.lamb import lamb
from shardwell_server.shard.arithmetic.algorithms.lion import lion
from shardwell_wire.layout import BLOCK_BYTES

Settings = Mapping[str, Any]
"""Hyper-parameters as torch's functions take them."""
State = dict[str, Tensor]
"""What an algorithm keeps of one parameter, by the names that torch's optimizers give it."""

SLICE_BYTES = 256 * BLOCK_BYTES
"""Element-wise algorithms update this much of a part's values at a time."""

_SCALARS = ("step", "mu_product")
"""State that is one number for the whole parameter."""

_WORKSPACE_TENSORS = 4
"""Temporary tensors of the size of the values that an algorithm on whole tensors may have at once."""


@dataclass(slots=True)
class Part:
    """A parameter, or the part of it that lies in a shard, which has a gradient in this step."""

    number: int
    """Of the part in its shard."""
    values: Tensor
    gradient: Tensor
    """Of the shape of ``values``."""
    state: State
    """Everything that ``Engine.missing`` names."""
    fresh: frozenset[str] = frozenset()
    """Names of the state that this update begins."""
    done_elements: int = 0
    """How many of the first elements are updated, by engines that go slice by slice."""
    done: bool = False
    """Whether values and state are those of the next version."""


Make = Callable[[Tensor, Settings], Tensor | None]
"""Makes state of a parameter's values and the settings; None: a parameter of this shape has none."""


class Engine:
    """One algorithm; what it keeps is with the parameters.

    Args:
        function: Updates values in place. Takes lists of values, of gradients and of every state, and settings.
        state: How state begins, in the order in which the function takes it.
        switches: Names of state that is there only while a hyper-parameter is set, and of that. It may be set late.
        unused: Hyper-parameters that only ``state`` uses.
        whole_tensors: Whether the function needs the whole parameter; else it works element by element.
        **options: Which of its implementations the function shall use.
    """

    def __init__(
        self,
        function: Callable[..., None],
        state: Mapping[str, Make],
        *,
        switches: Mapping[str, str] | None = None,
        unused: frozenset[str] = frozenset(),
        whole_tensors: bool = False,
        **options: Any,
    ) -> None:
        self._function, self._state, self._switches = function, state, switches or {}
        self._unused, self._whole_tensors, self._options = unused, whole_tensors, options

    def missing(self, values: Tensor, state: Mapping[str, Tensor], settings: Settings) -> State:
        """Allocates the state that a part needs for its next update and does not have yet."""
        made = {
            name: make(values, settings)
            for name, make in self._state.items()
            if name not in state and not self._off(name, settings)
        }
        return {name: tensor for name, tensor in made.items() if tensor is not None}

    def begins_with(self, settings: Settings) -> dict[str, Any]:
        """The settings that decide what is in new state."""
        return {name: settings[name] for name in self._unused}

    def workspace_bytes(self, values: Tensor, state: Mapping[str, Tensor]) -> int:
        """What the update of one part may allocate and free again; a few slices count as nothing."""
        if not self._whole_tensors:
            return 0
        return _WORKSPACE_TENSORS * values.nbytes + sum(tensor.nbytes for tensor in (values, *state.values()))

    def update(self, parts: Sequence[Part], settings: Settings) -> None:
        """Updates values and state in place. If it raises, it can be called again for the parts that are not done."""
        for part in parts:
            if self._whole_tensors:
                self._update(part, part.values, part.gradient, part.state, settings)
            else:
                self._update_in_slices(part, settings)
            part.done = True

    def _off(self, name: str, settings: Settings) -> bool:
        return name in self._switches and not settings[self._switches[name]]

    def _update_in_slices(self, part: Part, settings: Settings) -> None:
        values, gradient = part.values.view(-1), part.gradient.view(-1)
        large = {name: tensor.view(-1) for name, tensor in part.state.items() if name not in _SCALARS}
        step = max(1, SLICE_BYTES // values.element_size())
        while part.done_elements < values.numel():
            here = slice(part.done_elements, min(values.numel(), part.done_elements + step))
            # Every slice counts from the same scalars; those of the last one stay.
            state = {name: part.state[name].clone() for name in _SCALARS if name in part.state}
            state |= {name: tensor[here] for name, tensor in large.items()}
            self._update(part, values[here], gradient[here], state, settings)
            if here.stop == values.numel():
                part.state |= {name: state[name] for name in _SCALARS if name in state}
            part.done_elements = here.stop

    def _update(self, part: Part, values: Tensor, gradient: Tensor, state: State, settings: Settings) -> None:
        """Updates some values and their state, all or nothing."""
        before = [(tensor, tensor.clone()) for tensor in (values, *state.values())]
        try:
            self._call(part, values, gradient, state, settings)
        except BaseException:
            for tensor, copy in before:
                tensor.copy_(copy)
            raise

    def _call(self, part: Part, values: Tensor, gradient: Tensor, state: State, settings: Settings) -> None:
        lists = [[] if self._off(name, settings) else [state.get(name)] for name in self._state]
        chosen = {name: value for name, value in settings.items() if name not in self._unused}
        self._function([values], [gradient], *lists, **self._options, **chosen)


class _AdamKernel(Engine):
    """torch's fused Adam or AdamW, for all parts at once. It wants steps counted already."""

    def __init__(self, kernel: Callable[..., None]) -> None:
        super().__init__(kernel, _ADAM, switches=_AMSGRAD)

    def update(self, parts: Sequence[Part], settings: Settings) -> None:
        steps = torch._foreach_add([part.state["step"] for part in parts], 1)
        tensors = [name for name in self._state if name != "step"]
        lists = [[] if self._off(name, settings) else [part.state[name] for part in parts] for name in tensors]
        values, gradients = [part.values for part in parts], [part.gradient for part in parts]
        self._function(values, gradients, *lists, list(steps), **settings)
        for part, step in zip(parts, steps, strict=True):
            part.state["step"], part.done = step, True


class _Sgd(Engine):
    """torch's kernel wants to know of all parameters alike whether they have a momentum buffer yet. 16-bit parameters
    it leaves all but the last few elements as they are (torch 2.13, CPU), so those go through the plain loop.
    """

    def __init__(self) -> None:
        super().__init__(sgd, {"momentum_buffer": _room}, switches={"momentum_buffer": "momentum"})

    def update(self, parts: Sequence[Part], settings: Settings) -> None:
        wide = [part for part in parts if part.values.element_size() > 2]
        for first in (False, True):
            alike = [part for part in wide if ("momentum_buffer" in part.fresh) == first]
            if alike:
                _sgd_kernel(alike, settings, first=first)
        super().update([part for part in parts if part.values.element_size() <= 2], settings)

    def _call(self, part: Part, values: Tensor, gradient: Tensor, state: State, settings: Settings) -> None:
        momentum = state.get("momentum_buffer")
        buffers = [None if "momentum_buffer" in part.fresh else momentum]
        sgd([values], [gradient], buffers, foreach=False, fused=False, **settings)
        if momentum is not None and buffers[0] is not None:
            momentum.copy_(buffers[0])


def _sgd_kernel(parts: Sequence[Part], settings: Settings, *, first: bool) -> None:
    buffers = [part.state["momentum_buffer"] for part in parts] if settings["momentum"] else []
    values, gradients = [part.values for part in parts], [part.gradient for part in parts]
    torch._fused_sgd_(values, gradients, buffers, is_first_step=bool(buffers) and first, **settings)
    for part in parts:
        part.done = True


def _muon(*lists: list[Tensor], **settings: Any) -> None:
    from torch.optim._muon import muon  # newer than the oldest torch that servers run with

    muon(*lists, has_complex=False, **settings)


def _zeros(values: Tensor, _: Settings) -> Tensor:
    return torch.zeros_like(values)


def _room(values: Tensor, _: Settings) -> Tensor:
    """What the first update overwrites. Written to already: the system gives pages only then."""
    return torch.zeros_like(values)


def _step(_: Tensor, __: Settings) -> Tensor:
    return torch.tensor(0.0)


def _one(_: Tensor, __: Settings) -> Tensor:
    return torch.tensor(1.0)


def _initial_sum(values: Tensor, settings: Settings) -> Tensor:
    return torch.full_like(values, settings["initial_accumulator_value"])


def _row_zeros(values: Tensor, _: Settings) -> Tensor | None:
    return values.new_zeros(*values.shape[:-1], 1) if values.ndim > 1 else None


def _column_zeros(values: Tensor, _: Settings) -> Tensor | None:
    return values.new_zeros(*values.shape[:-2], 1, values.shape[-1]) if values.ndim > 1 else None


def _vector_zeros(values: Tensor, _: Settings) -> Tensor | None:
    return torch.zeros_like(values) if values.ndim <= 1 else None


_MOMENTS: Mapping[str, Make] = {"exp_avg": _zeros, "exp_avg_sq": _zeros}
_ADAM: Mapping[str, Make] = {**_MOMENTS, "max_exp_avg_sq": _zeros, "step": _step}
_AMSGRAD = {"max_exp_avg_sq": "amsgrad"}

# With `foreach=False` torch goes through parameters one by one.
ENGINES: Mapping[str, Engine] = {
    "sgd": _Sgd(),
    "adam": _AdamKernel(torch._fused_adam_),
    "adamw": _AdamKernel(torch._fused_adamw_),
    "nadam": Engine(nadam, {**_MOMENTS, "mu_product": _one, "step": _step}, foreach=False),
    "radam": Engine(radam, {**_MOMENTS, "step": _step}, foreach=False),
    "adamax": Engine(adamax, {"exp_avg": _zeros, "exp_inf": _zeros, "step": _step}, foreach=False),
    "rmsprop": Engine(
        rmsprop,
        {"square_avg": _zeros, "grad_avg": _zeros, "momentum_buffer": _zeros, "step": _step},
        switches={"grad_avg": "centered", "momentum_buffer": "momentum"},
        foreach=False,
    ),
    "adagrad": Engine(
        adagrad,
        {"sum": _initial_sum, "step": _step},
        unused=frozenset({"initial_accumulator_value"}),
        foreach=False,
        fused=False,
    ),
    "adadelta": Engine(adadelta, {"square_avg": _zeros, "acc_delta": _zeros, "step": _step}, foreach=False),
    "lion": Engine(lion, {"exp_avg": _zeros}),
    "lamb": Engine(lamb, {**_MOMENTS, "step": _step}, whole_tensors=True),
    "adafactor": Engine(
        adafactor,
        {"row_var": _row_zeros, "col_var": _column_zeros, "variance": _vector_zeros, "step": _step},
        whole_tensors=True,
        foreach=False,
    ),
    "muon": Engine(_muon, {"momentum_buffer": _zeros}, whole_tensors=True),
}
"""By algorithm in ``hyperparameters.ALGORITHMS``."""


def torch_settings(hyperparameters: Mapping[str, float]) -> dict[str, Any]:
    """A parameter group as it travels, in the terms of torch's functions."""
    values: dict[str, Any] = {name: bool(value) if name in FLAGS else value for name, value in hyperparameters.items()}
    if "ns_steps" in values:
        values["ns_steps"] = int(values["ns_steps"])
        values["ns_coefficients"] = tuple(values.pop(name) for name in ("ns_a", "ns_b", "ns_c"))
        values["adjust_lr_fn"] = "match_rms_adamw" if values.pop("match_rms_adamw") else "original"
    return values
