"""The rules by which the performance monitor finds bottlenecks, and its report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from shardwell.monitor.report import Bottleneck, Severity, find_bottlenecks, make_report
from shardwell.monitor.step_times import CommitFacts, LastFinished, MonitoredSetup, ServerUpdate, StepPart, StepTimes

MB = 1_000_000
SETUP = MonitoredSetup(
    trainer="me",
    transports="shm,socket,grpc",
    streamed={"far:1": False},
    gather_dtype="float32",
    push_dtype="float32",
    prefetch_bytes=100 * MB,
    keep_bytes=0,
    max_gathers_in_flight=0,
    unit_bytes=(10 * MB, 30 * MB),
    memory_bytes=1000 * MB,
)


def step(number: int = 1, *, last: LastFinished | None = None, facts: CommitFacts | None = None, **parts: float) -> Any:
    """Returns a step of 1 s."""
    seconds = {StepPart(name): value for name, value in parts.items()}
    return StepTimes(
        step=number,
        duration_s=1.0,
        parts={
            **dict.fromkeys(StepPart, 0.0),
            StepPart.COMPUTE: 1.0 - sum(seconds.values()),
            **seconds,
        },
        facts=facts or CommitFacts(last_finished=last),
        received_bytes={"socket": 4000},
        sent_bytes={"socket": 2000},
        in_place_bytes=0,
        gather_count=2,
        push_count=2,
        peak_gathered_bytes=40 * MB,
        freed_bytes=40 * MB,
        tokens=100,
        samples=8,
    )


def only(*steps: StepTimes, setup: MonitoredSetup = SETUP) -> Bottleneck:
    (found,) = find_bottlenecks(steps, setup)
    return found


def assert_found(text: str, pattern: str) -> None:
    assert re.search(pattern, text), text


FACTS = {"update_wait": CommitFacts(previous_update=ServerUpdate("s1", 2.0))}


@pytest.mark.parametrize(
    ("share", "severity"),
    [
        (0.09, None),
        (0.1, Severity.LOW),
        (0.24, Severity.LOW),
        (0.25, Severity.MEDIUM),
        (0.5, Severity.HIGH),
        (0.74, Severity.HIGH),
        (0.75, Severity.CRITICAL),
    ],
)
@pytest.mark.parametrize("part", [part for part in StepPart if part is not StepPart.COMPUTE])
def test_severity_is_the_share_of_the_steps_time(part: StepPart, share: float, severity: Severity | None) -> None:
    found = find_bottlenecks([step(facts=FACTS.get(part.value), **{part.value: share})], SETUP)
    assert [(each.kind, each.severity) for each in found] == ([] if severity is None else [(part.value, severity)])
    for each in found:
        assert each.share == pytest.approx(share)
        assert each.advice.endswith(".") and each.finding.startswith(f"{share:.0%} of the step")


def test_compute_is_no_bottleneck() -> None:
    assert find_bottlenecks([step()], SETUP) == ()
    assert find_bottlenecks([], SETUP) == ()


def test_share_is_that_of_all_steps_and_the_worst_comes_first() -> None:
    found = find_bottlenecks([step(gather_wait=0.2, push=0.1), step(gather_wait=0.0, push=0.7)], SETUP)
    assert [(each.kind, each.severity.name) for each in found] == [("push", "MEDIUM"), ("gather_wait", "LOW")]


@pytest.mark.parametrize(
    ("setup", "advice"),
    [
        ({"streamed": {"here:1": True}, "transports": "socket,grpc"}, "transports='shm,socket,grpc'.* here:1"),
        ({"streamed": {"here:1": True}}, "Enable shared memory .* here:1"),
        ({"unit_bytes": (40 * MB,)}, "auto_wrap"),
        ({"prefetch_bytes": 20 * MB}, f"prefetch_bytes={30 * MB}"),
        ({"max_gathers_in_flight": 1}, "max_gathers_in_flight=0"),
        ({}, "gather_dtype='bfloat16'"),
        ({"gather_dtype": "bfloat16"}, "faster network"),
    ],
)
def test_advice_about_gathers(setup: dict[str, Any], advice: str) -> None:
    found = only(step(gather_wait=0.5), setup=replace(SETUP, **setup))
    assert found.kind == "gather_wait"
    assert_found(found.advice, advice)


def test_weights_that_are_gathered_twice_per_step_may_be_kept() -> None:
    twice = replace(step(gather_wait=0.5), gather_count=4)
    assert_found(only(twice).advice, rf"keep_bytes={40 * MB}.*: each unit is gathered 2\.0 times")
    assert "keep_bytes" not in only(twice, setup=replace(SETUP, keep_bytes=40 * MB)).advice


@pytest.mark.parametrize(
    ("setup", "advice"),
    [
        ({"streamed": {"here:1": True}, "transports": "socket,grpc"}, "transports='shm,socket,grpc'"),
        ({"streamed": {}}, "larger batches"),
        ({}, "push_dtype='bfloat16'"),
        ({"push_dtype": "int8"}, "faster network"),
    ],
)
def test_advice_about_pushes(setup: dict[str, Any], advice: str) -> None:
    assert_found(only(step(push=0.5), setup=replace(SETUP, **setup)).advice, advice)


def test_slowest_server_is_named() -> None:
    facts = [CommitFacts(previous_update=ServerUpdate(name, s)) for name, s in (("s1", 1.0), ("s1", 1.0), ("s2", 1.9))]
    found = only(*(step(update_wait=0.8, facts=each) for each in facts))
    assert (found.kind, found.severity) == ("update_wait", Severity.CRITICAL)
    assert_found(found.finding, r"they take 1\.30 s, and server 's1' is mostly the slowest")
    assert_found(found.advice, "Relieve server 's1'")


def test_straggler_is_named() -> None:
    steps = [step(finish_wait=0.7, last=LastFinished(3, "slow", 0.7)) for _ in range(3)]
    steps.append(step(finish_wait=0.2, last=LastFinished(2, "other", 0.2)))
    found = only(*steps)
    assert (found.kind, found.severity) == ("straggler", Severity.HIGH)
    assert_found(found.finding, r"rank 3 \(trainer 'slow'\), which finished last in 3 of 4 steps")
    assert_found(found.advice, "trainer 'slow'")


def test_nobody_is_named_if_different_ranks_finish_last() -> None:
    found = only(*(step(finish_wait=0.4, last=LastFinished(rank, f"t{rank}", 0.4)) for rank in range(3)))
    assert (found.kind, found.severity) == ("finish_wait", Severity.MEDIUM)
    assert_found(found.finding, "different ones finish last")


def test_trainer_learns_that_the_others_wait_for_it() -> None:
    steps = [step(last=LastFinished(1, "me", 0.6)), step(last=LastFinished(0, "other", 0.1))]
    found = only(*steps)
    assert (found.kind, found.severity, found.share) == ("straggler", Severity.MEDIUM, pytest.approx(0.3))
    assert_found(found.finding, r"\(rank 1\) finished last in 1 of 2 steps")


@pytest.mark.parametrize(("record_s", "advice"), [(0.4, "faster disk"), (0.1, "shard servers more cores")])
def test_advice_about_commits(record_s: float, advice: str) -> None:
    assert_found(only(step(commit_wait=0.6, facts=CommitFacts(record_s=record_s))).advice, advice)


@pytest.mark.parametrize(
    ("memory_bytes", "severity"),
    [(81 * MB, None), (80 * MB, "LOW"), (50 * MB, "MEDIUM"), (45 * MB, "HIGH"), (41 * MB, "CRITICAL")],
)
def test_memory_is_compared_with_what_is_available(memory_bytes: int, severity: str | None) -> None:
    found = find_bottlenecks([step()], replace(SETUP, memory_bytes=memory_bytes))
    assert [(each.kind, each.severity.name) for each in found] == ([] if severity is None else [("memory", severity)])


@pytest.mark.parametrize(
    ("setup", "advice"),
    [
        ({"keep_bytes": 6}, "keep_bytes=3.*half as much"),
        ({}, f"prefetch_bytes={30 * MB}.* instead of {100 * MB}"),
        ({"prefetch_bytes": 0}, "smaller units"),
    ],
)
def test_advice_about_memory(setup: dict[str, Any], advice: str) -> None:
    assert_found(only(step(), setup=replace(SETUP, memory_bytes=40 * MB, **setup)).advice, advice)


def test_report_as_data_and_text() -> None:
    found = make_report([step(4, gather_wait=0.5), step(5, gather_wait=0.5)], SETUP)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["parts"]["gather_wait"] == data["parts"]["compute"] == 0.5
    assert sum(data["parts"].values()) == data["step_s"] == 1.0
    assert (data["tokens_per_s"], data["samples_per_s"], data["num_steps"]) == (100.0, 8.0, 2)
    assert (data["received_bytes"], data["sent_bytes"]) == ({"socket": 4000.0}, {"socket": 2000.0})
    assert (data["peak_gathered_bytes"], data["freed_bytes"], data["model_bytes"]) == (40 * MB, 40 * MB, 40 * MB)
    assert [(each["kind"], each["severity"]) for each in data["bottlenecks"]] == [("gather_wait", "high")]
    assert [(each["step"], each["parts"]["gather_wait"]) for each in data["steps"]] == [(4, 0.5), (5, 0.5)]
    lines = str(found).splitlines()
    assert lines[0] == "trainer 'me', steps 4 to 5: 1.00 s per step, 100.0 tokens/s, 8.0 samples/s"
    assert any(line.split() == ["gather", "wait", "500.0", "ms", "50.0%"] for line in lines), lines
    assert "socket: 3.9 KiB received and 2.0 KiB sent per step" in lines
    words = " ".join(str(found).split())
    assert "high: 50% of the step is spent waiting for weights to arrive. Pass join(transfers=" in words


def test_report_without_steps_says_what_to_do() -> None:
    found = make_report([], SETUP)
    assert found.step_s == found.tokens_per_s == 0.0
    assert json.dumps(found.to_dict())
    assert "commit another one" in str(found)
