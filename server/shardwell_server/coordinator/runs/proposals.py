"""What a trainer hands in for a commit, and whether two trainers handed in the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardwell_server import hyperparameters
from shardwell_wire.errors import ConflictError, HyperparameterMismatchError, InvalidRequestError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2


@dataclass(frozen=True, slots=True)
class StepProposal:
    """One trainer's hyper-parameters for one step."""

    trainer: str
    who: str
    """The trainer and its ranks, for messages."""
    optimizer: common_pb2.OptimizerStep
    clip_coefficient: float
    unit_order: tuple[int, ...]
    state: coordinator_pb2.RunState | None
    norm_attempts: int | None = None
    """``Step.attempts`` of the norm that ``clip_coefficient`` was computed from; None: it was not computed from one."""

    def asks_the_same(self, other: StepProposal) -> bool:
        """Whether both want the same update: what holds of the one holds of the other."""
        return (self.clip_coefficient, self.unit_order, self.optimizer) == (
            other.clip_coefficient,
            other.unit_order,
            other.optimizer,
        )


def validate(step_proposal: StepProposal, layouts: Sequence[UnitLayout], cuts: Sequence[Sequence[int]]) -> None:
    """Raises InvalidRequestError if a hand-in could not be applied to the run's units.

    Args:
        step_proposal: A trainer's.
        layouts: Of the units.
        cuts: Where each unit's shards begin, in bytes of its flat vector.
    """
    hyperparameters.validate(step_proposal.optimizer)
    clip = step_proposal.clip_coefficient
    if not math.isfinite(clip) or clip < 0:
        raise InvalidRequestError(
            f"clip_coefficient is {clip}: expected a finite number of at least 0 (1: no clipping)"
        )
    _check_indices("optimizer.units", [unit.unit_index for unit in step_proposal.optimizer.units], len(layouts))
    _check_indices("unit_order", step_proposal.unit_order, len(layouts))
    for unit in step_proposal.optimizer.units:
        layout = layouts[unit.unit_index]
        if layout.holds_buffers:
            raise InvalidRequestError(
                f"optimizer.units names unit {layout.unit!r}, which holds buffers: no optimizer updates them",
                unit=layout.unit,
            )
        if len(unit.group_indices) != len(layout.parameters):
            raise InvalidRequestError(
                f"unit {layout.unit!r} has {len(layout.parameters)} parameters, but optimizer.units names groups for "
                f"{len(unit.group_indices)}",
                unit=layout.unit,
            )
        hyperparameters.check_fit(step_proposal.optimizer, unit.group_indices, layout, cuts[unit.unit_index])


@lru_cache(maxsize=16)
def committed_optimizer(record_optimizer: bytes) -> common_pb2.OptimizerStep:
    """The optimizer of a commit record, which every trainer is compared with. Not to be changed."""
    return common_pb2.OptimizerStep.FromString(record_optimizer)


def require_same_algorithms(
    former: common_pb2.OptimizerStep, optimizer: common_pb2.OptimizerStep, layouts: Sequence[UnitLayout]
) -> None:
    """Raises ConflictError if a parameter that a step optimised gets another algorithm in the next."""
    algorithms = {
        hyperparameters.algorithm_of(each, group) for each in (former, optimizer) for group in range(len(each.groups))
    }
    if len(algorithms) < 2:
        return
    before, now = _groups(former), _groups(optimizer)
    for index, layout in enumerate(layouts):
        for parameter, left, right in zip(layout.parameters, before.get(index, ()), now.get(index, ()), strict=False):
            if left < 0 or right < 0:
                continue
            expected, got = hyperparameters.algorithm_of(former, left), hyperparameters.algorithm_of(optimizer, right)
            if expected != got:
                raise ConflictError(
                    f"parameter {parameter.name!r} is optimised by {expected!r} and its state is that optimizer's: "
                    f"{got!r} needs a new run",
                    parameter=parameter.name,
                    expected=expected,
                    actual=got,
                )


def _check_indices(what: str, indices: Sequence[int], count: int) -> None:
    for index in indices:
        if index >= count:
            raise InvalidRequestError(f"{what} names unit index {index}: the run has {count} units")
    if len(set(indices)) != len(indices):
        raise InvalidRequestError(f"{what} names a unit index twice: {list(indices)}")


def require_same(decider: StepProposal, other: StepProposal, layouts: Sequence[UnitLayout]) -> None:
    """Raises HyperparameterMismatchError naming the first difference, with both values and both trainers."""
    difference = _first_difference(decider, other, layouts)
    if difference is not None:
        what, expected, got = difference
        raise HyperparameterMismatchError(
            f"{what}: {expected} at {decider.who}, whose hyper-parameters count, but {got} at {other.who}: "
            "every trainer must set the same",
            name=what,
            expected=expected,
            actual=got,
        )


def _first_difference(
    decider: StepProposal, other: StepProposal, layouts: Sequence[UnitLayout]
) -> tuple[str, object, object] | None:
    ours, theirs = decider.optimizer, other.optimizer
    if decider is other or (ours == theirs and decider.clip_coefficient == other.clip_coefficient):
        return None
    if len(ours.groups) != len(theirs.groups):
        return "number of parameter groups", len(ours.groups), len(theirs.groups)
    for index, (left, right) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        algorithms = hyperparameters.algorithm_of(ours, index), hyperparameters.algorithm_of(theirs, index)
        if algorithms[0] != algorithms[1]:
            return f"algorithm of parameter group {index}", repr(algorithms[0]), repr(algorithms[1])
        for name in sorted({*left.hyperparameters, *right.hyperparameters}):
            expected, got = _value(left, name), _value(right, name)
            if expected != got:
                return f"{name} of parameter group {index}", expected, got
    whole_step = {
        "clip coefficient": (decider.clip_coefficient, other.clip_coefficient),
        "whether losses are scaled": (ours.skip_non_finite, theirs.skip_non_finite),
        "clip value": (_set(ours, "clip_value"), _set(theirs, "clip_value")),
        "ema_decay": (_set(ours, "ema_decay"), _set(theirs, "ema_decay")),
    }
    for what, (expected, got) in whole_step.items():
        if expected != got:
            return what, expected, got
    return _first_group_difference(_groups(ours), _groups(theirs), layouts)


def _set(optimizer: common_pb2.OptimizerStep, name: Literal["clip_value", "ema_decay"]) -> float | None:
    return getattr(optimizer, name) if optimizer.HasField(name) else None


def _value(group: common_pb2.ParameterGroup, name: str) -> object:
    values: Mapping[str, float] = group.hyperparameters
    return values.get(name, "unset")


def _groups(optimizer: common_pb2.OptimizerStep) -> dict[int, Sequence[int]]:
    return {unit.unit_index: unit.group_indices for unit in optimizer.units}


def _first_group_difference(
    ours: dict[int, Sequence[int]], theirs: dict[int, Sequence[int]], layouts: Sequence[UnitLayout]
) -> tuple[str, object, object] | None:
    for index, layout in enumerate(layouts):
        none = [-1] * len(layout.parameters)
        pairs = zip(layout.parameters, ours.get(index, none), theirs.get(index, none), strict=True)
        for parameter, left, right in pairs:
            # Which gradients are kept the deciding trainer says: others may know more optimizers, or fewer.
            if left != right and max(left, right) >= 0:
                return f"parameter group of {parameter.name!r}", left, right
    return None
