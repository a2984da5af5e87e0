"""Limits of parallel plans, which trainers report and the coordinator stores with the run."""

from __future__ import annotations

MAX_PLAN_BYTES = 256 << 10
"""Most bytes of a plan. Trainers leave out the last rows of a larger plan."""

MAX_PLAN_ROWS = 2048
"""Most rows of a plan: stages, layers and collectives of all models."""

MAX_PLAN_MODELS = 16
"""Most models of a plan."""
