"""Which hyper-parameters each optimizer takes. Free of torch: the coordinator checks before it commits."""

from __future__ import annotations

import math

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.slices import runs_on_trainers
from shardwell_wire.v1 import common_pb2

ADAM = frozenset({"lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize"})

NAMES: dict[str, frozenset[str]] = {
    "sgd": frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"}),
    "adam": ADAM,
    "adamw": ADAM,
}
"""Hyper-parameters by algorithm; all of them are required."""

FLAGS = frozenset({"amsgrad", "nesterov", "maximize"})
"""Booleans, sent as 0 and 1."""


def validate(optimizer: common_pb2.OptimizerStep) -> None:
    """Checks that a step's optimizer can be applied.

    Raises:
        InvalidRequestError: The algorithm is unknown, a hyper-parameter is missing, unknown, not finite
            or out of its range, or a group index does not exist.
    """
    if runs_on_trainers(optimizer.algorithm):
        _check_groups(optimizer)  # trainers know what the values mean
        return
    names = NAMES.get(optimizer.algorithm)
    if names is None:
        raise InvalidRequestError(f"optimizer {optimizer.algorithm!r} is not known: expected one of {', '.join(NAMES)}")
    for index, group in enumerate(optimizer.groups):
        given = set(group.hyperparameters)
        if given != names:
            wrong = ", ".join(sorted(given ^ names))
            raise InvalidRequestError(
                f"parameter group {index} of {optimizer.algorithm}: {wrong} missing or unknown; "
                f"expected exactly {', '.join(sorted(names))}"
            )
        for name, value in group.hyperparameters.items():
            _check_value(index, name, value)
    _check_groups(optimizer)


def _check_groups(optimizer: common_pb2.OptimizerStep) -> None:
    for unit in optimizer.units:
        for group_index in unit.group_indices:
            if not -1 <= group_index < len(optimizer.groups):
                raise InvalidRequestError(
                    f"unit {unit.unit_index} names parameter group {group_index}: there are {len(optimizer.groups)}"
                )


def _check_value(group: int, name: str, value: float) -> None:
    where = f"parameter group {group}: {name}={value!r}"
    if not math.isfinite(value):
        raise InvalidRequestError(f"{where} is not finite")
    if name in FLAGS and value not in (0.0, 1.0):
        raise InvalidRequestError(f"{where}: expected 0 or 1")
    if name in ("beta1", "beta2") and not 0.0 <= value < 1.0:
        raise InvalidRequestError(f"{where}: expected 0 <= {name} < 1")
    if name in ("lr", "eps", "weight_decay", "momentum") and value < 0.0:
        raise InvalidRequestError(f"{where}: expected at least 0")
