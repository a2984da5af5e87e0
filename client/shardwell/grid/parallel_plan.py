"""The parallel plan of a run: what ``shardwell.parallel`` knows of a session's models, reported to the coordinator."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shardwell.membership.membership import Membership
from shardwell.module.units import Units
from shardwell_wire.errors import StaleEpochError
from shardwell_wire.model.names import MAX_PLAN_BYTES, MAX_PLAN_ROWS
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

descriptions: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The ``ModelDescription`` of each divided model, by the module that is the model, or a stage of it in this process.
Descriptions are equal for all trainers of a run."""


class PlanReport:
    """Reports a trainer's parallel plan to the coordinator, which compares it with the run's.

    Args:
        units: The sharded units, which say which models belong to the session.
    """

    def __init__(self, membership: Membership, units: Units) -> None:
        self._membership, self._units = membership, units
        self._sent: coordinator_pb2.ParallelPlan | None = None
        self._is_warned = False

    def send(self, step: int) -> bool:
        """Reports the plan, unless it was reported before, or the world needs none and there is none.

        Args:
            step: Number of committed steps.

        Returns:
            False if the membership has lapsed.

        Raises:
            RunMismatchError: Another trainer of the run has another plan. The message names what differs.
        """
        plan, world = self._plan(), self._membership.world
        if world.tp > 1 and not plan.models and not self._is_warned and not self._units.place.tp_rank:
            self._is_warned = True
            if not any("@tp" in unit.name for unit in self._units):
                logger.warning(
                    "%s, but no layer of the model is divided: the %d tensor-parallel ranks compute the same. Divide "
                    "it with shardwell.parallel.parallelize, or train with tp=1",
                    world,
                    world.tp,
                )
        if plan == self._sent or not (plan.models or world.replica_size > 1):
            return True
        request = coordinator_pb2.DeclareParallelPlanRequest(
            context=self._membership.context(step), trainer=self._membership.trainer, plan=plan
        )
        try:
            self._membership.call("DeclareParallelPlan", request)
        except StaleEpochError:
            if self._membership.lapsed:
                return False
            raise
        self._sent = plan
        return True

    def _plan(self) -> coordinator_pb2.ParallelPlan:
        plans = [
            description.to_proto()
            for module, description in descriptions.items()
            if any(self._units.locate(parameter) is not None for parameter in module.parameters())
        ]
        models = {model.SerializeToString(deterministic=True): model for model in plans}
        plan = coordinator_pb2.ParallelPlan(models=[models[key] for key in sorted(models)])
        _shorten(plan)
        return plan


def _shorten(plan: coordinator_pb2.ParallelPlan) -> None:
    """Leaves out rows of layers, the last ones first, until the plan is small enough for the coordinator."""
    stages = [(model, stage) for model in plan.models for stage in model.stages]
    rows = len(stages) + sum(1 + len(layer.collectives) for _, stage in stages for layer in stage.layers)
    size_bytes = plan.ByteSize()
    for model, stage in reversed(stages):
        while stage.layers and (rows > MAX_PLAN_ROWS or size_bytes > MAX_PLAN_BYTES):
            last = stage.layers.pop()
            rows -= 1 + len(last.collectives)
            size_bytes -= last.ByteSize()
            model.omitted_row_count += 1
