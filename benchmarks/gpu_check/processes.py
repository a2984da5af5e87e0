"""Checks 6 to 8 and those of two GPUs: NCCL, processes that share a GPU, and processes that are killed."""

from __future__ import annotations

import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, HashStore

import shardwell
from benchmarks.gpu_check.task import Task
from benchmarks.gpu_check.trainer import Spec, make_model
from shardwell.peers import node_group
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 64


class TrainerProcess:
    """A process with a trainer, which ends with the check.

    Args:
        spec: Its task.
        folder: For its output.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.trainer = spec.trainer
        self._output, self._errors = (folder / f"{spec.run} {spec.trainer} {each}" for each in ("out", "err"))
        with self._output.open("w") as output, self._errors.open("w") as errors:
            command = [sys.executable, "-m", "benchmarks.gpu_check.trainer", spec.argument]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=errors)

    def lines(self) -> list[dict[str, Any]]:
        """Returns what the process has said."""
        text = self._output.read_text()
        return [
            json.loads(line) for line in text.splitlines(keepends=True) if line.startswith("{") and line[-1] == "\n"
        ]

    def when(self, key: str, value: object, limit_s: float) -> float:
        """Waits until the process has said something; returns when it did."""
        deadline = time.monotonic() + limit_s
        while True:
            for line in self.lines():
                if line.get(key) == value:
                    return float(line["at"])
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {key}={value}: {self.error() or 'the process did not come so far'}")
            time.sleep(0.01)

    def result(self, limit_s: float) -> dict[str, Any]:
        """Waits for the end; returns the last line."""
        self.process.wait(max(0.1, limit_s))
        lines = self.lines()
        if self.process.returncode or not lines or "result" not in lines[-1]:
            raise RuntimeError(f"exit code {self.process.returncode}: {self.error()}")
        return lines[-1]

    def error(self) -> str:
        """Returns the last line that the process has written to its error output."""
        lines = [line.strip() for line in self._errors.read_text().splitlines() if line.strip()]
        return lines[-1] if lines else ""


@contextmanager
def trainers(specs: Sequence[Spec]) -> Iterator[list[TrainerProcess]]:
    """Context with trainer processes, which are killed at its end."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        started = []
        for spec in specs:
            each = TrainerProcess(spec, Path(folder))
            stack.callback(each.process.wait)
            stack.callback(each.process.kill)
            started.append(each)
        yield started


def in_one_process(task: Task, address: str, run: str, *, dp: int, steps: int) -> str:
    """Returns the hash of a run with one trainer process, which plays all ranks."""
    spec = Spec(address=address, run=run, device=str(task.device), dp=dp, min_trainers=1, width=WIDTH, steps=steps)
    with trainers([spec]) as (alone,):
        return str(alone.result(task.left_s)["result"])


# ---- NCCL ----


def check_nccl(task: Task) -> None:
    """Checks what tensor and pipeline groups need of NCCL, or of gloo on a CPU, with one device."""
    with shardwell.LocalCluster(num_shards=1) as cluster:
        with task.attempt("mesh of one trainer"), shardwell.join(cluster.address, run="alone") as session:
            mesh = session.replica_mesh(task.device.type)["tp"]
            value = torch.full((3,), 2.0, device=task.device)
            dist.all_reduce(value, group=mesh.get_group())
            task.row(f"all_reduce over {dist.get_backend()}, mesh of one trainer", ok=value.tolist() == [2.0] * 3)
            dist.destroy_process_group()
        with task.attempt("a new group over the store of a replica"):
            specs = [
                Spec(address=cluster.address, run="groups", device=str(task.device), tp=2, new_group=True, trainer=name)
                for name in "ab"
            ]
            with trainers(specs) as pair:
                for each in pair:
                    each.result(task.left_s)
                    said = next(line for line in each.lines() if "reduced" in line)
                    task.row("a new group over the store of a replica", ok=said["reduced"] == said["expected"])
    if task.on_gpu:
        with task.attempt("abort"):
            _check_abort(task)


def _check_abort(task: Task) -> None:
    """Aborts the backend of a node group, and ends it afterwards."""
    backend = node_group._nccl(HashStore(), 0, 1)
    source, target = (torch.full((1 << 20,), each, dtype=torch.uint8, device=task.device) for each in (7, 0))
    backend._allgather_base(target, source, AllgatherOptions()).wait()
    torch.cuda.synchronize()
    task.row("_allgather_base of one rank", ok=torch.equal(source, target))
    started = time.monotonic()
    backend.abort()
    seconds = time.monotonic() - started
    task.row("abort (<= 1 s)", f"{seconds:.2f} s", seconds <= 1.0)
    del backend
    gc.collect()
    task.row("a computation after the abort", ok=bool((source + 1 == 8).all()))


# ---- two processes ----


def share_a_device(task: Task) -> None:
    """Trains with two processes on one device: two data ranks, then two tensor-parallel ranks."""
    with shardwell.LocalCluster(num_shards=2) as cluster:
        with task.attempt("dp=2 on one device"):
            expected = in_one_process(task, cluster.address, "one process", dp=2, steps=4)
            specs = [
                Spec(address=cluster.address, run="pair", device=str(task.device), dp=2, trainer=name, steps=4)
                for name in "ab"
            ]
            with trainers(specs) as pair:
                ends = [each.result(task.left_s) for each in pair]
            is_equal = {end["result"] for end in ends} == {expected}
            peaks = f"peaks {[round(end['peak_mb']) for end in ends]} MB"
            task.row("dp=2, two processes on one device: equal bits", peaks, is_equal)
        if "backend" not in inspect.signature(shardwell.Session.replica_mesh).parameters:
            task.row("tp=2 on one device", "not tried: replica_mesh has no argument backend")
            return
        with task.attempt("tp=2 on one device"):
            _compare_tensor_parallel(task, cluster.address, [str(task.device)] * 2, "gloo")


def _compare_tensor_parallel(task: Task, address: str, devices: Sequence[str], backend: str) -> None:
    """Compares two tensor-parallel processes with one process."""
    whole = Spec(address=address, run="whole", device=devices[0], steps=4)
    parts = [
        Spec(address=address, run="parts", device=device, tp=2, backend=backend, trainer=f"t{number}", steps=4)
        for number, device in enumerate(devices)
    ]
    with trainers([whole]) as (alone,):
        alone.result(task.left_s)
    with trainers(parts) as pair:
        for each in pair:
            each.result(task.left_s)
    found = []
    for run in ("whole", "parts"):
        model = make_model(WIDTH)
        with shardwell.attach(address, run=run) as reader:
            reader.follow(model)
        found.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    before = torch.cat([value.detach().flatten() for value in make_model(WIDTH).parameters()])
    distance = ((found[0] - found[1]).norm() / (found[0] - before).norm()).item()
    what = f"tp=2 over {backend}: distance, relative to the movement (<= 1e-5)"
    task.row(what, f"{distance:.1e}", distance <= 1e-5)


# ---- kills ----


def kill_processes(task: Task) -> None:
    """Kills a trainer in its backward, with a spare, and a shard server whose shards have backups."""
    steps = 8
    with shardwell.LocalCluster(num_shards=3) as cluster:
        with task.attempt("a killed server"):
            _kill_server(task, cluster, steps)
        free = _free_bytes(task)  # this process has its kernels and libraries on the GPU now
        with task.attempt("a killed trainer"):
            expected = in_one_process(task, cluster.address, "undisturbed", dp=2, steps=steps)
            _kill_trainer(task, cluster.address, expected, steps)
        lost = (free - _free_bytes(task)) / 1e6
    if task.on_gpu:
        task.row("GPU memory that the dead have left (< 100 MB)", f"{lost:.0f} MB", lost < 100)


def _kill_trainer(task: Task, address: str, expected: str, steps: int) -> None:
    with TemporaryDirectory() as folder:
        begin = Path(folder) / "begin"
        common: dict[str, Any] = {"address": address, "run": "killed", "device": str(task.device), "dp": 2}
        common |= {"steps": steps, "wait_for": str(begin)}
        with trainers([Spec(**common, trainer="a"), Spec(**common, trainer="b", kill_at_step=4)]) as (first, second):
            for each in (first, second):
                each.when("joined", each.trainer, task.left_s)
            with trainers([Spec(**common, trainer="c")]) as (spare,):
                spare.when("joined", "c", task.left_s)
                begin.touch()
                second.process.wait(task.left_s)
                died = time.monotonic()
                committed = first.when("committed", 4, task.left_s) - died
                result = first.result(task.left_s)["result"]
    task.row("a trainer kills itself", f"signal {-second.process.returncode}", second.process.returncode == -9)
    task.row("a trainer killed in the backward, a spare: equal bits", ok=result == expected)
    goal = committed <= 1.0 if task.on_gpu else None
    task.row("commit after the death (<= 1 s)", f"{committed:.2f} s", goal)


def _kill_server(task: Task, cluster: shardwell.LocalCluster, steps: int) -> None:
    """Kills a server during a run of this process. Compares with the same run, undisturbed."""
    results, waited = [], 0.0
    for run in ("quiet", "loud"):
        remaining = ["the kill"] if run == "loud" else []
        with shardwell.join(cluster.address, run=run, backups=1) as session:
            model: Any = make_model(WIDTH).to(task.device)
            for block in model.blocks:
                shardwell.fully_shard(block, session)
            shardwell.fully_shard(model, session)
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-3)
            for step in session.steps(steps):
                started = time.monotonic()
                if remaining and step.number == 3:
                    remaining.clear()
                    _wait_until(lambda run=run: _is_in_sync(cluster.address, run), task.left_s)  # type: ignore[misc]
                    started = time.monotonic()
                    os.kill(cluster.shards[0].pid, signal.SIGKILL)
                for tokens in step.batches(lambda number, _: torch.full((2, 8), number % 7)):
                    model(tokens.to(task.device)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 3:
                    waited = time.monotonic() - started
            results.append({name: value.cpu() for name, value in shardwell.full_state_dict(model).items()})
    is_equal = all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    task.row("a server killed with backups=1: equal bits", ok=is_equal)
    task.row("step with the death of a server (<= 1.5 s)", f"{waited:.2f} s", waited <= 1.5 if task.on_gpu else None)


def _is_in_sync(address: str, run: str) -> bool:
    with closing(CoordinatorClient(address)) as client:
        units = client.call("ListUnits", coordinator_pb2.ListUnitsRequest(run=run), timeout_s=10.0).units
    states = [backup.state for unit in units for backup in unit.backups]
    return states == [coordinator_pb2.BACKUP_STATE_IN_SYNC] * sum(len(unit.shards) for unit in units)


def _wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("backups are not in sync")
        time.sleep(0.02)


def _free_bytes(task: Task) -> int:
    return torch.cuda.mem_get_info(task.device)[0] if task.on_gpu else 0


# ---- two GPUs ----


def split_over_gpus(task: Task) -> None:
    """Trains with two tensor-parallel ranks over NCCL, each on its GPU."""
    with shardwell.LocalCluster(num_shards=2) as cluster:
        _compare_tensor_parallel(task, cluster.address, ["cuda:0", "cuda:1"], "")


def share_over_gpus(task: Task) -> None:
    """Shares gathers over NCCL: equal bits, and about half of the bytes over the network."""
    probe = [sys.executable, "-m", "tests.support.node_group_probe", "--backend", "nccl", "--rounds", "1"]
    done = subprocess.run(probe, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=task.left_s)
    lines: list[Mapping[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    task.row("equal bits", ok=len({line["sha256"] for line in lines}) == 1 and len(lines) == 4)
    received = {
        group: sum(line["received_bytes"] for line in lines if line["group"] == group) for group in ("none", "nccl")
    }
    share = received["nccl"] / received["none"]
    task.row("bytes from the servers, relative (0.5)", f"{share:.2f}", 0.45 < share < 0.55)
