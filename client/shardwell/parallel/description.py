"""How a model is divided over tensor and pipeline ranks: the layers of each stage, their styles and collectives."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from shardwell.grid.parallel_plan import descriptions
from shardwell.parallel.outline import Layer, LayerKind
from shardwell_wire.v1 import coordinator_pb2


class CollectivePhase(enum.Enum):
    """When a collective runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENTS = "gradients"
    """Once per step: when the gradients of a unit are pushed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationShape:
    """Size of a micro-batch."""

    batch: int
    """Sequences."""
    length: int
    """Tokens per sequence."""
    item_size: int = 4
    """Bytes per value of an activation."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of one forward, one backward or one push."""

    operation: str
    """``all_reduce``, ``all_gather`` or ``reduce_scatter``."""
    phase: CollectivePhase
    last_dim: int
    """Size of the last dimension of the whole tensor, whose other dimensions are batch and length. In the phase
    ``GRADIENTS``: number of elements."""
    item_size: int | None = None
    """Bytes per value. None: those of an activation."""
    count: int = 1
    """Number of equal collectives."""

    def payload_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of the whole tensor, times ``count``."""
        positions = 1 if self.phase is CollectivePhase.GRADIENTS else shape.batch * shape.length
        return self.count * positions * self.last_dim * (self.item_size or shape.item_size)

    def describe(self, shape: ActivationShape | None = None) -> str:
        """Returns the operation, its phase and its bytes, such as ``forward all_reduce 4096 B``."""
        times = f"{self.count} x " if self.count > 1 else ""
        size = "" if shape is None else f" {self.payload_bytes(shape) // self.count} B"
        return f"{times}{self.phase.value} {self.operation}{size}"


_BLOCK_NUMBER = re.compile(r"\b\d+\b")


@dataclass(frozen=True, slots=True)
class StageDescription:
    """What one stage of a split model holds."""

    index: int
    calls: tuple[str, ...]
    """Names of the layers that the stage calls, in the order of the forward."""
    layers: tuple[Layer, ...]
    """Modules with parameters of their own."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(layer.size_bytes for layer in self.layers)

    def parameters_by_kind(self) -> dict[LayerKind, int]:
        """Returns the number of parameters for each kind of layer in the stage."""
        found = Counter[LayerKind]()
        for layer in self.layers:
            found[layer.kind] += layer.num_parameters
        return found


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """How tensor parallelism splits one module."""

    name: str
    """The module's name in the model."""
    style: str
    """``column``, ``row``, ``vocabulary``, ``sequence`` (the module computes its part of the sequence), or ``input``
    (the module's input is cut along the sequence)."""
    part: str
    """The part of the module's weight in one rank, such as ``rows 1/2``; ``whole`` if the weight is not split."""
    collectives: tuple[Collective, ...] = ()
    """Collectives of one forward and backward that the module causes."""


@dataclass(slots=True, eq=False)
class ModelDescription:
    """The known facts about the division of one model. The plans of ``shardwell.parallel`` add facts."""

    class_name: str
    """Class of the model."""
    stages: Sequence[StageDescription]
    """What each stage holds; one if the model is not divided."""
    micro_batch: ActivationShape | None = None
    """Size of a micro-batch. None: not known, or the model's first input has no sequences."""
    has_examples: bool = False
    """True if the shapes of a micro-batch are known in every stage."""
    styles: Mapping[str, SplitLayer] = field(default_factory=dict)
    """How tensor parallelism splits modules, by their names."""
    sequence_parallel: bool = False
    loss_parallel: bool = False
    schedule: str = ""
    num_micro_batches: int = 0
    pp_ranks: Mapping[int, int] = field(default_factory=dict)
    """Pipeline rank of each stage, by the stage's index."""
    indices: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)
    """Index of each stage, by its module."""

    def to_proto(self) -> coordinator_pb2.ModelPlan:
        """Returns the description, with one row for the same layer of all blocks in a stage."""
        at = self.micro_batch
        return coordinator_pb2.ModelPlan(
            model=self.class_name,
            schedule=self.schedule,
            num_micro_batches=self.num_micro_batches,
            micro_batch_shape=() if at is None else (at.batch, at.length),
            sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel,
            stages=[
                coordinator_pb2.PlannedStage(
                    pp_rank=self.pp_ranks.get(stage.index, 0),
                    first_layer=stage.calls[0] if stage.calls else "",
                    last_layer=stage.calls[-1] if stage.calls else "",
                    element_count=stage.num_parameters,
                    size_bytes=stage.size_bytes,
                    layers=self._rows(stage),
                )
                for stage in self.stages
            ],
        )

    def _rows(self, stage: StageDescription) -> list[coordinator_pb2.PlannedLayers]:
        rows: dict[tuple[object, ...], coordinator_pb2.PlannedLayers] = {}
        for layer in (*stage.layers, *self._layers_without_parameters(stage)):
            name, style = _BLOCK_NUMBER.sub("*", layer.name, count=1), self.styles.get(layer.name)
            key = (name, layer.kind, layer.class_name, style and (style.style, style.part, style.collectives))
            if key not in rows:
                rows[key] = coordinator_pb2.PlannedLayers(
                    name=name,
                    kind=layer.kind.value,
                    class_name=layer.class_name,
                    style=style.style if style else "",
                    part=style.part if style else "",
                )
            row = rows[key]
            row.count += 1
            row.element_count += layer.num_parameters
            row.size_bytes += layer.size_bytes
            self._add_collectives(row, style.collectives if style else ())
        return list(rows.values())

    def _layers_without_parameters(self, stage: StageDescription) -> list[Layer]:
        """Returns the modules of a stage that have a style, but no parameters that the stage's layers do not have."""
        listed = {layer.name for each in self.stages for layer in each.layers}
        return [
            Layer(name, LayerKind.OTHER, "", 0, 0)
            for name in self.styles
            if name not in listed
            and (any(f"{name}.".startswith(f"{call}.") for call in stage.calls) or not stage.calls)
        ]

    def _add_collectives(self, row: coordinator_pb2.PlannedLayers, collectives: Sequence[Collective]) -> None:
        """Adds the collectives of one layer to those of a row."""
        found = {(each.operation, each.phase): each for each in row.collectives}
        for collective in collectives:
            key = (collective.operation, collective.phase.value)
            if key not in found:
                found[key] = row.collectives.add(operation=key[0], phase=key[1])
            found[key].bytes_per_step += self._bytes_per_step(collective)

    def _bytes_per_step(self, collective: Collective) -> int:
        """Returns the bytes of a collective in one step of one dp rank. 0: not known."""
        if collective.phase is CollectivePhase.GRADIENTS:
            return collective.payload_bytes(ActivationShape(batch=1, length=1))
        if self.micro_batch is None:
            return 0
        return self.num_micro_batches * collective.payload_bytes(self.micro_batch)


def describe_model(module: nn.Module, class_name: str, stages: Sequence[StageDescription]) -> ModelDescription:
    """Returns the description of the model that a module is, or is a stage of. Makes one if there is none.

    Args:
        class_name: For a new description: class of the whole model.
        stages: For a new description: what each stage of the whole model holds, as far as known.
    """
    description: ModelDescription = descriptions.setdefault(module, ModelDescription(class_name, stages))
    return description
