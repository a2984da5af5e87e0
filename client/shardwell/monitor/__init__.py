"""Reports of a trainer: where the time of its steps and its memory go, bottlenecks, advice.

``session.report()`` and ``session.memory()`` return them.
"""

from typing import TYPE_CHECKING

from shardwell_wire.errors import import_on_use

if TYPE_CHECKING:
    from shardwell.monitor.report import Bottleneck, PerformanceReport, Severity
    from shardwell.monitor.step_times import StepPart
    from shardwell.session.memory_report import MemoryReport, UnitMemory, local_ratio, num_parameters

__all__ = [
    "Bottleneck", "MemoryReport", "PerformanceReport", "Severity", "StepPart", "UnitMemory", "local_ratio",
    "num_parameters",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    __getattr__, __dir__ = import_on_use(
        __name__,
        {
            "shardwell.monitor.report": "Bottleneck PerformanceReport Severity",
            "shardwell.monitor.step_times": "StepPart",
            "shardwell.session.memory_report": "MemoryReport UnitMemory local_ratio num_parameters",
        },
    )
