"""Tests for the arithmetic and the tables of the benchmarks."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from benchmarks import report, sampling, workers
from benchmarks.report import Chart, Summary

NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 1234567     100    0    0    0     0          0         0  1234567     100    0    0    0     0       0          0
  eth0:998       7    0    0    0     0          0         0      555       5    0    0    0     0       0          0
"""  # noqa: E501 (output of the kernel)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], Summary(3.0, 3.0, 3.0, 1)),
        ([2.0, 1.0], Summary(1.5, 1.25, 1.75, 2)),
        ([5.0, 1.0, 3.0, 2.0, 4.0], Summary(3.0, 2.0, 4.0, 5)),
    ],
)
def test_summarize_returns_median_and_quartiles(values: list[float], expected: Summary) -> None:
    assert report.summarize(values) == expected


def test_summarize_rejects_empty_sample() -> None:
    with pytest.raises(ValueError, match="cannot summarize an empty sample"):
        report.summarize([])


def test_inverse_swaps_the_quartiles() -> None:
    assert Summary(2.0, 1.0, 4.0, 9).inverse(8.0) == Summary(4.0, 2.0, 8.0, 9)


def test_ratio_divides_medians_and_is_absent_without_base() -> None:
    fast, slow = Summary(1.0, 0.0, 9.0, 3), Summary(4.0, 3.0, 5.0, 3)
    assert report.ratio(fast, slow) == "0.25"
    assert report.ratio(fast, None) == report.ratio(None, slow) == report.spread(None) == report.ABSENT


def test_table_aligns_numbers_and_escapes_text() -> None:
    table = report.to_table(["mode", "ms"], [["a|b", "1.5"], report.failure_row("c", "no transport", 2)])
    assert table == "| mode | ms |\n| --- | --: |\n| a\\|b | 1.5 |\n| c: failed (no transport) | - |"


def test_table_rejects_row_of_another_length() -> None:
    with pytest.raises(ValueError, match="has 1 cells, the header 2"):
        report.to_table(["mode", "ms"], [["plain"]])


def test_report_writes_json_markdown_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    parser = argparse.ArgumentParser()
    report.add_arguments(parser, name="example")
    document = report.Report(parser.parse_args(["--results", str(tmp_path)]), title="A title")
    chart = Chart(axis="ms", bars={"a": Summary(2.0, 1.0, 4.0, 3)}, lines={"roof": 1.5})
    document.write(results={"rows": [1, 2]}, sections=["text"], chart=chart)
    document = json.loads((tmp_path / "example.json").read_text())
    assert (document["title"], document["rows"]) == ("A title", [1, 2])
    assert document["machine"]["cores"] == os.cpu_count()
    markdown = (tmp_path / "example.md").read_text()
    assert markdown.startswith("# A title\n\n")
    assert markdown.endswith("\n\ntext\n")
    assert capsys.readouterr().out == markdown
    assert (tmp_path / "example.png").read_bytes().startswith(b"\x89PNG")


def test_command_line_omits_directory_of_interpreter() -> None:
    argv = ["/somewhere/bin/python3.11", "-m", "benchmarks.transports", "--name", "a b"]
    assert report.command_line(argv) == "python -m benchmarks.transports --name 'a b'"


def test_cpu_name_is_parsed_from_cpuinfo() -> None:
    assert report.parse_cpu_name("processor\t: 0\nmodel name\t: AMD EPYC\nmodel name\t: other\n") == "AMD EPYC"
    assert report.parse_cpu_name("processor\t: 0\n") == ""


def test_received_bytes_are_parsed_per_interface() -> None:
    assert sampling.parse_received_bytes(NET_DEV, "lo") == 1234567
    assert sampling.parse_received_bytes(NET_DEV, "eth0") == 998
    with pytest.raises(ValueError, match="no interface 'eth1'"):
        sampling.parse_received_bytes(NET_DEV, "eth1")


def test_sampling_reports_memory_peak_and_cpu_time_of_this_process() -> None:
    with sampling.PeakMemory([os.getpid()]) as memory:
        pass
    peak = memory.peaks[os.getpid()]
    assert 0 < peak.uss_bytes <= peak.rss_bytes
    assert sampling.cpu_seconds([os.getpid()]) > 0


def test_interleave_rotates_groups_and_drops_failed_group() -> None:
    events: list[str] = []

    def measure(name: str, group: workers.Group) -> None:
        events.append(name)
        if name == "b":
            raise workers.WorkerFailedError("a worker ended: why\nmore")

    def start() -> workers.GroupContext:
        return workers.start_group("no.module", [])

    failures = workers.interleave(
        {"a": start, "b": start, "c": start},
        rounds=3,
        resident=True,
        warm_up=lambda name, group: events.append(f"start {name}"),
        measure=measure,
    )
    assert failures == {"b": "a worker ended: why"}
    assert events == ["start a", "a", "start b", "b", "start c", "c", "c", "a", "c", "a"]


@pytest.mark.parametrize(("resident", "starts"), [(True, 1), (False, 3)])
def test_interleave_restarts_groups_for_every_turn_unless_resident(resident: bool, starts: int) -> None:
    started: list[str] = []
    workers.interleave(
        {"a": lambda: workers.start_group("no.module", [])},
        rounds=3,
        resident=resident,
        warm_up=lambda name, group: started.append(name),
        measure=lambda name, group: None,
    )
    assert len(started) == starts
