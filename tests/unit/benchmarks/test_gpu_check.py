"""The command of the GPU checks: which checks fail, what the last line says, and that no check outlives its limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import machine
from benchmarks.gpu_check.__main__ import CHECKS, Result
from benchmarks.gpu_check.task import ROW, Check, Task


def run(monkeypatch: pytest.MonkeyPatch, results: list[Result], *arguments: str) -> int:
    """Runs the command with given results of the checks; returns its exit code."""
    left = iter(results)
    monkeypatch.setattr(command, "run_apart", lambda *_: next(left))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", *arguments])
    return command.main()


def test_last_line_and_exit_code_count_the_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = [Result(check.name, "ok" if check.num_gpus == 1 else "needs two GPUs") for check in CHECKS]
    assert run(monkeypatch, good, "--results", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "15 ok, 0 failed, 2 need two GPUs"
    bad = [Result("adamw", "FAILED", 1.0, [{"what": "distance | far", "value": "3", "ok": False}])]
    assert run(monkeypatch, bad, "--only", "adamw", "--results", str(tmp_path)) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 ok, 1 failed"
    assert "|  | distance / far | 3 | FAILED |" in (tmp_path / "gpu_check.md").read_text()
    assert json.loads((tmp_path / "gpu_check.json").read_text())["checks"][0]["state"] == "FAILED"


def test_missing_package_stops_the_checks_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.OTHERS, "no_such_module", "transformers")
    result = command.run_apart(next(check for check in CHECKS if check.name == "load-export"), "cpu", 10.0)
    assert (result.state, result.rows[0]["value"]) == ("FAILED", "transformers")
    monkeypatch.setitem(machine.BASE, "neither.this", "xxhash")
    result = command.run_apart(next(check for check in CHECKS if check.name == "adamw"), "cpu", 10.0)
    assert (result.state, result.rows[0]["value"]) == ("FAILED", "xxhash")


def test_check_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f'print({ROW!r} + \'{{"what": "child", "value": "%d", "ok": true}}\' % child.pid, flush=True)\n'
        "time.sleep(60)\n"
    )
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    result = command.run_apart(Check("machine", 5, "none.none"), "cpu", 3.0)
    assert [row["what"] for row in result.rows] == ["child", "stopped after 3 s"]
    assert result.state == "FAILED"
    deadline, child = time.monotonic() + 10, int(str(result.rows[0]["value"]))
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child of the check lives"


def test_exception_is_a_row_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    task = Task(torch.device("cpu"), time.monotonic() + 10)
    with task.attempt("this"):
        raise ValueError("what is wrong\nand more")
    task.row("that", 3, True)
    rows = [json.loads(line.removeprefix(ROW)) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        {"what": "this", "value": "ValueError: what is wrong", "ok": False},
        {"what": "that", "value": "3", "ok": True},
    ]
    assert task.num_failed == 1


@pytest.mark.long
@pytest.mark.parametrize("name", [check.name for check in CHECKS if check.num_gpus == 1 and check.name != "nccl"])
def test_checks_are_ok_on_a_cpu(name: str, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--only", name, "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *options],
        cwd=machine.ROOT,
        env={**os.environ, "SHARDWELL_KEEP_BYTES": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
