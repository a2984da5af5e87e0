"""The two commands without a cluster: help, errors, tables, and the environment of launched trainers."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import shardwell
from shardwell.command import cli
from shardwell.command import inspect_tables as tables
from shardwell.command.cli import build_parser, main
from shardwell.command.inspect_commands import to_json
from shardwell.command.inspect_tables import ParameterPiece
from shardwell.processes import launch
from shardwell.processes.launch import describe_exit
from shardwell.tables import format_size
from shardwell_server import cli as server_cli
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2


def text(renderable: object) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def commands(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions if isinstance(action.choices, dict) for name in action.choices]


@pytest.mark.parametrize("command", commands(build_parser()))
def test_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"\n  shardwell {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", commands(server_cli.build_parser()))
def test_every_server_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        server_cli.main([command, "--help"])
    assert f"usage: shardwell-server {command}" in capsys.readouterr().out


def test_coordinator_command_does_not_import_torch() -> None:
    load = "from shardwell_server.cli import build_parser; build_parser('coordinator')"
    program = f"import sys; {load}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_absent_coordinator_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--address", "127.0.0.1:1", "--timeout", "2"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("shardwell runs: no answer from a coordinator at 127.0.0.1:1 (")
    assert "refused" in error and "SHARDWELL_ADDRESS" in error


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":50051", "http://localhost:50051", "a:0", "a:65536"])
def test_invalid_address_is_rejected_at_once(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"{address!r} is not an address: expected HOST:PORT, such as localhost:50051"
    assert main(["runs", "--address", address]) == 1
    assert capsys.readouterr().err == f"shardwell runs: {expected}\n"
    assert server_cli.main(["health", address]) == 1
    assert expected in capsys.readouterr().err
    with pytest.raises(shardwell.UsageError, match=re.escape(expected)):
        shardwell.join(address)
    with pytest.raises(shardwell.UsageError, match=re.escape(expected)):
        plan(tmp_path, "--coordinator", address)


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf", "nan"])
def test_timeout_must_be_positive_and_finite(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["runs"], ["export", "gpt", "out"]):
        with pytest.raises(SystemExit, match="2"):
            main([*command, "--timeout", seconds])
        assert f"expected seconds, more than 0, got {seconds!r}" in capsys.readouterr().err


def test_ctrl_c_prints_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwell.transport.service_client.CoordinatorClient.call", interrupted)
    assert main(["runs", "--address", "127.0.0.1:1"]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_while_torch_is_imported_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupt)
    assert main(["convert-checkpoint", "a", "b"]) == cli.INTERRUPTED


def test_exit_code_reports_an_unhealthy_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert server_cli.main(["health", "127.0.0.1:1", "--timeout", "0.5"]) == 1
    assert "127.0.0.1:1: UNAVAILABLE" in capsys.readouterr().err


def test_world_command_requires_a_run_or_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["world", "--address", "127.0.0.1:1"]) == 1
    assert "--dp, --cp, --tp and --pp" in capsys.readouterr().err


def plan(tmp_path: Path, *options: str) -> launch.LaunchPlan:
    script = tmp_path / "train.py"
    script.touch()
    return launch.make_plan(build_parser().parse_args(["launch", *options, str(script), "--its-own"]))


def test_default_world_fits_the_number_of_trainers(tmp_path: Path) -> None:
    made = plan(tmp_path, "--num-trainers", "8", "--tp", "2", "--pp", "2")
    assert (made.world, made.run, made.command[2:]) == (World(dp=2, tp=2, pp=2), "train", ("--its-own",))


def test_trainers_get_the_sizes_of_all_axes(tmp_path: Path) -> None:
    made = plan(tmp_path, "--num-trainers", "8", "--cp", "2", "--pp", "2")
    assert made.world == World(dp=2, cp=2, pp=2)
    environment = made.environment("t", "a:1", {})
    assert [environment[f"SHARDWELL_{axis}"] for axis in ("DP", "CP", "TP", "PP")] == ["2", "2", "1", "2"]
    with pytest.raises(shardwell.UsageError, match="--num-trainers 3 is not a multiple of cp=2 x tp=1 x pp=1"):
        plan(tmp_path, "--num-trainers", "3", "--cp", "2")


def test_number_of_trainers_that_does_not_fit_the_axes_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(shardwell.UsageError, match="--num-trainers 3 is not a multiple of tp=2 x pp=1"):
        plan(tmp_path, "--num-trainers", "3", "--tp", "2")


@pytest.mark.parametrize("option", ["--num-trainers", "--num-shards", "--dp", "--cp", "--tp", "--pp"])
def test_counts_must_be_positive(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan(tmp_path, option, "0")
    assert f"argument {option}: expected a positive integer, got '0'" in capsys.readouterr().err


@pytest.mark.parametrize(("num_trainers", "dp", "min_trainers"), [(2, 2, "2"), (2, 4, "2"), (3, 2, "2")])
def test_min_trainers_is_limited_to_the_launched_trainers(num_trainers: int, dp: int, min_trainers: str) -> None:
    made = launch.LaunchPlan(command=("x",), run="r", num_trainers=num_trainers, world=World(dp=dp))
    environment = made.environment("t", "a:1", {"PATH": "p", "SHARDWELL_RUN": "other", "OMP_NUM_THREADS": "4"})
    assert environment["SHARDWELL_MIN_TRAINERS"] == min_trainers
    assert (environment["PATH"], environment["SHARDWELL_RUN"], environment["OMP_NUM_THREADS"]) == ("p", "r", "4")


def test_trainers_get_numbers_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def environments(*options: str) -> list[tuple[str, str | None]]:
        made = plan(tmp_path, "--num-trainers", "2", *options)
        inherited = {"LOCAL_RANK": "9", **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
        found = [made.environment("t", "a:1", inherited, local_rank=index) for index in range(2)]
        return [(each["LOCAL_RANK"], each.get("CUDA_VISIBLE_DEVICES")) for each in found]

    monkeypatch.setattr(launch, "_count_gpus", lambda: 4)
    visible: str | None = None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environments() == [("0", None), ("1", None)]
    assert environments("--gpus-per-trainer", "2") == [("0", "0,1"), ("0", "2,3")]
    with pytest.raises(shardwell.UsageError, match=r"--gpus-per-trainer 3 with 2 trainers needs 6 GPUs, and .* has 4$"):
        environments("--gpus-per-trainer", "3")
    visible = "GPU-a,GPU-b,GPU-c"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environments() == [("0", visible), ("1", visible)]
    assert environments("--gpus-per-trainer", "1") == [("0", "GPU-a"), ("0", "GPU-b")]
    with pytest.raises(shardwell.UsageError, match=r"has 3 \(CUDA_VISIBLE_DEVICES=GPU-a,GPU-b,GPU-c\)"):
        environments("--gpus-per-trainer", "2")


def test_exit_codes_are_described() -> None:
    assert [describe_exit(code) for code in (3, 137, 255)] == [
        "ended with exit code 3",
        "ended by SIGKILL",
        "ended with exit code 255",
    ]


@pytest.mark.parametrize(("count", "expected"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB")])
def test_format_size(count: int, expected: str) -> None:
    assert format_size(count) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(0.04, "0.0 s"), (119, "119.0 s"), (120, "2 min"), (90000, "25 h")])
def test_format_duration(seconds: float, expected: str) -> None:
    assert tables.duration(seconds) == expected


def test_empty_cluster_prints_no_table() -> None:
    assert tables.runs(coordinator_pb2.ListRunsResponse()) == "no runs"
    assert tables.servers(coordinator_pb2.ListServersResponse()) == "no shard servers"


def test_run_table_shows_lost_trainers_and_spares() -> None:
    config = coordinator_pb2.RunConfig(world=World(dp=2, order=("pp", "tp", "dp")).to_proto())
    response = coordinator_pb2.DescribeRunResponse(
        summary=coordinator_pb2.RunSummary(run="gpt", config=config, committed_step=7, live_trainer_count=1),
        trainers=[
            coordinator_pb2.TrainerSummary(trainer="a", host="h", global_ranks=[0, 1], live=False, silent_s=300),
            coordinator_pb2.TrainerSummary(trainer="b", host="h", live=True),
        ],
        work=[
            coordinator_pb2.WorkSummary(
                item=coordinator_pb2.WorkItem(global_rank=1, dp_rank=1), state=coordinator_pb2.WORK_STATE_VACANT
            )
        ],
    )
    output = text(tables.run(response))
    for expected in ("2 x 1 x 1 (pp,tp,dp)", "0 1", "gone", "5 min ago", "spare", "vacant", "no step committed yet"):
        assert expected in output


def test_run_table_shows_checkpoints() -> None:
    saved = coordinator_pb2.CheckpointProgress(step=40, url="/c/gpt/step-000000040-ab")
    failed = coordinator_pb2.CheckpointProgress(step=60, error="No space left on device")
    writing = coordinator_pb2.CheckpointProgress(step=80, written_bytes=1 << 20, total_bytes=4 << 20)
    summary = coordinator_pb2.CheckpointSummary(
        checkpoint_dir="/c", checkpoint_every=20, in_flight=writing, last_saved=saved, last_failed=failed
    )
    output = text(tables.run(coordinator_pb2.DescribeRunResponse(checkpoints=summary)))
    for expected in (
        "checkpoints: after every 20 commits in /c, keeps all",
        "step 80 is being written: 1.0 MiB of 4.0 MiB",
        "newest: step 40",
        "failed: step 60",
        "No space left on device",
    ):
        assert expected in output
    assert "checkpoints" not in text(tables.run(coordinator_pb2.DescribeRunResponse()))


def test_peek_table_combines_the_pieces_of_all_servers() -> None:
    pieces = [
        ParameterPiece("shard-0", shard_pb2.PeekResponse(start_element=0, stop_element=2, norm=3, values=[1.0, 2.0])),
        ParameterPiece("shard-1", shard_pb2.PeekResponse(start_element=2, stop_element=5, norm=4, non_finite_count=1)),
    ]
    output = text(tables.peek("w", pieces))
    assert "w: 5 elements, norm 5\n" in output and "[2, 5)" in output


def test_units_table_names_units_without_initial_values() -> None:
    shards = [
        common_pb2.ShardRange(server_id=f"s{index}", start_bytes=index, stop_bytes=index + 1) for index in range(2)
    ]
    copy = common_pb2.ShardRange(server_id="s7", start_bytes=1, stop_bytes=2)
    backups = [coordinator_pb2.BackupSummary(shard=copy, state=coordinator_pb2.BACKUP_STATE_IN_SYNC)]
    unit = coordinator_pb2.UnitSummary(unit="blocks.0", element_count=1234, shards=shards, backups=backups)
    output = text(tables.units(coordinator_pb2.ListUnitsResponse(units=[unit])))
    assert "without initial values yet: blocks.0" in output and "1,234" in output and "s1" in output
    assert "s7 (in sync)" in output


def test_tables_name_the_parts_of_tensor_parallel_ranks() -> None:
    shard = common_pb2.ShardRange(server_id="s0", stop_bytes=64)
    whole = coordinator_pb2.UnitSummary(unit="blocks.9", pp_ranks=[3], shards=[shard])
    part = coordinator_pb2.UnitSummary(unit="blocks.9@tp5", pp_ranks=[3], tp_rank=5, shards=[shard])
    rows = [
        line.split() for line in text(tables.units(coordinator_pb2.ListUnitsResponse(units=[whole, part]))).splitlines()
    ]
    assert ["blocks.9", "3", "all"] in [row[1:4] for row in rows]
    assert ["blocks.9@tp5", "3", "5"] in [row[1:4] for row in rows]
    assert "STAGE" not in text(tables.units(coordinator_pb2.ListUnitsResponse(units=[coordinator_pb2.UnitSummary()])))
    piece = ParameterPiece("s0", shard_pb2.PeekResponse(stop_element=2, offsets=[4, 0]))
    assert "[0, 2) of the part at (4, 0)" in text(tables.peek("w", [piece]))


def test_lists_of_numbers_take_one_line_of_json() -> None:
    rank_assignment = coordinator_pb2.RankAssignment(groups=[coordinator_pb2.RankGroup(axis=1, global_ranks=range(64))])
    stall = coordinator_pb2.ExplainStallResponse(waiting_for=["rank [1]", "rank 2"])
    assert f'"global_ranks": [{", ".join(map(str, range(64)))}]' in to_json(rank_assignment)
    assert json.loads(to_json(rank_assignment))["groups"][0]["global_ranks"] == list(range(64))
    assert json.loads(to_json(stall))["waiting_for"] == ["rank [1]", "rank 2"]
    assert '"rank [1]",\n' in to_json(stall), "each string is on its own line"
