"""Whole values of parameters that tensor parallelism splits: the servers have every rank's part."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from shardwell.module.boxes import local_box
from shardwell.module.parameter import Owner, owner_of
from shardwell.session.session import Session, session_of
from shardwell.weights.run_names import name_on
from shardwell.weights.unit_reader import PlacedUnit, UnitReader, placed_units
from shardwell_wire.errors import UsageError

_READ_TIMEOUT_S = 600.0


def is_split(parameter: torch.Tensor) -> bool:
    """Whether this process has a part of a ``DTensor`` only."""
    placements = getattr(parameter, "placements", ())
    return any(not placement.is_replicate() for placement in placements)


class SplitUnits:
    """Reads the parts that other tensor-parallel ranks hold, of one version; a context manager.

    Args:
        parameter: One of those to read, of whose session and version all are.
        ema: The moving average of the values instead.

    Raises:
        UsageError: The parameter is in no run.
    """

    def __init__(self, parameter: torch.Tensor, *, ema: bool) -> None:
        session, owner = session_of(parameter), owner_of(parameter)
        assert owner is not None
        if session is None or session.tp_rank is None:
            raise UsageError(
                f"{owner.name!r} is split by tensor parallelism, and this trainer has no rank in a run that knows the "
                "other parts",
                parameter=owner.name,
            )
        self._session: Session = session
        self._ema = ema
        self._units = {unit.layout.unit: unit for unit in placed_units(session.describe_weights().units)}
        self._reader = UnitReader(session.run, session.step, timeout_s=_READ_TIMEOUT_S)
        self._read: dict[int, torch.Tensor] = {}
        self._read_of: str | None = None

    def __enter__(self) -> SplitUnits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def whole(self, parameter: Any, owner: Owner, own: torch.Tensor) -> torch.Tensor:
        """All of a parameter's values, on the CPU.

        Args:
            parameter: A ``DTensor``, split over the ranks of this trainer's tensor group.
            owner: Its place.
            own: This rank's part.

        Raises:
            UsageError: It is split over other ranks, or another rank has another model.
            VersionGoneError: A step was committed meanwhile.
        """
        self._check(parameter, owner)
        values = torch.empty(parameter.shape, dtype=own.dtype)
        for rank in range(self._session.world.tp):
            box = local_box(parameter, (rank,))
            part = own if rank == self._session.tp_rank else self._part(rank, owner)
            if tuple(part.shape) != box.shape:
                raise UsageError(
                    f"{owner.name!r} has shape {tuple(part.shape)} on tensor rank {rank}; with the placements "
                    f"{parameter.placements} of this trainer it would be {box.shape}: every rank must build the same "
                    "model",
                    parameter=owner.name,
                )
            values[box.slices] = part
        return values

    def _check(self, parameter: Any, owner: Owner) -> None:
        mesh, session = parameter.device_mesh, self._session
        if (mesh.ndim, mesh.size()) != (1, session.world.tp) or mesh.get_local_rank() != session.tp_rank:
            raise UsageError(
                f"{owner.name!r} is split over a mesh of shape {tuple(mesh.shape)}, in which this is number "
                f"{mesh.get_coordinate()}; the run has tp={session.world.tp}, in which this is rank {session.tp_rank}: "
                "split it over session.device_mesh()['tp']",
                parameter=owner.name,
            )
        if any(placement.is_partial() for placement in parameter.placements):
            raise UsageError(
                f"{owner.name!r} is a partial sum on every rank, not a part of a tensor", parameter=owner.name
            )

    def _part(self, rank: int, owner: Owner) -> torch.Tensor:
        """Another rank's part of a parameter; keeps its unit until another one is asked for."""
        if owner.unit.name != self._read_of:
            self._read, self._read_of = {}, owner.unit.name
        unit, name = self._sibling(rank, owner.unit.name), name_on(rank, owner.name)
        if rank not in self._read:
            self._read[rank] = self._reader.read(unit, ema=self._ema)
        index = unit.layout.index_by_name.get(name)
        if index is None:
            raise UsageError(
                f"tensor rank {rank} has no parameter {name!r}: every rank must build the same model", parameter=name
            )
        return unit.view(self._read[rank], index)

    def _sibling(self, rank: int, unit: str) -> PlacedUnit:
        name = name_on(rank, unit)
        if name not in self._units:
            raise UsageError(
                f"tensor rank {rank} has no unit {name!r}: every rank must wrap the model as this one does", unit=name
            )
        return self._units[name]
