"""Tensor, pipeline and context parallelism inside a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwell_wire.errors import import_on_use

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

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    __getattr__, __dir__ = import_on_use(  # torch's engines are slow to import
        __name__,
        {
            "shardwell.parallel.context_parallel": "ContextParallel",
            "shardwell.parallel.description": "ActivationShape",
            "shardwell.parallel.parallel_model": "ParallelModel TensorParallelOptions parallelize",
            "shardwell.parallel.pipeline": "SCHEDULES PipelineSchedule PipelineStage SchedulePlan",
            "shardwell.parallel.splitting": "ModelSplit StageExample split_model",
            "shardwell.parallel.tensor": "TensorParallelPlan plan_tensor_parallel",
        },
    )
