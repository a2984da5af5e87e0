"""What runs each algorithm: torch's own optimizers where it has them, set up so that no cut changes a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwell_server.hyperparameters import FLAGS
from shardwell_server.shard.algorithms.lamb import Lamb
from shardwell_server.shard.algorithms.lion import Lion

Group = tuple[dict[str, Any], Sequence[nn.Parameter]]
"""torch's settings of a parameter group, and those of its parameters that have a gradient."""


class Engine:
    """One algorithm and the state it keeps.

    Args:
        make: A ``torch.optim.Optimizer`` class.
        **options: Which of its implementations to use.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer], **options: bool) -> None:
        placeholder = nn.Parameter(torch.zeros(0, 0))
        self._torch = make([placeholder], **options)
        self._torch.state.clear()
        self._template = {key: value for key, value in self._torch.param_groups[0].items() if key != "params"}

    def step(self, groups: Sequence[Group]) -> None:
        """Updates the parameters in place by their ``grad``."""
        for settings, parameters in groups:
            for parameter in parameters:
                self._complete(self._torch.state[parameter], parameter, settings)
        # Taken together before the first call: it gives parameters their buffers.
        for options, together in list(self._calls(groups)):
            self._torch.param_groups = [
                {**self._template, **options, **settings, "params": parameters} for settings, parameters in together
            ]
            self._torch.step()

    def state(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """A parameter's state; empty before its first update."""
        state: Mapping[str, Any] = self._torch.state.get(parameter, {})
        return state

    def forget(self, parameter: nn.Parameter) -> None:
        """Drops a parameter's state."""
        self._torch.state.pop(parameter, None)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the state, with its name."""
        for state in self._torch.state.values():
            yield from ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))

    def _complete(self, state: dict[str, Any], parameter: nn.Parameter, settings: Mapping[str, Any]) -> None:
        """Adds state that torch would miss in the middle of a step."""

    def _calls(self, groups: Sequence[Group]) -> Iterable[tuple[Mapping[str, Any], Sequence[Group]]]:
        """Which parameters may share one call of torch's optimizer, and options for it."""
        return [({}, groups)]


class _Sgd(Engine):
    """Fused SGD refuses groups in which only some parameters have a momentum buffer yet. For 16-bit
    parameters it leaves all but the last few elements as they are (torch 2.13, CPU), so those go
    through the plain loop.
    """

    def _calls(self, groups: Sequence[Group]) -> Iterable[tuple[Mapping[str, Any], Sequence[Group]]]:
        for fused in (True, False):
            for with_buffer in (True, False):
                yield (
                    {} if fused else {"fused": False, "foreach": False},
                    [
                        (settings, [p for p in chosen if self._kind(p) == (fused, with_buffer)])
                        for settings, chosen in groups
                    ],
                )

    def _kind(self, parameter: nn.Parameter) -> tuple[bool, bool]:
        return parameter.element_size() > 2, self.state(parameter).get("momentum_buffer") is not None


class _LateState(Engine):
    """For algorithms in which a hyper-parameter that is switched on later needs state of its own.

    Args:
        make: As ``Engine``.
        late_state: Name of the state by that of the hyper-parameter.
        **options: As ``Engine``.
    """

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], late_state: Mapping[str, str], **options: bool
    ) -> None:
        super().__init__(make, **options)
        self._late_state = late_state

    def _complete(self, state: dict[str, Any], parameter: nn.Parameter, settings: Mapping[str, Any]) -> None:
        for switch, name in self._late_state.items():
            if state and settings.get(switch) and name not in state:
                state[name] = torch.zeros_like(parameter)


class _Adagrad(Engine):
    """torch makes Adagrad's state with the optimizer; here a parameter gets it with its first gradient."""

    def _complete(self, state: dict[str, Any], parameter: nn.Parameter, settings: Mapping[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["sum"] = torch.full_like(parameter, settings["initial_accumulator_value"])


# Without `fused` or `foreach` torch goes through parameters one by one on a CPU, as these options say.
_ENGINES: dict[str, Callable[[], Engine]] = {
    "sgd": lambda: _Sgd(torch.optim.SGD, fused=True),
    "adam": lambda: _LateState(torch.optim.Adam, {"amsgrad": "max_exp_avg_sq"}, fused=True),
    "adamw": lambda: _LateState(torch.optim.AdamW, {"amsgrad": "max_exp_avg_sq"}, fused=True),
    "nadam": lambda: Engine(torch.optim.NAdam, foreach=False),
    "radam": lambda: Engine(torch.optim.RAdam, foreach=False),
    "adamax": lambda: Engine(torch.optim.Adamax, foreach=False),
    "rmsprop": lambda: _LateState(
        torch.optim.RMSprop, {"centered": "grad_avg", "momentum": "momentum_buffer"}, foreach=False
    ),
    "adagrad": lambda: _Adagrad(torch.optim.Adagrad, foreach=False, fused=False),
    "adadelta": lambda: Engine(torch.optim.Adadelta, foreach=False),
    "lion": lambda: Engine(Lion),
    "lamb": lambda: Engine(Lamb),
    "adafactor": lambda: Engine(torch.optim.Adafactor, foreach=False),
    "muon": lambda: Engine(torch.optim.Muon),
}


def make_engine(algorithm: str) -> Engine:
    """The engine of an algorithm in ``hyperparameters.ALGORITHMS``, without state."""
    return _ENGINES[algorithm]()


def torch_settings(hyperparameters: Mapping[str, float]) -> dict[str, Any]:
    """A parameter group as it travels, in the terms of torch's optimizers."""
    values: dict[str, Any] = {name: bool(value) if name in FLAGS else value for name, value in hyperparameters.items()}
    for name, parts in _TUPLES.items():
        if parts[0] in values:
            values[name] = tuple(values.pop(part) for part in parts)
    if "ns_steps" in values:
        values["ns_steps"] = int(values["ns_steps"])
        values["adjust_lr_fn"] = "match_rms_adamw" if values.pop("match_rms_adamw") else "original"
    return values


_TUPLES = {"betas": ("beta1", "beta2"), "eps": ("eps1", "eps2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}
