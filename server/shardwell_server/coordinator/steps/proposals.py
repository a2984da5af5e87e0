"""Step proposals: validation, comparison between trainers, global gradient norms, and new optimizers.

Note: [New optimizers]
    In torch, an optimizer that a script makes for the next stage of training starts with new state, and a script that
    is restarted continues with the state of its checkpoint. Here the state is on the shard servers, and both make an
    optimizer for parameters that have state. Trainers therefore number the optimizers that replace an earlier one for
    the same parameters, in the order in which the script makes them. A restarted script gives the same numbers. The
    run's state, which is stored with every commit and in checkpoints, has the numbers that have taken a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from typing import Literal

from shardwell_server import optimizer_checks
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_wire.errors import ConflictError, HyperparameterMismatchError, InvalidRequestError, NonFiniteError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.optimizers import KEPT_GROUP
from shardwell_wire.model.topology import Consistency, runs_on_trainers
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

MAX_OTHER_NORMS = 16
"""Limit of the norms that are kept per step besides the Euclidean norm. Another one replaces the oldest."""


@dataclass(frozen=True, slots=True)
class NormKind:
    """Which norm of the step's gradient to compute besides the Euclidean norm."""

    norm_type: float
    bound: float = 0.0
    """Elements count as clamped to ``[-bound, bound]``. 0: not clamped."""


@dataclass(frozen=True, slots=True)
class OtherNorm:
    """A norm of the step's gradient besides the Euclidean norm."""

    kind: NormKind
    value: float
    partials: tuple[shard_pb2.UnitNorm, ...] = ()
    """Partial sums by unit and server, from which it was computed."""

    @classmethod
    def combine(cls, partials: Iterable[shard_pb2.UnitNorm], kind: NormKind) -> OtherNorm:
        """Combines the partial sums of all units and servers."""
        found = tuple(partials)
        if kind.norm_type == math.inf:
            return cls(kind, max((norm.max_abs for norm in found), default=0.0), found)
        powers = _exact_sum(partial for norm in found for partial in norm.power_partials)
        return cls(kind, _root(powers, kind.norm_type), found)


@dataclass(frozen=True, slots=True)
class PreparedGradients:
    """The servers' responses to ``PrepareStep``, combined."""

    grad_norm: float
    """Euclidean norm."""
    other_norms: tuple[OtherNorm, ...] = ()
    """The other norms that were requested, in this order."""
    norms: tuple[shard_pb2.UnitNorm, ...] = ()
    """Partial sums by unit and server, from which the Euclidean norm was computed."""
    memory_ready_for: bytes | None = None
    """``allocation_key`` of the optimizer for which every server has allocated memory. None: no optimizer."""
    changed_buffers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Layout indices of the buffers that the update will change, by unit index."""

    def find(self, kind: NormKind | None) -> float | None:
        """Returns a norm; None if it is not known. ``kind`` None: the Euclidean norm."""
        if kind is None:
            return self.grad_norm
        return next((norm.value for norm in self.other_norms if norm.kind == kind), None)

    def add_norms(self, former: PreparedGradients | None) -> PreparedGradients:
        """Returns this result together with the other norms of an earlier result for the same gradient."""
        if former is None:
            return self
        known = {norm.kind: norm for norm in (*former.other_norms, *self.other_norms)}
        return replace(self, other_norms=tuple(known.values())[-MAX_OTHER_NORMS:])

    @classmethod
    def combine(cls, norms: Iterable[shard_pb2.UnitNorm], kind: NormKind | None = None) -> PreparedGradients:
        """Combines the partial sums of all units and servers into global norms.

        The sums are exact, so the result does not depend on how units are cut into shards.

        Args:
            kind: Another norm to compute. None: none.
        """
        found = tuple(norms)
        grad_norm = math.sqrt(_exact_sum(partial for norm in found for partial in norm.square_partials))
        return cls(grad_norm, () if kind is None else (OtherNorm.combine(found, kind),), found)

    @classmethod
    def skipped(cls, kind: NormKind | None) -> PreparedGradients:
        """Returns the result of a step that is skipped because a gradient is not finite."""
        return cls(math.inf, () if kind is None else (OtherNorm(kind, math.inf),))

    def restricted_to(self, unit_indices: Collection[int]) -> PreparedGradients:
        """Returns the norms over some units only."""
        if not self.norms:
            return self  # the step was skipped, or it is committed and only the totals are stored
        return replace(
            self,
            grad_norm=PreparedGradients.combine(_of_units(self.norms, unit_indices)).grad_norm,
            other_norms=tuple(
                OtherNorm.combine(_of_units(norm.partials, unit_indices), norm.kind) for norm in self.other_norms
            ),
        )


def _of_units(norms: Iterable[shard_pb2.UnitNorm], indices: Collection[int]) -> Iterable[shard_pb2.UnitNorm]:
    return (norm for norm in norms if norm.unit_index in indices)


def _root(value: float, norm_type: float) -> float:
    try:
        return float(value ** (1.0 / norm_type))
    except OverflowError:  # norm_type close to 0
        return math.inf


def _exact_sum(partials: Iterable[float]) -> float:
    found = list(partials)
    if any(map(math.isnan, found)):
        raise NonFiniteError("a shard server reported a gradient norm that is not a number")
    try:
        return math.inf if math.inf in found else math.fsum(found)
    except OverflowError:
        return math.inf


_KEPT = 64
"""Limit of the numbers in the run's state."""


def starts_anew(state: coordinator_pb2.RunState | None, generation: int) -> bool:
    """True if the next step of an optimizer is its first one, which starts with new state.

    Args:
        state: The run's state.
        generation: ``OptimizerStep.generation``. 0: the optimizer replaces no other one.
    """
    if not generation:
        return False
    known = [] if state is None else state.optimizer_generations
    return generation not in known and not (len(known) == _KEPT and generation < known[0])


def note_step(state: coordinator_pb2.RunState, generation: int) -> None:
    """Records in the run's state that an optimizer takes its first step."""
    known = sorted([*state.optimizer_generations, generation])[-_KEPT:]
    del state.optimizer_generations[:]
    state.optimizer_generations.extend(known)


_CLIPPING = ("clip coefficient", "clip value")
"""Names of the differences between proposals that come from clipping."""

_CLIP_ALIKE = (
    "call clip_grad_norm_ and clip_grad_value_ with the same arguments and in the same order in every trainer. To log "
    'a norm in some of them only, call clip_grad_norm_(float("inf")), which changes nothing'
)

_ADVICE = {"new optimizer state": "make new optimizers before the same step in every trainer"}
"""What to do about other differences, by their name."""


@dataclass(frozen=True, slots=True)
class StepProposal:
    """What one trainer proposes to commit in a step."""

    trainer: str
    trainer_and_ranks: str
    """The trainer and its ranks, for messages."""
    optimizer: common_pb2.OptimizerStep
    clip_coefficient: float
    unit_order: tuple[int, ...]
    state: coordinator_pb2.RunState | None
    """Tracked objects. None: unchanged."""
    norm_attempts: int | None = None
    """``Step.attempts`` of the norm from which ``clip_coefficient`` was computed. None: not computed from a norm."""

    @classmethod
    def from_record(cls, record: CommitRecord) -> StepProposal:
        """Returns the proposal that was committed, for comparison with other proposals."""
        optimizer = committed_optimizer(record.optimizer)
        return cls(record.leader, record.leader, optimizer, record.clip_coefficient, record.unit_order, None)

    @property
    def updates_on_trainers(self) -> bool:
        """True if the trainers run the optimizer, each on its optimizer partitions."""
        return runs_on_trainers(self.optimizer.algorithm)

    @property
    def norm_units(self) -> tuple[set[int], set[int]]:
        """Indices of the trainer's units over whose gradients it had the norm computed, and of its other units.

        The trainer named the same ones in PrepareGradients. A restarted coordinator learns them from the proposal.
        """
        units = {unit.unit_index for unit in self.optimizer.units}
        counted = units & optimizer_checks.units_that_count(self.optimizer, max(units, default=-1) + 1)
        return counted, units - counted

    def same_update(self, other: StepProposal) -> bool:
        """True if both proposals ask for the same update. If one of them is valid, the other is valid too."""
        return (self.clip_coefficient, self.unit_order, self.optimizer) == (
            other.clip_coefficient,
            other.unit_order,
            other.optimizer,
        )


class Proposals:
    """The proposals of the step in flight, at most one per trainer.

    The proposals of the leaders are committed, the trainers of one replica. Each leader names its own units.
    """

    def __init__(self) -> None:
        self._by_trainer: dict[str, StepProposal] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of the trainers that have proposed."""
        return iter(self._by_trainer)

    def __contains__(self, trainer: object) -> bool:
        return trainer in self._by_trainer

    def add(self, proposal: StepProposal) -> None:
        """Adds a trainer's proposal, or replaces it."""
        self._by_trainer[proposal.trainer] = proposal

    def restore(self, proposal: StepProposal) -> None:
        """Adds a trainer's proposal again if it was dropped. A newer proposal of the trainer stays."""
        self._by_trainer.setdefault(proposal.trainer, proposal)

    def start_anew(self, state: coordinator_pb2.RunState | None) -> None:
        """Notes in all proposals whether they start with new optimizer state, given the run's state."""
        for proposal in self._by_trainer.values():
            proposal.optimizer.new_state = starts_anew(state, proposal.optimizer.generation)

    def clear(self) -> None:
        """Drops all proposals."""
        self._by_trainer.clear()

    def prove_valid(self, proposal: StepProposal) -> bool:
        """True if a valid proposal asks for the same update."""
        return any(proposal.same_update(valid) for valid in self._by_trainer.values())

    def leading(self, leaders: Sequence[str], layouts: Sequence[UnitLayout]) -> StepProposal | None:
        """Returns the proposal to commit: the union of the leaders' proposals.

        Args:
            leaders: The trainers whose proposals are committed, in the order of their ranks.
            layouts: Layouts of the run's units.

        Returns:
            None if there are no leaders, a leader has not proposed, or their proposals differ.
        """
        found = [self._by_trainer[leader] for leader in leaders if leader in self._by_trainer]
        if not found or len(found) < len(leaders):
            return None
        if any(_first_difference(*pair, layouts) is not None for pair in combinations(found, 2)):
            return None  # ``reject_if_different`` tells the trainer that differs
        return union_of(found, layouts)

    def reject_if_different(self, trainer: str, leaders: Sequence[str], layouts: Sequence[UnitLayout]) -> None:
        """Drops a trainer's proposal if it differs from that of a leader before it.

        Raises:
            HyperparameterMismatchError: The proposals differ.
        """
        before = leaders[: leaders.index(trainer)] if trainer in leaders else leaders
        try:
            for leader in before:
                if leader in self._by_trainer:
                    require_same_proposal(self._by_trainer[leader], self._by_trainer[trainer], layouts)
        except HyperparameterMismatchError:
            # The trainer may become a leader later. The rejected proposal must not be committed then.
            del self._by_trainer[trainer]
            raise


def union_of(proposals: Sequence[StepProposal], layouts: Sequence[UnitLayout]) -> StepProposal:
    """Returns one proposal for the units of several, which must not differ.

    Units are updated stage by stage, and within a stage in the order of the forward.
    """
    first = proposals[0]
    if len(proposals) == 1:
        return first
    units: dict[int, common_pb2.UnitGroups] = {}
    places: dict[int, tuple[int, int]] = {}
    for proposal in proposals:
        for unit in proposal.optimizer.units:
            units.setdefault(unit.unit_index, unit)
        for position, index in enumerate(proposal.unit_order):
            places.setdefault(index, (layouts[index].pp_rank, position))
    optimizer = common_pb2.OptimizerStep()
    optimizer.CopyFrom(first.optimizer)
    optimizer.ClearField("units")
    optimizer.units.extend(units[index] for index in sorted(units))
    return replace(first, optimizer=optimizer, unit_order=tuple(sorted(places, key=lambda index: places[index])))


def validate_proposal(proposal: StepProposal, layouts: Sequence[UnitLayout], cuts: Sequence[Sequence[int]]) -> None:
    """Raises InvalidRequestError if a proposal cannot be applied to the run's units.

    Args:
        proposal: A trainer's proposal.
        cuts: Start of every shard in bytes of its unit's flat vector.
    """
    optimizer_checks.validate(proposal.optimizer)
    clip = proposal.clip_coefficient
    if not math.isfinite(clip) or clip < 0:
        raise InvalidRequestError(
            f"clip_coefficient is {clip}: expected a finite number of at least 0 (1: no clipping)"
        )
    _check_indices("optimizer.units", [unit.unit_index for unit in proposal.optimizer.units], len(layouts))
    _check_indices("unit_order", proposal.unit_order, len(layouts))
    for unit in proposal.optimizer.units:
        layout = layouts[unit.unit_index]
        if layout.holds_buffers:
            raise InvalidRequestError(
                f"optimizer.units names unit {layout.unit!r}, which contains buffers: optimizers update parameters "
                "only",
                unit=layout.unit,
            )
        if len(unit.group_indices) != len(layout.parameters):
            raise InvalidRequestError(
                f"unit {layout.unit!r} has {len(layout.parameters)} parameters, but optimizer.units has group indices "
                f"for {len(unit.group_indices)}",
                unit=layout.unit,
            )
        optimizer_checks.check_fit(proposal.optimizer, unit.group_indices, layout, cuts[unit.unit_index])


def check_asynchronous(proposal: StepProposal, consistency: Consistency) -> None:
    """Raises InvalidRequestError if an asynchronous run cannot commit a proposal."""
    if proposal.updates_on_trainers:
        raise InvalidRequestError(
            f"consistency={consistency}: the optimizer runs on the trainers, which needs the gradients of all ranks. "
            "Use an optimizer that runs on the servers, or SYNCHRONOUS"
        )
    if any(KEPT_GROUP in unit.group_indices for unit in proposal.optimizer.units):
        raise InvalidRequestError(
            f"consistency={consistency}: several optimizers update the run's parameters in turn. Use one optimizer, "
            "such as shardwell.optim.Combined([...]), or SYNCHRONOUS"
        )


def _check_indices(what: str, indices: Sequence[int], count: int) -> None:
    for index in indices:
        if index >= count:
            raise InvalidRequestError(f"{what} contains unit index {index}, but the run has {count} units")
    if len(set(indices)) != len(indices):
        raise InvalidRequestError(f"{what} contains a unit index twice: {list(indices)}")


@lru_cache(maxsize=16)
def committed_optimizer(record_optimizer: bytes) -> common_pb2.OptimizerStep:
    """Decodes the optimizer of a commit record. The result is shared: do not modify it."""
    return common_pb2.OptimizerStep.FromString(record_optimizer)


def require_same_algorithms(
    before: common_pb2.OptimizerStep, optimizer: common_pb2.OptimizerStep, layouts: Sequence[UnitLayout]
) -> None:
    """Raises ConflictError if a step would update a parameter that has the state of another algorithm."""
    algorithms = {
        optimizer_checks.algorithm_of(each, group) for each in (before, optimizer) for group in range(len(each.groups))
    }
    if len(algorithms) < 2:
        return
    old_groups, new_groups = _groups(before), _groups(optimizer)
    for index, layout in enumerate(layouts):
        groups = zip(layout.parameters, old_groups.get(index, ()), new_groups.get(index, ()), strict=False)
        for parameter, old, new in groups:
            if old < 0 or new < 0:
                continue
            expected, got = optimizer_checks.algorithm_of(before, old), optimizer_checks.algorithm_of(optimizer, new)
            if expected != got:
                raise ConflictError(
                    f"parameter {parameter.name!r} already has {expected!r} state in this run: to train it with "
                    f"{got!r}, start a new run",
                    parameter=parameter.name,
                    expected=expected,
                    actual=got,
                )


def require_same_proposal(
    leader: StepProposal, other: StepProposal, layouts: Sequence[UnitLayout], *, clipping: bool = True
) -> None:
    """Raises HyperparameterMismatchError, naming the first difference, if a proposal differs from the leader's.

    Parameter groups are compared on the units that the trainers of the proposal's place in the grid hold. Clipping is
    compared only if ``clipping`` is True.
    """
    difference = _first_difference(leader, other, layouts, clipping=clipping)
    if difference is not None:
        what, expected, got = difference
        advice = _CLIP_ALIKE if what in _CLIPPING else _ADVICE.get(what, "set the same value in every trainer")
        raise HyperparameterMismatchError(
            f"{what} is {expected} at {leader.trainer_and_ranks}, whose proposal is committed, but {got} at "
            f"{other.trainer_and_ranks}: {advice}",
            name=what,
            expected=expected,
            actual=got,
        )


def _first_difference(
    leader: StepProposal, other: StepProposal, layouts: Sequence[UnitLayout], *, clipping: bool = True
) -> tuple[str, object, object] | None:
    ours, theirs = leader.optimizer, other.optimizer
    if leader is other or (ours == theirs and leader.clip_coefficient == other.clip_coefficient):
        return None
    if len(ours.groups) != len(theirs.groups):
        return "number of parameter groups", len(ours.groups), len(theirs.groups)
    for index, (left, right) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        algorithms = optimizer_checks.algorithm_of(ours, index), optimizer_checks.algorithm_of(theirs, index)
        if algorithms[0] != algorithms[1]:
            return f"algorithm of parameter group {index}", repr(algorithms[0]), repr(algorithms[1])
        for name in sorted({*left.hyperparameters, *right.hyperparameters}):
            expected, got = _value(left, name), _value(right, name)
            if expected != got:
                return f"{name} of parameter group {index}", expected, got
    whole_step = {
        _CLIPPING[0]: (leader.clip_coefficient, other.clip_coefficient),
        "skip_non_finite": (ours.skip_non_finite, theirs.skip_non_finite),
        _CLIPPING[1]: (_optional(ours, "clip_value"), _optional(theirs, "clip_value")),
        "new optimizer state": (ours.new_state, theirs.new_state),
        "ema_decay": (_optional(ours, "ema_decay"), _optional(theirs, "ema_decay")),
    }
    for what, (expected, got) in whole_step.items():
        if expected != got and (clipping or what not in _CLIPPING):
            return what, expected, got
    return _first_group_difference(_groups(ours), _groups(theirs), layouts)


def _optional(optimizer: common_pb2.OptimizerStep, name: Literal["clip_value", "ema_decay"]) -> float | None:
    return getattr(optimizer, name) if optimizer.HasField(name) else None


def _value(group: common_pb2.ParameterGroup, name: str) -> object:
    values: Mapping[str, float] = group.hyperparameters
    return values.get(name, "unset")


def _groups(optimizer: common_pb2.OptimizerStep) -> dict[int, Sequence[int]]:
    """Returns the group index of every parameter, by unit index."""
    return {unit.unit_index: unit.group_indices for unit in optimizer.units}


def _first_group_difference(
    ours: dict[int, Sequence[int]], theirs: dict[int, Sequence[int]], layouts: Sequence[UnitLayout]
) -> tuple[str, object, object] | None:
    # The commit record of a checkpoint with other units names none: then nothing is compared.
    places, known = {_place(layouts[index]) for index in theirs}, {_place(layouts[index]) for index in ours}
    for index, layout in enumerate(layouts):
        if places and _place(layout) not in places & known:
            continue
        none = [-1] * len(layout.parameters)
        pairs = zip(layout.parameters, ours.get(index, none), theirs.get(index, none), strict=True)
        for parameter, left, right in pairs:
            # Negative indices (no update) may differ: the leader decides which gradients are kept, because the other
            # trainers may have more optimizers, or fewer.
            if left != right and max(left, right) >= 0:
                return f"parameter group of {parameter.name!r}", left, right
    return None


def _place(layout: UnitLayout) -> tuple[int | None, tuple[int, ...]]:
    """Returns which trainers hold a unit: tp rank, or None for all of them, and pp ranks."""
    return layout.tp_rank if layout.holds_parts else None, layout.pp_ranks
