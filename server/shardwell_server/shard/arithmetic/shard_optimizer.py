"""Applies the optimizer of a step to the parts of parameters in a shard.

The state that an update creates is allocated before the update. Between two updates, the state can be saved, taken up,
exported and restored. ``JointUpdate`` updates several small shards by a few tensor operations. ``Averages`` are the
exponential moving averages of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

import torch

from shardwell_server.optimizer_checks import algorithm_of, allocation_key
from shardwell_server.shard.arithmetic.algorithms import (
    ENGINES,
    Engine,
    JointCall,
    Part,
    Plan,
    Settings,
    State,
    torch_settings,
)
from shardwell_server.shard.arithmetic.update_pieces import (
    Changed,
    Clipping,
    Piece,
    Progress,
    apply,
    packed_bytes,
    slice_bytes,
    slices,
)
from shardwell_wire import fault_points
from shardwell_wire.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class RestoredPart:
    """Optimizer state of one part, which another shard had before."""

    algorithm: str | None = None
    """The optimizer of the last update. None: the part has had no update."""
    step_count: int = 0
    """Number of updates by this optimizer."""
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """State tensors by torch's names."""
    average: torch.Tensor | None = None
    """Moving average. None: the part has none."""


@dataclass(slots=True)
class PartContent:
    """The state of one part between two updates."""

    algorithm: str | None
    step_count: int
    state: State
    average: torch.Tensor | None
    fresh_algorithm: str | None
    """Optimizer for whose first update state is allocated. None: no state is allocated."""
    initializers: Mapping[str, object]
    """The settings that determined the initial values of ``fresh_state``."""
    fresh_state: State
    fresh_average: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        averages = (self.average, self.fresh_average)
        return [*self.state.values(), *self.fresh_state.values(), *(each for each in averages if each is not None)]


@dataclass(frozen=True, slots=True)
class OptimizerContent:
    """The state of an optimizer between two updates, with the memory that is allocated for the next one."""

    parts: Sequence[PartContent] = ()
    averages_started: bool = False


Key = TypeVar("Key")

Allocate = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Returns memory for tensors that are given on the meta device, in their order. The content is undefined."""


def allocate_ordinary(templates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Allocates tensors in the memory of this process."""
    return [torch.empty_like(template, device="cpu") for template in templates]


@dataclass(frozen=True, slots=True)
class FreshState:
    """State that is allocated for the next update of one part."""

    algorithm: str
    initializers: Mapping[str, object]
    """The settings that determine the initial values."""
    state: State


@dataclass(slots=True)
class AllocatedState:
    """Memory that is allocated for the next update."""

    states: dict[int, FreshState] = field(default_factory=dict)
    """By part number."""
    averages: dict[int, torch.Tensor] = field(default_factory=dict)
    """By part number."""

    @property
    def size_bytes(self) -> int:
        states = sum(tensor.nbytes for fresh in self.states.values() for tensor in fresh.state.values())
        return states + sum(average.nbytes for average in self.averages.values())


class MissingTensors:
    """Tensors to allocate, together with their initial value and the mapping that receives them."""

    def __init__(self) -> None:
        self._templates: list[torch.Tensor] = []
        self._targets: list[tuple[float, Callable[[torch.Tensor], None]]] = []

    def add(self, template: torch.Tensor, initial: float, receiver: dict[Key, torch.Tensor], key: Key) -> None:
        """Adds a tensor, given on the meta device."""
        self._templates.append(template)
        self._targets.append((initial, partial(receiver.__setitem__, key)))

    def allocate(self, allocate: Allocate) -> None:
        """Allocates all tensors at once. Writes to all of the memory, because the system provides pages only then."""
        if self._templates:
            for tensor, (initial, receive) in zip(allocate(self._templates), self._targets, strict=True):
                receive(tensor.fill_(initial))


_AVERAGE = "ema"
"""Name of the moving average in the state."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A part that the next update will change."""

    number: int
    group: int
    algorithm: str
    engine: Engine
    settings: Settings
    starts_anew: bool
    """Whether the update starts with new state."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the prepared update is applied. Serves all updates of the same tensors."""

    groups: Sequence[tuple[int, Sequence[int], Plan]]
    """Number of each parameter group, the numbers of its parts, and their plan."""
    parts: Sequence[tuple[Part, str]]
    """The parts that the update changes, and their algorithms."""


@dataclass(frozen=True, slots=True)
class _Update:
    """An update that has started. ``finish`` can be repeated until it succeeds; see Note: [Failed updates]."""

    pieces: Sequence[Callable[[], Iterator[Piece]]]
    """By parameter group."""
    averages: AveragedUpdate
    progress: Progress

    def finish(self) -> None:
        """Applies the remaining pieces."""
        apply(self._pieces(), self.progress)

    def _pieces(self) -> Iterator[Piece]:
        yield from self.averages.before()
        for pieces in self.pieces:
            yield from pieces()
        yield from self.averages.after()


class ShardOptimizer:
    """The optimizer of one shard and its state.

    Parameters without a gradient are skipped, as in torch: their state does not change.

    Args:
        values: The parts of parameters in the shard. A whole parameter has its own shape, others have [numel].
    """

    def __init__(self, values: Sequence[torch.Tensor], allocate: Allocate = allocate_ordinary) -> None:
        self._values, self._allocate = list(values), allocate
        self._states: list[State] = [{} for _ in values]
        self._algorithms: list[str | None] = [None] * len(values)
        self._step_counts = [0] * len(values)
        self._tensor_count = -1
        self._allocated = AllocatedState()
        self._prepared_for: tuple[object, ...] | None = None
        self._members_prepared: Sequence[_Member] = ()
        """The parts that the prepared update changes."""
        self._update: _Update | None = None
        """An update that failed midway."""
        self._plan: _Plan | None = None
        """The plan of the last update, if it also serves the prepared one."""
        self._joint_parts: Sequence[JointPart] | None = None
        """None: not known yet, or the update cannot be joined."""
        self.averages = Averages(self._values)
        self.state_names: list[str] = []
        """Names of the state tensors after the last step, such as ``exp_avg``."""
        self._is_averaged = False
        """Whether the prepared update changes the averages."""
        self._drops_state = False
        """Whether the prepared update drops the state of former updates."""
        self._size_bytes = self._piece_bytes = 0
        self.revision = 0
        """Changes whenever ``content`` changes, except for the step counts of ``counted``."""
        self.counted: tuple[int, ...] = ()
        """Numbers of the parts that the prepared update changes, or the last one if none is prepared."""
        self.update_count = 0
        """Number of updates. Each adds one to the step counts of the parts that were ``counted`` then."""

    @property
    def is_updating(self) -> bool:
        """True after an update that failed midway, until its repetition succeeds."""
        return self._update is not None

    def content(self) -> OptimizerContent:
        """Returns the state, without a copy. Call while no update runs."""
        parts = []
        for number, (algorithm, count, state) in enumerate(
            zip(self._algorithms, self._step_counts, self._states, strict=True)
        ):
            fresh = self._allocated.states.get(number) or FreshState("", {}, {})
            average, fresh_average = self.averages[number], self._allocated.averages.get(number)
            parts.append(
                PartContent(
                    algorithm,
                    count,
                    state,
                    average,
                    fresh.algorithm or None,
                    fresh.initializers,
                    fresh.state,
                    fresh_average,
                )
            )
        return OptimizerContent(parts, self.averages.has_started)

    def take_up(self, content: OptimizerContent) -> None:
        """Continues with the state that ``content`` returned in a former process."""
        parts = [RestoredPart(part.algorithm, part.step_count, part.state, part.average) for part in content.parts]
        self.restore(parts, averages_begun=content.averages_started)
        for number, part in enumerate(content.parts):
            if part.fresh_algorithm is not None:
                self._allocated.states[number] = FreshState(part.fresh_algorithm, part.initializers, part.fresh_state)
            if part.fresh_average is not None:
                self._allocated.averages[number] = part.fresh_average

    @property
    def piece_bytes(self) -> int:
        """Size of the tensors that a piece of the prepared update changes, at most."""
        return self._piece_bytes

    @property
    def size_bytes(self) -> int:
        """Memory of the state, including what is allocated for the next update."""
        return self._size_bytes + self._allocated.size_bytes

    # ---- before the commit ----

    def is_prepared(self, present: Sequence[bool], group_of: Sequence[int], key: bytes) -> bool:
        """Returns whether all memory for an update is allocated. Arguments as in ``prepare``."""
        return self._update is not None or self._prepared_for == (tuple(present), tuple(group_of), key)

    def needs(
        self, present: Sequence[bool], optimizer: common_pb2.OptimizerStep, group_of: Sequence[int]
    ) -> tuple[int, int]:
        """Returns the bytes of state after an update, and the bytes of temporary memory during the update."""
        size_bytes, workspace_bytes = self._size_bytes, 0
        for member in self._members(present, optimizer, group_of):
            values, own = self._values[member.number], self._own_state(member)
            made = member.engine.missing(values, own, member.settings)
            size_bytes += sum(tensor.nbytes for tensor in made.values())
            workspace_bytes = max(workspace_bytes, member.engine.workspace_bytes(values, {**own, **made}))
        for number in self._missing_averages(optimizer, group_of):
            size_bytes += self._values[number].nbytes
        return size_bytes, workspace_bytes

    def prepare(
        self,
        present: Sequence[bool],
        optimizer: common_pb2.OptimizerStep,
        group_of: Sequence[int],
        key: bytes | None = None,
    ) -> None:
        """Allocates the state that an update creates, so that the update itself allocates nothing.

        Has no visible effect. Another call replaces the allocations of the call before.

        Args:
            present: Whether each part has a gradient.
            group_of: Group index of each part; negative for parts that are not optimised.
            key: ``allocation_key`` of the optimizer, if the caller has computed it.
        """
        key = allocation_key(optimizer) if key is None else key
        if self.is_prepared(present, group_of, key):
            return
        former, allocated, missing = self._allocated, AllocatedState(), MissingTensors()
        largest, total, tensor_count = max(map(slice_bytes, self._values), default=0), 0, 1
        for member in self._members(present, optimizer, group_of):
            if (fresh := self._fresh(member, former.states.get(member.number), missing)) is not None:
                allocated.states[member.number] = fresh
        for number in self._missing_averages(optimizer, group_of):
            if (reused := former.averages.get(number)) is not None:
                allocated.averages[number] = reused
            else:
                missing.add(torch.empty_like(self._values[number], device="meta"), 0.0, allocated.averages, number)
        missing.allocate(self._allocate)
        self._allocated = allocated
        self.revision += 1
        self._members_prepared, self._plan = tuple(self._members(present, optimizer, group_of)), None
        self._joint_parts, self._is_averaged = None, optimizer.HasField("ema_decay")
        self._drops_state = optimizer.new_state
        self.counted = tuple(member.number for member in self._members_prepared)
        for member in self._members_prepared:
            fresh_state = allocated.states[member.number].state if member.number in allocated.states else {}
            state = {**self._own_state(member), **fresh_state}
            size = member.engine.piece_bytes(self._values[member.number], state)
            largest, total, tensor_count = max(largest, size), total + size, max(tensor_count, 1 + len(state))
        self._piece_bytes = max(largest, packed_bytes(total, tensor_count))
        self._prepared_for = (tuple(present), tuple(group_of), key)

    def _fresh(self, member: _Member, former: FreshState | None, missing: MissingTensors) -> FreshState | None:
        """Returns the new state of a part, without the tensors that are added to ``missing``."""
        engine, settings = member.engine, member.settings
        initializers = engine.initializers(settings)
        if former is None or (former.algorithm, former.initializers) != (member.algorithm, initializers):
            former = FreshState(member.algorithm, initializers, {})
        fresh = FreshState(member.algorithm, initializers, dict(former.state))
        needed = engine.missing(self._values[member.number], {**self._own_state(member), **former.state}, settings)
        for name, template in needed.items():
            missing.add(template, engine.initial(name, settings), fresh.state, name)
        return fresh if fresh.state or needed else None

    def _members(
        self, present: Sequence[bool], optimizer: common_pb2.OptimizerStep, group_of: Sequence[int]
    ) -> Iterator[_Member]:
        names, settings = zip(*settings_of(optimizer), strict=True) if optimizer.groups else ((), ())
        for number, (has_gradient, group) in enumerate(zip(present, group_of, strict=True)):
            if has_gradient and group >= 0:
                engine = ENGINES[names[group]]
                yield _Member(number, group, names[group], engine, settings[group], optimizer.new_state)

    def _missing_averages(self, optimizer: common_pb2.OptimizerStep, group_of: Sequence[int]) -> list[int]:
        return self.averages.missing([group >= 0 for group in group_of], averaged=optimizer.HasField("ema_decay"))

    def _own_state(self, member: _Member) -> State:
        """Returns the state of a part; empty if the part had another optimizer before, whose state is dropped."""
        same = not member.starts_anew and self._algorithms[member.number] in (None, member.algorithm)
        return self._states[member.number] if same else {}

    # ---- after the commit ----

    def step(
        self,
        gradients: Sequence[torch.Tensor | None],
        optimizer: common_pb2.OptimizerStep,
        group_of: Sequence[int],
        clip_coefficient: float,
        key: bytes | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Updates the parameters in place.

        After an error, repeat the call: it completes the update and applies it to each part exactly once.

        Args:
            gradients: One per part, or None if no rank has a gradient. [numel]
            optimizer: The optimizer of the step.
            group_of: Group index of each part; negative for parts that are not optimised.
            clip_coefficient: Factor for every gradient, applied first.
            key: As in ``prepare``.
            progress: What a former process has applied of this update. None: nothing.
        """
        if self._update is None:
            self.prepare([gradient is not None for gradient in gradients], optimizer, group_of, key)
            self._update = self._begin(gradients, optimizer, group_of, clip_coefficient, progress or Progress())
        self._update.finish()
        self.averages.settle(self._update.averages)
        self._update = None
        self._update_statistics()

    def _begin(
        self,
        gradients: Sequence[torch.Tensor | None],
        optimizer: common_pb2.OptimizerStep,
        group_of: Sequence[int],
        clip_coefficient: float,
        progress: Progress,
    ) -> _Update:
        plan = self._plan or self._make_plan()
        clipping = Clipping(clip_coefficient, optimizer.clip_value if optimizer.HasField("clip_value") else None)
        settings, pieces = settings_of(optimizer), []
        for group, numbers, each in plan.groups:
            own = [gradient for number in numbers if (gradient := gradients[number]) is not None]
            pieces.append(partial(each, own, settings[group][1], clipping))
        decay = optimizer.ema_decay if optimizer.HasField("ema_decay") else None
        averages = self.averages.start_update(self._allocated.averages, decay)
        update = _Update(pieces, averages, progress)
        # Nothing below can fail, so the states are replaced together.
        if optimizer.new_state:
            self._drop_states(number for number, group in enumerate(group_of) if group >= 0)
        for part, algorithm in plan.parts:
            if self._algorithms[part.number] not in (None, algorithm):
                self._step_counts[part.number] = 0
                self._tensor_count = -1
            if self._algorithms[part.number] != algorithm or part.fresh:
                self.revision += 1
            self._algorithms[part.number], self._states[part.number] = algorithm, part.state
            self._step_counts[part.number] += 1
        if self._allocated.averages:
            self.revision += 1
        self._plan = None if self._allocated.states else plan
        self._allocated = AllocatedState()
        self.update_count += 1
        return update

    def _drop_states(self, numbers: Iterable[int]) -> None:
        """Drops the state of some parts, also of those without a gradient. Their averages stay."""
        for number in numbers:
            self._states[number], self._algorithms[number], self._step_counts[number] = {}, None, 0
        self._tensor_count = -1
        self.revision += 1

    def _make_plan(self) -> _Plan:
        """Returns the plan of the prepared update."""
        groups: dict[int, tuple[Engine, Settings, list[Part]]] = {}
        parts: list[tuple[Part, str]] = []
        for member in self._members_prepared:
            part = Part(member.number, self._values[member.number], self._own_state(member))
            if (fresh := self._allocated.states.get(member.number)) is not None:
                part.state, part.fresh = {**part.state, **fresh.state}, frozenset(fresh.state)
            groups.setdefault(member.group, (member.engine, member.settings, []))[2].append(part)
            parts.append((part, member.algorithm))
        return _Plan(
            [
                (group, [part.number for part in own], engine.plan(own, settings))
                for group, (engine, settings, own) in sorted(groups.items())
            ],
            parts,
        )

    # ---- together with the updates of other shards ----

    @property
    def joint_parts(self) -> Sequence[JointPart] | None:
        """What the prepared update changes, if it can be joined with those of other shards. None: it cannot.

        Such an update changes nothing but tensors that exist already, and step counts.
        """
        if self._update is not None or self._allocated.states or self._allocated.averages or self._drops_state:
            return None
        if self._is_averaged and not self.averages.has_started:
            return None
        if self._joint_parts is None:
            self._joint_parts = self._find_joint_parts()
        return self._joint_parts

    def _find_joint_parts(self) -> Sequence[JointPart] | None:
        parts = []
        for member in self._members_prepared:
            values, state = self._values[member.number], self._states[member.number]
            kind = member.engine.joint_kind(Part(member.number, values, state), member.settings)
            if kind is None or self._algorithms[member.number] != member.algorithm:
                return None
            parts.append(JointPart(member.number, member.group, kind, member.engine, values.view(-1), state))
        return parts

    def changed_state(self) -> Iterator[torch.Tensor]:
        """Yields the state and the averages that a joint update may change."""
        for part in self.joint_parts or ():
            yield from part.state.values()
        yield from (average for number in range(len(self._values)) if (average := self.averages[number]) is not None)

    def count_joint_update(self) -> None:
        """Counts an update that was applied to ``joint_parts``."""
        for number in self.counted:
            self._step_counts[number] += 1
        self.update_count += 1

    def _update_statistics(self) -> None:
        tensor_count = sum(map(len, self._states)) + self.averages.count
        if tensor_count == self._tensor_count:
            return  # state tensors are only added, unless a part got another optimizer, which resets _tensor_count
        self._tensor_count = tensor_count
        names = {name for state in self._states for name in state if name != "step"}
        self.state_names = sorted(names | {_AVERAGE} if self.averages.has_started else names)
        self._size_bytes = sum(value.nbytes for state in self._states for value in state.values())
        self._size_bytes += self.averages.size_bytes

    def state(self, part: int) -> Mapping[str, torch.Tensor]:
        """Returns the state of one part; empty before its first update."""
        own, average = self._states[part], self.averages[part]
        return own if average is None else {**own, _AVERAGE: average}

    def part(self, part: int) -> RestoredPart:
        """Returns the state of one part, without a copy, in the form that ``restore`` takes."""
        return RestoredPart(
            self._algorithms[part], self._step_counts[part], dict(self._states[part]), self.averages[part]
        )

    def allocate_like(self, parts: Sequence[RestoredPart]) -> list[RestoredPart]:
        """Allocates memory for the state of all parts, given on any device, in the shapes of this optimizer's parts."""
        missing, made, averages = MissingTensors(), [], dict[int, torch.Tensor]()
        for number, (part, values) in enumerate(zip(parts, self._values, strict=True)):
            state: State = {}
            for name, tensor in part.state.items():
                flat = tensor.numel() == values.numel() and tensor.ndim == 1
                shape = values.shape if flat else tensor.shape
                missing.add(torch.empty(shape, dtype=tensor.dtype, device="meta"), 0.0, state, name)
            if part.average is not None:
                missing.add(torch.empty_like(values, device="meta"), 0.0, averages, number)
            made.append(state)
        missing.allocate(self._allocate)
        return [
            RestoredPart(part.algorithm, part.step_count, state, averages.get(number))
            for number, (part, state) in enumerate(zip(parts, made, strict=True))
        ]

    def restore(self, parts: Sequence[RestoredPart], *, averages_begun: bool) -> None:
        """Replaces the state of all parts. The tensors are used as they are; see ``allocate_like``."""
        self._states = [dict(part.state) for part in parts]
        self._algorithms = [part.algorithm for part in parts]
        self._step_counts = [part.step_count for part in parts]
        averages = {number: part.average for number, part in enumerate(parts) if part.average is not None}
        self.averages.restore(averages, has_started=averages_begun)
        self._allocated, self._prepared_for, self._tensor_count = AllocatedState(), None, -1
        self._members_prepared, self._joint_parts, self._plan = (), None, None
        self.revision, self.counted = self.revision + 1, ()
        self._update_statistics()

    def steps_of(self, part: int) -> int:
        """Returns the number of updates that a part has had."""
        return self._step_counts[part]


def settings_of(optimizer: common_pb2.OptimizerStep) -> list[tuple[str, Settings]]:
    """Returns the algorithm and the settings of each parameter group."""
    names = [algorithm_of(optimizer, group) for group in range(len(optimizer.groups))]
    return [
        (name, _settings(name, group.SerializeToString(deterministic=True)))
        for name, group in zip(names, optimizer.groups, strict=True)
    ]


@lru_cache(64)
def _settings(algorithm: str, group: bytes) -> Settings:
    """Returns the settings of a serialized parameter group. All shards of a run have the same groups in a step."""
    return torch_settings(algorithm, common_pb2.ParameterGroup.FromString(group).hyperparameters)


Gradients = Sequence[torch.Tensor | None]
"""Mean gradients of one shard, by part. Each [numel]"""


@dataclass(frozen=True, slots=True)
class JointPart:
    """A part of a parameter that a joint update changes. It has all state that the update needs."""

    number: int
    """Index of the part in its shard."""
    group: int
    """Index of its parameter group."""
    kind: Hashable
    """``Engine.joint_kind``."""
    engine: Engine
    values: torch.Tensor
    """[numel]"""
    state: State


@dataclass(frozen=True, slots=True)
class _Call:
    group: int
    call: JointCall
    places: Sequence[tuple[int, int]]
    """Shard and part of each gradient."""


class JointUpdate:
    """The prepared updates of several shards. The same object can run the updates of later steps.

    The bits are those of one update per shard, because the algorithms treat every part by itself.

    Args:
        parts: The parts that change, by shard.
        averages: The averages of each shard. None of them is new.
    """

    def __init__(
        self, parts: Sequence[Sequence[JointPart]], averages: Sequence[Averages], settings: Sequence[Settings]
    ) -> None:
        self._averages = averages
        alike: dict[Hashable, list[tuple[int, JointPart]]] = {}
        for shard, own in enumerate(parts):
            for part in own:
                alike.setdefault((part.group, part.kind), []).append((shard, part))
        self._calls = [_joint_call(own, settings) for own in alike.values()]

    def run(
        self, gradients: Sequence[Gradients], settings: Sequence[Settings], clipping: Clipping, decay: float | None
    ) -> None:
        """Updates values, state and averages in place. After an error, they are undefined.

        Args:
            gradients: By shard.
            settings: By parameter group.
            clipping: How gradients are scaled and clamped.
            decay: See ``Averages.start_update``.
        """
        for each in self._calls:
            own = [gradient for shard, part in each.places if (gradient := gradients[shard][part]) is not None]
            each.call(clipping.apply_all(own), settings[each.group])
            fault_points.reach("server.update.joint", stage="changed")
        if decay is not None:
            for averages in self._averages:
                for piece in averages.start_update({}, decay).after():
                    piece.run()


def _joint_call(parts: Sequence[tuple[int, JointPart]], settings: Sequence[Settings]) -> _Call:
    first = parts[0][1]
    values, states = [part.values for _, part in parts], [part.state for _, part in parts]
    call = first.engine.joint_call(values, states, settings[first.group])
    return _Call(first.group, call, [(shard, part.number) for shard, part in parts])


class Averages:
    """Averages, as in ``torch.optim.swa_utils.AveragedModel``: the first average is a copy of the values.

    A parameter that is not optimised has no average. Its average equals its value.

    Args:
        values: The parts of parameters, which change in place.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = values
        self._averages: list[torch.Tensor | None] = [None] * len(values)
        self._has_started = False

    def __getitem__(self, part: int) -> torch.Tensor | None:
        return self._averages[part]

    @property
    def has_started(self) -> bool:
        """True once a step has updated the averages."""
        return self._has_started

    @property
    def count(self) -> int:
        return sum(average is not None for average in self._averages)

    @property
    def size_bytes(self) -> int:
        return sum(average.nbytes for average in self._averages if average is not None)

    def missing(self, optimised: Sequence[bool], *, averaged: bool) -> list[int]:
        """Returns the parts for which the next update must allocate an average.

        Args:
            optimised: Whether each part is optimised.
            averaged: Whether the update changes the averages.
        """
        if not (self._has_started or averaged):
            return []
        return [part for part, average in enumerate(self._averages) if optimised[part] and average is None]

    def start_update(self, fresh: Mapping[int, torch.Tensor], decay: float | None) -> AveragedUpdate:
        """Returns the changes that one update of the values makes to the averages.

        Args:
            fresh: Memory for the averages that ``missing`` returned, by part.
            decay: Weight of the previous average. None: averages do not change.
        """
        existing = {part: average for part, average in enumerate(self._averages) if average is not None}
        ordered = dict(sorted(fresh.items()))  # the pieces have the same order in every process
        return AveragedUpdate(self._values, existing, ordered, decay, has_started=self._has_started)

    def settle(self, update: AveragedUpdate) -> None:
        """Records the averages that an update has started."""
        for part, average in update.fresh.items():
            self._averages[part] = average
        self._has_started |= update.decay is not None

    def restore(self, averages: Mapping[int, torch.Tensor], *, has_started: bool) -> None:
        """Sets the averages, by part."""
        self._averages = [averages.get(part) for part in range(len(self._values))]
        self._has_started = has_started


class AveragedUpdate:
    """The pieces of one update of the averages; see ``update_pieces.py``.

    Args:
        values: The parts of parameters.
        existing: Averages that the update changes, by part.
        fresh: Memory for new averages, by part.
        decay: See ``Averages.start_update``.
        has_started: True if a former update has started the averages.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        existing: Mapping[int, torch.Tensor],
        fresh: Mapping[int, torch.Tensor],
        decay: float | None,
        *,
        has_started: bool,
    ) -> None:
        self.fresh, self.decay = fresh, decay
        self._values, self._existing, self._has_started = values, existing, has_started

    def before(self) -> Iterator[Piece]:
        """Starts the averages of parts that are optimised for the first time, from their values before the update."""
        if self._has_started:
            yield from self._start()

    def after(self) -> Iterator[Piece]:
        """Adds the updated values: ``average += (1 - decay) * (value - average)``."""
        if self.decay is None:
            return
        for part, average in {**self._existing, **(self.fresh if self._has_started else {})}.items():
            flat, values = average.view(-1), self._values[part].view(-1)
            for here in slices(flat):
                run = partial(flat[here].lerp_, values[here], 1 - self.decay)
                yield Piece(run, Changed([flat[here]]), atomic=True)
        if not self._has_started:
            yield from self._start()

    def _start(self) -> Iterator[Piece]:
        # The values do not change before all of these pieces are done, so the copies can be repeated.
        for part, average in self.fresh.items():
            yield Piece(partial(average.copy_, self._values[part]))
