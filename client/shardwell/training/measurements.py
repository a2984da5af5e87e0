"""What a session tells its performance monitor: counters, options and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil
import torch

from shardwell.module.units import Units
from shardwell.monitor.step_times import MonitoredSetup
from shardwell.step.step_commit import StepCommitter
from shardwell.store.run_store import RunStore
from shardwell.transport.selector import STREAM_TRANSPORTS, is_this_host


class SessionCounters:
    """The counters of one session. See ``StepCounters`` in ``monitor/step_times.py``.

    Args:
        store: Counts transfers.
        committer: Counts waits at the end of steps.
        units: Count memory.
    """

    def __init__(self, store: RunStore, committer: StepCommitter, units: Units) -> None:
        self._store, self._committer, self._units = store, committer, units

    def stats(self) -> dict[str, float]:
        """See ``Session.stats``."""
        memory = self._units.memory
        return {
            **self._store.stats,
            **self._committer.stats,
            "live_unit_bytes": memory.live_bytes,
            "peak_unit_bytes": memory.peak_bytes,
            "freed_unit_bytes": memory.freed_bytes,
        }

    def moved_bytes(self) -> Mapping[str, tuple[int, int]]:
        """See ``StepCounters``."""
        return self._store.moved_bytes()

    def gather_wait_s(self) -> float:
        """See ``StepCounters``."""
        return self._store.traffic.gather_wait_s

    def take_gather_waits(self) -> Sequence[tuple[float, float]]:
        """See ``StepCounters``."""
        return self._store.traffic.take_gather_waits()

    def take_peak_bytes(self) -> int:
        """See ``StepCounters``."""
        return self._units.memory.take_recent_peak()


def describe_setup(trainer: str, store: RunStore, units: Units) -> MonitoredSetup:
    """Returns the options and sizes that advice depends on, as they are now.

    Args:
        trainer: Name of the trainer.
        store: Knows the options of transfers and the transports.
        units: The sharded units.
    """
    transfers, policy = store.transfers, units.policy
    return MonitoredSetup(
        trainer=trainer,
        transports=transfers.transports,
        streamed={
            at["server"]: is_this_host(at["server"]) for at in store.transports if at["transport"] in STREAM_TRANSPORTS
        },
        gather_dtype=transfers.gather_dtype,
        push_dtype=transfers.push_dtype,
        prefetch_bytes=policy.prefetch_bytes,
        keep_bytes=policy.keep_bytes or 0,
        max_gathers_in_flight=transfers.max_gathers_in_flight,
        unit_bytes=tuple(unit.size_bytes for unit in units),
        memory_bytes=_free_bytes(units) + units.live_bytes + units.memory.pool.idle_bytes,
        routes=store.routes,
        corrupt_transfers=store.corrupt_transfers,
    )


def _free_bytes(units: Units) -> int:
    """Returns the free memory of the GPU if weights are gathered there, otherwise of this host.

    The limit of a container is not considered.
    """
    if any(unit.device_type == "cuda" for unit in units):
        free_bytes, _ = torch.cuda.mem_get_info()
        return free_bytes
    return int(psutil.virtual_memory().available)
