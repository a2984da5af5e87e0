"""How much of a model is in this process: the report of ``session.memory()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from torch import nn

from shardwell.module.mixed_precision import local_part
from shardwell.module.residency import UnitState
from shardwell.module.unit import Unit, owner_of
from shardwell.module.units import Units
from shardwell.tables import format_size, report_table, report_text


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Memory of one unit at the time of the report."""

    name: str
    state: UnitState
    size_bytes: int
    """Size of its flat vector, wherever the vector is stored."""
    num_parameters: int
    """Number of elements, without padding."""
    held_bytes: int
    """Memory of this process that its weights take now; 0 if they are read in a server's memory."""
    gradient_bytes: int
    """Local gradients that are not pushed."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory that a trainer uses for its sharded modules; ``print`` shows a table.

    Does not include the interpreter, activations, and gradients that are being sent.
    """

    current_bytes: int
    """Weights in this process's own memory now."""
    peak_bytes: int
    """Maximum of ``current_bytes`` since the session began."""
    fetching_bytes: int
    """Part of ``current_bytes``: weights that are being fetched or have not been used yet."""
    kept_bytes: int
    """Part of ``current_bytes``: weights kept for their next use in the step (``keep_bytes`` of ``join``)."""
    idle_bytes: int
    """Empty buffers for the next units; not part of ``current_bytes``."""
    delta_cache_bytes: int
    """16-bit weights kept as bases of deltas (``delta_cache_bytes`` of ``join``); not part of ``current_bytes``."""
    gather_count: int
    """Gathers so far, including waits for units that are read in place."""
    reduce_scatter_count: int
    """Pushes so far: one per part of a contribution."""
    units: tuple[UnitMemory, ...]
    """All units, in the order in which they were made."""

    @property
    def model_bytes(self) -> int:
        """Size of all weights: the memory of a replica."""
        return sum(unit.size_bytes for unit in self.units)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all units; tied parameters count once."""
        return sum(unit.num_parameters for unit in self.units)

    @property
    def gradient_bytes(self) -> int:
        """Local gradients that are not pushed."""
        return sum(unit.gradient_bytes for unit in self.units)

    @property
    def saved_bytes(self) -> int:
        """Weights of a replica that this process does not hold now."""
        return self.model_bytes - self.current_bytes

    @property
    def saved_at_peak_bytes(self) -> int:
        """Weights of a replica that this process did not hold at its peak."""
        return self.model_bytes - self.peak_bytes

    @property
    def local_ratio(self) -> float:
        """Fraction of the units' parameters that are in this process's own memory now."""
        here = sum(unit.num_parameters for unit in self.units if unit.held_bytes)
        return here / self.num_parameters if self.num_parameters else 0.0

    def __rich__(self) -> RenderableType:
        numbers = ("SIZE", "PARAMETERS", "IN MEMORY", "GRADIENTS")
        rows = []
        for unit in self.units:
            size, held, gradients = map(format_size, (unit.size_bytes, unit.held_bytes, unit.gradient_bytes))
            rows.append((unit.name, unit.state.name, size, f"{unit.num_parameters:,}", held, gradients))
        units = report_table(("UNIT", "STATE", *numbers), rows, numbers=numbers)
        return Group(report_table(("", ""), self._rows()), "", units)

    def __str__(self) -> str:
        return report_text(self)

    def _rows(self) -> Iterable[tuple[str, str]]:
        return (
            (
                "model",
                f"{format_size(self.model_bytes)} in {self.num_parameters:,} parameters, {len(self.units)} units",
            ),
            ("in memory now", f"{format_size(self.current_bytes)}, {self.local_ratio:.1%} of the parameters"),
            ("  being fetched", format_size(self.fetching_bytes)),
            ("  kept for the next use", format_size(self.kept_bytes)),
            ("peak", format_size(self.peak_bytes)),
            (
                "saved by sharding",
                f"{format_size(self.saved_bytes)} now, {format_size(self.saved_at_peak_bytes)} at the peak",
            ),
            ("idle buffers", format_size(self.idle_bytes)),
            *([("bases of deltas", format_size(self.delta_cache_bytes))] if self.delta_cache_bytes else []),
            ("local gradients", format_size(self.gradient_bytes)),
            ("gathers", f"{self.gather_count:,}"),
            ("reduce-scatters", f"{self.reduce_scatter_count:,}"),
        )


def measure(units: Units, stats: Mapping[str, float]) -> MemoryReport:
    """Measures the memory that the units of a session use now.

    Args:
        units: Units of the session.
        stats: ``gather_count``, ``push_count`` and ``delta_cache_bytes`` of its store.
    """
    return MemoryReport(
        current_bytes=units.live_bytes,
        peak_bytes=units.peak_bytes,
        fetching_bytes=units.memory.fetching_bytes,
        kept_bytes=units.memory.kept_bytes,
        idle_bytes=units.memory.pool.idle_bytes,
        delta_cache_bytes=int(stats["delta_cache_bytes"]),
        gather_count=int(stats["gather_count"]),
        reduce_scatter_count=int(stats["push_count"]),
        units=tuple(_measure_unit(unit) for unit in units),
    )


def num_parameters(model: nn.Module) -> int:
    """Returns the number of elements of a model's parameters, sharded or not. Tied parameters count once.

    Args:
        model: Any module. For a ``DTensor``, the part of this process counts.
    """
    return sum(local_part(parameter).numel() for parameter in model.parameters())


def local_ratio(model: nn.Module) -> float:
    """Returns the fraction of a model's parameters whose values are in this process's own memory now.

    Parameters that are not sharded count; parameters that are read in a server's memory do not.

    Args:
        model: Any module, sharded or not.

    Returns:
        A number from 0 to 1; 0 for a model without parameters.
    """
    total = num_parameters(model)
    here = sum(local_part(parameter).numel() for parameter in model.parameters() if _is_local(parameter))
    return here / total if total else 0.0


def _is_local(parameter: nn.Parameter) -> bool:
    owner = owner_of(parameter)
    return owner is None or _held_bytes(owner.unit) > 0


def _held_bytes(unit: Unit) -> int:
    return 0 if unit.state is UnitState.FREED else unit.own_bytes


def _measure_unit(unit: Unit) -> UnitMemory:
    with torch._C.DisableTorchFunctionSubclass():
        gradient_bytes = sum(parameter.grad.nbytes for parameter in unit.parameters if parameter.grad is not None)
    return UnitMemory(
        name=unit.name,
        state=unit.state,
        size_bytes=unit.layout.size_bytes,
        num_parameters=sum(parameter.numel for parameter in unit.layout.parameters),
        held_bytes=_held_bytes(unit),
        gradient_bytes=gradient_bytes,
    )
