"""Tables of the benchmarks of training steps."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.measured_steps import Measured
from benchmarks.report import spread, summarize, to_table


def cost_table(measured: Mapping[str, Measured]) -> str:
    """Returns the table of memory, CPU time and loopback traffic."""
    header = [
        "mode",
        "peak USS per trainer, MB",
        "peak RSS per trainer, MB",
        "peak USS of all servers, MB",
        "CPU of trainers, s/step",
        "CPU of servers, s/step",
        "loopback, MB/step",
    ]
    rows = [
        [
            mode,
            f"{each.trainer_peak['uss_bytes'] / 1e6:.0f}",
            f"{each.trainer_peak['rss_bytes'] / 1e6:.0f}",
            f"{each.server_peak['uss_bytes'] / 1e6:.0f}",
            f"{each.per_step(each.trainer_cpu_s):.3f}",
            f"{each.per_step(each.server_cpu_s):.3f}",
            f"{each.per_step(each.loopback_bytes) / 1e6:.1f}",
        ]
        for mode, each in measured.items()
    ]
    return to_table(header, rows)


def waits_section(measured: Mapping[str, Measured]) -> list[str]:
    """Returns the table of waits and transferred bytes of Shardwell's modes; empty if none of them ran."""
    columns = {
        "gather_wait_s": ("weights, ms", 1e3),
        "push_wait_s": ("gradients in flight, ms", 1e3),
        "finish_wait_s": ("the other trainer's work, ms", 1e3),
        "commit_wait_s": ("the commit, ms", 1e3),
        "received_bytes": ("received, MB", 1e-6),
        "sent_bytes": ("sent, MB", 1e-6),
    }
    rows = [
        [mode, *(spread(summarize(each.details[name]).scaled(factor), ".1f") for name, (_, factor) in columns.items())]
        for mode, each in measured.items()
        if each.details
    ]
    if not rows:
        return []
    header = ["mode", *(title for title, _ in columns.values())]
    introduction = "What the training thread waits for and what the transports carry, per step and trainer (quartiles):"
    return [f"{introduction}\n\n{to_table(header, rows)}"]
