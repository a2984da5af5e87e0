"""Where the optimizer is applied, to the parts of parameters in a shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwell_server.hyperparameters import algorithm_of, allocation_key
from shardwell_server.shard.arithmetic.algorithms.engines import ENGINES, Engine, Part, Settings, State, torch_settings
from shardwell_server.shard.arithmetic.averages import AveragedUpdate, Averages
from shardwell_wire.v1 import common_pb2

_AVERAGE = "ema"
"""Name of the moving average among the state."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A part that the next update changes."""

    number: int
    group: int
    algorithm: str
    engine: Engine
    settings: Settings


@dataclass(frozen=True, slots=True)
class _Fresh:
    """State that is allocated for the next update of one part."""

    algorithm: str
    begins_with: Mapping[str, object]
    """The settings that decide its content."""
    state: State


@dataclass(slots=True)
class _Allocated:
    """What is allocated for the next update."""

    states: dict[int, _Fresh] = field(default_factory=dict)
    """By part."""
    averages: dict[int, torch.Tensor] = field(default_factory=dict)
    """By part."""

    @property
    def size_bytes(self) -> int:
        states = sum(tensor.nbytes for fresh in self.states.values() for tensor in fresh.state.values())
        return states + sum(average.nbytes for average in self.averages.values())


@dataclass(slots=True)
class _Update:
    """One update that has begun; ``finish`` can be repeated until it succeeds.

    See ``Note: an update that fails`` in ``engines``.
    """

    groups: list[tuple[Engine, Settings, list[Part]]]
    averages: AveragedUpdate
    clip_coefficient: float
    clip_value: float | None
    unscaled: list[Part]
    """Parts whose gradient is to be multiplied by the clip coefficient."""
    unclamped: list[Part]
    """Parts whose gradient is to be clamped."""

    def finish(self) -> None:
        """Does what is left to do."""
        self.averages.before()
        while self.unscaled:
            self.unscaled[-1].gradient.mul_(self.clip_coefficient)
            self.unscaled.pop()
        while self.unclamped:
            assert self.clip_value is not None
            gradient = self.unclamped[-1].gradient
            # torch refuses a bound that the dtype does not have, which clips nothing.
            bound = min(self.clip_value, torch.finfo(gradient.dtype).max)
            gradient.clamp_(-bound, bound)
            self.unclamped.pop()
        for engine, settings, parts in self.groups:
            if left := [part for part in parts if not part.done]:
                engine.update(left, settings)
        self.averages.after()


class ShardOptimizer:
    """The optimizer of one shard and its state.

    A parameter without a gradient is skipped, as torch does: its state does not advance.

    Args:
        values: The parts of parameters in the shard: of their own shape where they are whole, else
            [numel].
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = list(values)
        self._states: list[State] = [{} for _ in values]
        self._algorithms: list[str | None] = [None] * len(values)
        self._step_counts = [0] * len(values)
        self._tensor_count = -1
        self._allocated = _Allocated()
        self._prepared_for: tuple[object, ...] | None = None
        self._update: _Update | None = None
        """One that failed midway."""
        self.averages = Averages(self._values)
        self.state_names: list[str] = []
        """Names of the state's tensors, such as ``exp_avg``, after the last step."""
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """What the state takes, with what is allocated for the next update."""
        return self._size_bytes + self._allocated.size_bytes

    # ---- before the commit ----

    def is_prepared(self, present: Sequence[bool], group_of: Sequence[int], key: bytes) -> bool:
        """Whether everything is allocated that such an update needs; arguments as of ``prepare``."""
        return self._update is not None or self._prepared_for == (tuple(present), tuple(group_of), key)

    def needs(
        self, present: Sequence[bool], optimizer: common_pb2.OptimizerStep, group_of: Sequence[int]
    ) -> tuple[int, int]:
        """Bytes of the state after such an update, and of what the update allocates and frees again."""
        size_bytes, workspace_bytes = self._size_bytes, 0
        for member in self._members(present, optimizer, group_of):
            values, own = self._values[member.number], self._own_state(member)
            made = member.engine.missing(values.to("meta"), own, member.settings)
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
        """Allocates the state that an update begins, so that the update itself finds everything there.

        Changes nothing that can be seen; another call replaces what an earlier one allocated.

        Args:
            present: Whether each part has a gradient.
            optimizer: The step's.
            group_of: The group of each part; -1: not optimised.
            key: ``allocation_key`` of the optimizer, if the caller has it.
        """
        key = allocation_key(optimizer) if key is None else key
        if self.is_prepared(present, group_of, key):
            return
        former, allocated = self._allocated, _Allocated()
        for member in self._members(present, optimizer, group_of):
            if (fresh := self._fresh(member, former.states.get(member.number))) is not None:
                allocated.states[member.number] = fresh
        for number in self._missing_averages(optimizer, group_of):
            known = former.averages.get(number)
            allocated.averages[number] = torch.zeros_like(self._values[number]) if known is None else known
        self._allocated = allocated
        self._prepared_for = (tuple(present), tuple(group_of), key)

    def _fresh(self, member: _Member, known: _Fresh | None) -> _Fresh | None:
        begins_with = member.engine.begins_with(member.settings)
        if known is None or (known.algorithm, known.begins_with) != (member.algorithm, begins_with):
            known = _Fresh(member.algorithm, begins_with, {})
        have = {**self._own_state(member), **known.state}
        made = member.engine.missing(self._values[member.number], have, member.settings)
        state = {**known.state, **made}
        return _Fresh(member.algorithm, begins_with, state) if state else None

    def _members(
        self, present: Sequence[bool], optimizer: common_pb2.OptimizerStep, group_of: Sequence[int]
    ) -> Iterator[_Member]:
        names = [algorithm_of(optimizer, group) for group in range(len(optimizer.groups))]
        settings = [torch_settings(group.hyperparameters) for group in optimizer.groups]
        for number, (there, group) in enumerate(zip(present, group_of, strict=True)):
            if there and group >= 0:
                yield _Member(number, group, names[group], ENGINES[names[group]], settings[group])

    def _missing_averages(self, optimizer: common_pb2.OptimizerStep, group_of: Sequence[int]) -> list[int]:
        return self.averages.missing([group >= 0 for group in group_of], averaged=optimizer.HasField("ema_decay"))

    def _own_state(self, member: _Member) -> State:
        """A parameter that was left out for a step may come back under another algorithm: it begins anew then."""
        same = self._algorithms[member.number] in (None, member.algorithm)
        return self._states[member.number] if same else {}

    # ---- after the commit ----

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[torch.Tensor | None],
        optimizer: common_pb2.OptimizerStep,
        group_of: Sequence[int],
        clip_coefficient: float,
        key: bytes | None = None,
    ) -> None:
        """Updates the parameters in place.

        If it raises, the same call finishes the update, each part of it exactly once.

        Args:
            gradients: One per part; None: no rank had one. They are changed when clipped. [numel]
            optimizer: The step's.
            group_of: The group of each part; -1: not optimised.
            clip_coefficient: What gradients are multiplied by first.
            key: As of ``prepare``.
        """
        if self._update is None:
            self.prepare([gradient is not None for gradient in gradients], optimizer, group_of, key)
            self._update = self._begin(gradients, optimizer, group_of, clip_coefficient)
        self._update.finish()
        self._update = None
        self._take_stock()

    def _begin(
        self,
        gradients: Sequence[torch.Tensor | None],
        optimizer: common_pb2.OptimizerStep,
        group_of: Sequence[int],
        clip_coefficient: float,
    ) -> _Update:
        groups: dict[int, tuple[Engine, Settings, list[Part]]] = {}
        algorithms: list[tuple[Part, str]] = []
        for member in self._members([gradient is not None for gradient in gradients], optimizer, group_of):
            gradient, values = gradients[member.number], self._values[member.number]
            assert gradient is not None
            state, fresh = self._own_state(member), self._allocated.states.get(member.number)
            part = Part(member.number, values, gradient.view_as(values), state)
            if fresh is not None:
                part.state, part.fresh = {**state, **fresh.state}, frozenset(fresh.state)
            groups.setdefault(member.group, (member.engine, member.settings, []))[2].append(part)
            algorithms.append((part, member.algorithm))
        update = _Update(
            [groups[group] for group in sorted(groups)],
            self.averages.updating(self._allocated.averages, _decay(optimizer)),
            clip_coefficient,
            optimizer.clip_value if optimizer.HasField("clip_value") else None,
            [part for part, _ in algorithms] if clip_coefficient != 1.0 else [],
            [part for part, _ in algorithms] if optimizer.HasField("clip_value") else [],
        )
        # From here on nothing can fail that would leave half of it.
        for part, algorithm in algorithms:
            if self._algorithms[part.number] not in (None, algorithm):
                self._step_counts[part.number] = 0
                self._tensor_count = -1
            self._algorithms[part.number], self._states[part.number] = algorithm, part.state
            self._step_counts[part.number] += 1
        self._allocated = _Allocated()
        return update

    def _take_stock(self) -> None:
        tensor_count = sum(map(len, self._states)) + self.averages.count
        if tensor_count == self._tensor_count:
            return  # state only ever grows, but for a parameter that begins anew
        self._tensor_count = tensor_count
        names = {name for state in self._states for name in state if name != "step"}
        self.state_names = sorted(names | {_AVERAGE} if self.averages.begun else names)
        self._size_bytes = sum(value.nbytes for state in self._states for value in state.values())
        self._size_bytes += self.averages.size_bytes

    def state(self, part: int) -> Mapping[str, torch.Tensor]:
        """The state of one part's parameter; empty before its first update."""
        own, average = self._states[part], self.averages[part]
        return own if average is None else {**own, _AVERAGE: average}

    def steps_of(self, part: int) -> int:
        """Updates that a part has seen."""
        return self._step_counts[part]


def _decay(optimizer: common_pb2.OptimizerStep) -> float | None:
    return optimizer.ema_decay if optimizer.HasField("ema_decay") else None
