"""The inspection commands, against a real cluster."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell.command import inspect_commands
from shardwell.command.cli import main
from tests.support.cluster import build_model, small_run, wait_until


@pytest.fixture(scope="module")
def run(cluster: shardwell.LocalCluster) -> Iterator[str]:
    with small_run(cluster.address, "inspected", steps=2):
        yield "inspected"


@pytest.fixture
def show(cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]) -> object:
    def command(*arguments: str) -> str:
        code = main([*arguments, "--address", cluster.address])
        output = capsys.readouterr()
        assert code == 0, output.err
        return output.out

    return command


def test_runs_command_lists_runs(show, run) -> None:
    line = next(line for line in show("runs").splitlines() if line.startswith(run))
    assert line.split()[:3] == [run, "running", "2"], "name, status and step"
    assert "1 of 1" in line and "1 x 1 x 1" in line and "tester on here" in line


def test_run_command_describes_a_run(show, run) -> None:
    output = show("run", run)
    assert "tester" in output and "here" in output and "leased" in output
    assert "last committed step: adamw, gradient norm" in output and "lr=0.01" in output


def test_run_transports_shows_reported_transports(show, cluster: shardwell.LocalCluster) -> None:
    with small_run(cluster.address, "transports", steps=1) as session:
        transports = {
            transport["server"]: (transport["transport"], transport["bytes_per_s"])
            for transport in session.transports()
        }
        assert transports
        wait_until(lambda: "TRANSPORT" in show("run", "transports"), "a heartbeat reports the transports")
        (trainer,) = json.loads(show("run", "transports", "--json"))["trainers"]
        rows = [line.split() for line in show("run", "transports").splitlines()]
    addresses = {server.name: server.address for server in cluster.shards}
    for transport in trainer["transports"]:
        kind, bytes_per_s = transports.pop(transport["address"])
        assert transport["kind"] == f"TRANSPORT_KIND_{kind.upper()}"
        assert transport["bytes_per_s"] == round(bytes_per_s) > 0
        assert addresses[transport["server_id"]] == transport["address"]
        assert ["tester", transport["server_id"], kind] in [row[:3] for row in rows]
    assert not transports


def test_world_command_shows_the_world_of_a_run(show, run) -> None:
    output = show("world", run)
    assert "World(dp=1, tp=1, pp=1): 1 rank\n" in output and "tester" in output


def test_world_command_shows_a_hypothetical_world(show) -> None:
    rows = [line.split() for line in show("world", "--dp", "2", "--tp", "2", "--pp", "2").splitlines()]
    places = {row[0]: row[1:4] for row in rows if row and row[0].isdigit()}
    assert len(places) == 8
    assert places["3"] == ["0", "1", "1"] and places["5"] == ["1", "0", "1"]


def test_units_command_lists_units_and_shards(show, run) -> None:
    version, _, *lines = show("units", run).splitlines()
    assert version == "version 2"
    rows = [line.split(maxsplit=7) for line in lines]
    assert {(row[0], row[1], row[2], row[3]) for row in rows} == {
        ("0", "first", "2", "1,152"),
        ("1", "rest", "2", "65"),
    }
    # The placement depends on the other runs of the cluster.
    assert all(row[6] in ("shard-0", "shard-1") for row in rows)
    for unit, size in (("0", 4608), ("1", 320)):
        ranges = [re.findall(r"\d+", row[7].replace(",", ""))[:2] for row in rows if row[0] == unit]
        assert ranges[0][0] == "0" and ranges[-1][1] == str(size)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))


def test_servers_command_lists_servers(show, run) -> None:
    lines = show("servers").splitlines()
    assert [line.split()[0] for line in lines if line.startswith("shard-")] == ["shard-0", "shard-1"]
    assert all("live" in line for line in lines if line.startswith("shard-"))


def test_stall_command_explains_a_stall(show, run) -> None:
    assert show("stall", run).startswith("step 2: ")


def test_events_command_lists_events(show, run) -> None:
    assert "step_committed" in show("events", "--run", run, "--duration", "0.2")


def test_peek_joins_the_shards_of_all_servers(show, run) -> None:
    output = show("peek", run, "first.weight", "--count", "3")
    assert "first.weight: 1,088 elements, norm" in output
    pieces = [json.loads(line) for line in show("peek", run, "first.weight", "--json").splitlines()]
    assert sum(int(piece["peek"]["stop_element"]) - int(piece["peek"]["start_element"]) for piece in pieces) == 1088


def test_peek_shows_optimizer_state(show, run) -> None:
    assert "first.weight" in show("peek", run, "first.weight", "--source", "exp_avg")


def test_json_option_prints_json(show, run) -> None:
    summaries = {summary["run"]: summary for summary in json.loads(show("runs", "--json"))["runs"]}
    assert summaries[run]["committed_step"] == "2"


FIELDS = {
    "status": {"shardwell_version", "term", "servers", "runs", "problems"},
    "top --once RUN": {"run", "cluster", "performance"},
    "report RUN": {"committed_step", "commit_interval_s", "trainers", "logged", "tokens_per_s", "samples_per_s"},
    "runs": {"runs"},
    "run RUN": {"summary", "trainers", "work", "grad_norm", "optimizer", "checkpoints"},
    "world RUN": {"world", "world_size", "rank_assignments", "replicas", "ended"},
    "readers RUN": {"newest", "readers"},
    "units RUN": {"units", "version", "placement"},
    "servers": {"servers", "coordinator_insecure"},
    "stall RUN": {"step", "phase", "phase_s", "waiting_for"},
    "events --duration 0.2": {"time", "kind", "run", "message"},
    "peek RUN first.weight": {"server_id", "peek"},
}
"""Fields of what ``-o json`` prints."""


@pytest.mark.parametrize("command", FIELDS)
def test_every_command_prints_json(show, run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command.replace("RUN", run).split()
    if words[0] == "status":  # other tests damage the cluster's runs
        monkeypatch.setattr(inspect_commands, "DEGRADED", 0)
    printed = show(*words, "-o", "json")
    documents = [json.loads(line) for line in printed.splitlines()] if printed[1] != "\n" else [json.loads(printed)]
    assert all(set(document) == FIELDS[command] for document in documents) and documents
    assert all(line and not line.isspace() for line in show(*words, "-o", "wide").splitlines() if line)


def test_every_inspection_command_has_formats(capsys: pytest.CaptureFixture[str]) -> None:
    tested = {command.split()[0] for command in FIELDS} | {"delete-run", "forget-server"}
    assert tested == {command.name for command in inspect_commands._COMMANDS}


def test_status_is_0_when_healthy_and_3_when_backups_are_missing(
    cluster: shardwell.LocalCluster, run_name: str, show, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_run(cluster.address, run_name):
        asked = ["status", run_name, "--address", cluster.address]
        wait_until(lambda: main(asked) == 0, "the servers of the cluster, which other tests restart, are all right")
        capsys.readouterr()
        assert show("status", run_name).startswith("healthy\n")
    (health,) = json.loads(show("status", run_name, "-o", "json"))["runs"]
    summary = health["summary"]
    assert summary["status"] == "RUN_STATUS_FINISHED" and summary["step_s"] > 0
    assert (summary["created_by"], summary["created_on"]) == ("tester", "here")
    assert "finished" in next(line for line in show("runs").splitlines() if line.startswith(run_name))
    show("backups", run_name, "2")  # two servers have room for one backup of each shard
    assert main(["status", run_name, "--address", cluster.address]) == 3
    shown = capsys.readouterr().out
    assert shown.startswith("degraded\n") and "missing or not in sync" in shown
    show("delete-run", run_name)


INTERRUPTIBLE = """
import signal, sys
from shardwell.command.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, the signal is ignored
sys.exit(main(sys.argv[1:]))
"""


def test_watching_redraws_a_terminal_until_ctrl_c(cluster: shardwell.LocalCluster, run: str) -> None:
    reader, writer = pty.openpty()
    command = [sys.executable, "-c", INTERRUPTIBLE, "top", run, "--watch", "0.1", "--address", cluster.address]
    process = subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer)
    try:
        os.close(writer)
        shown = ""
        while shown.count("Ctrl-C ends") < 3:
            shown += os.read(reader, 65536).decode()
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal ends with the process
            while data := os.read(reader, 65536):
                shown += data.decode()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(20)
        os.close(reader)
    assert "Traceback" not in shown and "\x1b[1A" in shown, "the cursor moves up to draw again"
    assert f"run {run}: " in shown and "computing" in shown


def test_error_names_an_unknown_run(cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nobody", "--address", cluster.address]) == 1
    assert "nobody" in capsys.readouterr().err


def test_address_of_a_shard_server_is_rejected(
    cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--address", cluster.shards[0].address]) == 1
    assert "check that the address belongs to the right kind of server" in capsys.readouterr().err


def test_error_names_an_unknown_parameter(
    cluster: shardwell.LocalCluster, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peek", run, "absent.weight", "--address", cluster.address]) == 1
    assert "absent.weight" in capsys.readouterr().err


def test_deleting_a_live_run_needs_force(
    cluster: shardwell.LocalCluster, run_name: str, capsys: pytest.CaptureFixture[str], show
) -> None:
    with small_run(cluster.address, run_name):
        assert main(["delete-run", run_name, "--address", cluster.address]) == 1
        assert run_name in capsys.readouterr().err
        assert f"deleted run '{run_name}'" in show("delete-run", run_name, "--force")
    assert run_name not in show("runs")


def check_trace(events: list[dict[str, Any]]) -> None:
    """Checks the trace of the steps of one trainer: parts follow each other and fill their step."""
    names = {event["name"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"process_name": "run reported", "thread_name": "tester (ranks 0)"}
    steps = [event for event in events if event.get("cat") == "step"]
    assert steps and len(steps) <= 2
    for step in steps:
        stop = step["ts"] + step["dur"]
        parts = [event for event in events if event.get("cat") == "part" and step["ts"] <= event["ts"] < stop]
        assert sum(part["dur"] for part in parts) == pytest.approx(step["dur"])
        assert "compute" in [part["name"] for part in parts] and abs(stop / 1e6 - time.time()) < 600
        assert all(before["ts"] + before["dur"] <= after["ts"] + 1 for before, after in pairwise(parts))


def test_report_command_shows_where_the_time_goes(show, cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    with shardwell.join(cluster.address, run="reported", trainer="tester") as session:
        model = build_model()
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
        assert "no step is measured yet" in show("report", "reported")
        for step in session.steps(6):
            for inputs in step.batches(lambda *_: torch.ones(3, 17)):
                loss = model(inputs).sum()
                loss.backward()
                step.log(loss=step.number)
                session.count(tokens=3)
                time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
        wait_until(lambda: "no step is measured" not in show("report", "reported"), "a heartbeat with a report")
        answer = json.loads(show("report", "reported", "--json", "--logged", "2"))
        output = show("report", "reported", "--logged", "2")
        assert f": {tmp_path}/t.json, to be" in show("trace", "reported", "--steps", "2", "-o", f"{tmp_path}/t.json")
    check_trace(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    (trainer,) = answer["trainers"]
    report = trainer["report"]
    assert report["step_s"] == pytest.approx(sum(report["part_s"].values()))
    assert report["part_s"]["compute"] > 0.02 and answer["tokens_per_s"] == report["tokens_per_s"] > 0
    assert [each["means"] for each in answer["logged"]] == [{"loss": 4.0}, {"loss": 5.0}]
    assert re.search(r"^step 6, \S+ m?s from commit to commit, [\d.]+ tokens/s$", output, re.MULTILINE)
    assert re.search(r"^tester +0 +1 to \d .*compute \d+%", output, re.MULTILINE)
    assert output.endswith("step 4: loss 4\nstep 5: loss 5\n")
