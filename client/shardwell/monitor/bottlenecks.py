"""Finds what slows the steps of a trainer down, how much, and what to do about it.

Pure rules over measured steps, without I/O.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from shardwell.monitor.step_times import MonitoredSetup, StepPart, StepTimes
from shardwell.tables import format_seconds, format_size


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


def find_bottlenecks(steps: Sequence[StepTimes], setup: MonitoredSetup) -> tuple[Bottleneck, ...]:
    """Returns the bottlenecks of measured steps, the most severe first. Empty if there are none.

    Args:
        steps: The steps.
        setup: Options and sizes of their session.
    """
    if not steps:
        return ()
    found = [*_time_bottlenecks(steps, setup), *_own_lateness(steps, setup), *_memory_bottlenecks(steps, setup)]
    return tuple(sorted(found, key=lambda bottleneck: (-bottleneck.severity, -bottleneck.share)))


def _severity(share: float, shares: dict[Severity, float]) -> Severity | None:
    return next((severity for severity, least in shares.items() if share >= least), None)


# ---- time ----

Explanation = tuple[str, str]
"""Finding and advice."""


def _time_bottlenecks(steps: Sequence[StepTimes], setup: MonitoredSetup) -> Iterator[Bottleneck]:
    duration_s = sum(step.duration_s for step in steps)
    for part, explain in _EXPLANATIONS.items():
        seconds = sum(step.parts[part] for step in steps)
        share = min(1.0, seconds / duration_s) if duration_s else 0.0
        if (severity := _severity(share, _TIME_SHARES)) is not None:
            finding, advice = explain(steps, setup)
            yield Bottleneck(_kind(part, steps), severity, share, f"{share:.0%} of the step {finding}", advice)


def _kind(part: StepPart, steps: Sequence[StepTimes]) -> str:
    return "straggler" if part is StepPart.FINISH_WAIT and _straggler(steps) is not None else part.value


def _gather(steps: Sequence[StepTimes], setup: MonitoredSetup) -> Explanation:
    return "is spent waiting for weights to arrive", _gather_advice(steps, setup)


def _gather_advice(steps: Sequence[StepTimes], setup: MonitoredSetup) -> str:
    if (advice := _shared_memory_advice(setup) or _overlap_advice(setup)) is not None:
        return advice
    gathers = fmean(step.gather_count for step in steps) / max(1, len(setup.unit_bytes))
    if gathers > _REPEATED_GATHERS and setup.keep_bytes < setup.model_bytes:
        return (
            f"Pass {_option(keep_bytes=setup.model_bytes)}, or less if memory is short: each unit is gathered "
            f"{gathers:.1f} times per step, and kept weights are gathered once."
        )
    if setup.gather_dtype == "float32":
        option = _option(gather_dtype="bfloat16")
        return f"Pass {option}, which halves the bytes and rounds the weights that layers see."
    return "Add shard servers on other hosts, or use a faster network between trainers and servers."


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
    return finding, "Add shard servers on other hosts, or use a faster network between trainers and servers."


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


def _optimizer(_: Sequence[StepTimes], __: MonitoredSetup) -> Explanation:
    return (
        "is spent updating optimizer partitions on this trainer",
        "Use an optimizer that runs on the servers (shardwell.optim), which update while the next step begins.",
    )


def _bubble(_: Sequence[StepTimes], __: MonitoredSetup) -> Explanation:
    return (
        "is a pipeline bubble: this stage had no micro-batch to compute",
        "Use more micro-batches or an interleaved schedule, and stages of equal cost.",
    )


def _data(_: Sequence[StepTimes], __: MonitoredSetup) -> Explanation:
    return (
        "is spent making batches",
        "Prepare batches in advance, in worker processes or in memory, so that step.batches only has to pick them up.",
    )


def _between(_: Sequence[StepTimes], __: MonitoredSetup) -> Explanation:
    return (
        "passes between the commit and the next step.batches",
        "Evaluate, log and save weights less often, or in a process that reads the live run (shardwell.attach).",
    )


_EXPLANATIONS: dict[StepPart, Callable[[Sequence[StepTimes], MonitoredSetup], Explanation]] = {
    StepPart.GATHER_WAIT: _gather,
    StepPart.UPDATE_WAIT: _update,
    StepPart.PUSH: _push,
    StepPart.FINISH_WAIT: _finish,
    StepPart.COMMIT_WAIT: _commit,
    StepPart.OPTIMIZER: _optimizer,
    StepPart.PIPELINE_BUBBLE: _bubble,
    StepPart.DATA: _data,
    StepPart.BETWEEN_STEPS: _between,
}
"""Returns the finding, after "NN% of the step", and the advice for each part but COMPUTE."""


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


# ---- memory ----


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
