"""A ``ParameterStore`` within the test's process that computes as the servers do, and counts calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from shardwell.module.parameter_store import InitialValues
from shardwell_server.shard.arithmetic import random_values
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import BLOCK_BYTES, UnitLayout, cut

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

Part = Sequence[tuple[int, torch.Tensor]]


def fused_adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Returns AdamW with the kernel of the servers, also for the plain model of a comparison."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


@dataclass
class StoredUnit:
    """One unit: the values of its shards, and the contributions to its next version."""

    layout: UnitLayout
    shards: list[tuple[int, int, torch.Tensor]]
    """``(start, stop, bytes)`` of each shard."""
    parts: list[Part] = field(default_factory=list)
    """Parts of the current work item."""
    contributions: list[list[Part]] = field(default_factory=list)
    """Contributions of finished work items, in rank order."""
    segments: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Views of the shards that the optimizer updates, by parameter index and first element."""


class InMemoryStore:
    """Cuts and reduces shards as the servers do. The work items of a step run one after another.

    Args:
        num_shards: Number of shards per unit.
        make_optimizer: Updates segments of parameters.
        before_gather: Called in the background with the unit's index before bytes are copied.
        num_threads: Number of concurrent gathers.
    """

    def __init__(
        self,
        num_shards: int = 3,
        make_optimizer: MakeOptimizer = fused_adamw,
        *,
        before_gather: Callable[[int], None] = lambda unit_index: None,
        num_threads: int = 2,
    ) -> None:
        self.abandoned = False
        """True if the current work item does not count."""
        self.units: list[StoredUnit] = []
        self.gathers: Counter[str] = Counter()
        self.pushes: Counter[str] = Counter()
        self.pushed_bytes = 0
        self.events: list[str] = []
        """``gather NAME``, ``push NAME`` and ``discard`` in the order of the calls."""
        self.before_gather = before_gather
        self.accepts_pushes = True
        self._num_shards = num_shards
        self._make_optimizer = make_optimizer
        self._optimizer: torch.optim.Optimizer | None = None
        self._pool = ThreadPoolExecutor(num_threads)
        self._lock = threading.Lock()

    # ParameterStore.

    @property
    def gradients(self) -> InMemoryStore:
        return self

    def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
        values = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        unit = StoredUnit(
            layout,
            [
                (start, stop, values[start:stop].clone())
                for start, stop in cut(layout.size_bytes, [1.0] * self._num_shards, BLOCK_BYTES)
            ],
        )
        for start, stop, shard in unit.shards:
            for segment in layout.segments(start, stop):
                dtype = getattr(torch, layout.parameters[segment.parameter_index].dtype)
                view = shard[segment.start_bytes - start : segment.stop_bytes - start].view(dtype)
                unit.segments[segment.parameter_index, segment.start_element] = view
                if (draw := initial_values.draws.get(segment.parameter_index)) is not None:
                    random_values.fill(
                        view, segment.start_element, draw, layout.parameters[segment.parameter_index].box
                    )
                else:
                    data = bytearray().join(initial_values.read(segment))
                    view.view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        self.units.append(unit)
        return len(self.units) - 1

    def gather(
        self,
        unit_index: int,
        target: memoryview,
        *,
        exact: bool = False,
        layout: UnitLayout | None = None,
        vector: object = None,
    ) -> Future[int]:
        unit = self.units[unit_index]
        layout = layout or unit.layout
        assert len(target) == layout.size_bytes
        with self._lock:
            self.gathers[unit.layout.unit] += 1
            self.events.append(f"gather {unit.layout.unit}")
        return self._pool.submit(self._copy, unit_index, target, layout)

    def gathering_together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _copy(self, unit_index: int, target: memoryview, layout: UnitLayout) -> int:
        self.before_gather(unit_index)
        unit = self.units[unit_index]
        if layout == unit.layout:
            for start, stop, shard in unit.shards:
                target[start:stop] = shard.numpy().tobytes()
            return 0
        # The caller asks for another layout, such as one with other dtypes.
        whole = torch.frombuffer(target, dtype=torch.uint8)
        for (index, first), values in unit.segments.items():
            spec = layout.parameters[index]
            start = layout.starts[index] + first * spec.item_size
            part = whole[start : start + values.numel() * spec.item_size]
            part.view(getattr(torch, spec.dtype)).copy_(values)
        return 0

    def in_place(self, unit_index: int) -> None:
        return None

    def share_on_host(self, unit_index: int) -> bool:
        return False

    def streams_gradients(self, unit_index: int) -> bool:
        return True

    def present_version(self, unit_index: int) -> int | None:
        raise AssertionError("nothing is read in place")

    def wrote_in_place(self) -> bool:
        return False

    def fetches_in_place(self) -> bool:
        return False

    def await_version(self, unit_index: int) -> Callable[[], int]:
        raise AssertionError("nothing is read in place")

    def compare(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.events.append(f"compare {self.units[unit_index].layout.unit}")

    def push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        if not self.accepts_pushes:
            raise UsageError("no work item is in progress")
        unit = self.units[unit_index]
        assert gradients and [index for index, _ in gradients] == sorted({index for index, _ in gradients})
        for index, gradient in gradients:
            spec = unit.layout.parameters[index]
            assert tuple(gradient.shape) == spec.shape and str(gradient.dtype) == f"torch.{spec.dtype}"
            assert gradient.is_contiguous() and not gradient.requires_grad
            self.pushed_bytes += spec.size_bytes
        # Not copied: the tensors are read at the step only, so a later change by the caller would be detected.
        unit.parts.append(gradients)
        self.pushes[unit.layout.unit] += 1
        self.events.append(f"push {unit.layout.unit}")

    def may_keep(self, unit_index: int) -> bool:
        return False

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        raise AssertionError("nothing is kept from step to step")

    def abandons_work(self) -> bool:
        return self.abandoned

    def discard(self) -> None:
        for unit in self.units:
            unit.parts.clear()
        self.events.append("discard")

    # The run.

    def finish_item(self) -> None:
        """Ends a work item: later pushes belong to the next rank."""
        for unit in self.units:
            unit.contributions.append(unit.parts)
            unit.parts = []

    def step(self, *, dp: int = 1) -> None:
        """Commits the step: sums parts and then ranks in order, divides by ``dp``, and updates the shards."""
        if any(unit.parts for unit in self.units) or not self.units[0].contributions:
            self.finish_item()
        assert len(self.units[0].contributions) == dp
        if self._optimizer is None:
            self._optimizer = self._make_optimizer([view for unit in self.units for view in unit.segments.values()])
        for unit in self.units:
            for index, gradient in self._reduce(unit, dp).items():
                for (parameter_index, start), view in unit.segments.items():
                    if parameter_index == index:
                        view.grad = gradient.reshape(-1)[start : start + view.numel()].clone()
            unit.contributions.clear()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @staticmethod
    def _reduce(unit: StoredUnit, dp: int) -> dict[int, torch.Tensor]:
        total: dict[int, torch.Tensor] = {}
        for contribution in unit.contributions:
            own: dict[int, torch.Tensor] = {}
            for part in contribution:
                for index, gradient in part:
                    own[index] = own[index] + gradient if index in own else gradient
            for index, gradient in own.items():
                total[index] = total[index] + gradient if index in total else gradient
        return {index: gradient / dp if dp > 1 else gradient for index, gradient in total.items()}

    def values(self) -> dict[str, torch.Tensor]:
        """Returns the current value of every parameter by name and alias."""
        found = {}
        for unit in self.units:
            flat = torch.cat([shard for _, _, shard in unit.shards]) if unit.layout.size_bytes else None
            for spec, start in zip(unit.layout.parameters, unit.layout.starts, strict=True):
                dtype = getattr(torch, spec.dtype)
                raw = flat[start : start + spec.size_bytes] if flat is not None else torch.empty(0, dtype=torch.uint8)
                for name in (spec.name, *spec.aliases):
                    found[name] = raw.clone().view(dtype).view(spec.shape)
        return found

    def close(self) -> None:
        self._pool.shutdown()
