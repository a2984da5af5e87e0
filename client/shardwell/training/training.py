"""A model in training: what a session makes anew when the replica of its trainer is formed again."""

from __future__ import annotations

import weakref
from typing import Any

import psutil
import torch

from shardwell.grid.parallel_plan import PlanReport
from shardwell.grid.replica import ReplicaGroup
from shardwell.membership.membership import Membership
from shardwell.module.naming import GridPlace
from shardwell.module.strategy import BackwardPrefetch
from shardwell.module.units import Units
from shardwell.monitor.step_times import CounterSample, MonitoredSetup, StepMonitor
from shardwell.options import TransferOptions
from shardwell.seeds import derive_seed
from shardwell.step.step_commit import StepCommitter
from shardwell.step.step_state import StepState
from shardwell.store.module_buffers import RunBuffers
from shardwell.store.run_store import RunStore
from shardwell.training.tracked_objects import StateOwners, TrackedObjects
from shardwell.transport.selector import STREAM_TRANSPORTS, is_this_host
from shardwell_wire.v1 import common_pb2


class Training:
    """The units of one model, and the objects and buffers that belong to the run's state, with what trains them.

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
        monitor: Measures the steps.
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
        self.membership, self.state, self.store = membership, state, store
        self.committer, self.replica = committer, replica
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
        self.buffers = RunBuffers(lambda: units.named_modules, store.buffers, joined.state, units.place)
        self.monitor = StepMonitor(membership.trainer)
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.state_owners = StateOwners(joined.state.optimizer_generations)

    def stats(self) -> dict[str, float]:
        """See ``Session.stats``."""
        memory = self.units.memory
        return {
            **self.store.stats,
            **self.committer.stats,
            "live_unit_bytes": memory.live_bytes,
            "peak_unit_bytes": memory.peak_bytes,
            "freed_unit_bytes": memory.freed_bytes,
        }

    def sample(self) -> CounterSample:
        """Returns the counters that the monitor compares from step to step."""
        traffic, memory = self.store.traffic, self.units.memory
        stats = {
            "gather_wait_s": traffic.gather_wait_s,
            "push_wait_s": traffic.push_wait_s,
            "push_copy_s": traffic.push_copy_s,
            "in_place_bytes": traffic.in_place_bytes,
            "gather_count": traffic.gather_count,
            "push_count": traffic.push_count,
            "freed_unit_bytes": memory.freed_bytes,
            **self.committer.stats,
            **traffic.routes.as_dict(),
        }
        return CounterSample(stats, self.store.moved_bytes(), memory.take_recent_peak())

    def describe_setup(self) -> MonitoredSetup:
        """Returns the options and sizes that advice depends on, as they are now."""
        store, units = self.store, self.units
        transfers, policy = store.transfers, units.policy
        streams = [at["server"] for at in store.transports if at["transport"] in STREAM_TRANSPORTS]
        streamed = {server: is_this_host(server) for server in streams}
        return MonitoredSetup(
            trainer=self.membership.trainer,
            transports=transfers.transports,
            streamed=streamed,
            gather_dtype=transfers.gather_dtype,
            push_dtype=transfers.push_dtype,
            prefetch_bytes=policy.prefetch_bytes,
            keep_bytes=policy.keep_bytes or 0,
            max_gathers_in_flight=transfers.max_gathers_in_flight,
            unit_bytes=tuple(unit.size_bytes for unit in units),
            memory_bytes=_free_bytes(units) + units.live_bytes + units.memory.pool.idle_bytes,
            routes=store.routes,
            corrupt_transfers=store.corrupt_transfers,
        )


def _place(membership: Membership) -> GridPlace:
    """Returns the place of a trainer's units in the grid. A spare has the place of rank 0."""
    world = membership.world
    at = next((each.coordinates for each in membership.rank_assignments), common_pb2.Coordinates())
    return GridPlace(tp=world.tp, pp=world.pp, tp_rank=at.tp_rank, pp_rank=at.pp_rank)


def _free_bytes(units: Units) -> int:
    """Returns the free memory of the GPU if weights are gathered there, otherwise of this host.

    The limit of a container is not considered.
    """
    if any(unit.device_type == "cuda" for unit in units):
        free_bytes, _ = torch.cuda.mem_get_info()
        return free_bytes
    return int(psutil.virtual_memory().available)
