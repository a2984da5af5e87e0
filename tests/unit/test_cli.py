"""The two commands without a cluster: help, errors, tables, and the environment of launched trainers."""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import shardwell
from shardwell.command import cli
from shardwell.command import inspect_tables as tables
from shardwell.command.arguments import DEGRADED, INTERRUPTED, UNREACHABLE
from shardwell.command.cli import build_parser, main
from shardwell.command.inspect_tables import ParameterPiece
from shardwell.command.output import Answer, show, to_json
from shardwell.processes import launch
from shardwell.processes.launch import describe_exit
from shardwell.tables import format_size
from shardwell_server import cli as server_cli
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2


def text(renderable: object, width: int = 200) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable, crop=False)
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
    assert main(["runs", "--address", "127.0.0.1:1", "--timeout", "2"]) == 4
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
        shardwell.join(address, run="r")
    with pytest.raises(shardwell.UsageError, match=re.escape(expected)):
        plan(tmp_path, "--coordinator", address)


def test_coordinator_that_does_not_answer_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["status", "--address", address, "--timeout", "0.5"]) == 4
    assert f"shardwell status: the coordinator at {address} has not answered within 0.5 s" in capsys.readouterr().err


def test_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    codes = capsys.readouterr().out.partition("exit codes:\n")[2]
    listed = [int(line.split()[0]) for line in codes.splitlines()]
    assert listed == [0, 1, 2, DEGRADED, UNREACHABLE, INTERRUPTED]
    page = (Path(__file__).parents[2] / "docs/inspection.md").read_text().partition("## Exit codes")[2]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)] == listed


def test_options_of_the_connection_are_a_group_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("runs", "drain", "export", "token"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        own, _, connection = capsys.readouterr().out.partition("options of the connection:")
        for option in ("--address", "--token-file", "--tls-ca", "--tls-server-name"):
            assert f"  {option} " in connection and f"  {option} " not in own
        assert "[--tls-ca" not in own, "the usage names only the command's own options"


def complete(*words: str) -> list[str]:
    """Returns what bash offers for the last word."""
    script = 'source /dev/stdin <<< "$SCRIPT"; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _shtab_shardwell; '
    script += 'echo "${COMPREPLY[*]}"'
    command = ["bash", "-c", script, "bash", *words]
    done = subprocess.run(command, env={"SCRIPT": bash_script()}, capture_output=True, text=True, check=True)
    return done.stdout.split()


@cache
def bash_script() -> str:
    with redirect_stdout(StringIO()) as output:
        assert main(["completion", "bash"]) == 0
    return output.getvalue()


def test_completion_knows_all_commands_options_and_choices() -> None:
    assert complete("shardwell", "") == commands(build_parser())
    assert complete("shardwell", "sta") == ["status", "stall"]
    assert complete("shardwell", "runs", "--w") == ["--watch"]
    assert complete("shardwell", "runs", "-o", "") == complete("shardwell", "runs", "--output", "")
    assert complete("shardwell", "runs", "-o", "") == ["table", "wide", "json"]
    assert complete("shardwell", "export", "gpt", "--format", "") == ["safetensors", "dcp"]
    assert complete("shardwell", "run", "gp") == []
    assert complete("shardwell", "export", "gpt", "/et") == ["/etc"], "arguments that are files"


def test_completion_of_zsh_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef shardwell\n") and all(
        f"    {name}:" in script for name in commands(build_parser())
    )


class Answers:
    """Answers of a command that is repeated. Ctrl-C follows the last one."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self._answers = [*answers, KeyboardInterrupt()]

    def __call__(self) -> Answer:
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.mark.parametrize("output", ["table", "wide", "json"])
def test_watching_appends_to_a_pipe_until_ctrl_c(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(
        Answer(({"step": 1},), "step 1", exit_code=3),
        shardwell.UnavailableError("the coordinator restarts"),
        Answer(({"step": 2},), "step 2"),
    )
    assert show(argparse.Namespace(output=output, watch=0.0), answers) == 0
    shown = capsys.readouterr().out
    if output == "json":
        assert [json.loads(line) for line in shown.splitlines()] == [
            {"step": 1},
            {"error": "the coordinator restarts"},
            {"step": 2},
        ]
    else:
        lines = [line for line in shown.splitlines() if line and "Ctrl-C ends" not in line]
        assert lines == ["step 1", "the coordinator restarts", "step 2"]


def test_first_error_ends_a_command_that_watches() -> None:
    with pytest.raises(shardwell.UnavailableError):
        show(argparse.Namespace(output="table", watch=0.0), Answers(shardwell.UnavailableError("nobody")))


def test_watch_takes_no_name_for_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--watch", "gpt"])
    assert "expected seconds, more than 0, got 'gpt'" in capsys.readouterr().err


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

    monkeypatch.setattr(cli, "import_with_torch", interrupt)
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


LONG = "gpt-medium-experiment-17-seed-3"
ADDRESS = "training-node-0017.cluster.example.org:50052"


def answers() -> list[object]:
    """Returns what commands show of long names."""
    config = coordinator_pb2.RunConfig(world=World(dp=64).to_proto(), backups=2)
    summary = coordinator_pb2.RunSummary(
        run=LONG,
        config=config,
        committed_step=123456,
        live_trainer_count=63,
        run_id="0123456789abcdef",
        status=coordinator_pb2.RUN_STATUS_RUNNING,
        step_s=0.25,
        created_by="trainer-0",
        created_on="training-node-0017.cluster.example.org",
    )
    server = coordinator_pb2.ServerSummary(
        server_id="shard-17", address=ADDRESS, state=coordinator_pb2.SERVER_STATE_LIVE, live=True, used_bytes=1 << 33
    )
    shard = common_pb2.ShardRange(server_id="shard-17", stop_bytes=1 << 30)
    backup = coordinator_pb2.BackupSummary(shard=shard, state=coordinator_pb2.BACKUP_STATE_IN_SYNC)
    unit = coordinator_pb2.UnitSummary(unit="model.layers.17.mlp", shards=[shard], backups=[backup] * 9)
    peeked = shard_pb2.PeekResponse(stop_element=1 << 30, values=[-0.123456] * 16)
    assignment = coordinator_pb2.RankAssignment(groups=[coordinator_pb2.RankGroup(axis=1, global_ranks=range(64))])
    rank = coordinator_pb2.RankAssignmentSummary(rank_assignment=assignment, trainer="trainer-0", host="node-0017")
    health = coordinator_pb2.RunHealth(summary=summary)
    trainer = coordinator_pb2.TrainerSummary(trainer="trainer-0", host="node-0017", global_ranks=range(64))
    work = coordinator_pb2.WorkSummary(trainer="trainer-0", state=coordinator_pb2.WORK_STATE_LEASED)
    described = coordinator_pb2.DescribeRunResponse(summary=summary, trainers=[trainer], work=[work])
    cluster = coordinator_pb2.DescribeClusterResponse(servers=[server], runs=[health])
    return [
        tables.runs(coordinator_pb2.ListRunsResponse(runs=[summary])),
        tables.run(described),
        tables.servers(coordinator_pb2.ListServersResponse(servers=[server])),
        tables.units(coordinator_pb2.ListUnitsResponse(units=[unit])),
        tables.peek("w", [ParameterPiece("shard-17", peeked)]),
        tables.world(
            coordinator_pb2.DescribeWorldResponse(world=World(dp=64).to_proto(), world_size=64, rank_assignments=[rank])
        ),
        tables.cluster(cluster, ADDRESS),
        tables.top(described, cluster, coordinator_pb2.DescribePerformanceResponse()),
    ]


@pytest.mark.parametrize("index", range(len(answers())))
def test_tables_fit_80_columns_and_break_no_name(index: int) -> None:
    narrow, wide = text(answers()[index], 80), text(answers()[index], 100_000)
    assert max(map(len, narrow.splitlines())) <= 80
    for name in (LONG, ADDRESS, "shard-17", "trainer-0", "model.layers.17.mlp"):
        assert (name in narrow) == (name in wide) or name == "trainer-0", "a name is whole, or its column left out"
    assert set(re.findall(r"[A-Z]{3,}", narrow)) <= set(re.findall(r"[A-Z]{3,}", wide))


def test_wide_tables_have_all_columns() -> None:
    server = coordinator_pb2.ServerSummary(server_id="shard-17", address=ADDRESS)
    response = coordinator_pb2.ListServersResponse(servers=[server])
    headings = "SERVER ADDRESS STATE IN USE RESERVED BUDGET PRIMARIES BACKUPS SENT TO BACKUPS LAST HEARTBEAT VERSION"
    assert " ".join(text(tables.servers(response), 100_000).splitlines()[0].split()) == headings
    assert "SENT TO BACKUPS" not in text(tables.servers(response), 80)
    assert ADDRESS in text(tables.servers(response), 40), "a line is longer than a console that is too narrow"


def test_status_lists_all_problems_first() -> None:
    running = coordinator_pb2.RunSummary(run="a", status=coordinator_pb2.RUN_STATUS_RUNNING, missing_backup_count=2)
    stalled = coordinator_pb2.RunSummary(run="b", status=coordinator_pb2.RUN_STATUS_STALLED)
    response = coordinator_pb2.DescribeClusterResponse(
        problems=["server 's' has ended"],
        runs=[
            coordinator_pb2.RunHealth(summary=running, problems=["2 backups are missing"]),
            coordinator_pb2.RunHealth(
                summary=stalled, stall=coordinator_pb2.ExplainStallResponse(waiting_for=["rank 0"])
            ),
        ],
    )
    assert tables.is_degraded(response)
    lines = text(tables.cluster(response, "a:1")).splitlines()
    assert lines[:3] == ["degraded", "  - server 's' has ended", "  - run 'a': 2 backups are missing"]
    assert "run 'b' waits: rank 0" in lines
    healthy = coordinator_pb2.DescribeClusterResponse(runs=[coordinator_pb2.RunHealth(summary=stalled)])
    assert not tables.is_degraded(healthy) and text(tables.cluster(healthy, "a:1")).startswith("healthy\n")


def test_every_status_of_a_run_has_a_name() -> None:
    statuses = coordinator_pb2.RunStatus.values()
    names = [str(tables.status_text(status)) for status in statuses]
    assert names == ["unknown", "waiting", "loading", "running", "stalled", "idle", "finished"]


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
