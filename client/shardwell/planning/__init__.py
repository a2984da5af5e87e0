"""Estimates of training runs: ``shardwell plan``, and the same from Python."""

from shardwell.planning.plan import Plan, describe, plan_run
from shardwell.planning.plan_model import DivisionOptions, PlanOptions

__all__ = ["DivisionOptions", "Plan", "PlanOptions", "describe", "plan_run"]
