"""Checks 0 and 1: what the machine has, the bandwidths that no transfer can exceed, and the tests that need a GPU."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_check.task import Task

BASE = {
    "numpy": "numpy",
    "psutil": "psutil",
    "xxhash": "xxhash",
    "rich": "rich",
    "fsspec": "fsspec",
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
}
"""Modules that the SDK and its servers import, and the packages that have them."""
OTHERS = {
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "safetensors": "safetensors",
    "transformers": "transformers",
    "cryptography": "cryptography",
}
"""Modules that single checks, or TLS, import."""
ROOT = Path(__file__).resolve().parents[2]


def missing(modules: dict[str, str]) -> list[str]:
    """Returns the packages that are not installed."""
    found = []
    for module, package in modules.items():
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package around it
            is_there = False
        if not is_there:
            found.append(package)
    return found


def describe_machine(task: Task) -> None:
    """Reports versions, missing packages and bandwidths."""
    task.row("Python, torch", f"{platform.python_version()}, {torch.__version__}")
    task.row("cores, memory", f"{os.cpu_count()}, {_memory_gb():.0f} GB")
    if task.on_gpu:
        properties = torch.cuda.get_device_properties(task.device)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        task.row("GPUs", f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 1e9:.0f} GB")
        task.row("driver, CUDA, NCCL", f"{_driver()}, {torch.version.cuda}, {nccl}")
    if base := missing(BASE):
        task.row("missing: every check but this one needs", ", ".join(base), False)
    if others := missing(OTHERS):
        task.row("missing: single checks or TLS need", ", ".join(others))
    free = shutil.disk_usage("/dev/shm").free
    task.row("free in /dev/shm", f"{free / 1e9:.1f} GB", free > (30e9 if task.on_gpu else 64e6))
    measure_bandwidths(task, (256 if task.on_gpu else 8) << 20)


def measure_bandwidths(task: Task, size_bytes: int) -> None:
    """Reports six bandwidths between host and device, and within the host."""
    random = torch.randint(256, (size_bytes,), dtype=torch.uint8)
    pinned = random.pin_memory() if task.on_gpu else random.clone()
    on_device = torch.empty(size_bytes, dtype=torch.uint8, device=task.device)
    back = torch.empty_like(pinned, pin_memory=task.on_gpu)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size_bytes)
        shared = torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=size_bytes, dtype=torch.uint8)
        shared.copy_(random)
        copies = {
            "pinned host to device": (on_device, pinned),
            "device to pinned host": (back, on_device),
            "pageable host to device": (on_device, random),
            "device to pageable host": (torch.empty_like(random), on_device),
            "/dev/shm to pinned host, one thread": (pinned, shared),
            "pinned host to /dev/shm, one thread": (shared, back),
        }
        torch.set_num_threads(1)
        for what, (target, source) in copies.items():
            seconds = task.seconds(partial(target.copy_, source, non_blocking=True))
            is_equal = torch.equal(target.cpu(), random)
            task.row(what, f"{size_bytes / seconds / 1e9:.1f} GB/s", None if is_equal else False)
        task.row("the bytes of six copies arrive", ok=torch.equal(shared, random) and torch.equal(back, random))


def run_gpu_tests(task: Task) -> None:
    """Runs the tests with the marker ``gpu``. On a CPU, all of them are skipped."""
    files = sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    )
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    for line in done.stdout.splitlines():
        if line.startswith(("SKIPPED", "FAILED", "ERROR")):
            task.row(line[:200])
    is_right = counts.get("passed", 0) > 0 if task.on_gpu else counts.get("skipped", 0) > 0
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    task.row(f"pytest -m gpu ({len(files)} files)", summary or done.stdout[-200:], done.returncode == 0 and is_right)


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"  (\d+\.[\d.]+)", version.read_text()) if version.exists() else None
    return found[1] if found else "unknown driver"
