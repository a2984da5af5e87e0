"""``plan_run``: from a model's function to the estimates of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwell.planning.division import DivisionOptions, divide
from shardwell.planning.options import PlanOptions
from shardwell.planning.plan import Plan, make_plan
from shardwell.planning.plan_model import load
from shardwell_wire.errors import UsageError


def plan_run(
    model: str | Callable[..., Any],
    options: PlanOptions,
    *,
    division: DivisionOptions | None = None,
    batch: int | None = None,
    length: int = 1024,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Estimates a training run as ``shardwell plan`` does. The model takes no memory.

    Args:
        model: ``module:callable``, the path of a Hugging Face ``config.json``, or a callable. A callable returns the
            model, or ``(model, (tokens,))`` with the arguments of an example call. ``batch`` and ``length`` are passed
            if it has arguments of these names; ``batch`` is then the number of sequences of a micro-batch.
        options: World, servers, links and memory settings of the run.
        division: How the model is divided over the tensor and pipeline axes of the world. None: the defaults.
        batch: Sequences per work item. None: one per micro-batch.
        length: Tokens per sequence.
        dtype: Default dtype of parameters. None: the model's.

    Returns:
        The plan. ``plan.division.stages`` has the units of every stage, ``plan.division.description`` the layers.

    Raises:
        UsageError: The model cannot be built from shapes, or not be divided; the message says why.
        TiedParameterError: Two stages of one trainer share a parameter.
    """
    division = division or DivisionOptions()
    schedule = division.schedule_plan(options.world)
    batch = batch if batch is not None else 1 if schedule is None else schedule.num_micro_batches
    if batch < 1 or length < 1:
        raise UsageError(f"batch={batch}, length={length}: expected at least 1")
    micro_batch = batch if schedule is None else schedule.micro_batch_size(batch)
    shapes = load(model, batch=micro_batch, length=length, dtype=dtype)
    return make_plan(divide(shapes, options.world, division), options)
