"""What processes use while they are measured: memory, CPU seconds, bytes through the loopback interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil


def parse_received_bytes(text: str, interface: str) -> int:
    """Bytes that an interface has received since it came up, from the text of ``/proc/net/dev``.

    Raises:
        ValueError: The text has no such interface.
    """
    for line in text.splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            return int(counters.split()[0])
    raise ValueError(f"no interface {interface!r} in /proc/net/dev")


def loopback_bytes() -> int:
    """Bytes through the loopback interface so far, of whatever process, TCP's and IP's headers included."""
    return parse_received_bytes(Path("/proc/net/dev").read_text(), "lo")


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time that processes have used so far, in sum."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(used.user + used.system for used in times)


def wait_until_quiet(pids: Iterable[int], *, limit_s: float = 5.0) -> None:
    """Returns when processes have finished what they were about, or after ``limit_s``.

    A step's end is not the end of its work: servers update after the commit. Counters are read after this.
    """
    known, give_up = list(pids), time.monotonic() + limit_s
    before = cpu_seconds(known)
    while time.monotonic() < give_up:
        time.sleep(0.2)
        if (now := cpu_seconds(known)) - before < 0.02:
            return
        before = now


@dataclass
class MemoryPeak:
    """The most that one process had."""

    rss_bytes: int = 0
    """Resident; shared memory counts in every process that has touched it."""
    uss_bytes: int = 0
    """Resident and of this process alone: what the machine would get back if it ended."""


class PeakMemory:
    """Samples the memory of processes in the background, as a context manager.

    Reading how much of a process is its own walks its page tables, which costs milliseconds per gigabyte: steps
    taken inside are for their memory only, not for their time.

    Args:
        pids: Processes to watch; those that end are let go.
        interval_s: Pause between two samples.

    Attributes:
        peaks: By process id.
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
