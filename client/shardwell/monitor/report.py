"""The report of ``session.report()``: where the time of the last steps went, what slows them down, and advice.

``find_bottlenecks`` has pure rules over measured steps.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwell.monitor.step_times import TRACED_STEPS, MonitoredSetup, StepPart, StepTimes
from shardwell.tables import format_seconds, format_size, report_table, report_text
from shardwell.transport.base import ROUTES, RouteTotals
from shardwell_wire.v1 import coordinator_pb2


@dataclass(frozen=True, slots=True)
class PerformanceReport:
    """Where the time of a trainer's last steps went; ``print`` shows tables.

    Times are seconds of the training thread, as means per step.
    """

    trainer: str
    """Name of this trainer."""
    steps: tuple[StepTimes, ...]
    """The measured steps, oldest first. Empty before the second commit."""
    model_bytes: int
    """Size of all weights."""
    bottlenecks: tuple[Bottleneck, ...]
    """What slows the steps down, the most severe first."""
    unit_routes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Route of each unit's gradient, and why, by the unit's name; see ``TransferOptions.gradient_reduction``."""
    corrupt_transfers: Mapping[str, int] = field(default_factory=dict)
    """Transfers since ``join`` that were repeated because of a wrong checksum, by the servers' addresses."""

    @property
    def step_s(self) -> float:
        """Duration of a step; 0 without steps."""
        return self._mean([step.duration_s for step in self.steps])

    @property
    def parts(self) -> dict[StepPart, float]:
        """Seconds of each part of a step. They add up to ``step_s``."""
        return {part: self._mean([step.parts[part] for step in self.steps]) for part in StepPart}

    @property
    def tokens_per_s(self) -> float:
        """Tokens that this trainer has counted with ``session.count``, per second."""
        return self._rate(sum(step.tokens for step in self.steps))

    @property
    def samples_per_s(self) -> float:
        """Samples of this trainer per second: those of datasets, and those counted with ``session.count``."""
        return self._rate(sum(step.samples for step in self.steps))

    @property
    def received_bytes(self) -> dict[str, float]:
        """Bytes of weights that arrived in a step, in wire dtypes, by transport."""
        return {
            name: self._mean([step.received_bytes.get(name, 0) for step in self.steps]) for name in self._transports
        }

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes of gradients that left in a step, in wire dtypes, by transport."""
        return {name: self._mean([step.sent_bytes.get(name, 0) for step in self.steps]) for name in self._transports}

    @property
    def in_place_bytes(self) -> float:
        """Bytes of weights that were read in the servers' memory in a step, and not copied."""
        return self._mean([step.in_place_bytes for step in self.steps])

    @property
    def peak_gathered_bytes(self) -> int:
        """Maximum of the memory that gathered weights took in this process."""
        return max((step.peak_gathered_bytes for step in self.steps), default=0)

    @property
    def freed_bytes(self) -> float:
        """Memory of gathered weights that was released in a step."""
        return self._mean([step.freed_bytes for step in self.steps])

    @property
    def routes(self) -> dict[str, dict[str, float]]:
        """What each route of gradients carried in a step: ``count``, ``pushed_bytes``, ``peer_bytes``, ``seconds``."""
        names = [name for name in ROUTES if any(name in step.routes for step in self.steps)]
        return {
            name: {
                item.name: self._mean([getattr(step.routes.get(name, RouteTotals()), item.name) for step in self.steps])
                for item in fields(RouteTotals)
            }
            for name in names
        }

    @property
    def staleness(self) -> dict[int, int]:
        """Number of steps by staleness: commits of other work items between the version that a step read and its own
        commit. Empty in a synchronous run."""
        return dict(sorted(Counter(at for step in self.steps if (at := step.facts.staleness) is not None).items()))

    @property
    def _transports(self) -> list[str]:
        return sorted({name for step in self.steps for name in (*step.received_bytes, *step.sent_bytes)})

    def _mean(self, numbers: Sequence[float]) -> float:
        return sum(numbers) / len(numbers) if numbers else 0.0

    def _rate(self, count: int) -> float:
        duration_s = sum(step.duration_s for step in self.steps)
        return count / duration_s if duration_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as numbers, strings, lists and maps, which ``json.dumps`` accepts."""
        return {
            "trainer": self.trainer,
            "num_steps": len(self.steps),
            "step_s": self.step_s,
            "parts": {part.value: seconds for part, seconds in self.parts.items()},
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "in_place_bytes": self.in_place_bytes,
            "routes": self.routes,
            "unit_routes": {name: dict(at) for name, at in self.unit_routes.items()},
            "corrupt_transfers": dict(self.corrupt_transfers),
            "model_bytes": self.model_bytes,
            "peak_gathered_bytes": self.peak_gathered_bytes,
            "freed_bytes": self.freed_bytes,
            "staleness": {str(commits): count for commits, count in self.staleness.items()},
            "bottlenecks": [
                {**dataclasses.asdict(bottleneck), "severity": bottleneck.severity.name.lower()}
                for bottleneck in self.bottlenecks
            ],
            "steps": [
                {**dataclasses.asdict(step), "parts": {part.value: step.parts[part] for part in StepPart}}
                for step in self.steps
            ],
        }

    def to_proto(self) -> coordinator_pb2.StepReport:
        """Returns what heartbeats carry of the report, which needs at least one step."""
        return coordinator_pb2.StepReport(
            first_step=self.steps[0].step,
            last_step=self.steps[-1].step,
            step_s=self.step_s,
            part_s={part.value: seconds for part, seconds in self.parts.items() if seconds},
            tokens_per_s=self.tokens_per_s,
            samples_per_s=self.samples_per_s,
            model_bytes=self.model_bytes,
            peak_gathered_bytes=self.peak_gathered_bytes,
            bottlenecks=[bottleneck.to_proto() for bottleneck in self.bottlenecks],
            steps=[
                coordinator_pb2.MeasuredStep(
                    step=step.step,
                    committed_s=step.committed_s,
                    step_s=step.duration_s,
                    part_s={part.value: seconds for part, seconds in step.parts.items() if seconds},
                )
                for step in self.steps[-TRACED_STEPS:]
            ],
        )

    def __rich__(self) -> RenderableType:
        if not self.steps:
            return Text("No step is measured yet. The first step after join is not measured: commit another one.")
        parts = [self._parts_table(), *([self._staleness_table()] if self.staleness else [])]
        tables = [line for part in parts for line in (part, "")]
        return Group(Text(self._headline()), "", *tables, *self._traffic(), "", *self._advice())

    def __str__(self) -> str:
        return report_text(self)

    def _headline(self) -> str:
        first, last = self.steps[0].step, self.steps[-1].step
        rates = [
            f"{rate:,.1f} {what}/s"
            for rate, what in ((self.tokens_per_s, "tokens"), (self.samples_per_s, "samples"))
            if rate
        ]
        times = f"{format_seconds(self.step_s)} per step"
        return f"trainer {self.trainer!r}, steps {first} to {last}: {', '.join([times, *rates])}"

    def _parts_table(self) -> Table:
        rows = [
            (
                part.value.replace("_", " "),
                format_seconds(seconds),
                f"{seconds / self.step_s if self.step_s else 0.0:.1%}",
            )
            for part, seconds in self.parts.items()
            if seconds or part is StepPart.COMPUTE
        ]
        return report_table(("PART", "PER STEP", "SHARE"), rows, numbers=("PER STEP", "SHARE"))

    def _staleness_table(self) -> Table:
        total = sum(self.staleness.values())
        rows = [(str(commits), str(count), f"{count / total:.1%}") for commits, count in self.staleness.items()]
        return report_table(("STALENESS", "STEPS", "SHARE"), rows, numbers=("STEPS", "SHARE"))

    def _traffic(self) -> list[RenderableType]:
        received, sent = self.received_bytes, self.sent_bytes
        lines = [
            f"{name}: {format_size(round(received[name]))} received and {format_size(round(sent[name]))} sent per step"
            for name in self._transports
        ]
        lines += [
            f"gradients, {name}: {format_size(round(at['pushed_bytes']))} pushed and "
            f"{format_size(round(at['peer_bytes']))} to other trainers per step, "
            f"{at['count']:.1f} pushes of {format_seconds(at['seconds'] / at['count'])} each"
            for name, at in self.routes.items()
        ]
        chosen = Counter((at["route"], at["reason"]) for at in self.unit_routes.values())
        lines += [f"{count} units {route}: {reason}" for (route, reason), count in sorted(chosen.items())]
        lines += [
            f"damaged: {count} transfers with {server} since join had a wrong checksum and were repeated: check the "
            "memory and the network interfaces of both hosts"
            for server, count in sorted(self.corrupt_transfers.items())
        ]
        if self.in_place_bytes:
            lines.append(f"in place: {format_size(round(self.in_place_bytes))} of weights read per step")
        lines.append(
            f"memory: gathered weights take at most {format_size(self.peak_gathered_bytes)} of "
            f"{format_size(self.model_bytes)}; {format_size(round(self.freed_bytes))} freed per step"
        )
        return [Text(line) for line in lines]

    def _advice(self) -> list[RenderableType]:
        return [Text(str(bottleneck)) for bottleneck in self.bottlenecks] or [Text("no bottlenecks")]


def make_report(steps: Sequence[StepTimes], setup: MonitoredSetup) -> PerformanceReport:
    """Makes the report of measured steps.

    Args:
        steps: The steps, oldest first.
        setup: Options and sizes of their session.
    """
    return PerformanceReport(
        setup.trainer,
        tuple(steps),
        setup.model_bytes,
        find_bottlenecks(steps, setup),
        setup.routes,
        setup.corrupt_transfers,
    )


# ---- bottlenecks ----


class Severity(enum.IntEnum):
    """How much a bottleneck costs: the share of the step's time, or of the memory, that it takes."""

    LOW = 1
    """10% of the time, or 50% of the memory."""
    MEDIUM = 2
    """25% of the time, or 70% of the memory."""
    HIGH = 3
    """50% of the time, or 85% of the memory."""
    CRITICAL = 4
    """75% of the time, or 95% of the memory."""


_TIME_SHARES = {Severity.CRITICAL: 0.75, Severity.HIGH: 0.5, Severity.MEDIUM: 0.25, Severity.LOW: 0.1}
_MEMORY_SHARES = {Severity.CRITICAL: 0.95, Severity.HIGH: 0.85, Severity.MEDIUM: 0.7, Severity.LOW: 0.5}

_NAMED_SHARE = 0.5
"""A rank is named if it finished last in steps with at least this share of the waiting time."""

_REPEATED_GATHERS = 1.5
"""Gathers per unit and step from which on ``keep_bytes`` is advised. Forward and backward make two."""


_MORE_NETWORK = "Add shard servers on other hosts, or use a faster network between trainers and servers."


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One thing that slows the steps down or takes too much memory."""

    kind: str
    """The ``StepPart`` that takes the time, or ``straggler`` or ``memory``."""
    severity: Severity
    share: float
    """Share of the steps' time, or of the available memory, from 0 to 1."""
    finding: str
    """What was measured, without a full stop."""
    advice: str
    """What to do about it: one sentence."""

    def __str__(self) -> str:
        return f"{self.severity.name.lower()}: {self.finding}. {self.advice}"

    def to_proto(self) -> coordinator_pb2.StepBottleneck:
        return coordinator_pb2.StepBottleneck(
            kind=self.kind,
            severity=self.severity.name.lower(),
            share=self.share,
            finding=self.finding,
            advice=self.advice,
        )


def find_bottlenecks(steps: Sequence[StepTimes], setup: MonitoredSetup) -> tuple[Bottleneck, ...]:
    """Returns the bottlenecks of measured steps, the most severe first. Empty if there are none.

    Args:
        setup: Options and sizes of their session.
    """
    if not steps:
        return ()
    found = [*_time_bottlenecks(steps, setup), *_own_lateness(steps, setup), *_memory_bottlenecks(steps, setup)]
    return tuple(sorted(found, key=lambda bottleneck: (-bottleneck.severity, -bottleneck.share)))


def _severity(share: float, shares: dict[Severity, float]) -> Severity | None:
    return next((severity for severity, least in shares.items() if share >= least), None)


Explanation = tuple[str, str]
"""Finding and advice."""


def _time_bottlenecks(steps: Sequence[StepTimes], setup: MonitoredSetup) -> Iterator[Bottleneck]:
    duration_s = sum(step.duration_s for step in steps)
    for part, explain in _EXPLANATIONS.items():
        seconds = sum(step.parts[part] for step in steps)
        share = min(1.0, seconds / duration_s) if duration_s else 0.0
        if (severity := _severity(share, _TIME_SHARES)) is not None:
            finding, advice = explain(steps, setup) if callable(explain) else explain
            kind = "straggler" if part is StepPart.FINISH_WAIT and _straggler(steps) is not None else part.value
            yield Bottleneck(kind, severity, share, f"{share:.0%} of the step {finding}", advice)


def _gather(steps: Sequence[StepTimes], setup: MonitoredSetup) -> Explanation:
    finding = "is spent waiting for weights to arrive"
    if (advice := _shared_memory_advice(setup) or _overlap_advice(setup)) is not None:
        return finding, advice
    gathers = fmean(step.gather_count for step in steps) / max(1, len(setup.unit_bytes))
    if gathers > _REPEATED_GATHERS and setup.keep_bytes < setup.model_bytes:
        return finding, (
            f"Pass {_option(keep_bytes=setup.model_bytes)}, or less if memory is short: each unit is gathered "
            f"{gathers:.1f} times per step, and kept weights are gathered once."
        )
    if setup.gather_dtype == "float32":
        option = _option(gather_dtype="bfloat16")
        return finding, f"Pass {option}, which halves the bytes and rounds the weights that layers see."
    return finding, _MORE_NETWORK


def _option(**value: object) -> str:
    """Returns the argument of ``join`` that sets one field of ``TransferOptions``."""
    ((name, setting),) = value.items()
    return f"join(transfers=shardwell.TransferOptions({name}={setting!r}))"


def _overlap_advice(setup: MonitoredSetup) -> str | None:
    """Returns advice if the options prevent that a unit arrives while another one computes."""
    if len(setup.unit_bytes) == 1:
        return "Shard the layers as units of their own (auto_wrap), so that a layer arrives while another computes."
    if setup.prefetch_bytes < setup.largest_unit_bytes:
        size = format_size(setup.largest_unit_bytes)
        return (
            f"Pass {_option(prefetch_bytes=setup.largest_unit_bytes)}, the size of the largest unit ({size}), so that "
            "it arrives while the unit before it computes."
        )
    if setup.max_gathers_in_flight == 1:
        return f"Pass {_option(max_gathers_in_flight=0)}, so that the next unit arrives while this one computes."
    return None


def _shared_memory_advice(setup: MonitoredSetup) -> str | None:
    """Returns advice if a server on this host is reached over a stream."""
    local = [address for address, on_this_host in setup.streamed.items() if on_this_host]
    if not local:
        return None
    if "shm" not in setup.transports.split(","):
        option = _option(transports=f"shm,{setup.transports}")
        return f"Pass {option}: the shard server at {local[0]} is on this host."
    return (
        f"Enable shared memory with the shard server at {local[0]}, which is on this host: the log says why the "
        "transport shm could not be opened."
    )


def _update(steps: Sequence[StepTimes], _: MonitoredSetup) -> Explanation:
    updates = [step.facts.previous_update for step in steps if step.facts.previous_update is not None]
    slowest = Counter[str]()
    for update in updates:
        slowest[update.server] += round(1e9 * update.duration_s)
    server = max(slowest, key=lambda name: slowest[name])
    mean_s = fmean(update.duration_s for update in updates)
    return (
        f"is spent waiting for updates of the weights; they take {format_seconds(mean_s)}, and server {server!r} is "
        "mostly the slowest",
        f"Relieve server {server!r}, give the servers more cores, or add shard servers, so that each updates less.",
    )


def _push(_: Sequence[StepTimes], setup: MonitoredSetup) -> Explanation:
    finding = "is spent copying gradients and waiting for their pushes"
    if (advice := _shared_memory_advice(setup)) is not None:
        return finding, advice
    if not setup.streamed:
        return finding, "Push less often: accumulate the gradients of several backwards, or use larger batches."
    if setup.push_dtype == "float32":
        return finding, (
            f"Pass {_option(push_dtype='bfloat16')}, which halves the bytes and rounds the gradients, or accumulate "
            "the gradients of several backwards."
        )
    return finding, _MORE_NETWORK


def _finish(steps: Sequence[StepTimes], _: MonitoredSetup) -> Explanation:
    if (named := _straggler(steps)) is None:
        return (
            "is spent waiting for the work of other trainers, of which different ones finish last",
            "Make batches equally expensive, or use hosts of equal speed.",
        )
    rank, trainer, count = named
    return (
        f"is spent waiting for the work of rank {rank} (trainer {trainer!r}), which finished last in {count} of "
        f"{len(steps)} steps",
        f"Compare the host, the load and the batches of trainer {trainer!r} with the others; its own report says where "
        "its time goes.",
    )


def _straggler(steps: Sequence[StepTimes]) -> tuple[int, str, int] | None:
    """Returns rank, last trainer and number of late steps of the rank that causes most of the waits for other work."""
    waits, counts, trainers = Counter[int](), Counter[int](), dict[int, str]()
    for step in steps:
        last, wait_s = step.facts.last_finished, step.parts[StepPart.FINISH_WAIT]
        if last is not None and wait_s:
            waits[last.global_rank] += round(1e9 * wait_s)
            counts[last.global_rank] += 1
            trainers[last.global_rank] = last.trainer
    if not waits:
        return None
    rank, wait = waits.most_common(1)[0]
    total = sum(step.parts[StepPart.FINISH_WAIT] for step in steps)
    return (rank, trainers[rank], counts[rank]) if wait >= _NAMED_SHARE * 1e9 * total else None


def _commit(steps: Sequence[StepTimes], _: MonitoredSetup) -> Explanation:
    finding = "is spent waiting for gradient norms and commits"
    wait_s = sum(step.parts[StepPart.COMMIT_WAIT] for step in steps)
    record_s = sum(step.facts.record_s for step in steps)
    if record_s >= wait_s / 2:
        return (
            f"{finding}; writing a commit record takes {format_seconds(record_s / len(steps))}",
            "Put the coordinator's state (--state-dir) on a faster disk.",
        )
    return finding, (
        "Give the shard servers more cores, or add servers, so that they add the gradients faster; with steps of a few "
        "milliseconds, use larger batches."
    )


_EXPLANATIONS: dict[StepPart, Explanation | Callable[[Sequence[StepTimes], MonitoredSetup], Explanation]] = {
    StepPart.GATHER_WAIT: _gather,
    StepPart.UPDATE_WAIT: _update,
    StepPart.PUSH: _push,
    StepPart.FINISH_WAIT: _finish,
    StepPart.COMMIT_WAIT: _commit,
    StepPart.OPTIMIZER: (
        "is spent updating optimizer partitions on this trainer",
        "Use an optimizer that runs on the servers (shardwell.optim), which update while the next step begins.",
    ),
    StepPart.PIPELINE_BUBBLE: (
        "is a pipeline bubble: this stage had no micro-batch to compute",
        "Use more micro-batches or an interleaved schedule, and stages of equal cost.",
    ),
    StepPart.DATA: (
        "is spent making batches",
        "Let worker processes make batches ahead: step.batches(..., num_workers=2).",
    ),
    StepPart.BETWEEN_STEPS: (
        "passes between the commit and the next step.batches",
        "Evaluate, log and save weights less often, or in a process that reads the live run (shardwell.attach).",
    ),
}
"""The finding, after "NN% of the step", and the advice for each part but COMPUTE."""


def _own_lateness(steps: Sequence[StepTimes], setup: MonitoredSetup) -> Iterator[Bottleneck]:
    """Yields a bottleneck if the other trainers wait for this one."""
    late = [last for step in steps if (last := step.facts.last_finished) is not None and last.trainer == setup.trainer]
    share = min(1.0, sum(last.late_s for last in late) / sum(step.duration_s for step in steps))
    if (severity := _severity(share, _TIME_SHARES)) is not None:
        ranks = ", ".join(map(str, sorted({last.global_rank for last in late})))
        yield Bottleneck(
            "straggler",
            severity,
            share,
            f"the other trainers wait for this one for {share:.0%} of the step: it (rank {ranks}) finished last in "
            f"{len(late)} of {len(steps)} steps",
            f"Compare the host, the load and the batches of trainer {setup.trainer!r} with the others.",
        )


def _memory_bottlenecks(steps: Sequence[StepTimes], setup: MonitoredSetup) -> Iterator[Bottleneck]:
    peak_bytes = max(step.peak_gathered_bytes for step in steps)
    share = peak_bytes / setup.memory_bytes if peak_bytes < setup.memory_bytes else float(peak_bytes > 0)
    if (severity := _severity(share, _MEMORY_SHARES)) is not None:
        finding = (
            f"gathered weights take {format_size(peak_bytes)} at their peak, {share:.0%} of the memory that is "
            "available to them"
        )
        yield Bottleneck("memory", severity, share, finding, _memory_advice(setup))


def _memory_advice(setup: MonitoredSetup) -> str:
    if setup.keep_bytes:
        option = _option(keep_bytes=setup.keep_bytes // 2)
        return f"Pass {option}, half as much as now: kept weights stay in memory between uses."
    if setup.prefetch_bytes > setup.largest_unit_bytes:
        return (
            f"Pass {_option(prefetch_bytes=setup.largest_unit_bytes)}, the size of the largest unit, instead of "
            f"{setup.prefetch_bytes}."
        )
    return "Split the model into smaller units (auto_wrap, TiledLinear): a unit is gathered as a whole."
