"""The coordinator's metrics: runs, backups, checkpoints, and the shard servers as the coordinator sees them.

Each series is made from the state at the time of a scrape. The series of a deleted run and of a forgotten server
therefore end with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from shardwell_server.coordinator.inspection.describe import describe_server_state
from shardwell_server.coordinator.inspection.events import EventLog
from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.cluster import Cluster, Server
from shardwell_server.coordinator.steps.step import WorkState
from shardwell_server.coordinator.storage.records import CheckpointRecord
from shardwell_server.serving.metrics import Samples, counter, gauge, histogram
from shardwell_wire.v1 import coordinator_pb2

_SERVER_STATES = {
    state: name.removeprefix("SERVER_STATE_").lower() for name, state in coordinator_pb2.ServerState.items() if state
}
_ITEM_STATES = ("vacant", "leased", "finished")


def _shards(run: Run) -> int:
    return sum(len(unit.shards) for unit in run.units)


_OF_RUN: tuple[tuple[str, str, Callable[[Run], float]], ...] = (
    (
        "shardwell_run_committed_step",
        "Committed steps, which is also the newest version. A rollback lowers it.",
        lambda run: run.committed_step,
    ),
    (
        "shardwell_run_last_commit_timestamp_seconds",
        "Time of the last commit record; of the creation of the run before the first.",
        lambda run: run.created if run.commits.last is None else run.commits.last.time,
    ),
    (
        "shardwell_run_last_step_duration_seconds",
        "Time between the last two commits; 0 before.",
        lambda run: run.commits.durations.last_s,
    ),
    (
        "shardwell_run_last_record_duration_seconds",
        "Time in which the last commit record became durable; 0 after a restart.",
        lambda run: run.commits.record_s,
    ),
    (
        "shardwell_run_pending_updates",
        "Servers that have not acknowledged the update of the last commit.",
        lambda run: len(run.commits.pending_updates),
    ),
    ("shardwell_run_started", "1 if enough trainers have joined once.", lambda run: run.started),
    (
        "shardwell_run_ended",
        "1 if a trainer's loop has ended and nothing was committed since.",
        lambda run: run.started and run.ended,
    ),
    (
        "shardwell_run_wanted_trainers",
        "Logical ranks of the world. With fewer trainers, some compute several work items per step.",
        lambda run: run.settings.world.size,
    ),
    ("shardwell_run_units", "Units of the run.", lambda run: len(run.units)),
    (
        "shardwell_run_parameter_bytes",
        "Size of the units' flat vectors.",
        lambda run: sum(unit.layout.size_bytes for unit in run.units),
    ),
    ("shardwell_run_shards", "Shards of the run.", _shards),
    (
        "shardwell_run_wanted_backups",
        "Backups of shards that the run should have: its number of backups for each shard.",
        lambda run: run.settings.backups * _shards(run),
    ),
    (
        "shardwell_run_backups_in_sync",
        "Backups of shards that get every step.",
        lambda run: sum(backup.in_sync for unit in run.units for backup in unit.backups),
    ),
    (
        "shardwell_run_relocations_total",
        "Changes of the servers of shards since the run was created.",
        lambda run: run.relocations.count,
    ),
    (
        "shardwell_run_rollbacks_total",
        "Times that the run went back to a checkpoint since it was created.",
        lambda run: run.checkpoints.rollback_count,
    ),
    (
        "shardwell_run_checkpoint_every_steps",
        "Steps between two checkpoints as the run wants it; 0: only on request.",
        lambda run: run.checkpoints.options.every_commits if run.checkpoints.options.directory else 0,
    ),
    (
        "shardwell_run_checkpoint_failing",
        "1 if the last attempt to save a checkpoint failed.",
        lambda run: bool(run.checkpoints.problem),
    ),
    (
        "shardwell_run_checkpoint_in_progress",
        "1 while a checkpoint is being written.",
        lambda run: run.checkpoints.in_flight is not None,
    ),
    (
        "shardwell_run_loading",
        "1 while the run is loaded from a checkpoint.",
        lambda run: run.checkpoints.restore is not None,
    ),
    (
        "shardwell_run_readers",
        "Readers that have asked for weights in the last ten minutes.",
        lambda run: len(run.readers.describe(run.committed_step, run.clock())),
    ),
    (
        "shardwell_run_max_reader_lag_versions",
        "Versions by which the slowest of these readers is behind the newest; 0 without readers.",
        lambda run: max((each.lag for each in run.readers.describe(run.committed_step, run.clock())), default=0),
    ),
)
"""Metrics of each run: name, meaning and value. Those whose name ends in ``_total`` are counters."""
_OF_CHECKPOINT: tuple[tuple[str, str, Callable[[CheckpointRecord], float]], ...] = (
    ("step", "Step", lambda record: record.step),
    ("timestamp_seconds", "Time", lambda record: record.time),
    ("size_bytes", "Size", lambda record: record.size_bytes),
)
"""Metrics of the newest complete checkpoint of each run."""


def coordinator_metrics(
    runs: Mapping[str, Run], cluster: Cluster, events: EventLog, term: int, now: float
) -> Iterator[Metric]:
    """Yields the metrics of a coordinator."""
    yield gauge("shardwell_coordinator_term", "Number of starts of the coordinator with this state.", [(term,)])
    events_total = "Events since the start of the coordinator, as `shardwell events` shows them; run is empty for the "
    yield counter("shardwell_events_total", f"{events_total}cluster.", events.counts(runs), "run", "kind")
    for name, text, value in _OF_RUN:
        kind = counter if name.endswith("_total") else gauge
        yield kind(name, text, [(run, value(state)) for run, state in runs.items()], "run")
    for name, what, of_record in _OF_CHECKPOINT:
        saved = ((run, state.checkpoints.saved) for run, state in runs.items())
        samples = [(run, of_record(records[-1])) for run, records in saved if records]
        text = f"{what} of the newest complete checkpoint; missing if there is none."
        yield gauge(f"shardwell_run_checkpoint_{name}", text, samples, "run")
    yield from _steps(runs)
    yield from _servers(runs, cluster, now)


def _steps(runs: Mapping[str, Run]) -> Iterator[Metric]:
    yield histogram(
        "shardwell_run_step_duration_seconds",
        "Time from one commit to the next, with the time in which nobody trained.",
        ((name, run.commits.durations) for name, run in runs.items()),
        "run",
    )
    yield gauge(
        "shardwell_run_trainers",
        "Trainers with a valid lease (live), and with an expired one whose work nobody else has (expired).",
        (
            (name, state, count)
            for name, run in runs.items()
            for state, count in (("live", len(run.members.live)), ("expired", len(run.members.expired)))
        ),
        "run",
        "state",
    )
    items: Counter[tuple[str, str]] = Counter()
    for name, run in runs.items():
        for item in run.work.items:
            working = "finished" if item.state.is_finished else "leased"
            items[name, "vacant" if item.state is WorkState.VACANT else working] += 1
    yield gauge(
        "shardwell_run_work_items",
        "Work items of the step in flight: nobody computes it (vacant), a trainer does (leased), or it is finished.",
        ((name, state, items[name, state]) for name in runs for state in _ITEM_STATES),
        "run",
        "state",
    )


def _servers(runs: Mapping[str, Run], cluster: Cluster, now: float) -> Iterator[Metric]:
    servers = sorted(cluster.servers.items())

    def of(value: Callable[[Server], float]) -> Samples:
        return ((server_id, value(server)) for server_id, server in servers)

    yield gauge(
        "shardwell_cluster_server_state",
        "1 for the state of the server as the coordinator sees it, 0 for the others.",
        (
            (server_id, name, describe_server_state(server) == state)
            for server_id, server in servers
            for state, name in _SERVER_STATES.items()
        ),
        "server",
        "state",
    )
    yield gauge(
        "shardwell_cluster_server_draining",
        "1 while the server must hand over its shards.",
        of(lambda at: at.draining),
        "server",
    )
    yield gauge(
        "shardwell_cluster_server_silent_seconds",
        "Time since the last heartbeat of the server.",
        of(lambda at: max(0.0, now - at.last_seen_s)),
        "server",
    )
    shards: dict[tuple[str, str], list[int]] = {
        (server_id, role): [0, 0] for server_id, _ in servers for role in ("primary", "backup")
    }
    for unit in (unit for run in runs.values() for unit in run.units):
        for server_id, role, size_bytes in _shards_of(unit):
            found = shards.setdefault((server_id, role), [0, 0])
            found[0] += 1
            found[1] += size_bytes
    for number, name, text in ((0, "shards", "Shards"), (1, "shard_bytes", "Bytes of shards")):
        yield gauge(
            f"shardwell_cluster_server_{name}",
            f"{text} of all runs on the server, by role.",
            ((server_id, role, found[number]) for (server_id, role), found in shards.items()),
            "server",
            "role",
        )


def _shards_of(unit: Unit) -> Iterator[tuple[str, str, int]]:
    for role, copies in (("primary", unit.shards), ("backup", unit.backups)):
        for copy in copies:
            yield copy.server_id, role, copy.size_bytes
