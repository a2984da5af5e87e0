"""Checks of the optimizer in a step proposal or a request, and the units and memory that it needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.optimizers import KEPT_GROUP, MAX_VALUE, OPTIMIZERS, Hyperparameter, OptimizerSpec
from shardwell_wire.model.topology import runs_on_trainers
from shardwell_wire.v1 import common_pb2


def units_that_count(optimizer: common_pb2.OptimizerStep, unit_count: int) -> frozenset[int]:
    """Returns the indices of the units whose gradients a step uses up.

    Units with a kept gradient belong to another optimizer.
    """
    kept = {unit.unit_index for unit in optimizer.units if KEPT_GROUP in unit.group_indices}
    return frozenset(range(unit_count)) - kept


def algorithm_of(optimizer: common_pb2.OptimizerStep, group_index: int) -> str:
    """Returns the name of a parameter group's optimizer."""
    return optimizer.groups[group_index].algorithm or optimizer.algorithm


def validate(optimizer: common_pb2.OptimizerStep) -> None:
    """Checks a step's optimizer without regard to the units.

    Raises:
        InvalidRequestError: An optimizer is unknown, a hyper-parameter is missing, unknown, not finite or out of
            bounds, or a group index does not exist.
    """
    if optimizer.HasField("clip_value") and not optimizer.clip_value > 0.0:
        raise InvalidRequestError(f"clip_value={optimizer.clip_value!r}: expected a positive number")
    if runs_on_trainers(optimizer.algorithm):
        _validate_on_trainers(optimizer)
        return
    for index, group in enumerate(optimizer.groups):
        spec, given = _spec(algorithm_of(optimizer, index)), set(group.hyperparameters)
        if given != spec.names:
            wrong = ", ".join(sorted(given ^ spec.names))
            raise InvalidRequestError(
                f"parameter group {index} of {spec.name}: hyper-parameter {wrong} is missing or unknown; "
                f"expected exactly {', '.join(sorted(spec.names))}"
            )
        for hyperparameter in spec.hyperparameters:
            _check_value(index, hyperparameter, group.hyperparameters[hyperparameter.name])
    if optimizer.HasField("ema_decay") and not 0.0 <= optimizer.ema_decay <= 1.0:
        raise InvalidRequestError(f"ema_decay={optimizer.ema_decay!r}: expected 0 <= ema_decay <= 1")
    if not optimizer.groups:
        _spec(optimizer.algorithm)
    _check_group_indices(optimizer)


def _validate_on_trainers(optimizer: common_pb2.OptimizerStep) -> None:
    """Checks an optimizer that runs on the trainers. Its hyper-parameters have no bounds here."""
    if optimizer.HasField("ema_decay"):
        raise InvalidRequestError("ema_decay requires an optimizer that runs on the servers")
    if any(runs_on_trainers(group.algorithm) != bool(group.algorithm) for group in optimizer.groups):
        raise InvalidRequestError("optimizers that run on the trainers and on the servers cannot be combined")
    _check_group_indices(optimizer)


def allocation_key(optimizer: common_pb2.OptimizerStep) -> bytes:
    """Returns a key that is equal for optimizers that need the same memory.

    It depends only on hyper-parameters that enable state or set its initial values, not, for example, on the value of
    the learning rate.
    """
    copy = common_pb2.OptimizerStep()
    copy.CopyFrom(optimizer)
    copy.ClearField("skip_non_finite")
    copy.ClearField("generation")
    copy.ClearField("clip_value")
    if copy.HasField("ema_decay"):
        copy.ema_decay = 0.0
    for index, group in enumerate(copy.groups):
        spec = OPTIMIZERS.get(algorithm_of(optimizer, index))
        kept = spec.initializers if spec else ()
        for name, value in list(group.hyperparameters.items()):  # writing to a protobuf map may change its order
            if name not in kept:
                group.hyperparameters[name] = bool(value)  # state only depends on whether the value is 0
    return copy.SerializeToString(deterministic=True)


def check_fit(
    optimizer: common_pb2.OptimizerStep, groups: Sequence[int], layout: UnitLayout, cuts: Sequence[int]
) -> None:
    """Checks that a valid optimizer can be applied to the shards of a unit.

    Args:
        optimizer: Passed ``validate``.
        groups: Group index of each parameter; negative for parameters that are not optimised.
        cuts: Bounds of the shards, in bytes of the flat vector.

    Raises:
        InvalidRequestError: A parameter has a dtype that optimizers do not update, or must be whole and is cut over
            servers or split by tensor parallelism, or has another number of dims than its optimizer supports.
    """
    for parameter, group in zip(layout.parameters, groups, strict=True):
        if group >= 0 and not parameter.is_trainable and not layout.holds_buffers:
            raise InvalidRequestError(
                f"parameter {parameter.shown_name!r} of unit {layout.unit!r} is {parameter.dtype}, which no optimizer "
                "updates",
                parameter=parameter.shown_name,
            )
    if runs_on_trainers(optimizer.algorithm):
        return
    found = {group: OPTIMIZERS[algorithm_of(optimizer, group)] for group in set(groups) if group >= 0}
    whole = {group: spec for group, spec in found.items() if spec.needs_whole_tensors}
    if not whole:
        return
    specs = {index: whole[group] for index, group in enumerate(groups) if group in whole}
    cut = layout.parameters_cut_at(cuts)
    for index, spec in specs.items():
        parameter = layout.parameters[index]
        what = f"parameter {parameter.shown_name!r} of unit {layout.unit!r}"
        if spec.num_dims not in (None, len(parameter.shape)):
            raise InvalidRequestError(
                f"{spec.name} takes parameters of {spec.num_dims} dimensions; {what} has shape {parameter.shape}: put "
                "it into another optimizer, shardwell.optim.Combined([...])",
                parameter=parameter.shown_name,
            )
        if parameter.is_part:
            raise InvalidRequestError(
                f"{spec.name} needs whole tensors, but {what} is a part of {parameter.whole_shape}, which tensor "
                "parallelism splits: put it into another optimizer, shardwell.optim.Combined([...])",
                parameter=parameter.shown_name,
            )
        if index in cut:
            raise InvalidRequestError(
                f"{spec.name} needs whole tensors, but {what} is cut over several servers: make its unit with "
                'fully_shard(..., placement="tensor"), in a new run',
                parameter=parameter.shown_name,
            )


def _check_group_indices(optimizer: common_pb2.OptimizerStep) -> None:
    group_count = len(optimizer.groups)
    for unit in optimizer.units:
        for group_index in set(unit.group_indices):
            if not KEPT_GROUP <= group_index < group_count:
                raise InvalidRequestError(
                    f"unit {unit.unit_index} names parameter group {group_index}: expected an index below "
                    f"{group_count}, the number of groups"
                )


def _spec(name: str) -> OptimizerSpec:
    spec = OPTIMIZERS.get(name)
    if spec is None:
        raise InvalidRequestError(f"optimizer {name!r} is not known: expected one of {', '.join(OPTIMIZERS)}")
    return spec


def _check_value(group: int, hyperparameter: Hyperparameter, value: float) -> None:
    if not abs(value) <= MAX_VALUE:
        problem = " is not finite in fp32"
    elif (violation := hyperparameter.violation(value)) is not None:
        problem = f": {violation}"
    else:
        return
    raise InvalidRequestError(f"parameter group {group}: {hyperparameter.name}={value!r}{problem}")
