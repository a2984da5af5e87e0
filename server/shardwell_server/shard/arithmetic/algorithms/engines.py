"""What runs each algorithm: torch's own kernels and functions where it has them, told to use those in which no cut
changes a bit.

They are called without torch's optimizer classes, whose first instance imports torch's compiler: seconds of CPU time
in the life of every server.
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

Settings = Mapping[str, Any]
"""Hyper-parameters as torch's functions take them."""
State = dict[str, Tensor]
"""What an algorithm keeps of one parameter, by the names that torch's optimizers give it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter, or the part of it that lies in a shard, which has a gradient in this step."""

    values: Tensor
    gradient: Tensor
    """Of the shape of ``values``."""
    state: State
    """Empty before the first update."""


Make = Callable[[Tensor, Settings], Tensor | None]
"""Makes state of a parameter's values and the settings; None: a parameter of this shape has none."""


class Engine:
    """One algorithm; what it keeps is with the parameters.

    Args:
        function: Updates values in place. Takes lists of values, of gradients and of every state, and settings.
        state: How state begins, in the order in which the function takes it.
        switches: Names of state that is there only while a hyper-parameter is set, and of that. It may be set late.
        unused: Hyper-parameters that only ``state`` uses.
        **options: Which of its implementations the function shall use.
    """

    def __init__(
        self,
        function: Callable[..., None],
        state: Mapping[str, Make],
        *,
        switches: Mapping[str, str] | None = None,
        unused: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        self._function, self._state, self._switches = function, state, switches or {}
        self._unused, self._options = unused, options

    def update(self, parts: Sequence[Part], settings: Settings) -> None:
        """Updates values and state in place."""
        lists = [self._listed(name, make, parts, settings) for name, make in self._state.items()]
        chosen = {name: value for name, value in settings.items() if name not in self._unused}
        values, gradients = [part.values for part in parts], [part.gradient for part in parts]
        self._function(values, gradients, *lists, **self._options, **chosen)

    def _listed(self, name: str, make: Make, parts: Sequence[Part], settings: Settings) -> list[Tensor | None]:
        """One state of every part, begun where it is not there yet; none while it is switched off."""
        if name in self._switches and not settings[self._switches[name]]:
            return []
        for part in parts:
            if name not in part.state and (begun := make(part.values, settings)) is not None:
                part.state[name] = begun
        return [part.state.get(name) for part in parts]


class _Sgd(Engine):
    """torch's kernel wants to know of all parameters alike whether they have a momentum buffer yet. 16-bit parameters
    it leaves all but the last few elements as they are (torch 2.13, CPU), so those go through the plain loop.
    """

    def __init__(self) -> None:
        super().__init__(sgd, {})

    def update(self, parts: Sequence[Part], settings: Settings) -> None:
        wide = [part for part in parts if part.values.element_size() > 2]
        for begun in (True, False):
            alike = [part for part in wide if ("momentum_buffer" in part.state) == begun]
            if alike:
                _sgd_kernel(alike, settings, begun=begun)
        if len(wide) < len(parts):
            _sgd_loop([part for part in parts if part.values.element_size() <= 2], settings)


def _sgd_kernel(parts: Sequence[Part], settings: Settings, *, begun: bool) -> None:
    buffers: list[Tensor] = []
    if settings["momentum"]:
        for part in parts:
            if not begun:
                part.state["momentum_buffer"] = torch.empty_like(part.gradient)
            buffers.append(part.state["momentum_buffer"])
    values, gradients = [part.values for part in parts], [part.gradient for part in parts]
    torch._fused_sgd_(values, gradients, buffers, is_first_step=bool(buffers) and not begun, **settings)


def _sgd_loop(parts: Sequence[Part], settings: Settings) -> None:
    buffers = [part.state.get("momentum_buffer") for part in parts]
    values, gradients = [part.values for part in parts], [part.gradient for part in parts]
    sgd(values, gradients, buffers, foreach=False, fused=False, **settings)
    for part, buffer in zip(parts, buffers, strict=True):
        if buffer is not None:
            part.state["momentum_buffer"] = buffer


def _with_kernel(kernel: Callable[..., None]) -> Callable[..., None]:
    """torch's fused Adam or AdamW, which wants steps counted already."""

    def run(
        values: list[Tensor],
        gradients: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        **settings: Any,
    ) -> None:
        torch._foreach_add_(steps, 1)
        kernel(values, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, **settings)

    return run


def _muon(*lists: list[Tensor], **settings: Any) -> None:
    from torch.optim._muon import muon  # newer than the oldest torch that servers run with

    muon(*lists, has_complex=False, **settings)


def _zeros(values: Tensor, _: Settings) -> Tensor:
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
    "adam": Engine(_with_kernel(torch._fused_adam_), _ADAM, switches=_AMSGRAD),
    "adamw": Engine(_with_kernel(torch._fused_adamw_), _ADAM, switches=_AMSGRAD),
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
    "lamb": Engine(lamb, {**_MOMENTS, "step": _step}),
    "adafactor": Engine(
        adafactor,
        {"row_var": _row_zeros, "col_var": _column_zeros, "variance": _vector_zeros, "step": _step},
        foreach=False,
    ),
    "muon": Engine(_muon, {"momentum_buffer": _zeros}),
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
