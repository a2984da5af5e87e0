"""The training job of a simulation: a tiny model whose gradients depend on its values, so that every bit counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from shardwell_wire.model.layout import DTYPE_NUMBERS, UnitLayout
from shardwell_wire.model.topology import SYNCHRONOUS, Consistency
from shardwell_wire.v1 import common_pb2

_SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}
_ADAMW = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "amsgrad": 0.0, "maximize": 0.0}
_UNITS = {"a": {"w": (1536,), "v": (8, 64)}, "b": {"w": (7,)}}
"""Shapes of the parameters of each unit. Unit ``a`` has two blocks, so two servers can share it."""


@dataclass(frozen=True)
class Job:
    """A run: what is trained, and by how many ranks."""

    dp: int
    steps: int
    """Number of steps; in an asynchronous run, of items of each rank."""
    algorithm: str = "sgd"
    backups: int = 0
    consistency: Consistency = SYNCHRONOUS

    @property
    def options(self) -> dict[str, Any]:
        """More fields of ``RunConfig``."""
        return {**({"backups": self.backups} if self.backups else {}), **self.consistency.to_fields()}

    @property
    def commits(self) -> int:
        """Number of commits, which is the last version."""
        return self.steps * self.dp if self.consistency.asynchronous else self.steps

    @property
    def plain(self) -> Job:
        """The job that gives the same bits and has no copies."""
        return replace(self, backups=0)

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        return _layouts()

    def optimizer(self) -> common_pb2.OptimizerStep:
        """Returns the optimizer that every trainer proposes."""
        return common_pb2.OptimizerStep(
            algorithm=self.algorithm,
            groups=[common_pb2.ParameterGroup(hyperparameters=_SGD if self.algorithm == "sgd" else _ADAMW)],
            units=[
                common_pb2.UnitGroups(unit_index=index, group_indices=[0] * len(layout.parameters))
                for index, layout in enumerate(self.layouts)
            ],
        )

    def initial(self, unit: int) -> list[torch.Tensor]:
        """Returns the initial values of a unit's parameters. Each [numel]."""
        return [_noise(-1, unit, number, size) for number, size in enumerate(_sizes(unit))]

    def gradient(self, unit: int, values: list[torch.Tensor], step: int, dp_rank: int) -> list[torch.Tensor]:
        """Returns the gradient of a work item for a unit. Each [numel]."""
        return [
            value * 0.25 + _noise(step * 64 + dp_rank, unit, number, value.numel())
            for number, value in enumerate(values)
        ]


@cache
def _layouts() -> tuple[UnitLayout, ...]:
    return tuple(
        UnitLayout.from_proto(
            common_pb2.UnitSpec(
                name=unit,
                parameters=[
                    common_pb2.ParameterSpec(name=f"{unit}.{name}", shape=shape, dtype=DTYPE_NUMBERS["float32"])
                    for name, shape in parameters.items()
                ],
            )
        )
        for unit, parameters in _UNITS.items()
    )


def _sizes(unit: int) -> list[int]:
    return [int(np.prod(parameter.shape)) for parameter in _layouts()[unit].parameters]


@cache
def _noise(salt: int, unit: int, number: int, size: int) -> torch.Tensor:
    generator = np.random.default_rng([salt + 1, unit, number])
    return torch.from_numpy(generator.standard_normal(size, dtype=np.float32))


@dataclass
class History:
    """What must be the same in every schedule of a job: the bytes of each version."""

    versions: dict[tuple[int, str], bytes] = field(default_factory=dict)
    """Bytes of whole units, by version and unit name."""
    state: dict[str, bytes] = field(default_factory=dict)
    """Final values and optimizer state of each parameter, such as ``a.w|exp_avg``."""
    problems: list[str] = field(default_factory=list)
    """What went wrong."""
    complete: bool = False
    """True if ``versions`` has every version, so that no reader may add one."""
    acknowledged: dict[int, int] = field(default_factory=dict)
    """Highest number of committed steps that anyone was told of, by the number of rollbacks before."""

    def note_read(self, reader: str, version: int, unit: str, content: bytes) -> None:
        """Compares what a reader got with the version's bytes."""
        known = self.versions.get((version, unit))
        if known is None and not self.complete:
            self.versions[version, unit] = content
        elif known != content:
            self.problems.append(f"{reader} read other bytes of unit {unit!r} at version {version} than the run has")

    def note_acknowledged(self, rollbacks: int, committed: int) -> None:
        """Records that someone was told of committed steps."""
        self.acknowledged[rollbacks] = max(committed, self.acknowledged.get(rollbacks, 0))

    def check_joined(self, trainer: str, rollbacks: int, committed: int, before: dict[int, int]) -> None:
        """Checks that no step was lost that was acknowledged before a trainer called Join."""
        if committed < before.get(rollbacks, 0):
            self.problems.append(
                f"Join answered {trainer} that {committed} steps are committed after {rollbacks} rollbacks, but "
                f"{before[rollbacks]} were acknowledged before it was called"
            )
        if rollbacks < max(before, default=0):
            self.problems.append(f"Join answered {trainer} with {rollbacks} rollbacks after {max(before)}")
