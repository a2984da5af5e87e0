"""Committed steps of a run, the updates that follow from the last commit, and the versions of its buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from shardwell_server.coordinator.steps.proposals import (
    committed_optimizer,
    note_step,
    require_same_algorithms,
    starts_anew,
)
from shardwell_server.coordinator.steps.step import Step
from shardwell_server.coordinator.storage.records import KEPT_COMMITS, CommitRecord
from shardwell_server.optimizer_checks import units_that_count
from shardwell_server.serving.metrics import Durations
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

KEPT_LOGGED = 1000
"""Steps whose logged numbers are kept in memory for inspection."""
_STEP_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of the histogram of step times, in seconds."""


@dataclass(slots=True)
class PendingUpdate:
    """The update of the last commit on a server that has not acknowledged it."""

    step: int
    since_s: float
    incarnation: str = ""
    """The server process that the update is sent to."""
    error: str = ""
    """Error of the last attempt."""


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """How long a server took to update its shards after a commit."""

    step: int
    server_id: str
    duration_s: float
    """From the commit record to the acknowledgement."""


class CommittedSteps:
    """The commit records of a run, and the pending updates of its last commit. ``Storage`` makes them durable first."""

    def __init__(self) -> None:
        self.records: deque[CommitRecord] = deque(maxlen=KEPT_COMMITS)
        """The most recent commit records, oldest first."""
        self.logged: deque[CommitRecord] = deque(maxlen=KEPT_LOGGED)
        """The most recent commit records with numbers of training scripts, oldest first."""
        self.state: coordinator_pb2.RunState | None = None
        """Tracked objects and buffer versions. None before the first commit that stores any."""
        self.pending_updates: dict[str, PendingUpdate] = {}
        """Updates that are not acknowledged yet, by server. The next step is prepared only when there are none."""
        self._updated_s = 0.0
        self.writing = False
        """True while a commit record is being written. It is then too late to reset a work item."""
        self.record_s = 0.0
        """How long it took to write the last commit record; 0 after a restart."""
        self.acting: dict[int, dict[str, list[int]]] = {}
        """Ranks for which each trainer acts after a step, by step. Only commits since the start of the coordinator."""
        self.durations = Durations(_STEP_BOUNDS)
        """Times between two commits since the start of the coordinator."""
        self._committed_s: float | None = None
        """Clock time of the last commit. None: none since the start of the coordinator."""
        self._slowest_update: UpdateTime | None = None
        self._previous_update: UpdateTime | None = None

    @property
    def last(self) -> CommitRecord | None:
        return self.records[-1] if self.records else None

    @property
    def count(self) -> int:
        """Number of committed steps, which is also the number of the step in flight."""
        return self.records[-1].step + 1 if self.records else 0

    @property
    def step_s(self) -> float:
        """Median time between the kept commits, in seconds. 0: fewer than two are kept."""
        times = [record.time for record in self.records]
        return median(max(0.0, after - before) for before, after in pairwise(times)) if len(times) > 1 else 0.0

    @property
    def updated_s(self) -> float | None:
        """Clock time since which all servers have the newest version. None: an update is pending."""
        return None if self.pending_updates else self._updated_s

    def find(self, step: int) -> CommitRecord | None:
        """Returns the record of a committed step. None: the record is no longer kept."""
        return next((record for record in self.records if record.step == step), None)

    def find_item(self, dp_rank: int, number: int) -> CommitRecord | None:
        """Returns the record of a work item of an asynchronous run. None: the record is no longer kept.

        Records from a checkpoint with other data ranks name no trainer: they are of no item.
        """
        key = (dp_rank, number)
        return next((each for each in self.records if each.trainer and (each.dp_rank, each.item) == key), None)

    def restore(
        self, records: Sequence[CommitRecord], state: bytes | None, servers: Iterable[tuple[str, str]], now: float
    ) -> None:
        """Restores the commits after a coordinator restart. The last update is sent again to every server.

        Args:
            records: The commit records, oldest first.
            state: The run's state.
            servers: Server processes, as (server id, incarnation), that receive the update.
            now: Clock time.
        """
        self.records.extend(records)
        self.logged.extend(record for record in records if record.means)
        if state is not None:
            self.state = coordinator_pb2.RunState.FromString(state)
        if records:
            self._expect_updates(records[-1], servers, now)

    def load(self, records: Sequence[CommitRecord], state: coordinator_pb2.RunState | None) -> None:
        """Replaces everything, because the run was loaded from a checkpoint. Nothing is to be updated."""
        self.records.clear()
        self.records.extend(records)
        while self.logged and self.logged[-1].step >= self.count:  # it was rolled back to an earlier step
            self.logged.pop()
        self.state = state
        self.pending_updates, self.acting = {}, {}

    def check_algorithms(self, optimizer: common_pb2.OptimizerStep, layouts: Sequence[UnitLayout]) -> None:
        """Raises ConflictError if a parameter has optimizer state of another algorithm."""
        for record in reversed(self.records):
            before = committed_optimizer(record.optimizer)
            require_same_algorithms(before, optimizer, layouts)
            if len(units_that_count(before, len(layouts))) == len(layouts):
                return  # this optimizer updated all units; otherwise earlier steps used other optimizers

    def append(
        self,
        record: CommitRecord,
        state: coordinator_pb2.RunState | None,
        servers: Iterable[tuple[str, str]],
        now: float,
    ) -> None:
        """Adds a durable commit record, whose update is now pending on every server."""
        self.records.append(record)
        if record.means:
            self.logged.append(record)
        self.state = state
        if self._committed_s is not None:
            self.durations.add(now - self._committed_s)
        self._committed_s = now
        self._expect_updates(record, servers, now)

    def _expect_updates(self, record: CommitRecord, servers: Iterable[tuple[str, str]], now: float) -> None:
        self._previous_update = self._slowest_update
        self.pending_updates = {server: PendingUpdate(record.step, now, incarnation) for server, incarnation in servers}

    def expect_update(self, process: tuple[str, str], now: float) -> None:
        """Makes the update of the last commit pending on one more server process, for example a restarted one."""
        if self.last is not None:
            server_id, incarnation = process
            self.pending_updates[server_id] = PendingUpdate(self.last.step, now, incarnation)

    def finish_update(self, server_id: str, update: PendingUpdate, now: float) -> None:
        """Removes a pending update: the server has acknowledged it, or its process is gone."""
        if self.pending_updates.get(server_id) is update:
            del self.pending_updates[server_id]
            self._updated_s = now
            duration_s, slowest = now - update.since_s, self._slowest_update
            if slowest is None or slowest.step != update.step or slowest.duration_s < duration_s:
                self._slowest_update = UpdateTime(update.step, server_id, duration_s)

    def update_before(self, step: int) -> UpdateTime | None:
        """Returns the slowest update of the step before a step, which is the last or the second to last commit."""
        known = (self._previous_update, self._slowest_update)
        return next((update for update in known if update is not None and update.step == step - 1), None)

    @contextmanager
    def writing_record(self) -> Iterator[None]:
        """Sets ``writing`` while a commit record is being written."""
        self.writing = True
        try:
            yield
        finally:
            self.writing = False


def changed_buffers(
    responses: Iterable[shard_pb2.PrepareStepResponse], layouts: Sequence[UnitLayout]
) -> dict[int, Sequence[int]]:
    """Returns the sorted layout indices of buffers for which a server has new values, by unit index."""
    found: dict[int, set[int]] = {}
    for response in responses:
        for unit in response.buffers:
            found.setdefault(unit.unit_index, set()).update(unit.buffer_indices)
    return {index: sorted(buffers) for index, buffers in sorted(found.items()) if index < len(layouts)}


def next_run_state(
    before: coordinator_pb2.RunState | None,
    step: Step,
    proposed: coordinator_pb2.RunState | None,
    changed: Mapping[int, Sequence[int]],
    layouts: Sequence[UnitLayout],
    generation: int = 0,
) -> coordinator_pb2.RunState | None:
    """Returns the run's state after the step in flight is committed.

    Args:
        before: State after the previous step.
        proposed: Tracked objects in the leader's proposal. None: unchanged.
        changed: Result of ``changed_buffers``.
        generation: ``OptimizerStep.generation`` of the step.
    """
    is_new = starts_anew(before, generation)
    positions = {rank: position for rank, item in step.items.items() if (position := item.data_position)}
    if proposed is None and not changed and not is_new and not positions:
        return before
    state = coordinator_pb2.RunState()
    if before is not None:
        state.CopyFrom(before)
    state.step = step.number
    state.ClearField("ended_tracked_json")
    if proposed is not None:
        state.ClearField("tracked_json")
        state.tracked_json.update(proposed.tracked_json)
    state.data_positions.update(positions)
    known = {unit.unit_index: unit for unit in state.buffer_versions}
    for index, buffers in changed.items():
        if (unit := known.get(index)) is None:
            unit = state.buffer_versions.add(unit_index=index)
            unit.versions.extend([0] * len(layouts[index].parameters))
        for buffer in buffers:
            unit.versions[buffer] = step.number + 1
    if changed:
        # The trainer of this attempt has the new values already; all others read them from the servers.
        state.buffer_source.CopyFrom(step.items[0].to_proto())
    if is_new:
        note_step(state, generation)
    return state
