"""Measures where the training thread spends each step, from counters that the session keeps anyway.

Note: [What the monitor measures]
    A step lasts from the end of the previous commit to the end of its own commit. The first step after ``join`` is not
    measured: it includes the start of the run. Every part but ``COMPUTE`` is measured; ``COMPUTE`` is the rest. On a
    GPU, kernels run in the background, so ``COMPUTE`` includes the waits for them.

    Servers update in the background while the next step begins, so their time appears as waits of its first gathers.
    The coordinator says how long the update took. Gather waits within this time count as ``UPDATE_WAIT``.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwell.transport.base import ROUTES, RouteTotals
from shardwell_wire.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitoredSetup:
    """The options and sizes of a session that advice depends on."""

    trainer: str
    """Name of this trainer."""
    transports: str
    """``transports`` of ``join``."""
    streamed: Mapping[str, bool]
    """The servers whose weights are streamed, by address, and whether each is on this host."""
    gather_dtype: str
    push_dtype: str
    prefetch_bytes: int
    keep_bytes: int
    """0 also if kept weights share ``prefetch_bytes``."""
    max_gathers_in_flight: int
    unit_bytes: tuple[int, ...]
    """Size of each unit's flat vector."""
    memory_bytes: int
    """Memory that this process could use for gathered weights when the report was made: what is free on the device
    of the units, and what the weights and their idle buffers take."""

    routes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Route and reason of each unit whose gradient was pushed, by the unit's name. Empty: all gradients are pushed
    directly."""
    corrupt_transfers: Mapping[str, int] = field(default_factory=dict)
    """Transfers since ``join`` whose bytes arrived with a wrong checksum, by the servers' addresses. Empty: none."""

    @property
    def model_bytes(self) -> int:
        """Size of all weights."""
        return sum(self.unit_bytes)

    @property
    def largest_unit_bytes(self) -> int:
        """Size of the largest unit."""
        return max(self.unit_bytes, default=0)


REPORTED_STEPS, REPORT_EVERY_S = 32, 2.0
"""Most steps in the reports that heartbeats carry, and the shortest time between two of them."""

TRACED_STEPS = 8
"""Steps whose parts the reports of heartbeats carry one by one."""
MAX_STEPS = 1024
"""Steps that the monitor remembers. A step takes about 3 KiB."""


class StepPart(enum.StrEnum):
    """A part of a step's time, in seconds of the training thread."""

    COMPUTE = "compute"
    """Everything that is not one of the other parts: forward, backward and the script's own work."""
    GATHER_WAIT = "gather_wait"
    """Waits for weights to arrive."""
    UPDATE_WAIT = "update_wait"
    """Waits for weights that the servers had not updated yet."""
    PUSH = "push"
    """Copies of gradients for their pushes, and waits for pushes."""
    FINISH_WAIT = "finish_wait"
    """Waits for the work items of other trainers."""
    COMMIT_WAIT = "commit_wait"
    """Waits for the gradient norm and for the commit."""
    OPTIMIZER = "optimizer"
    """Updates of optimizer partitions, if the optimizer runs on the trainers."""
    PIPELINE_BUBBLE = "pipeline_bubble"
    """Time in which a pipeline stage had no micro-batch to compute."""
    DATA = "data"
    """The functions and datasets from which ``step.batches`` takes the batches."""
    BETWEEN_STEPS = "between_steps"
    """From the commit to the next ``step.batches``, such as logging and evaluation. 0 in a plain loop, where it is part
    of COMPUTE."""


@dataclass(frozen=True, slots=True)
class LastFinished:
    """The work item that was finished last in a step."""

    global_rank: int
    trainer: str
    late_s: float
    """Seconds from the last item of the other trainers to this one."""


@dataclass(frozen=True, slots=True)
class ServerUpdate:
    """The slowest update of a step."""

    server: str
    """Id of the shard server."""
    duration_s: float
    """From the commit record to the server's acknowledgement."""


@dataclass(frozen=True, slots=True)
class CommitFacts:
    """What the coordinator says about a committed step."""

    last_finished: LastFinished | None = None
    """None: one trainer computed all work items, or the coordinator does not know."""
    previous_update: ServerUpdate | None = None
    """The update that made the weights that the step read. None: not known."""
    record_s: float = 0.0
    """Duration of writing the commit record."""
    staleness: int | None = None
    """Number of commits of other work items between the version that the item read and its own commit. None: the run is
    synchronous."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One committed step, as this trainer spent it."""

    step: int
    duration_s: float
    parts: Mapping[StepPart, float]
    """Seconds of each part. They add up to ``duration_s``."""
    facts: CommitFacts
    received_bytes: Mapping[str, int]
    """Bytes of weights that arrived, in wire dtypes, by transport."""
    sent_bytes: Mapping[str, int]
    """Bytes of gradients that left, in wire dtypes, by transport."""
    in_place_bytes: int
    """Bytes of weights that were read in the servers' memory, and not copied."""
    gather_count: int
    push_count: int
    peak_gathered_bytes: int
    """Maximum of the memory that gathered weights took in this process."""
    freed_bytes: int
    """Memory of gathered weights that was released."""
    tokens: int
    samples: int
    routes: Mapping[str, RouteTotals] = field(default_factory=dict)
    """What each route of gradients has carried, by its name. Routes without a gradient are left out."""
    committed_s: float = 0.0
    """End of the step: seconds since the epoch, by the clock of this host."""


@dataclass(frozen=True, slots=True)
class CounterSample:
    """The counters of a session at one time."""

    stats: Mapping[str, float]
    """Counts, bytes and seconds by the names of ``Session.stats``, those that ``StepTimes`` shows. They never fall."""
    moved_bytes: Mapping[str, tuple[int, int]]
    """Bytes received and sent over each transport, in wire dtypes, by its name."""
    peak_bytes: int
    """Maximum of the memory of gathered weights since the last sample."""


@dataclass(frozen=True, slots=True)
class _MeasuredStep:
    """One committed step, from which ``steps`` computes the ``StepTimes`` when somebody asks for them."""

    step: int
    facts: CommitFacts
    duration_s: float
    update_wait_s: float
    before: CounterSample
    after: CounterSample
    added: Mapping[StepPart, float]
    """What ``StepMonitor.add`` has measured."""
    tokens: int
    samples: int
    committed_s: float


class StepMonitor:
    """Measures the steps of one trainer. See Note: [What the monitor measures].

    Used by the training thread only.

    Args:
        trainer: Name of this trainer.
    """

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer
        self._steps: deque[_MeasuredStep] = deque(maxlen=MAX_STEPS)
        self._started_s: float | None = None
        """Start of the step in flight. None: it is not measured, because this trainer has joined in it."""
        self._before: CounterSample | None = None
        """The sample at the start of the step in flight."""
        self._added: dict[StepPart, float] = {}
        self._began_work = False
        self._tokens = self._samples = 0
        self._reported_s = 0.0

    def steps(self, last: int) -> tuple[StepTimes, ...]:
        """Returns the last measured steps, oldest first."""
        return tuple(self._times(step) for step in tuple(self._steps)[-last:])

    def count(self, *, tokens: int = 0, samples: int = 0) -> None:
        """Counts tokens and samples of the step in flight.

        Raises:
            UsageError: A number is negative.
        """
        if tokens < 0 or samples < 0:
            raise UsageError(f"count(tokens={tokens!r}, samples={samples!r}): expected numbers that are not negative")
        self._tokens += tokens
        self._samples += samples

    def add(self, part: StepPart, seconds: float) -> None:
        """Adds time to a part of the step in flight that has no counter: DATA or PIPELINE_BUBBLE."""
        self._added[part] = self._added.get(part, 0.0) + seconds

    def begin_work(self, gather_wait_s: float) -> None:
        """Called when ``step.batches`` begins to yield. Ends BETWEEN_STEPS.

        Args:
            gather_wait_s: Seconds that the training thread has waited for weights so far, in all steps.
        """
        if self._started_s is None or self._before is None or self._began_work:
            return
        self._began_work = True
        waited_s = gather_wait_s - self._before.stats["gather_wait_s"]
        self.add(StepPart.BETWEEN_STEPS, max(0.0, time.perf_counter() - self._started_s - waited_s))

    def end_step(
        self, step: int, facts: CommitFacts, sample: CounterSample, gather_waits: Sequence[tuple[float, float]]
    ) -> bool:
        """Called when a step is committed. Starts the next one.

        Args:
            facts: What the coordinator says about it.
            sample: The counters now.
            gather_waits: Start and end of each gather wait since the last call, by ``time.perf_counter``.

        Returns:
            Whether the heartbeats need a new report.
        """
        now, started_s, before = time.perf_counter(), self._started_s, self._before
        if started_s is not None and before is not None:
            update_wait_s = 0.0
            if facts.previous_update is not None:
                update_end = started_s + facts.previous_update.duration_s
                for began, stopped in gather_waits:
                    update_wait_s += max(0.0, min(stopped, update_end) - began)
            self._steps.append(
                _MeasuredStep(
                    step,
                    facts,
                    now - started_s,
                    update_wait_s,
                    before,
                    sample,
                    self._added,
                    self._tokens,
                    self._samples,
                    time.time(),
                )
            )
        self._started_s, self._before = now, sample
        self._added, self._began_work = {}, False
        self._tokens = self._samples = 0
        if not self._steps or now - self._reported_s < REPORT_EVERY_S:
            return False
        self._reported_s = now
        return True

    def _times(self, measured: _MeasuredStep) -> StepTimes:
        before, after = measured.before, measured.after
        grown = {name: after.stats[name] - before.stats[name] for name in after.stats}
        moved = {
            name: (received - was[0], sent - was[1])
            for name, (received, sent) in after.moved_bytes.items()
            for was in (before.moved_bytes.get(name, (0, 0)),)
        }
        return StepTimes(
            step=measured.step,
            duration_s=measured.duration_s,
            parts=self._parts(measured, grown),
            facts=measured.facts,
            received_bytes={name: received for name, (received, _) in moved.items()},
            sent_bytes={name: sent for name, (_, sent) in moved.items()},
            in_place_bytes=int(grown["in_place_bytes"]),
            gather_count=int(grown["gather_count"]),
            push_count=int(grown["push_count"]),
            peak_gathered_bytes=after.peak_bytes,
            freed_bytes=int(grown["freed_unit_bytes"]),
            tokens=measured.tokens,
            samples=measured.samples,
            routes=_routes(grown),
            committed_s=measured.committed_s,
        )

    def _parts(self, measured: _MeasuredStep, grown: Mapping[str, float]) -> dict[StepPart, float]:
        parts = {
            StepPart.GATHER_WAIT: max(0.0, grown["gather_wait_s"] - measured.update_wait_s),
            StepPart.UPDATE_WAIT: measured.update_wait_s,
            StepPart.PUSH: grown["push_wait_s"] + grown["push_copy_s"],
            StepPart.FINISH_WAIT: grown["finish_wait_s"],
            StepPart.COMMIT_WAIT: grown["norm_wait_s"] + grown["commit_wait_s"] - grown["partition_update_s"],
            StepPart.OPTIMIZER: grown["partition_update_s"],
            **{part: measured.added.get(part, 0.0) for part in _ADDED},
        }
        last = measured.facts.last_finished
        if last is None or last.trainer == self._trainer:
            # No other trainer was later, so this one has waited for the coordinator only.
            parts[StepPart.COMMIT_WAIT] += parts[StepPart.FINISH_WAIT]
            parts[StepPart.FINISH_WAIT] = 0.0
        return {StepPart.COMPUTE: max(0.0, measured.duration_s - sum(parts.values())), **parts}


_ADDED = (StepPart.PIPELINE_BUBBLE, StepPart.DATA, StepPart.BETWEEN_STEPS)
"""Parts that ``StepMonitor.add`` measures."""


def _routes(grown: Mapping[str, float]) -> dict[str, RouteTotals]:
    """Returns what each route has carried, from the growth of the counters of ``RouteStats``."""
    found = {}
    for route in ROUTES:
        if count := int(grown.get(f"{route}_count", 0)):
            pushed_bytes, peer_bytes = (int(grown[f"{route}_{name}"]) for name in ("pushed_bytes", "peer_bytes"))
            found[route] = RouteTotals(count, pushed_bytes, peer_bytes, grown[f"{route}_seconds"])
    return found
