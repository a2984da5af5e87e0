"""Estimates of training runs: ``shardwell plan``, and the same from Python."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwell.planning.plan import Plan, plan_run
    from shardwell.planning.plan_options import DivisionOptions, PlanOptions
    from shardwell.planning.tables import describe

__all__ = ["DivisionOptions", "Plan", "PlanOptions", "describe", "plan_run"]

_MODULES = {
    "DivisionOptions": "shardwell.planning.plan_options",
    "Plan": "shardwell.planning.plan",
    "PlanOptions": "shardwell.planning.plan_options",
    "describe": "shardwell.planning.tables",
    "plan_run": "shardwell.planning.plan",
}


if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used: torch is slow to import."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
