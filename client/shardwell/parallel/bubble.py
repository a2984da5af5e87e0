"""Reports the measured bubble of a pipeline to the performance monitor of the trainer."""

from __future__ import annotations

from torch import nn

from shardwell.monitor.step_times import StepPart
from shardwell.session.session import session_of


def report_bubble(module: nn.Module, idle_s: float) -> None:
    """Adds idle time to ``PIPELINE_BUBBLE`` of the session that has a module's parameters, if there is one.

    Reports nothing for a GPU: its kernels run in the background, so the calls of a stage end before its work.

    Args:
        module: A stage's module.
        idle_s: Seconds in which this trainer computed nothing.
    """
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.device.type == "cpu" and (session := session_of(parameter)) is not None:
        session.monitor.add(StepPart.PIPELINE_BUBBLE, max(0.0, idle_s))
