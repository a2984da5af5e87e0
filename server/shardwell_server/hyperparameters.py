"""Which hyper-parameters each optimizer takes. Free of torch: the coordinator checks before it commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.partitions import runs_on_trainers
from shardwell_wire.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What must be known of an optimizer without running it."""

    names: frozenset[str]
    """Its hyper-parameters; all of them are required."""
    whole_tensors: bool = False
    """Whether an update needs the whole parameter: it may not be cut over servers."""
    only_ndim: int | None = None
    """Dimensions that a parameter must have; None: any number."""


_MOMENTS = frozenset({"lr", "beta1", "beta2", "eps", "weight_decay", "maximize"})
_ADAM = Algorithm(_MOMENTS | {"amsgrad"})

ALGORITHMS: dict[str, Algorithm] = {
    "sgd": Algorithm(frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"})),
    "adam": _ADAM,
    "adamw": _ADAM,
    "nadam": Algorithm(_MOMENTS | {"momentum_decay", "decoupled_weight_decay"}),
    "radam": Algorithm(_MOMENTS | {"decoupled_weight_decay"}),
    "adamax": Algorithm(_MOMENTS),
    "rmsprop": Algorithm(frozenset({"lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"})),
    "adagrad": Algorithm(frozenset({"lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize"})),
    "adadelta": Algorithm(frozenset({"lr", "rho", "eps", "weight_decay", "maximize"})),
    "lion": Algorithm(frozenset({"lr", "beta1", "beta2", "weight_decay", "maximize"})),
    "lamb": Algorithm(_MOMENTS, whole_tensors=True),
    "adafactor": Algorithm(
        frozenset({"lr", "beta2_decay", "eps1", "eps2", "d", "weight_decay", "maximize"}), whole_tensors=True
    ),
    "muon": Algorithm(
        frozenset({"lr", "weight_decay", "momentum", "nesterov", "eps", "ns_steps", "match_rms_adamw"})
        | {"ns_a", "ns_b", "ns_c"},
        whole_tensors=True,
        only_ndim=2,
    ),
}
"""By the names they have in an ``OptimizerStep``."""

FLAGS = frozenset(
    {"amsgrad", "nesterov", "maximize", "centered", "decoupled_weight_decay", "match_rms_adamw"},
)
"""Booleans, sent as 0 and 1."""

_FILLING = frozenset({"initial_accumulator_value"})
"""What new state is filled with."""

MAX_VALUE = 3.4028234663852886e38
"""The largest number of fp32. What is beyond it torch refuses in mid-update, when it is too late."""

MAX_NS_STEPS = 99
"""Newton-Schulz iterations that torch accepts."""

_AT_LEAST_ZERO = frozenset(
    {"lr", "eps", "eps1", "eps2", "weight_decay", "momentum", "momentum_decay", "alpha", "lr_decay", "ns_steps"}
    | {"initial_accumulator_value"}
)


KEPT = -2
"""Instead of a parameter's group: its gradient is kept for a later step, which another optimizer commits."""


def units_that_count(optimizer: common_pb2.OptimizerStep, unit_count: int) -> frozenset[int]:
    """The units whose gradients a step uses up; those with a kept gradient are another optimizer's."""
    kept = {unit.unit_index for unit in optimizer.units if KEPT in unit.group_indices}
    return frozenset(range(unit_count)) - kept


def algorithm_of(optimizer: common_pb2.OptimizerStep, group_index: int) -> str:
    """The algorithm of one parameter group."""
    return optimizer.groups[group_index].algorithm or optimizer.algorithm


def validate(optimizer: common_pb2.OptimizerStep) -> None:
    """Checks that a step's optimizer can be applied.

    Raises:
        InvalidRequestError: The algorithm is unknown, a hyper-parameter is missing, unknown, not finite
            or out of its range, or a group index does not exist.
    """
    if optimizer.HasField("clip_value") and not optimizer.clip_value > 0.0:
        raise InvalidRequestError(f"clip_value={optimizer.clip_value!r}: expected a positive number")
    if runs_on_trainers(optimizer.algorithm):
        _check_on_trainers(optimizer)
        return
    for index, group in enumerate(optimizer.groups):
        name = algorithm_of(optimizer, index)
        known, given = _require_known(name), set(group.hyperparameters)
        if given != known.names:
            wrong = ", ".join(sorted(given ^ known.names))
            raise InvalidRequestError(
                f"parameter group {index} of {name}: {wrong} missing or unknown; "
                f"expected exactly {', '.join(sorted(known.names))}"
            )
        for name, value in group.hyperparameters.items():
            _check_value(index, name, value)
    if optimizer.HasField("ema_decay") and not 0.0 <= optimizer.ema_decay <= 1.0:
        raise InvalidRequestError(f"ema_decay={optimizer.ema_decay!r}: expected 0 <= ema_decay <= 1")
    if not optimizer.groups:
        _require_known(optimizer.algorithm)
    _check_groups(optimizer)


def _check_on_trainers(optimizer: common_pb2.OptimizerStep) -> None:
    """Of an optimizer that runs on the trainers: they know what the values mean."""
    if optimizer.HasField("ema_decay"):
        raise InvalidRequestError("ema_decay is for optimizers that run on the servers")
    if any(runs_on_trainers(group.algorithm) != bool(group.algorithm) for group in optimizer.groups):
        raise InvalidRequestError("optimizers that run on the trainers and on the servers cannot be combined")
    _check_groups(optimizer)


def allocation_key(optimizer: common_pb2.OptimizerStep) -> bytes:
    """Equal for optimizers that need the same memory: only values that switch state on, or fill it, make a difference.

    A learning rate that changes from step to step does not.
    """
    copy = common_pb2.OptimizerStep()
    copy.CopyFrom(optimizer)
    copy.ClearField("skip_non_finite")
    copy.ClearField("clip_value")
    if copy.HasField("ema_decay"):
        copy.ema_decay = 0.0
    for group in copy.groups:
        for name, value in list(group.hyperparameters.items()):  # a map that is written to may change its order
            if name not in _FILLING:
                group.hyperparameters[name] = bool(value)
    return copy.SerializeToString(deterministic=True)


def _check_groups(optimizer: common_pb2.OptimizerStep) -> None:
    for unit in optimizer.units:
        for group_index in unit.group_indices:
            if not KEPT <= group_index < len(optimizer.groups):
                raise InvalidRequestError(
                    f"unit {unit.unit_index} names parameter group {group_index}: there are {len(optimizer.groups)}"
                )


def check_fit(
    optimizer: common_pb2.OptimizerStep, groups: Sequence[int], layout: UnitLayout, cuts: Sequence[int]
) -> None:
    """Checks that the optimizer can be applied to a unit where it lies.

    Args:
        optimizer: Valid by itself.
        groups: The group of each parameter; -1: not optimised.
        layout: Of the unit.
        cuts: Where shards begin or end, in bytes of the flat vector.

    Raises:
        InvalidRequestError: A parameter that must be whole is cut over servers, or has other dimensions than
            its algorithm works on.
    """
    if runs_on_trainers(optimizer.algorithm):
        return
    algorithms = {
        index: algorithm_of(optimizer, group)
        for index, group in enumerate(groups)
        if group >= 0 and ALGORITHMS[algorithm_of(optimizer, group)].whole_tensors
    }
    if not algorithms:
        return
    cut = layout.parameters_cut_at(cuts)
    for index, algorithm in algorithms.items():
        parameter, ndim = layout.parameters[index], ALGORITHMS[algorithm].only_ndim
        what = f"parameter {parameter.name!r} of unit {layout.unit!r}"
        if ndim not in (None, len(parameter.shape)):
            raise InvalidRequestError(
                f"{algorithm} takes parameters of {ndim} dimensions; {what} has shape {parameter.shape}: put it into "
                "another optimizer, shardwell.optim.Combined([...])",
                parameter=parameter.name,
            )
        if index in cut:
            raise InvalidRequestError(
                f"{algorithm} needs whole tensors, but {what} is cut over several servers: make its unit with "
                'fully_shard(..., placement="tensor"), in a new run',
                parameter=parameter.name,
            )


def _require_known(name: str) -> Algorithm:
    known = ALGORITHMS.get(name)
    if known is None:
        raise InvalidRequestError(f"optimizer {name!r} is not known: expected one of {', '.join(ALGORITHMS)}")
    return known


def _check_value(group: int, name: str, value: float) -> None:
    where = f"parameter group {group}: {name}={value!r}"
    if not abs(value) <= MAX_VALUE:
        raise InvalidRequestError(f"{where} is not finite in fp32")
    if name in FLAGS and value not in (0.0, 1.0):
        raise InvalidRequestError(f"{where}: expected 0 or 1")
    if name in ("beta1", "beta2") and not 0.0 <= value < 1.0:
        raise InvalidRequestError(f"{where}: expected 0 <= {name} < 1")
    if name == "rho" and not 0.0 <= value <= 1.0:
        raise InvalidRequestError(f"{where}: expected 0 <= rho <= 1")
    if name in _AT_LEAST_ZERO and value < 0.0:
        raise InvalidRequestError(f"{where}: expected at least 0")
    if name == "beta2_decay" and value > 0.0:
        raise InvalidRequestError(f"{where}: expected at most 0")
    if name == "d" and value < 1.0:
        raise InvalidRequestError(f"{where}: expected at least 1")
    if name == "ns_steps" and (value > MAX_NS_STEPS or value != int(value)):
        raise InvalidRequestError(f"{where}: expected a whole number of at most {MAX_NS_STEPS}")
