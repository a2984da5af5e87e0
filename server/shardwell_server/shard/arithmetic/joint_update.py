"""The update of several small shards by a few tensor operations."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from shardwell_server.shard.arithmetic.algorithms.engines import Engine, JointCall, Settings, State
from shardwell_server.shard.arithmetic.averages import Averages
from shardwell_server.shard.arithmetic.update_pieces import Clipping
from shardwell_wire import fault_points

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
        settings: Settings of each parameter group.
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
