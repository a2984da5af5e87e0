"""A model in training: what a session makes anew when the replica of its trainer is formed again.

Beside the units and buffers these are the objects of the training script whose state the run stores: tracked objects,
which are stored with every commit, and the optimizers' own state. The optimizer state of a parameter is on the shard
servers and belongs to one optimizer of the script. See Note: [New optimizers] in the coordinator's
``steps/proposals.py``.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from shardwell.grid.parallel_plan import PlanReport
from shardwell.grid.replica import ReplicaGroup
from shardwell.membership.membership import Membership
from shardwell.module.new_units import GridPlace
from shardwell.module.strategy import BackwardPrefetch
from shardwell.module.units import Units
from shardwell.monitor.report import make_report
from shardwell.monitor.step_times import REPORTED_STEPS, CounterSample, MonitoredSetup, StepMonitor
from shardwell.options import TransferOptions
from shardwell.seeds import derive_seed
from shardwell.step.step_commit import StepCommitter
from shardwell.step.step_state import StepState
from shardwell.store.module_buffers import RunBuffers
from shardwell.store.run_store import RunStore
from shardwell.transport.server_connection import STREAM_TRANSPORTS, is_this_host
from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import common_pb2, coordinator_pb2


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
        stored, is_complete = tracked_state(joined)
        self.tracked = TrackedObjects(stored, is_complete=is_complete)
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
            **traffic.routes.totals,
        }
        peak_bytes, memory.recent_peak_bytes = memory.recent_peak_bytes, memory.live_bytes
        return CounterSample(stats, self.store.servers.moved_bytes(), peak_bytes)

    def report_to_coordinator(self) -> None:
        """Gives the heartbeats a report of the last steps. In the training thread, which owns the GPU's context."""
        report = make_report(self.monitor.steps(REPORTED_STEPS), self.describe_setup())
        self.membership.reports.report = report.to_proto()

    def describe_setup(self) -> MonitoredSetup:
        """Returns the options and sizes that advice depends on, as they are now."""
        store, units = self.store, self.units
        transfers, policy = store.transfers, units.policy
        streams = [at["server"] for at in store.servers.describe() if at["transport"] in STREAM_TRANSPORTS]
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
            corrupt_transfers=store.servers.corrupt_transfers,
        )


def _place(membership: Membership) -> GridPlace:
    """Returns the place of a trainer's units in the grid. A spare has the place of rank 0."""
    world = membership.world
    at = next((each.coordinates for each in membership.rank_assignments), common_pb2.Coordinates())
    return GridPlace(tp=world.tp, pp=world.pp, tp_rank=at.tp_rank, pp_rank=at.pp_rank, cp=world.cp, cp_rank=at.cp_rank)


def _free_bytes(units: Units) -> int:
    """Returns the free memory of the GPU if weights are gathered there, otherwise of this host.

    The limit of a container is not considered.
    """
    if any(unit.device_type == "cuda" for unit in units):
        free_bytes, _ = torch.cuda.mem_get_info()
        return free_bytes
    return int(psutil.virtual_memory().available)


ParameterKey = tuple[int, int]
"""Index of a unit, and of a parameter in its layout."""


@dataclass(slots=True, eq=False)
class StateOwner:
    """One optimizer of the script."""

    generation: int
    """``OptimizerStep.generation``."""
    members: Sequence[StateOwner] = ()
    """The optimizers that it combines."""
    predecessors: Sequence[StateOwner] = ()
    """Earlier optimizers for some of the same parameters."""
    has_stepped: bool = False
    is_replaced: bool = False
    """True if a later optimizer has taken a step: the state on the servers is that of the later one."""

    def note_step(self) -> None:
        """Records that the optimizer has taken a step in this session."""
        for owner in (self, *self.members):
            owner.has_stepped = True
            for former in owner.predecessors:
                former.is_replaced = True

    def continue_state(self) -> None:
        """Makes the optimizer continue with the state on the servers."""
        self.generation = 0


class StateOwners:
    """The optimizers of one model in the order in which the script makes them.

    Args:
        generations: Numbers that have taken a step, from ``RunState`` at the time of the join.
    """

    def __init__(self, generations: Iterable[int]) -> None:
        self._joined, self._last = max(generations, default=0), 0
        self._owners: dict[ParameterKey, StateOwner] = {}

    def extend(self, owner: StateOwner, parameters: Iterable[ParameterKey]) -> None:
        """Adds parameters to an optimizer. Parameters of another optimizer keep their state."""
        for key in parameters:
            self._owners.setdefault(key, owner)

    def add(self, parameters: Iterable[ParameterKey], members: Sequence[StateOwner] = ()) -> StateOwner:
        """Adds an optimizer. If it replaces an earlier one, it gets a number, and its first step starts anew.

        Args:
            parameters: Its parameters.
            members: The optimizers that it combines.
        """
        keys = set(parameters)
        former = {owner for key in keys if (owner := self._owners.get(key)) is not None and owner not in members}
        generation = 0
        if former or any(member.generation for member in members):
            # An earlier optimizer that has taken steps in this session may have continued the state of any number that
            # the run had then.
            continued = self._joined if any(owner.has_stepped for owner in former) else 0
            generation = self._last = 1 + max(self._last, continued)
        added = StateOwner(generation, tuple(members), tuple(former))
        self._owners.update(dict.fromkeys(keys, added))
        return added


class TrackedObjects:
    """Objects whose ``state_dict`` is stored with every commit and restored when a trainer joins.

    Note: [State between iterations]
        A commit stores the objects as they are at the call of ``optimizer.step()``. When the loop body has ended, the
        trainer that has computed data rank 0 reports them once more. Only if this report is missing, because that
        trainer or the coordinator was lost in between, a trainer that joins repeats what follows ``optimizer.step()``.

    Args:
        stored: JSON text by name, from the last commit.
        is_complete: Whether the loop body of the last commit had ended when this state was stored.
    """

    def __init__(self, stored: Mapping[str, str], *, is_complete: bool = False) -> None:
        self.stored, self._is_complete = dict(stored), is_complete
        self._objects: dict[str, Any] = {}
        self._committed: set[str] = set()
        """Names of objects whose state was part of a commit of this trainer."""
        self.restored = False
        """True if an object has the state of a call of ``optimizer.step()``, whose iteration is then repeated."""

    def track(self, objects: Mapping[str, Any]) -> None:
        """Adds objects by name, and restores those whose state the run has stored.

        An object that replaces a tracked one gets the present state of this one, which the run has reached since the
        trainer has joined.

        Raises:
            UsageError: An object has no ``state_dict`` and ``load_state_dict``, or its state is not
                made of plain numbers, strings, lists and maps with string keys.
        """
        for name, tracked in objects.items():
            if not callable(getattr(tracked, "state_dict", None)) or not callable(
                getattr(tracked, "load_state_dict", None)
            ):
                raise UsageError(f"track({name}=...): {type(tracked).__name__} has no state_dict and load_state_dict")
            former = self._objects.get(name)
            reached = self._capture(name, former) if former is not None else None
            self._objects[name] = tracked
            self._capture(name, tracked)
            if reached is not None and (name in self.stored or name in self._committed):
                self._restore(tracked, json.loads(reached))
            elif name in self.stored:
                self._restore(tracked, json.loads(self.stored[name]))
                self.restored = not self._is_complete

    def note_commit(self) -> None:
        """Called when a commit has stored the objects."""
        self._committed |= self._objects.keys()

    def restore(self, states: Mapping[str, str]) -> None:
        """Restores objects from a former result of ``to_json``."""
        for name, tracked in self._objects.items():
            if name in states:
                self._restore(tracked, json.loads(states[name]))

    def replace(self, stored: Mapping[str, str], *, is_complete: bool) -> None:
        """Restores all objects from another commit than the one with which this object was made."""
        self.stored, self._is_complete = dict(stored), is_complete
        self.restored = not is_complete and any(name in self.stored for name in self._objects)
        self.restore(self.stored)

    def __bool__(self) -> bool:
        return bool(self._objects)

    def has_owner(self, optimizer: Any) -> bool:
        """True if an object belongs to an optimizer, such as its LR scheduler."""
        return any(getattr(tracked, "optimizer", None) is optimizer for tracked in self._objects.values())

    def to_json(self) -> dict[str, str]:
        """Returns the present state of every tracked object as JSON text by name."""
        return {name: self._capture(name, tracked) for name, tracked in self._objects.items()}

    def _capture(self, name: str, tracked: Any) -> str:
        state: dict[str, Any] = {"state_dict": tracked.state_dict()}
        if (groups := _param_groups(tracked)) is not None:
            state["hyperparameters"] = [_plain_group(group) for group in groups]
        require_plain(state["state_dict"], f"{name}.state_dict()")
        return json.dumps(state)

    def _restore(self, tracked: Any, state: dict[str, Any]) -> None:
        tracked.load_state_dict(state["state_dict"])
        # The state of an LR scheduler does not include the learning rate of its optimizer.
        for group, values in zip(_param_groups(tracked) or (), state.get("hyperparameters", ()), strict=False):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def tracked_state(joined: coordinator_pb2.JoinResponse) -> tuple[Mapping[str, str], bool]:
    """Returns the stored tracked objects, and whether this is their state at the end of the last step's loop body.

    Otherwise it is the state at the call of ``optimizer.step()``.
    """
    state = joined.state
    if state.ended_tracked_json and state.step + 1 == joined.committed_step:
        return state.ended_tracked_json, True
    return state.tracked_json, False


def _param_groups(tracked: Any) -> list[dict[str, Any]] | None:
    groups = getattr(getattr(tracked, "optimizer", tracked), "param_groups", None)
    return groups if isinstance(groups, list) else None


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def require_plain(value: Any, path: str) -> None:
    """Raises UsageError if a value is not made of numbers, strings, lists and maps. ``path`` names it."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{path} has the key {key!r}: keys must be strings to be stored with the run")
            require_plain(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_plain(item, f"{path}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise UsageError(
            f"{path} is a {type(value).__name__}: only numbers, strings, lists and maps are stored with the run"
        )
