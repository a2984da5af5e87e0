"""``parallelize``: divides a model over the trainers of a replica, and makes the schedule that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn

from shardwell.parallel.description import ActivationShape
from shardwell.parallel.pipeline import Loss, PipelineSchedule, PipelineStage, SchedulePlan
from shardwell.parallel.splitting import ModelSplit, micro_batch_of, split_model
from shardwell.parallel.tensor import TensorParallelPlan, plan_tensor_parallel
from shardwell.wrapping.auto_wrap import auto_wrap
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.session.session import Session


class TensorParallelOptions(TypedDict, total=False):
    """Options of ``plan_tensor_parallel``."""

    vocabulary: bool
    sequence_parallel: bool
    loss_parallel: bool
    fused_by_head: bool
    example: Any


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """A model that is divided over the trainers of a replica. Made by ``parallelize``."""

    schedule: PipelineSchedule
    """Runs this trainer's stages."""
    split: ModelSplit
    """The stages of the whole model."""
    tensor_plan: TensorParallelPlan
    """How the stages are divided over the tensor-parallel ranks."""
    micro_batch: ActivationShape | None
    """Size of a micro-batch. None: the first input has no sequences."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of this trainer's stages."""
        return [stage.submod for stage in self.schedule.stages]

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of this trainer's stages, for an optimizer."""
        return [parameter for module in self.modules for parameter in module.parameters()]

    def describe(self) -> str:
        """Returns stages, schedule and tensor parallelism as text."""
        return "\n".join(
            [self.split.describe(), self.schedule.plan.describe(), self.tensor_plan.describe(self.micro_batch)]
        )


def parallelize(
    model: nn.Module,
    session: Session,
    *,
    loss: Loss,
    example: torch.Tensor | Sequence[torch.Tensor],
    micro_batches: int,
    schedule: str = "1F1B",
    stages_per_trainer: int | None = None,
    split: ModelSplit | None = None,
    tp: TensorParallelPlan | TensorParallelOptions | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> ParallelModel:
    """Divides a model over the tensor-parallel and pipeline ranks of the session's world, and shards its stages.

    All trainers of a replica call it together, with equal arguments. It does what these functions do one after another:
    ``SchedulePlan``, ``split_model``, ``plan_tensor_parallel``, ``ModelSplit.examples``, ``TensorParallelPlan.apply``,
    ``auto_wrap``, ``PipelineStage`` and ``PipelineSchedule``. It also works in a world without tensor and pipeline
    parallelism, where the schedule computes micro-batches one after another.

    Args:
        model: The whole model, in any process with the same values, or on the meta device.
        session: The session that stores the parameters.
        loss: ``(output of the last stage, target) -> mean loss`` of one micro-batch.
        example: Inputs of one work item, as ``schedule.step`` gets them. Only shapes and dtypes are used, so the meta
            device is enough.
        micro_batches: Micro-batches per work item.
        schedule: One of ``SCHEDULES``.
        stages_per_trainer: As in ``SchedulePlan``.
        split: How the model is divided into stages. None: ``split_model(model, num_stages, example=...)`` with a
            micro-batch of ``example``.
        tp: A plan for the world's tensor-parallel ranks, or options of ``plan_tensor_parallel``, which gets the same
            micro-batch. None: its defaults.
        device: The device to compute on.
        **options: Further arguments of ``auto_wrap`` for every stage, such as ``mp_policy``, ``policy`` or ``source``.

    Returns:
        The schedule and parameters of this trainer, with the plans.

    Raises:
        UsageError: The model cannot be divided like this. The message gives the reason.
        TiedParameterError: One trainer has two stages that share a parameter.
        DeadlineError: The other trainers of the replica did not call in ``wait_limit_s``.
    """
    world, inputs = session.world, (example,) if isinstance(example, torch.Tensor) else tuple(example)
    plan = SchedulePlan(
        schedule=schedule, pp=world.pp, num_micro_batches=micro_batches, stages_per_trainer=stages_per_trainer
    )
    parts = [_micro_batch(value, plan) for value in inputs]
    split = split or split_model(model, plan.num_stages, example=parts)
    if len(split.stages) != plan.num_stages:
        raise UsageError(f"the split has {len(split.stages)} stages, but {plan.describe()} needs {plan.num_stages}")
    for tie in split.ties:
        tie.check_holders(plan.holders)
    if isinstance(tp, TensorParallelPlan):
        tensor_plan = tp
    else:
        wanted: TensorParallelOptions = {"example": tuple(parts), **(tp or {})}
        tensor_plan = plan_tensor_parallel(model, world.tp, **wanted)
    policy = options.get("mp_policy")
    dtype = None if policy is None else policy.output_dtype or policy.param_dtype
    examples = split.examples(*parts, dtype=dtype, tensor_plan=tensor_plan)
    mesh = session.replica_mesh(torch.device(device).type)
    options.setdefault("device", device)
    stages = []
    for index in plan.stages_of(session.pp_rank or 0):
        module = auto_wrap(tensor_plan.apply(split.module(index), mesh["tp"]), session, **options)
        group = mesh["pp"].get_group()
        stages.append(PipelineStage(module, index, plan.num_stages, device, example=examples[index], group=group))
    run = PipelineSchedule(plan, stages, loss, context=tensor_plan.loss_context)
    activations = [value for each in examples for value in each.outputs]
    return ParallelModel(run, split, tensor_plan, micro_batch_of(parts, activations))


def _micro_batch(value: torch.Tensor, plan: SchedulePlan) -> torch.Tensor:
    """Returns a tensor without memory that has the shape of one micro-batch."""
    size = plan.micro_batch_size(value.shape[0])
    return torch.empty(size, *value.shape[1:], dtype=value.dtype, device="meta")
