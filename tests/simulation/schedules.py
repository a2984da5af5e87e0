"""One random schedule: draws a job and faults, runs the cluster, and checks what must hold in every schedule."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any

from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_wire import fault_points
from shardwell_wire.connection import channel
from shardwell_wire.errors import ShardwellError, UnavailableError
from shardwell_wire.model.topology import ASYNCHRONOUS, BOUNDED_STALENESS, SYNCHRONOUS
from tests.simulation import environment
from tests.simulation.asynchronous import AsynchronousMembership, find_item_problems, replay
from tests.simulation.environment import Environment
from tests.simulation.host_memory import HostMemory
from tests.simulation.jobs import History, Job
from tests.simulation.loop import ProcessDied, VirtualLoop, current_process
from tests.simulation.network import Network
from tests.simulation.nodes import LEASE_S, SHARD_SERVICE, CoordinatorNode, Node, ServerNode
from tests.simulation.trainer import RUN, Operator, TrainerNode

CHECKPOINTED = 0.15
"""Share of the schedules with checkpoints. They take longer."""

SHARED_MEMORY = 0.4
"""Share of the schedules whose shard servers take up their shards after a restart."""

ASYNCHRONOUS_SHARE = 0.15
"""Share of the schedules with an asynchronous mode."""

HOST_LOSS = 0.25
"""Chance that a killed shard server loses its shared memory, too."""

CAN_HAVE_BACKUPS = "PromoteShards" in SHARD_SERVICE.methods_by_name

PROGRESS_S = 120.0
"""Virtual seconds after the last fault in which the run must finish."""

KILL_POINTS = tuple(name for name in fault_points.POINTS if name.startswith(("coordinator.", "server.")))
ERROR_POINTS = ("server.stream.middle", "server.push.accepted", "server.gather.middle", "server.fence.after")


@dataclass
class Outcome:
    """The result of one schedule."""

    seed: int
    problems: list[str]
    faults: list[str]
    events: int = 0
    virtual_s: float = 0.0
    lines: list[str] = field(default_factory=list)


class Simulation:
    """A cluster under one random schedule.

    Args:
        seed: Decides everything.
        job: What is trained. None: drawn.
        reference: Bytes of every version. None: those of the job without faults.
        quiet: True for the run without faults.
        with_more: False to leave out the kinds of faults and jobs that were added last.
        asynchronous: Share of the schedules with an asynchronous mode, if ``with_more``.
        trace: Keep a line for each event.
    """

    def __init__(
        self,
        seed: int,
        job: Job | None = None,
        reference: History | None = None,
        *,
        quiet: bool = False,
        with_more: bool = True,
        asynchronous: float = ASYNCHRONOUS_SHARE,
        trace: bool = False,
    ) -> None:
        self.seed, self._trace_on = seed, trace
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.faults: list[str] = []
        self.job = job or self._draw_job(asynchronous if with_more else 0.0)
        self.history = reference or expected_history(self.job)
        self._records: dict[int, CommitRecord] = {}
        """The commit records of an asynchronous run, by step. A rollback replaces those of later steps."""
        self.loop = VirtualLoop(self.rng)
        self.network = Network(self.loop, self.rng, self.trace)
        self.environment = Environment(self.network, self.rng, one_host=quiet or self.rng.random() < 0.6)
        self._quiet, self._with_more = quiet, with_more
        self._faulty_until_s = 0.0

    def _draw_job(self, asynchronous: float) -> Job:
        # From a generator of its own, so that the other schedules stay the same.
        more, consistency = random.Random(f"consistency {self.seed}"), SYNCHRONOUS
        if more.random() < asynchronous:
            consistency = more.choice((ASYNCHRONOUS, BOUNDED_STALENESS(0), BOUNDED_STALENESS(1)))
        return Job(
            consistency=consistency,
            dp=self.rng.choice((1, 2, 2, 3)),
            steps=self.rng.choice((2, 3)),
            algorithm=self.rng.choice(("sgd", "adamw")),
            backups=self.rng.choice((0, 1)) if CAN_HAVE_BACKUPS else 0,
        )

    def trace(self, line: str) -> None:
        """Notes an event."""
        if self._trace_on:
            self.lines.append(f"{self.loop.time():9.4f}  {line}")

    # ---- running ----

    def run(self) -> Outcome:
        """Runs the schedule."""
        channel.PAUSES.seed(self.seed)
        environment.enter(self.environment)
        try:
            with ExitStack() as stack:
                self._start(stack)
                self.loop.run(self._is_over, self._limit_s)
                self._check()
        finally:
            self.loop.close()
            environment.leave()
        problems = [*self.history.problems, *self.loop.problems]
        return Outcome(self.seed, problems, self.faults, self.loop.event_count, self.loop.time(), self.lines)

    def _start(self, stack: ExitStack) -> None:
        self.coordinator = CoordinatorNode(self.loop)
        self.operator = Operator(self.loop)
        count = 2 if self._quiet else 2 + self.job.backups + self.rng.choice((0, 0, 1))
        has_shared_memory = not self._quiet and self.rng.random() < SHARED_MEMORY
        hosts = [HostMemory() if has_shared_memory else None for _ in range(count)]
        self.servers = [ServerNode(f"shard-{index}", self.loop, host) for index, host in enumerate(hosts)]
        spare = 0 if self._quiet else self.rng.choice((0, 0, 1))
        self.trainers = [
            TrainerNode(f"trainer-{index}", self.loop, self.job, self.history) for index in range(self.job.dp + spare)
        ]
        self._checkpoints = ""
        if not self._quiet and self.rng.random() < CHECKPOINTED:
            self._checkpoints = stack.enter_context(TemporaryDirectory(dir=environment.DISK))
            for trainer in self.trainers:
                trainer.options |= {"checkpoint_dir": self._checkpoints, "checkpoint_every": 1}
        if self.job.consistency.asynchronous:
            for trainer in self.trainers:
                trainer.membership = AsynchronousMembership
        for node in (self.coordinator, *self.servers, *self.trainers):
            node.when_failed = partial(self._node_failed, node)
        self.coordinator.start()
        for server in self.servers:
            server.start()
        for trainer in self.trainers:
            self._later(self.rng.uniform(0.0, 0.02), trainer.start)
        if not self._quiet:
            self._draw_faults(stack)

    def _node_failed(self, node: Node, error: ShardwellError) -> None:
        if node is self.coordinator and isinstance(error, UnavailableError):
            self._note(f"the coordinator ends: {error}")
            self._restart(node)
        else:
            self.history.problems.append(f"{node.name} failed: {type(error).__name__}: {error}")

    def _is_over(self) -> bool:
        if self.history.problems or self.loop.problems:
            return True
        if self.job.consistency.asynchronous and (run := self._run()) is not None:
            self._records.update((record.step, record) for record in run.commits.records)
        if not all(trainer.finished for trainer in self.trainers):
            return False
        if (run := self._run()) is None:
            return False
        if run.committed_step < self.job.commits:
            self._train_again()
            return False
        return all(self._is_updated(unit.layout.unit, holder) for unit, holder in _holders(run))

    def _train_again(self) -> None:
        """Starts the trainers again: the run was rolled back when they had finished."""
        self.trace("*** the trainers start again, because the run was rolled back")
        for trainer in self.trainers:
            trainer.finished = False
            trainer.start()

    def _run(self) -> Any:
        """Returns the run as the coordinator sees it. None: no coordinator is running, or it does not know the run."""
        coordinator = self.coordinator.coordinator if self.coordinator.alive else None
        return None if coordinator is None else coordinator.state.runs.get(RUN)

    def _is_updated(self, unit: str, holder: Any) -> bool:
        """True if the process that has a copy of a shard is running, and the copy has the last version."""
        server = next(server for server in self.servers if server.name == holder.server_id)
        if not server.alive or server.incarnation != holder.incarnation:
            return False
        return server.versions().get((unit, holder.start_bytes)) == self.job.commits

    def _limit_s(self) -> float:
        return self._faulty_until_s + PROGRESS_S

    def _later(self, delay_s: float, action: Callable[[], Any]) -> None:
        self.loop.call_later(delay_s, action, context=self.loop.outside)

    # ---- checks ----

    def _check(self) -> None:
        if self.history.problems or self.loop.problems:
            return
        coordinator = self.coordinator.coordinator
        run = None if coordinator is None else coordinator.state.runs.get(RUN)
        committed = -1 if run is None else run.committed_step
        waiting = [trainer.name for trainer in self.trainers if not trainer.finished]
        if waiting or committed != self.job.commits:
            why = [] if coordinator is None or run is None else self._stall(coordinator, run)
            self.history.problems.append(
                f"no progress: {committed} of {self.job.commits} steps are committed, {', '.join(waiting) or 'nobody'} "
                f"still trains: {'; '.join(why)}"
            )
            return
        assert run is not None
        if self.job.consistency.asynchronous:
            if problems := find_item_problems(self.job, self._records):
                self.history.problems.extend(problems)
                return
            self.history.state, self.history.complete = replay(self.job, self._records), True
        for unit, holder in _holders(run):
            self._check_copy(unit.layout.unit, holder)

    def _check_copy(self, unit: str, holder: Any) -> None:
        """Checks that a server has the expected values and optimizer state of a shard."""
        server = next(server for server in self.servers if server.name == holder.server_id)
        what = f"{server.name}, {unit!r} at byte {holder.start_bytes}"
        for shard, state in server.states():
            if (shard.unit, shard.start_bytes) == (unit, holder.start_bytes):
                if shard.version != self.job.commits:
                    self.history.problems.append(f"{what}: version {shard.version}")
                for label, content in state.items():
                    if self.history.complete and not matches(self.history.state, label, content):
                        self.history.problems.append(f"{what}: other bytes of {label} than expected")
                return
        self.history.problems.append(f"{what}: the server does not hold this shard")

    def _stall(self, coordinator: Any, run: Any) -> list[str]:
        from shardwell_server.coordinator.inspection.stall import explain_stall

        state = coordinator.state
        return list(explain_stall(run, state.cluster, self.loop.time(), state.settings.min_servers).lines)

    # ---- faults ----

    def _draw_faults(self, stack: ExitStack) -> None:
        horizon_s = 0.05 + 0.07 * self.job.steps
        if self.rng.random() < 0.3:
            self.network.loss = self.rng.choice((0.01, 0.05, 0.15))
            self._note(f"{self.network.loss:.0%} of calls fail")
            self._fault_until(horizon_s, lambda: setattr(self.network, "loss", 0.0))
        kinds = [
            *[self._crash_trainer] * 3,
            *[self._crash_coordinator] * 3,
            *[self._stop_node] * 3,
            *[self._crash_server] * 3,
            self._cut_node,
            self._cut_pair,
            self._break_calls,
            self._fill_disk,
            self._jump_clock,
            *[self._drain_server] * 2,
            self._rebalance,
            self._set_backups,
        ]
        for _ in range(self.rng.choice((0, 1, 1, 2, 2, 3, 4))):
            kind, when_s = self.rng.choice(kinds), self.rng.uniform(0.0, horizon_s)
            self._fault_until(when_s, kind)
        # From a generator of their own, so that the schedules that had failed before stay the same.
        more = random.Random(f"more {self.seed}")
        kinds = [self._stop_server, self._end_servers, self._slow_threads]
        for _ in range(more.choice((0, 0, 1, 1, 2)) if self._with_more else 0):
            self._fault_until(more.uniform(0.0, horizon_s), more.choice(kinds))
        if self.rng.random() < 0.35:
            self._arm_kill(stack, self.rng.choice(KILL_POINTS))
        if self.rng.random() < 0.15:
            self._arm_error(stack, self.rng.choice(ERROR_POINTS))

    def _note(self, what: str) -> None:
        self.faults.append(f"{self.loop.time():.3f} {what}")
        self.trace(f"*** {what}")

    def _fault_until(self, delay_s: float, action: Callable[[], None]) -> None:
        """Plans something after which the cluster still has a fault, or no longer."""
        self._faulty_until_s = max(self._faulty_until_s, self.loop.time() + delay_s)
        self._later(delay_s, action)

    def _node(self) -> Node:
        return self.rng.choice([self.coordinator, *self.servers, *self.trainers])

    def _kill(self, node: Node, why: str) -> None:
        if node.alive and not (isinstance(node, TrainerNode) and node.finished):
            self._note(f"{node.name} is killed{why}")
            node.process.kill()
            self._restart(node)

    def _restart(self, node: Node) -> None:
        delay_s, ended = self.rng.choice((0.02, 0.2, 1.0, 4.0)) * self.rng.random(), node.process

        def restart() -> None:
            if node.process is ended:
                self.trace(f"*** {node.name} starts again")
                node.start()

        self._fault_until(delay_s, restart)

    def _crash_trainer(self) -> None:
        self._kill(self.rng.choice(self.trainers), "")

    def _crash_coordinator(self) -> None:
        self._kill(self.coordinator, "")

    def _crash_server(self) -> None:
        server = self.rng.choice(self.servers)
        if server.is_restartable and self.rng.random() >= HOST_LOSS:
            self._kill(server, "")
        elif self._may_lose(server):
            if server.is_restartable:
                server.lose_host()
                self._note(f"{server.name} and its shared memory are lost")
                self._restart(server)
            else:
                self._kill(server, "")

    def _stop_server(self) -> None:
        server = self.rng.choice(self.servers)
        if server.alive and (server.is_restartable or (self._may_lose(server) and not self._gets_units())):
            self._ask_to_stop(server)

    def _gets_units(self) -> bool:
        """True if a server may get shards before it stops, and cannot move them to another one."""
        if not self.job.consistency.asynchronous:
            return False
        run = self._run()
        return run is None or sum(unit.published for unit in run.units) < len(self.job.layouts)

    def _ask_to_stop(self, server: ServerNode) -> None:
        """Stops a server as SIGTERM does, and starts it again once it has ended."""
        if server.alive and not server.process.stopped:
            self._note(f"{server.name} is asked to stop")
            server.process.when_dead.append(lambda: self._restart(server))
            server.ask_to_stop()

    def _end_servers(self) -> None:
        """Ends several servers nearly at once: all of them, or the processes of one command."""
        if not all(server.is_restartable and server.alive for server in self.servers):
            return
        ending = self.rng.sample(self.servers, self.rng.choice((2, len(self.servers))))
        losing = ending[0] if self.rng.random() < HOST_LOSS and self._may_lose(ending[0]) else None
        end = self.rng.choice((self._ask_to_stop, lambda server: self._kill(server, "")))
        if losing is not None:
            ending.remove(losing)
            losing.lose_host()
            self._note(f"{losing.name} and its shared memory are lost")
            self._restart(losing)
        for server in ending:
            self._fault_until(self.rng.choice((0.0, 0.01, 0.5)) * self.rng.random(), partial(end, server))

    def _slow_threads(self) -> None:
        """Makes loading, copying and updating take so long that heartbeats arrive meanwhile."""
        duration_s = self.rng.uniform(0.1, 3.0)
        self._note(f"threads are slow for {duration_s:.2f} s")
        before_s, self.loop.thread_s = self.loop.thread_s, 0.2
        self._fault_until(duration_s, lambda: setattr(self.loop, "thread_s", before_s))

    def _may_lose(self, server: ServerNode) -> bool:
        """True if a server may die with its memory: the run keeps copies of its shards, or has a checkpoint."""
        run = self._run()
        if not server.alive or run is None:
            return False
        if self._checkpoints and run.checkpoints.saved:
            return True
        others = [each for each in self.servers if each is not server]
        if not any(each.alive and not each.is_stopping for each in others):
            return False
        # A restartable server keeps its copies when it ends.
        kept = {
            (each.name, each.incarnation)
            for each in others
            if each.is_restartable or (each.alive and not each.is_stopping)
        }
        coordinator = self.coordinator.coordinator
        assert coordinator is not None
        unwanted = {id(backup) for _, backup in coordinator.backups.unwanted(run)}
        return all(
            not (unit.published or unit.publishing.in_flight)
            or shard.process in kept
            or any(
                backup.in_sync and backup.process in kept and id(backup) not in unwanted
                for backup in unit.backups_of(shard)
            )
            for unit in run.units
            for shard in unit.shards
        )

    def _stop_node(self) -> None:
        node = self._node()
        if not node.alive or node.process.stopped:
            return
        process, duration_s = node.process, self.rng.choice((0.05, 0.5, 2.0)) * LEASE_S * self.rng.random()
        self._note(f"{node.name} stops for {duration_s:.2f} s")
        process.stop()
        self._fault_until(duration_s, process.resume)

    def _cut_node(self) -> None:
        node = self._node()
        others = [each.name for each in (self.coordinator, *self.servers, *self.trainers) if each is not node]
        self._cut([node.name], others)

    def _cut_pair(self) -> None:
        one, other = self.rng.sample([self.coordinator, *self.servers, *self.trainers], 2)
        self._cut([one.name], [other.name])

    def _cut(self, ones: list[str], others: list[str]) -> None:
        duration_s = self.rng.choice((0.05, 0.5, 2.0)) * LEASE_S * self.rng.random()
        self._note(f"no messages between {', '.join(ones)} and {', '.join(others)} for {duration_s:.2f} s")
        self._fault_until(duration_s, self.network.cut(ones, others))

    def _break_calls(self) -> None:
        node = self._node()
        if node.alive:
            self._note(f"the connections of {node.name} break")
            self.network.break_calls(node.process)

    def _fill_disk(self) -> None:
        duration_s = self.rng.uniform(0.0, 0.3)
        self._note(f"the coordinator's disk is full for {duration_s:.2f} s")
        self.environment.disk.full = True
        self._fault_until(duration_s, lambda: setattr(self.environment.disk, "full", False))

    def _jump_clock(self) -> None:
        self.coordinator.clock_offset_s += self.rng.choice((-86400.0, -1.0, 1.0, 86400.0))
        self._note("the coordinator's wall clock jumps")

    def _drain_server(self) -> None:
        server = self.rng.choice(self.servers)
        self._note(f"{server.name} is drained")
        self.operator.drain(server.name)
        if self.rng.random() < 0.5:
            self._fault_until(
                self.rng.choice((0.02, 0.5)) * self.rng.random(), lambda: self.operator.drain(server.name, cancel=True)
            )

    def _rebalance(self) -> None:
        self._note("the run is rebalanced")
        self.operator.rebalance()

    def _set_backups(self) -> None:
        backups = self.rng.choice((0, 1))
        self._note(f"the run gets {backups} backups")
        self.operator.set_backups(backups)

    def _arm_kill(self, stack: ExitStack, point: str) -> None:
        def die(details: Any) -> None:
            process = current_process()
            node = next(node for node in (self.coordinator, *self.servers) if node.process is process)
            if isinstance(node, ServerNode) and not node.is_restartable and not self._may_lose(node):
                return
            self._note(f"{process.name} is killed at {point} {dict(details)}")
            process.kill()
            self._restart(node)
            raise ProcessDied

        stack.enter_context(fault_points.armed(point, die, nth=self.rng.choice((1, 1, 2, 3, 5))))

    def _arm_error(self, stack: ExitStack, point: str) -> None:
        def fail(details: Any) -> None:
            self._note(f"{current_process().name}: an error at {point}")
            raise UnavailableError(f"{point}: the simulation raised this")

        stack.enter_context(fault_points.armed(point, fail, nth=self.rng.randint(1, 6)))


def _holders(run: Any) -> list[tuple[Any, Any]]:
    """Returns the primaries and the backups in sync of a run, with their units."""
    return [
        (unit, holder)
        for unit in run.units
        for holder in (*unit.shards, *(backup for backup in unit.backups if backup.in_sync))
    ]


def expected_history(job: Job) -> History:
    """Returns what must be the same as in the run of a job without faults."""
    if job.consistency.asynchronous:
        return History()
    recorded = reference_of(job.plain)
    return History(dict(recorded.versions), dict(recorded.state), complete=True)


@cache
def reference_of(job: Job) -> History:
    """Returns the bytes of every version of a job, from a run without faults."""
    recorded = History()
    simulation = Simulation(0, job, recorded, quiet=True)
    outcome = simulation.run()
    assert not outcome.problems, outcome.problems
    pieces: dict[str, dict[int, bytes]] = {}
    for server in simulation.servers:
        for _, state in server.states():
            for label, content in state.items():
                name, place = label.rsplit("|", 1)
                pieces.setdefault(name, {})[int(place.split(":")[0])] = content
    for name, by_start in pieces.items():
        scalar = len(set(by_start.values())) == 1 and len(by_start[min(by_start)]) == 4
        ordered = [content for _, content in sorted(by_start.items())]
        recorded.state[name] = ordered[0] if scalar else b"".join(ordered)
    for layout in job.layouts:
        whole = bytearray(layout.size_bytes)
        for parameter, start in zip(layout.parameters, layout.starts, strict=True):
            values = recorded.state[f"{parameter.name}|values"]
            whole[start : start + len(values)] = values
        recorded.versions[job.steps, layout.unit] = bytes(whole)
    return recorded


def matches(expected: dict[str, bytes], label: str, content: bytes) -> bool:
    """Returns whether a part of a tensor has the expected bytes.

    Args:
        expected: Whole tensors by name.
        label: Name of the tensor and half-open range of elements, such as ``a.w|exp_avg|0:512``.
        content: The part. Scalars are whole in every part.
    """
    name, place = label.rsplit("|", 1)
    start, stop = map(int, place.split(":"))
    whole = expected.get(name, b"")
    return content in (whole[4 * start : 4 * stop], whole if len(whole) == 4 else None)
