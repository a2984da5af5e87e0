"""Measures resources of processes: memory, CPU seconds, and bytes through the loopback interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil


def parse_received_bytes(text: str, interface: str) -> int:
    """Returns the bytes that an interface has received, from the text of ``/proc/net/dev``.

    Raises:
        ValueError: The text does not contain the interface.
    """
    for line in text.splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            return int(counters.split()[0])
    raise ValueError(f"no interface {interface!r} in /proc/net/dev")


def loopback_bytes() -> int:
    """Returns the total bytes through the loopback interface, of all processes and with headers."""
    return parse_received_bytes(Path("/proc/net/dev").read_text(), "lo")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Returns the sum of the processes' user and system time."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(used.user + used.system for used in times)


def wait_until_quiet(pids: Iterable[int], *, limit_s: float = 5.0) -> None:
    """Returns when the processes are idle, or after ``limit_s``.

    Servers update after the commit, so a step causes work after its end. Read counters after this call.
    """
    waiting_for, deadline = list(pids), time.monotonic() + limit_s
    before = cpu_seconds(waiting_for)
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if (now := cpu_seconds(waiting_for)) - before < 0.02:
            return
        before = now


@dataclass
class MemoryPeak:
    """Peak memory of one process."""

    rss_bytes: int = 0
    """Resident memory. Shared memory counts in every process that has touched it."""
    uss_bytes: int = 0
    """Resident memory of this process alone, which would be free if the process ended."""


class PeakMemory:
    """Context manager that samples the memory of processes in a background thread.

    A sample walks the page tables, which costs milliseconds per gigabyte. Do not time steps inside the context.

    Args:
        pids: Processes to sample. Processes that end are dropped.
        interval_s: Seconds between two samples.

    Attributes:
        peaks: Peak memory by process id.
    """

    def __init__(self, pids: Iterable[int], *, interval_s: float = 0.02) -> None:
        self.peaks = {pid: MemoryPeak() for pid in pids}
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="peak-memory")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample_until_stopped(self) -> None:
        processes = {pid: psutil.Process(pid) for pid in self.peaks}
        while True:
            for pid, process in list(processes.items()):
                try:
                    sample = process.memory_full_info()
                except psutil.NoSuchProcess:
                    del processes[pid]
                    continue
                peak = self.peaks[pid]
                peak.rss_bytes = max(peak.rss_bytes, sample.rss)
                peak.uss_bytes = max(peak.uss_bytes, sample.uss)
            if self._stop.wait(self._interval_s):
                return
