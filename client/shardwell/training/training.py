"""A model in training: what a session makes anew when the replica of its trainer is formed again."""

from __future__ import annotations

import weakref
from typing import Any

from shardwell.grid.parallel_plan import PlanReport
from shardwell.grid.replica import ReplicaGroup
from shardwell.membership.membership import Membership
from shardwell.module import torch_patches
from shardwell.module.naming import GridPlace
from shardwell.module.strategy import BackwardPrefetch
from shardwell.module.units import Units
from shardwell.monitor.step_times import StepMonitor
from shardwell.options import TransferOptions
from shardwell.seeds import derive_seed
from shardwell.step.step_commit import StepCommitter
from shardwell.step.step_state import StepState
from shardwell.store.buffers import RunBuffers
from shardwell.store.run_store import RunStore
from shardwell.training.measurements import SessionCounters
from shardwell.training.rejoining import Iteration, preemption
from shardwell.training.step import TrainingLoop
from shardwell.training.step_in_flight import StepInFlight
from shardwell.training.tracked_objects import StateOwners, TrackedObjects
from shardwell_wire.v1 import common_pb2


class Training:
    """The units of one model, its training loop, and the objects and buffers that belong to the run's state.

    Args:
        membership: The membership of this trainer. Tells the run's state and this trainer's place in the grid.
        transfers: How weights and gradients travel.
        state: State of the step in flight.
        store: Stores the units on the shard servers.
        committer: Calls the coordinator at the end of a step.
        replica: The replica's process group.

    Attributes:
        units: The sharded units of this process.
        plan_report: Reports the parallel plan of the model.
        tracked: The tracked objects.
        buffers: The buffers of the model.
        counters: Counts transfers and memory.
        monitor: Measures the steps.
        in_flight: The step in flight.
        loop: The training loop.
        optimizers: Optimizers of the parameters.
        state_owners: Which of them the state on the servers belongs to.
    """

    def __init__(
        self,
        membership: Membership,
        transfers: TransferOptions,
        state: StepState,
        store: RunStore,
        committer: StepCommitter,
        replica: ReplicaGroup,
    ) -> None:
        joined = membership.joined
        units = self.units = Units(
            store,
            prefetch_bytes=transfers.prefetch_bytes,
            keep_bytes=transfers.keep_bytes,
            max_gathers_in_flight=transfers.max_gathers_in_flight,
            backward_prefetch=BackwardPrefetch(transfers.backward_prefetch),
            place=_place(membership),
            init_seed=derive_seed(membership.seed, "parameters"),
        )
        self.plan_report = PlanReport(membership, units)
        self.tracked = TrackedObjects(joined.state.tracked_json)
        iteration = Iteration(self.tracked)
        self.buffers = RunBuffers(lambda: units.named_modules, store.buffers, joined.state, units.place)
        self.counters = SessionCounters(store, committer, units)
        self.monitor = StepMonitor(self.counters, membership.trainer)
        self.in_flight = StepInFlight(
            state,
            membership,
            committer,
            store,
            units,
            self.buffers,
            self.tracked,
            iteration,
            self.monitor,
            replica,
        )
        self.loop = TrainingLoop(self.in_flight, iteration, self.tracked, membership)
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.state_owners = StateOwners(joined.state.optimizer_generations)
        preemption.add(self.in_flight.items)

    def close(self) -> None:
        """Ends what this process does for the model outside of the training thread."""
        preemption.remove(self.in_flight.items)
        torch_patches.unwatch(self.units)


def _place(membership: Membership) -> GridPlace:
    """Returns the place of a trainer's units in the grid. A spare has the place of rank 0."""
    world = membership.world
    at = next((each.coordinates for each in membership.rank_assignments), common_pb2.Coordinates())
    return GridPlace(tp=world.tp, pp=world.pp, tp_rank=at.tp_rank, pp_rank=at.pp_rank)
