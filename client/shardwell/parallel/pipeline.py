"""Pipeline stages of sharded models, and the schedules of ``torch.distributed.pipelining`` that run them.

``PipelineStage`` is one stage. ``SchedulePlan`` has the numbers of a schedule: which stages a trainer computes in which
order. ``PipelineSchedule`` runs torch's schedule on a trainer's stages. ``micro_batches_in_flight`` tells how many
micro-batches have activations at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from shardwell.grid.replica import first_line, is_lost_peer
from shardwell.membership.membership import START_AGAIN
from shardwell.module.fully_shard import Accumulation
from shardwell.monitor.step_times import StepPart
from shardwell.parallel.description import ModelDescription, StageDescription, describe_model
from shardwell.parallel.splitting import StageExample
from shardwell.seeds import derive_seed
from shardwell.session.session import session_of
from shardwell_wire.errors import ReplicaLostError, UsageError


class PipelineStage(pipelining.PipelineStage):
    """A stage of a pipeline whose parameters are on the shard servers.

    Every unit of the stage is gathered once per step, stays gathered for all micro-batches, and is pushed once, divided
    by the number of micro-batches, when the stage has finished its last backward. The schedule calls the stage; any
    schedule of ``torch.distributed.pipelining`` works. The gradients have the bits of one process that runs the same
    micro-batches one after another and divides their sum (``LoopedBFS``: in reverse order).

    Each forward draws its random numbers from a seed for (seed of the work item, stage, micro-batch). Dropout is
    therefore the same in every schedule, and different in every stage. The stage runs inside the loop over
    ``step.batches``, which sets the seed of the work item.

    Args:
        submodule: The stage's module, after ``fully_shard``.
        stage_index: Number of the stage, from 0.
        num_stages: Number of stages of the pipeline.
        device: The device to compute on.
        example: Shapes and dtypes of one micro-batch, from ``ModelSplit.examples``. They are required: without them,
            torch runs a forward to find the shapes, which changes buffers such as the statistics of ``BatchNorm``.
        group: Process group of the pipeline. None: the default group.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        *,
        example: StageExample,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            torch.device(device),
            input_args=example.inputs,
            output_args=example.outputs,
            group=group,
        )
        self._example = example
        self._accumulation = Accumulation(submodule)
        self._has_begun = False
        self.busy_s = 0.0
        """Seconds in forwards, backwards and pushes since the stage was made, without waits for other stages."""

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Runs the forward of one micro-batch. Called by the schedule."""
        if self.has_backward and not self._has_begun:
            self._accumulation.begin()
            self._has_begun = True
        seed = derive_seed(torch.initial_seed(), "stage", self.stage_index, fwd_chunk_id)
        with self._busy(), _seeded(seed, self.device):
            output = super().forward_one_chunk(
                fwd_chunk_id, args, dict(kwargs or {}), save_forward_output=save_forward_output
            )
        if not self.is_last:
            self._check_output(output)
        return output

    def _check_output(self, output: Any) -> None:
        """Raises unless the output is what the next stage has allocated memory for."""
        sent = output if isinstance(output, tuple) else (output,)
        expected = self._example.outputs
        if len(sent) != len(expected) or any(
            value.shape != other.shape or value.dtype != other.dtype
            for value, other in zip(sent, expected, strict=False)
        ):
            raise UsageError(
                f"stage {self.stage_index} sends {_describe(sent)} to the next stage, which expects "
                f"{_describe(expected)}: all micro-batches must have the size of the example, and with mixed precision "
                "its dtype: split.examples(..., dtype=torch.bfloat16)"
            )

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs the backward of one micro-batch, or the part for the stage's inputs. Called by the schedule."""
        with self._busy():
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the part of a backward that computes gradients of weights. Called by zero-bubble schedules."""
        with self._busy():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
            self._accumulation.add()  # no hook of a unit sees these gradients

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Divides, pushes and frees the stage's units. Called by the schedule after the stage's last backward."""
        self._has_begun = False
        with self._busy():
            if self._accumulation:
                self._accumulation.finish(grad_scale_factor)
            else:
                super().perform_reduce_grad(grad_scale_factor)

    def abandon(self) -> None:
        """Frees the stage's units after an error in the schedule."""
        self._accumulation.abandon()
        self._has_begun = False

    @contextmanager
    def _busy(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.busy_s += time.perf_counter() - started

    def clear_runtime_states(self) -> None:
        """Drops what the last step left. Called by the schedule when a step begins."""
        self._has_begun = False
        super().clear_runtime_states()


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Context with a seed for torch's generators, which have their former state afterwards."""
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


# ---- schedules ----

Loss = Callable[[Any, Any], torch.Tensor]
"""``(output of the last stage, target) -> mean loss`` of one micro-batch."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What torch's schedule requires."""

    make: Any
    is_single: bool = False
    """True if each trainer has one stage."""
    is_v: bool = False
    """True if each trainer has two stages, placed as a V: trainer 0 has the first and the last stage."""
    splits_backward: bool = False
    """True if gradients of weights are computed apart from gradients of inputs."""
    in_rounds: bool = False
    """True if rounds of ``pp`` micro-batches must have equal sizes."""
    needs_stages: bool = False
    """True if there must be as many micro-batches as stages."""


_KINDS = {
    "GPipe": _Kind(pipelining.ScheduleGPipe, is_single=True),
    "1F1B": _Kind(pipelining.Schedule1F1B, is_single=True, needs_stages=True),
    "Interleaved1F1B": _Kind(pipelining.ScheduleInterleaved1F1B, in_rounds=True),
    "LoopedBFS": _Kind(pipelining.ScheduleLoopedBFS),
    "InterleavedZeroBubble": _Kind(pipelining.ScheduleInterleavedZeroBubble, splits_backward=True, in_rounds=True),
    "ZBVZeroBubble": _Kind(pipelining.ScheduleZBVZeroBubble, is_v=True, splits_backward=True),
    "DualPipeV": _Kind(pipelining.ScheduleDualPipeV, is_v=True, splits_backward=True, needs_stages=True),
}


SCHEDULES = tuple(_KINDS)
"""Names of the schedules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePlan:
    """A schedule, and the stages that each trainer computes. Equal for all replicas of a run.

    Raises:
        UsageError: The schedule is unknown, or does not work with these numbers.
    """

    schedule: str
    """One of ``SCHEDULES``."""
    pp: int
    """Number of trainers in the pipeline."""
    num_micro_batches: int
    """Micro-batches per work item."""
    stages_per_trainer: int | None = None
    """None: 1, or 2 for the schedules that need several."""

    def __post_init__(self) -> None:
        kind = _KINDS.get(self.schedule)
        if kind is None:
            raise UsageError(f"schedule={self.schedule!r}: expected one of {', '.join(SCHEDULES)}")
        if self.pp < 1 or self.num_micro_batches < 1:
            raise UsageError(f"{self}: pp and num_micro_batches must be at least 1")
        if self.stages_per_trainer is None:
            object.__setattr__(self, "stages_per_trainer", 1 if kind.is_single else 2)
        self._check(kind)

    def _check(self, kind: _Kind) -> None:
        per_trainer, count = self._per_trainer, self.num_micro_batches
        wanted = 1 if kind.is_single else 2 if kind.is_v else None
        if wanted not in (None, per_trainer) or per_trainer < 1:
            raise UsageError(
                f"schedule {self.schedule} needs {wanted or 'at least 1'} stages per trainer, got {per_trainer}"
            )
        if kind.needs_stages and count < self.num_stages:
            raise UsageError(
                f"schedule {self.schedule} needs at least as many micro-batches as stages: {self.num_stages} stages, "
                f"{count} micro-batches"
            )
        rounds = max(1, count // self.pp)
        if kind.in_rounds and count % rounds:
            raise UsageError(
                f"schedule {self.schedule} runs {count} micro-batches in {rounds} rounds of {self.pp}, which must have "
                f"equal sizes: use {rounds * self.pp} or {(rounds + 1) * self.pp} micro-batches"
            )

    @property
    def _per_trainer(self) -> int:
        assert self.stages_per_trainer is not None
        return self.stages_per_trainer

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.pp * self._per_trainer

    @property
    def splits_backward(self) -> bool:
        """True if gradients of weights are computed apart from gradients of inputs."""
        return _KINDS[self.schedule].splits_backward

    def stages_of(self, pp_rank: int) -> list[int]:
        """Returns the indices of the stages of a trainer, in increasing order."""
        if not 0 <= pp_rank < self.pp:
            raise UsageError(f"pp_rank={pp_rank}: expected 0 to {self.pp - 1}")
        if _KINDS[self.schedule].is_v:
            return [pp_rank, self.num_stages - 1 - pp_rank]
        return list(range(pp_rank, self.num_stages, self.pp))

    @property
    def holders(self) -> list[int]:
        """Pipeline rank of the trainer of each stage."""
        owners = {stage: pp_rank for pp_rank in range(self.pp) for stage in self.stages_of(pp_rank)}
        return [owners[stage] for stage in range(self.num_stages)]

    def micro_batch_size(self, batch_size: int) -> int:
        """Returns the samples of a micro-batch.

        Args:
            batch_size: Samples of a work item.

        Raises:
            UsageError: The number of micro-batches does not divide them.
        """
        if batch_size % self.num_micro_batches:
            raise UsageError(
                f"a batch of {batch_size} samples cannot be divided into {self.num_micro_batches} micro-batches of "
                f"equal size: use a multiple of {self.num_micro_batches} samples per work item"
            )
        return batch_size // self.num_micro_batches

    def note_in(self, description: ModelDescription) -> None:
        """Adds the schedule to the description of the model that its stages are made of."""
        description.schedule, description.num_micro_batches = self.schedule, self.num_micro_batches
        description.pp_ranks = dict(enumerate(self.holders))

    def bubble(self) -> float | None:
        """Returns the share of a step that a trainer idles, in theory: all stages take equally long.

        None for schedules that split the backward: their bubble depends on the time of each part.
        """
        if self.splits_backward:
            return None
        idle = self.pp - 1
        return idle / (self.num_micro_batches * self._per_trainer + idle)

    def describe(self) -> str:
        """Returns one line: schedule, micro-batches, stages and bubble."""
        bubble = self.bubble()
        share = "bubble depends on the backward's parts" if bubble is None else f"bubble {100 * bubble:.1f}% in theory"
        return (
            f"{self.schedule}, {self.num_micro_batches} micro-batches, {self.num_stages} stages on {self.pp}, {share}"
        )


class PipelineSchedule:
    """Runs the stages of one trainer on the micro-batches of a work item.

    Attributes:
        idle_share: Share of the last step in which this trainer computed nothing: the measured bubble, with the time of
            transfers between stages. Computation on a GPU is asynchronous and is not measured.

    Args:
        plan: The schedule.
        stages: This trainer's stages, in the order of ``plan.stages_of``.
        loss: Mean loss of one micro-batch. The step's loss and gradient are means over the micro-batches.
        context: Returns the context in which forwards, losses and backwards run, such as
            ``TensorParallelPlan.loss_context``.

    Raises:
        UsageError: The stages are not those of the plan, or the schedule cannot run them.
    """

    def __init__(
        self,
        plan: SchedulePlan,
        stages: Sequence[PipelineStage],
        loss: Loss,
        *,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        _check_stages(plan, stages)
        unknown = [StageDescription(index, (), ()) for index in range(plan.num_stages)]
        for stage in stages:
            plan.note_in(describe_model(stage.submod, "pipeline", unknown))
        kind = _KINDS[plan.schedule]
        self.plan = plan
        self._stages, self._context = list(stages), context
        self.idle_share = 0.0
        self._loss, self._loss_s = loss, 0.0
        self._schedule = kind.make(
            self._stages[0] if kind.is_single else self._stages,
            n_microbatches=plan.num_micro_batches,
            loss_fn=self._measured_loss,
        )

    def step(self, *inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
        """Runs all forwards and backwards of one work item. All trainers of the pipeline call it together.

        Args:
            inputs: Arguments of the first stage for the whole work item. Used by the trainer of the first stage.
            target: Target for the loss. Used by the trainer of the last stage.

        Returns:
            The mean loss, on the trainer of the last stage. None on the others.

        Raises:
            UsageError: The number of samples is not a multiple of the number of micro-batches.
            ReplicaLostError: Another trainer of the replica was lost meanwhile.
        """
        for tensor in (*inputs, target):
            self.plan.micro_batch_size(tensor.shape[0])
        started, busy_s = time.perf_counter(), self._busy_s()
        try:
            return self._run(inputs, target)
        except BaseException as error:
            for stage in self._stages:
                stage.abandon()
            if is_lost_peer(error):
                raise ReplicaLostError(
                    f"a trainer of this replica was lost, or did not answer in time: {START_AGAIN}. {first_line(error)}"
                ) from error
            raise
        finally:
            seconds = time.perf_counter() - started
            idle_s = seconds - (self._busy_s() - busy_s)
            self.idle_share = idle_s / seconds
            parameter = next(self._stages[0].submod.parameters(), None)
            # A GPU runs kernels in the background: the calls of a stage end before its work, so they tell no idle time.
            if parameter is not None and parameter.device.type == "cpu" and (session := session_of(parameter)):
                session.monitor.add(StepPart.PIPELINE_BUBBLE, max(0.0, idle_s))

    def _run(self, inputs: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor | None:
        has_first = any(stage.is_first for stage in self._stages)
        has_last = any(stage.is_last for stage in self._stages)
        losses: list[torch.Tensor] = []
        with self._context():
            self._schedule.step(
                *(inputs if has_first else ()),
                target=target if has_last else None,
                losses=losses,
                return_outputs=False,
            )
        return torch.stack([loss.detach() for loss in losses]).mean() if has_last else None

    def _busy_s(self) -> float:
        return self._loss_s + sum(stage.busy_s for stage in self._stages)

    def _measured_loss(self, output: Any, target: Any) -> torch.Tensor:
        started = time.perf_counter()
        loss = self._loss(output, target)
        self._loss_s += time.perf_counter() - started
        return loss


def _check_stages(plan: SchedulePlan, stages: Sequence[PipelineStage]) -> None:
    indices = [stage.stage_index for stage in stages]
    group_size, pp_rank = stages[0].group_size, stages[0].group_rank
    if group_size != plan.pp:
        raise UsageError(f"the plan is for pp={plan.pp}, but the process group of the stages has {group_size} members")
    if indices != plan.stages_of(pp_rank):
        raise UsageError(
            f"schedule {plan.schedule}: trainer {pp_rank} of the pipeline has the stages {plan.stages_of(pp_rank)}, "
            f"got {indices}"
        )
    for stage in stages if plan.splits_backward else ():
        _check_single_use(plan, stage.stage_index, stage.submod)


def _check_single_use(plan: SchedulePlan, index: int, module: nn.Module) -> None:
    """Raises if two modules of a stage share a parameter: torch cannot split their backward."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise UsageError(
                f"schedule {plan.schedule} splits the backward, which torch cannot do for a parameter that is used "
                f"twice: {first!r} and {name!r} of stage {index} are tied. Use 1F1B, Interleaved1F1B, GPipe or "
                "LoopedBFS"
            )


def micro_batches_in_flight(plan: SchedulePlan, pp_rank: int) -> list[Mapping[int, int]]:
    """Returns the number of micro-batches with activations by stage, after each forward of a trainer.

    A micro-batch counts until its backward is complete, with the gradients of the weights.

    Args:
        plan: The schedule.
        pp_rank: The trainer.
    """
    if plan.schedule in ("GPipe", "1F1B"):
        count = plan.num_micro_batches if plan.schedule == "GPipe" else plan.pp - pp_rank
        return [{pp_rank: min(count, plan.num_micro_batches)}]
    held = dict.fromkeys(plan.stages_of(pp_rank), 0)
    found: list[Mapping[int, int]] = []
    for kind, stage in _actions(plan, pp_rank):
        if kind == "FORWARD":
            held[stage] += 1
            found.append(dict(held))
        elif kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):
            held[stage] -= 1
    return found


def _actions(plan: SchedulePlan, pp_rank: int) -> Iterator[tuple[str, int]]:
    """Yields kind and stage of each action of a trainer, in the order of torch's schedule."""
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=plan.num_stages,
            group_size=plan.pp,
            group_rank=pp_rank,
            is_first=index == 0,
            is_last=index == plan.num_stages - 1,
            submod=None,
        )
        for index in plan.stages_of(pp_rank)
    ]
    schedule = _KINDS[plan.schedule].make(stages, n_microbatches=plan.num_micro_batches, loss_fn=lambda *_: None)
    for action in schedule.pipeline_order[pp_rank]:
        for part in () if action is None else (action.sub_actions or (action,)):
            yield part.computation_type.name, part.stage_index
