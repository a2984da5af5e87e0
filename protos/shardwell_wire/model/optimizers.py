"""The table of optimizers that shard servers can apply.

Clients take hyper-parameters and their bounds from the table, the coordinator checks every commit against it, shard
servers allocate the optimizer state that it lists, and ``shardwell plan`` estimates memory with it. Imports no torch.

CONTRIBUTING.md lists the steps of adding an optimizer.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwell_wire.model.layout import Parameter, UnitLayout

MAX_VALUE = 3.4028234663852886e38
"""The largest fp32 number. torch rejects larger hyper-parameters only in the middle of an update, after the commit."""

NO_GROUP, KEPT_GROUP = -1, -2
"""Entries of ``UnitGroups.group_indices`` for parameters that a step does not update: their gradient is dropped, or
kept for a later step of another optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameter:
    """A number that every parameter group must have."""

    name: str
    """Key in ``ParameterGroup.hyperparameters``."""
    default: float | None
    """Default of the constructor's argument. None: the constructor has no such argument, or its default is None."""
    low: float = -math.inf
    """Smallest value."""
    high: float = math.inf
    """Largest value. Exclusive if ``excludes_high`` is True."""
    excludes_high: bool = False
    is_flag: bool = False
    """True for booleans, which are sent as 0 or 1."""
    is_integer: bool = False
    argument: str = ""
    """Name of the tuple in which the constructor takes the number, such as ``betas``. Empty: no tuple."""
    index: int = 0
    """Position in the tuple."""

    @property
    def label(self) -> str:
        """The argument as users write it, such as ``betas[0]``."""
        return f"{self.argument}[{self.index}]" if self.argument else self.name

    def value_in(self, settings: Mapping[str, Any]) -> Any:
        """Returns the number from the settings of a parameter group; None if it is not set."""
        value = settings.get(self.argument or self.name)
        return value[self.index] if self.argument and value is not None else value

    def violation(self, value: float) -> str | None:
        """Returns what is expected if ``value`` is not allowed, such as ``expected at least 0``, else None."""
        if self.is_flag:
            return None if value in (0.0, 1.0) else "expected 0 or 1"
        in_bounds = self.low <= value < self.high if self.excludes_high else self.low <= value <= self.high
        if in_bounds and not (self.is_integer and value != int(value)):
            return None
        if self.is_integer:
            return f"expected a whole number of at least {self.low:g} and at most {self.high:g}"
        if math.isinf(self.high):
            return f"expected at least {self.low:g}" if math.isfinite(self.low) else "expected a number"
        if math.isinf(self.low):
            return f"expected at most {self.high:g}"
        return f"expected {self.low:g} <= {self.name} {'<' if self.excludes_high else '<='} {self.high:g}"


class StateShape(enum.Enum):
    """Shape of a state tensor, from the shape ``[..., rows, columns]`` of the parameter or of its part in a shard."""

    PARAMETER = enum.auto()
    """The parameter's shape and dtype."""
    SCALAR = enum.auto()
    """One fp32 number per parameter."""
    ROWS = enum.auto()
    """``[..., rows, 1]``; parameters of fewer than 2 dims have no such tensor."""
    COLUMNS = enum.auto()
    """``[..., 1, columns]``; parameters of fewer than 2 dims have no such tensor."""
    VECTOR = enum.auto()
    """The parameter's shape; parameters of 2 or more dims have no such tensor."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that an optimizer keeps per parameter, under the name that torch's optimizer gives it."""

    name: str
    shape: StateShape = StateShape.PARAMETER
    initial: float | str = 0.0
    """Initial value of every element, or the name of the hyper-parameter that sets it."""
    enabled_by: str = ""
    """Hyper-parameter without which the tensor does not exist. Empty: it always exists."""

    def max_elements(self, parameter: Parameter) -> int:
        """Returns the number of elements for a whole parameter, 0 if it has no such tensor."""
        is_matrix = len(parameter.shape) > 1
        match self.shape:
            case StateShape.SCALAR:
                return 1
            case StateShape.ROWS:
                return parameter.numel // max(1, parameter.shape[-1]) if is_matrix else 0
            case StateShape.COLUMNS:
                return parameter.numel // max(1, parameter.shape[-2]) if is_matrix else 0
            case StateShape.VECTOR:
                return 0 if is_matrix else parameter.numel
        return parameter.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Properties of an optimizer, for code that does not run it."""

    name: str
    """As in ``OptimizerStep.algorithm``."""
    hyperparameters: tuple[Hyperparameter, ...]
    """All of them are required in every parameter group."""
    state: tuple[StateTensor, ...] = ()
    """In the order in which the arithmetic takes the tensors."""
    needs_whole_tensors: bool = False
    """True if an update needs the whole parameter, which then must not be cut over servers. Otherwise the optimizer
    works element by element, on any range."""
    num_dims: int | None = None
    """Number of dims that parameters must have. None: any number."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the hyper-parameters."""
        return frozenset(hyperparameter.name for hyperparameter in self.hyperparameters)

    @property
    def initializers(self) -> frozenset[str]:
        """Names of the hyper-parameters that only set initial values of the state."""
        return frozenset(tensor.initial for tensor in self.state if isinstance(tensor.initial, str))

    def state_bytes(self, layout: UnitLayout, enabled: Collection[str] = ()) -> int:
        """Returns the bytes of state for a whole unit, without scalars.

        Args:
            layout: The unit. State of the parameter's shape counts with the padding of the flat vector.
            enabled: Names of the hyper-parameters that are set and enable state, such as ``momentum``.
        """
        used = [tensor for tensor in self.state if not tensor.enabled_by or tensor.enabled_by in enabled]
        full = [tensor for tensor in used if tensor.shape is StateShape.PARAMETER]
        factored = [tensor for tensor in used if tensor.shape not in (StateShape.PARAMETER, StateShape.SCALAR)]
        return len(full) * layout.size_bytes + sum(
            tensor.max_elements(parameter) * parameter.item_size
            for tensor in factored
            for parameter in layout.parameters
        )


def _number(name: str, default: float | None, low: float = 0.0, high: float = math.inf, **more: Any) -> Hyperparameter:
    return Hyperparameter(name=name, default=default, low=low, high=high, **more)


def _any(name: str, default: float | None, **more: Any) -> Hyperparameter:
    return _number(name, default, low=-math.inf, **more)


def _flag(name: str, default: bool | None = False) -> Hyperparameter:
    return Hyperparameter(name=name, default=default, is_flag=True)


def _betas(first: float, second: float) -> tuple[Hyperparameter, Hyperparameter]:
    beta = _number("beta1", first, high=1.0, excludes_high=True, argument="betas", index=0)
    return beta, replace(beta, name="beta2", default=second, index=1)


_STEP = StateTensor("step", StateShape.SCALAR)
_MOMENTS = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))
_MOMENTUM = StateTensor("momentum_buffer", enabled_by="momentum")
_AMSGRAD = StateTensor("max_exp_avg_sq", enabled_by="amsgrad")


def _adam_numbers(lr: float, eps: float, weight_decay: float) -> tuple[Hyperparameter, ...]:
    return (
        _number("lr", lr),
        *_betas(0.9, 0.999),
        _number("eps", eps),
        _number("weight_decay", weight_decay),
        _flag("maximize"),
    )


_SPECS = (
    OptimizerSpec(
        name="sgd",
        hyperparameters=(
            _number("lr", 1e-3),
            _number("momentum", 0.0),
            _any("dampening", 0.0),
            _number("weight_decay", 0.0),
            _flag("nesterov"),
            _flag("maximize"),
        ),
        state=(_MOMENTUM,),
    ),
    OptimizerSpec(
        name="adam",
        hyperparameters=(*_adam_numbers(1e-3, 1e-8, 0.0), _flag("amsgrad")),
        state=(*_MOMENTS, _AMSGRAD, _STEP),
    ),
    OptimizerSpec(
        name="adamw",
        hyperparameters=(*_adam_numbers(1e-3, 1e-8, 1e-2), _flag("amsgrad")),
        state=(*_MOMENTS, _AMSGRAD, _STEP),
    ),
    OptimizerSpec(
        name="nadam",
        hyperparameters=(
            *_adam_numbers(2e-3, 1e-8, 0.0),
            _number("momentum_decay", 4e-3),
            _flag("decoupled_weight_decay"),
        ),
        state=(*_MOMENTS, StateTensor("mu_product", StateShape.SCALAR, initial=1.0), _STEP),
    ),
    OptimizerSpec(
        name="radam",
        hyperparameters=(*_adam_numbers(1e-3, 1e-8, 0.0), _flag("decoupled_weight_decay")),
        state=(*_MOMENTS, _STEP),
    ),
    OptimizerSpec(
        name="adamax",
        hyperparameters=_adam_numbers(2e-3, 1e-8, 0.0),
        state=(StateTensor("exp_avg"), StateTensor("exp_inf"), _STEP),
    ),
    OptimizerSpec(
        name="rmsprop",
        hyperparameters=(
            _number("lr", 1e-2),
            _number("alpha", 0.99),
            _number("eps", 1e-8),
            _number("weight_decay", 0.0),
            _number("momentum", 0.0),
            _flag("centered"),
            _flag("maximize"),
        ),
        state=(StateTensor("square_avg"), StateTensor("grad_avg", enabled_by="centered"), _MOMENTUM, _STEP),
    ),
    OptimizerSpec(
        name="adagrad",
        hyperparameters=(
            _number("lr", 1e-2),
            _number("lr_decay", 0.0),
            _number("weight_decay", 0.0),
            _number("initial_accumulator_value", 0.0),
            _number("eps", 1e-10),
            _flag("maximize"),
        ),
        state=(StateTensor("sum", initial="initial_accumulator_value"), _STEP),
    ),
    OptimizerSpec(
        name="adadelta",
        hyperparameters=(
            _number("lr", 1.0),
            _number("rho", 0.9, high=1.0),
            _number("eps", 1e-6),
            _number("weight_decay", 0.0),
            _flag("maximize"),
        ),
        state=(StateTensor("square_avg"), StateTensor("acc_delta"), _STEP),
    ),
    OptimizerSpec(
        name="lion",
        hyperparameters=(_number("lr", 1e-4), *_betas(0.9, 0.99), _number("weight_decay", 0.0), _flag("maximize")),
        state=(StateTensor("exp_avg"),),
    ),
    OptimizerSpec(
        name="lamb", hyperparameters=_adam_numbers(1e-3, 1e-6, 0.01), state=(*_MOMENTS, _STEP), needs_whole_tensors=True
    ),
    OptimizerSpec(
        name="adafactor",
        hyperparameters=(
            _number("lr", 1e-2),
            _any("beta2_decay", -0.8, high=0.0),
            _number("eps1", None, argument="eps", index=0),
            _number("eps2", 1e-3, argument="eps", index=1),
            _number("d", 1.0, low=1.0),
            _number("weight_decay", 0.0),
            _flag("maximize"),
        ),
        state=(
            StateTensor("row_var", StateShape.ROWS),
            StateTensor("col_var", StateShape.COLUMNS),
            StateTensor("variance", StateShape.VECTOR),
            _STEP,
        ),
        needs_whole_tensors=True,
    ),
    OptimizerSpec(
        name="muon",
        hyperparameters=(
            _number("lr", 1e-3),
            _number("weight_decay", 0.1),
            _number("momentum", 0.95),
            _flag("nesterov", True),
            _any("ns_a", 3.4445, argument="ns_coefficients", index=0),
            _any("ns_b", -4.7750, argument="ns_coefficients", index=1),
            _any("ns_c", 2.0315, argument="ns_coefficients", index=2),
            _number("eps", 1e-7),
            _number("ns_steps", 5, high=99, is_integer=True),
            _flag("match_rms_adamw", None),
        ),
        state=(StateTensor("momentum_buffer"),),
        needs_whole_tensors=True,
        num_dims=2,
    ),
)

OPTIMIZERS: Mapping[str, OptimizerSpec] = {spec.name: spec for spec in _SPECS}
"""The specs by name."""
