"""Runs the checks, each in a process of its own, and writes the table after each: ``python -m benchmarks.gpu_check``.

``--device cpu`` runs the same code with tiny sizes. ``--only NAME`` runs some checks. The last line counts the checks,
and the exit code is 1 if one has failed. The project need not be installed: its folders are in ``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_check import machine
from benchmarks.gpu_check.task import ROW, Check, Task

CHECKS = (
    Check("machine", 40, "machine.describe_machine"),
    Check("tests", 60, "machine.run_gpu_tests", ("pytest", "pytest-timeout")),
    Check("strategies", 60, "bits.compare_strategies"),
    Check("precision", 40, "bits.compare_precisions"),
    Check("adamw", 40, "bits.compare_adamw"),
    Check("schedules", 40, "bits.compare_schedules"),
    Check("nccl", 30, "processes.check_nccl"),
    Check("two-processes", 60, "processes.share_a_device"),
    Check("kills", 60, "processes.kill_processes"),
    Check("speed", 120, "speed.compare_speed"),
    Check("unit", 30, "speed.move_one_unit"),
    Check("memory", 30, "speed.compare_memory"),
    Check("offload", 30, "features.offload"),
    Check("compile", 70, "features.compile_blocks"),
    Check("load-export", 40, "features.load_and_export", ("transformers", "safetensors")),
    Check("two-gpus-tp", 60, "processes.split_over_gpus", num_gpus=2),
    Check("two-gpus-node-group", 60, "processes.share_over_gpus", num_gpus=2),
)
TOTAL_S = 525.0
"""All checks together: nine minutes, with the start of this process."""
RESULTS = Path(__file__).resolve().parents[1] / "results"
STATES = {True: "ok", False: "FAILED", None: ""}


@dataclass
class Result:
    """What one check has reported."""

    name: str
    state: str
    """``ok``, ``FAILED`` or ``needs two GPUs``."""
    seconds: float = 0.0
    rows: list[dict[str, object]] = field(default_factory=list)
    """What, value and ok of each row; see ``Task.row``."""


def main() -> int:
    options = parse_arguments()
    if options.run:
        return run_here(next(check for check in CHECKS if check.name == options.run), options)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device. To run the same code with tiny sizes on the CPU, pass --device cpu")
        return 1
    report, started = Report(options), time.monotonic()
    for check in CHECKS:
        if not options.only or check.name in options.only:
            left_s = TOTAL_S - (time.monotonic() - started)
            result = run_apart(check, options.device, min(check.limit_s, left_s))
            report.add(result)
            for row in result.rows:
                print(f"  {STATES[row['ok']]:6} {row['what']}  {row['value']}")  # type: ignore[index]
            print(f"{result.state:6} {check.name}, {result.seconds:.0f} s", flush=True)
    print(report.summary())
    return int(report.count("FAILED") > 0)


def parse_arguments() -> argparse.Namespace:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=names, nargs="+", metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--results", type=Path, help="folder of the table (default: benchmarks/results; on a CPU: none)"
    )
    parser.add_argument("--run", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_here(check: Check, options: argparse.Namespace) -> int:
    """Runs a check in this process, which ``run_apart`` has started."""
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    task = Task(device, time.monotonic() + options.limit_s)
    module, name = check.function.split(".")
    with task.attempt("the check"):
        getattr(importlib.import_module(f"benchmarks.gpu_check.{module}"), name)(task)
    return int(task.num_failed > 0)


def run_apart(check: Check, device: str, limit_s: float) -> Result:
    """Runs a check in a process of its own, and kills it with its children after its limit."""
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    if check.num_gpus > max(1, num_gpus):
        return Result(check.name, "needs two GPUs")
    absent = [name for name in check.needs if name in machine.missing(machine.OTHERS)]
    if check.name != "machine":
        absent += machine.missing(machine.BASE)
    if absent:
        row = {"what": "not run: packages are missing", "value": ", ".join(absent), "ok": False}
        return Result(check.name, "FAILED", rows=[row])
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--run", check.name, "--device", device]
    command += ["--limit-s", str(limit_s)]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment(), cwd=machine.ROOT, start_new_session=True
        )
        try:
            code = child.wait(timeout=max(0.0, limit_s))
            ending = "" if code in (0, 1) else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ending = f"stopped after {limit_s:.0f} s"
        finally:
            kill_group(child)
        rows = list(rows_in(output))
        if ending or not rows:
            rows.append({"what": ending or "no row", "value": tail_of(errors), "ok": False})
    state = "FAILED" if any(row["ok"] is False for row in rows) else "ok"
    return Result(check.name, state, time.monotonic() - started, rows)


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a check: its process group, in which its trainers are."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def environment() -> dict[str, str]:
    """Returns the environment of a check, in which cuBLAS gives the same bits each time."""
    return {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def rows_in(output: object) -> Iterator[dict[str, object]]:
    output.seek(0)  # type: ignore[attr-defined]
    for line in output:  # type: ignore[attr-defined]
        if line.startswith(ROW):
            yield json.loads(line.removeprefix(ROW))


def tail_of(output: object) -> str:
    """Returns the last lines of a file, in one line."""
    output.seek(0)  # type: ignore[attr-defined]
    lines = [line.strip() for line in output if line.strip()]  # type: ignore[attr-defined]
    return " / ".join(lines[-4:])[-400:]


class Report:
    """The table, which is written again after each check.

    Args:
        options: The arguments of the command.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._folder: Path | None = options.results or (RESULTS if options.device == "cuda" else None)
        self._results: list[Result] = []
        hardware = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU, tiny sizes"
        self._where = (
            f"{time.strftime('%Y-%m-%d')}, {hardware}, {os.cpu_count()} cores, Python {platform.python_version()}, "
            f"torch {torch.__version__}"
        )

    def add(self, result: Result) -> None:
        """Adds a result and writes the files."""
        self._results.append(result)
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        whole = {"where": self._where, "summary": self.summary(), "checks": [asdict(each) for each in self._results]}
        (self._folder / "gpu_check.json").write_text(json.dumps(whole, indent=1) + "\n")
        (self._folder / "gpu_check.md").write_text(self._table())

    def count(self, state: str) -> int:
        """Returns the number of checks in a state."""
        return sum(result.state == state for result in self._results)

    def summary(self) -> str:
        """Returns the last line of the command."""
        summary = f"{self.count('ok')} ok, {self.count('FAILED')} failed"
        return f"{summary}, {missing} need two GPUs" if (missing := self.count("needs two GPUs")) else summary

    def _table(self) -> str:
        lines = [
            "# GPU check",
            "",
            f"{self._where}: {self.summary()}.",
            "",
            "| check | what | value | |",
            "|---|---|---|---|",
        ]
        for result in self._results:
            lines.append(f"| **{result.name}** | {result.state} | {result.seconds:.0f} s | |")
            for row in result.rows:
                cells: Sequence[object] = ("", row["what"], row["value"], STATES[row["ok"]])  # type: ignore[index]
                lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
