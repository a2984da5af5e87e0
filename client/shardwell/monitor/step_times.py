"""The options and sizes of a session that advice depends on.

Measures where the training thread spends each step, from counters that the session keeps anyway.

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
from typing import Protocol

from shardwell.transport.route_stats import ROUTES, RouteTotals
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


MAX_STEPS = 1024
"""Steps that the monitor remembers. A step takes about 1 KiB."""


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


class StepCounters(Protocol):
    """The counters of a session. They never fall."""

    def stats(self) -> Mapping[str, float]:
        """Returns counts, bytes and seconds; see ``Session.stats``."""
        ...

    def moved_bytes(self) -> Mapping[str, tuple[int, int]]:
        """Returns the bytes received and sent over each transport, in wire dtypes, by its name."""
        ...

    def gather_wait_s(self) -> float:
        """Returns the seconds that the training thread has waited for weights."""
        ...

    def take_gather_waits(self) -> Sequence[tuple[float, float]]:
        """Returns start and end of each gather wait since the last call, by ``time.perf_counter``."""
        ...

    def take_peak_bytes(self) -> int:
        """Returns the maximum of the memory of gathered weights since the last call."""
        ...


class StepMonitor:
    """Measures the steps of one trainer. See Note: [What the monitor measures].

    Used by the training thread only.

    Args:
        counters: The counters of the session.
        trainer: Name of this trainer.
    """

    def __init__(self, counters: StepCounters, trainer: str) -> None:
        self._counters, self._trainer = counters, trainer
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self._started_s: float | None = None
        """Start of the step in flight. None: it is not measured, because this trainer has joined in it."""
        self._stats: Mapping[str, float] = {}
        self._moved: Mapping[str, tuple[int, int]] = {}
        self._measured: dict[StepPart, float] = {}
        self._began_work = False
        self._tokens = self._samples = 0

    def steps(self, last: int) -> tuple[StepTimes, ...]:
        """Returns the last measured steps, oldest first."""
        return tuple(self._steps)[-last:]

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
        self._measured[part] = self._measured.get(part, 0.0) + seconds

    def begin_work(self) -> None:
        """Called when ``step.batches`` begins to yield. Ends BETWEEN_STEPS."""
        if self._started_s is None or self._began_work:
            return
        self._began_work = True
        waited_s = self._counters.gather_wait_s() - self._stats["gather_wait_s"]
        self.add(StepPart.BETWEEN_STEPS, max(0.0, time.perf_counter() - self._started_s - waited_s))

    def end_step(self, step: int, facts: CommitFacts) -> None:
        """Called when a step is committed. Starts the next one."""
        now, started_s = time.perf_counter(), self._started_s
        stats, moved = self._counters.stats(), self._counters.moved_bytes()
        waits, peak_bytes = self._counters.take_gather_waits(), self._counters.take_peak_bytes()
        if started_s is not None:
            self._steps.append(self._times(step, facts, now - started_s, stats, moved, waits, peak_bytes))
        self._started_s, self._stats, self._moved = now, stats, moved
        self._measured, self._began_work = {}, False
        self._tokens = self._samples = 0

    def _times(
        self,
        step: int,
        facts: CommitFacts,
        duration_s: float,
        stats: Mapping[str, float],
        moved: Mapping[str, tuple[int, int]],
        waits: Sequence[tuple[float, float]],
        peak_bytes: int,
    ) -> StepTimes:
        before = {name: self._moved.get(name, (0, 0)) for name in moved}
        grown = {name: stats[name] - self._stats[name] for name in stats}
        return StepTimes(
            step=step,
            duration_s=duration_s,
            parts=self._parts(grown, duration_s, facts, waits),
            facts=facts,
            received_bytes={name: received - before[name][0] for name, (received, _) in moved.items()},
            sent_bytes={name: sent - before[name][1] for name, (_, sent) in moved.items()},
            in_place_bytes=int(grown["in_place_bytes"]),
            gather_count=int(grown["gather_count"]),
            push_count=int(grown["push_count"]),
            peak_gathered_bytes=peak_bytes,
            freed_bytes=int(grown["freed_unit_bytes"]),
            tokens=self._tokens,
            samples=self._samples,
            routes=_routes(grown),
        )

    def _parts(
        self, grown: Mapping[str, float], duration_s: float, facts: CommitFacts, waits: Sequence[tuple[float, float]]
    ) -> dict[StepPart, float]:
        update = facts.previous_update
        update_wait_s = 0.0 if update is None else self._waited_until(update.duration_s, waits)
        parts = {
            StepPart.GATHER_WAIT: max(0.0, grown["gather_wait_s"] - update_wait_s),
            StepPart.UPDATE_WAIT: update_wait_s,
            StepPart.PUSH: grown["push_wait_s"] + grown["push_copy_s"],
            StepPart.FINISH_WAIT: grown["finish_wait_s"],
            StepPart.COMMIT_WAIT: grown["norm_wait_s"] + grown["commit_wait_s"] - grown["partition_update_s"],
            StepPart.OPTIMIZER: grown["partition_update_s"],
            **{part: self._measured.get(part, 0.0) for part in _MEASURED},
        }
        last = facts.last_finished
        if last is None or last.trainer == self._trainer:
            # No other trainer was later, so this one has waited for the coordinator only.
            parts[StepPart.COMMIT_WAIT] += parts[StepPart.FINISH_WAIT]
            parts[StepPart.FINISH_WAIT] = 0.0
        return {StepPart.COMPUTE: max(0.0, duration_s - sum(parts.values())), **parts}

    def _waited_until(self, limit_s: float, waits: Sequence[tuple[float, float]]) -> float:
        """Returns the seconds of waits in the first ``limit_s`` of the step."""
        assert self._started_s is not None
        end = self._started_s + limit_s
        return sum(max(0.0, min(stopped, end) - started) for started, stopped in waits)


_MEASURED = (StepPart.PIPELINE_BUBBLE, StepPart.DATA, StepPart.BETWEEN_STEPS)
"""Parts that ``StepMonitor.add`` measures."""


def _routes(grown: Mapping[str, float]) -> dict[str, RouteTotals]:
    """Returns what each route has carried, from the growth of the counters of ``RouteStats``."""
    found = {}
    for route in ROUTES:
        if count := int(grown.get(f"{route}_count", 0)):
            pushed_bytes, peer_bytes = (int(grown[f"{route}_{name}"]) for name in ("pushed_bytes", "peer_bytes"))
            found[route] = RouteTotals(count, pushed_bytes, peer_bytes, grown[f"{route}_seconds"])
    return found
