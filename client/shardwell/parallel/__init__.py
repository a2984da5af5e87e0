"""Tensor, pipeline and context parallelism inside a replica."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwell.parallel.context_parallel import ContextParallel
    from shardwell.parallel.description import ActivationShape
    from shardwell.parallel.parallel_model import ParallelModel, TensorParallelOptions, parallelize
    from shardwell.parallel.pipeline import SCHEDULES, PipelineSchedule, PipelineStage, SchedulePlan
    from shardwell.parallel.splitting import ModelSplit, StageExample, split_model
    from shardwell.parallel.tensor import TensorParallelPlan, plan_tensor_parallel

__all__ = [
    "SCHEDULES",
    "ActivationShape",
    "ContextParallel",
    "ModelSplit",
    "ParallelModel",
    "PipelineSchedule",
    "PipelineStage",
    "SchedulePlan",
    "StageExample",
    "TensorParallelOptions",
    "TensorParallelPlan",
    "parallelize",
    "plan_tensor_parallel",
    "split_model",
]

_MODULES = {
    "SCHEDULES": "shardwell.parallel.pipeline",
    "ActivationShape": "shardwell.parallel.description",
    "ContextParallel": "shardwell.parallel.context_parallel",
    "ModelSplit": "shardwell.parallel.splitting",
    "ParallelModel": "shardwell.parallel.parallel_model",
    "PipelineSchedule": "shardwell.parallel.pipeline",
    "PipelineStage": "shardwell.parallel.pipeline",
    "SchedulePlan": "shardwell.parallel.pipeline",
    "StageExample": "shardwell.parallel.splitting",
    "TensorParallelOptions": "shardwell.parallel.parallel_model",
    "TensorParallelPlan": "shardwell.parallel.tensor",
    "parallelize": "shardwell.parallel.parallel_model",
    "plan_tensor_parallel": "shardwell.parallel.tensor",
    "split_model": "shardwell.parallel.splitting",
}


if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used: torch's engines are slow to import."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
