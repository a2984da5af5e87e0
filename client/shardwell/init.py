"""Initial values that the servers draw, so that trainers compute and send nothing.

>>> shardwell.auto_wrap(model, session, policy, source=shardwell.init.drawn())

A value depends on the run's seed, the parameter's name and the element's index in the whole parameter only. It
does not depend on the grid, the number of servers or the cut into units. Names are those in the run (``auto_wrap``
uses the names in the model).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from shardwell.module.new_units import InitFunction
from shardwell.module.parameter_store import InitialValues
from shardwell.module.parameters import FoundParameter, Site
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import Segment, UnitLayout
from shardwell_wire.v1 import initialization_pb2

__all__ = ["Draw", "constant", "default_rule", "drawn", "normal", "ones", "trunc_normal", "uniform", "zeros"]


@dataclass(frozen=True)
class Draw:
    """The distribution of one parameter's values. ``normal``, ``uniform`` and the other functions return one."""

    distribution: initialization_pb2.Distribution
    zero_row: int | None = None
    """Row along the first dim that is 0."""

    def with_zero_row(self, row: int) -> Draw:
        """Returns the same distribution with one row of zeros, such as an embedding's ``padding_idx``.

        Args:
            row: Index of the row, from 0.
        """
        return replace(self, zero_row=row)


Rule = Callable[[nn.Module, str, nn.Parameter], Draw | None]
"""``(module that holds the parameter, name, parameter) -> Draw``; None selects ``default_rule``."""


def zeros() -> Draw:
    """Zeros."""
    return constant(0.0)


def ones() -> Draw:
    """Ones."""
    return constant(1.0)


def constant(value: float) -> Draw:
    """One value for all elements."""
    return Draw(initialization_pb2.Distribution(constant=value))


def uniform(low: float = 0.0, high: float = 1.0) -> Draw:
    """The uniform distribution over ``[low, high)``."""
    return Draw(initialization_pb2.Distribution(uniform=initialization_pb2.Uniform(low=low, high=high)))


def normal(mean: float = 0.0, std: float = 1.0) -> Draw:
    """The normal distribution."""
    return Draw(initialization_pb2.Distribution(normal=initialization_pb2.Normal(mean=mean, standard_deviation=std)))


def trunc_normal(mean: float = 0.0, std: float = 1.0, low: float = -2.0, high: float = 2.0) -> Draw:
    """The normal distribution truncated to ``[low, high]``, as ``torch.nn.init.trunc_normal_``."""
    cut = initialization_pb2.Normal(mean=mean, standard_deviation=std, low=low, high=high)
    return Draw(initialization_pb2.Distribution(normal=cut))


def drawn(rule: Rule | None = None, *, init: InitFunction | None = None) -> DrawnValues:
    """Returns a source for ``fully_shard`` and ``auto_wrap`` with which the servers draw all parameters.

    Args:
        rule: Chooses the distribution of each parameter. If it is None or returns None, ``default_rule`` chooses.
        init: Initialises modules with buffers on the meta device; by default their ``reset_parameters``.
    """
    return DrawnValues(rule or (lambda module, name, parameter: None), init)


def default_rule(module: nn.Module, name: str, parameter: nn.Parameter) -> Draw:
    """Returns the distribution that torch's own modules use at construction.

    Args:
        module: The module that holds the parameter.
        name: Name of the parameter; the part after the last dot is its name in the module.
        parameter: The parameter.

    Raises:
        UsageError: The module is not one of torch's.
    """
    draw = _torch_default(module, name, parameter)
    if draw is None:
        raise UsageError(
            f"shardwell.init.default_rule has no distribution for {name!r} of {type(module).__name__}: pass one, "
            "shardwell.init.drawn(lambda module, name, parameter: ...)",
            parameter=name,
        )
    return draw


def _torch_default(module: nn.Module, name: str, parameter: nn.Parameter) -> Draw | None:
    own_name, draw = name.rpartition(".")[2], None
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        draw = replace(normal(), zero_row=module.padding_idx)
    elif isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm | _NormBase):
        draw = zeros() if own_name == "bias" else ones()
    elif isinstance(module, NonDynamicallyQuantizableLinear) and own_name == "bias":
        draw = zeros()
    elif isinstance(module, nn.Linear | _ConvNd | nn.Bilinear):
        draw = _symmetric(1 / math.sqrt(max(1, _fan_in(module))))
    elif isinstance(module, RNNBase | RNNCellBase):
        draw = _symmetric(1 / math.sqrt(max(1, module.hidden_size)))
    elif isinstance(module, nn.MultiheadAttention):
        draw = _attention_default(own_name, parameter)
    elif isinstance(module, nn.PReLU):
        draw = constant(0.25)
    return draw


def _fan_in(module: nn.Linear | _ConvNd | nn.Bilinear) -> int:
    return module.in1_features if isinstance(module, nn.Bilinear) else math.prod(module.weight.shape[1:])


def _symmetric(bound: float) -> Draw:
    return uniform(-bound, bound)


def _attention_default(own_name: str, parameter: nn.Parameter) -> Draw:
    if own_name == "in_proj_bias":
        return zeros()
    fan_out, fan_in = parameter.shape[0], math.prod(parameter.shape[1:])
    if own_name in ("bias_k", "bias_v"):  # [1, 1, width]
        return normal(std=1 / math.sqrt(parameter.shape[2]))
    return _symmetric(math.sqrt(6 / (fan_in + fan_out)))


@dataclass(frozen=True)
class DrawnValues:
    """A source whose values the servers draw. Made by ``drawn``."""

    rule: Rule
    init: InitFunction | None

    def unit_values(self, layout: UnitLayout, found: Sequence[FoundParameter], seed: int) -> InitialValues:
        """See ``ValueSource.unit_values``."""
        return _Draws({index: self._draw(index, entry, seed) for index, entry in enumerate(found)})

    def fill(self, site: Site, tensor: torch.Tensor) -> bool:
        """See ``ValueSource.fill``. Tensors that stay in the trainer are not drawn."""
        return False

    def _draw(self, index: int, entry: FoundParameter, seed: int) -> initialization_pb2.ParameterDraw:
        name, module = entry.names[0], entry.sites[0].module
        draw = self.rule(module, name, entry.parameter) or default_rule(module, name, entry.parameter)
        zero_start, zero_stop = _zero_range(draw, entry.parameter, name)
        return initialization_pb2.ParameterDraw(
            parameter_index=index,
            distribution=draw.distribution,
            seed=seed,
            stream=name,
            zero_start=zero_start,
            zero_stop=zero_stop,
        )


def _zero_range(draw: Draw, parameter: nn.Parameter, name: str) -> tuple[int, int]:
    """Returns the half-open range of zeros in the whole parameter."""
    if draw.zero_row is None:
        return 0, 0
    if not (parameter.shape and 0 <= draw.zero_row < parameter.shape[0]):
        raise UsageError(
            f"zero row {draw.zero_row} of {name!r} is out of range: its shape is {tuple(parameter.shape)}",
            parameter=name,
        )
    size = math.prod(parameter.shape[1:])
    return draw.zero_row * size, (draw.zero_row + 1) * size


@dataclass(frozen=True)
class _Draws:
    draws: Mapping[int, initialization_pb2.ParameterDraw] = field(default_factory=dict)

    def read(self, segment: Segment) -> Iterator[bytes]:
        raise AssertionError("every parameter is drawn")
