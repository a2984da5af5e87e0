"""Pipeline stages of sharded models, and the schedules of ``torch.distributed.pipelining`` that run them.

``PipelineStage`` is one stage. ``SchedulePlan`` has the numbers of a schedule: which stages a trainer computes in which
order. ``PipelineSchedule`` runs torch's schedule on a trainer's stages. ``micro_batches_in_flight`` tells how many
micro-batches have activations at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from shardwell.grid.parallel_plan import descriptions
from shardwell.grid.process_group import is_lost_peer, lost_peer_error
from shardwell.module.fully_shard import Accumulation, ShardedModule
from shardwell.monitor.step_times import StepPart
from shardwell.parallel.description import ModelDescription, StageDescription, describe_model
from shardwell.parallel.outline import list_layers
from shardwell.parallel.splitting import (
    SEQUENCE_DIM,
    KeywordNames,
    StageExample,
    check_names,
    check_shapes,
    count_samples,
    detached,
    merge,
    micro_batch_of,
    sends_parts,
)
from shardwell.seeds import derive_seed
from shardwell.session.session import Session, session_of
from shardwell_wire.errors import UsageError


class PipelineStage(pipelining.PipelineStage):
    """A stage of a pipeline whose parameters are on the shard servers.

    Every unit of the stage is gathered once per step, stays gathered for all micro-batches, and is pushed once, divided
    by the number of micro-batches, when the stage has finished its last backward. The schedule calls the stage; any
    schedule of ``torch.distributed.pipelining`` works. The gradients have the bits of one process that runs the same
    micro-batches one after another and divides their sum (``LoopedBFS``: in reverse order).

    Keyword arguments of the schedule go to the stages whose forward takes them.

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

    Raises:
        UsageError: The stage was made neither by ``split_model`` nor by ``ModelSplit.from_modules``, or as another one
            or for another number of stages.
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
        if num_stages > 1:
            _check_division(submodule, stage_index, num_stages)
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            torch.device(device),
            input_args=example.inputs,
            output_args=example.outputs,
            group=group,
        )
        self.example = example
        self.keywords = KeywordNames(submodule.forward)
        self.outputs: dict[int, Any] | None = None
        """Outputs by micro-batch while they are collected; None otherwise."""
        self.defers_push = False
        """True if the gradients wait for the push of a later call of the schedule."""
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
        taken = {name: value for name, value in (kwargs or {}).items() if name in self.keywords}
        with self._busy(), _seeded(seed, self.device):
            output = super().forward_one_chunk(fwd_chunk_id, args, taken, save_forward_output=save_forward_output)
        if not self.is_last:
            self._check_output(output)
        elif self.outputs is not None:
            self.outputs[fwd_chunk_id] = detached(output)
        return output

    def _check_output(self, output: Any) -> None:
        """Raises unless the output is what the next stage has allocated memory for."""
        sent = output if isinstance(output, tuple) else (output,)
        expected = self.example.outputs
        if len(sent) != len(expected) or any(
            value.shape != other.shape or value.dtype != other.dtype
            for value, other in zip(sent, expected, strict=False)
        ):
            raise UsageError(
                f"stage {self.stage_index} sends {_describe(sent)} to the next stage, which expects "
                f"{_describe(expected)}: all micro-batches must have the size of the example, and with mixed precision "
                "its dtype: split.examples(..., dtype=torch.bfloat16). With sequence parallelism stages send parts: "
                "split.examples(..., tensor_plan=plan)"
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
            if not self._accumulation:
                super().perform_reduce_grad(grad_scale_factor)
            elif self.defers_push:
                self._accumulation.defer(grad_scale_factor)
            else:
                self._accumulation.finish(grad_scale_factor)

    @property
    def is_sharded(self) -> bool:
        """True if the stage has units."""
        return bool(self._accumulation)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of forwards without backwards: the module is in evaluation mode, each unit is gathered once."""
        modes = [(module, module.training) for module in self.submod.modules()]
        self.submod.eval()
        stays = self._accumulation.is_open  # the units stay for the next call of the schedule
        if not stays:
            self._accumulation.begin()
        try:
            yield
            if not stays:
                self._accumulation.close()
        finally:
            self.fwd_cache.clear()
            for module, training in modes:
                module.training = training

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


def _check_division(module: nn.Module, index: int, num_stages: int) -> None:
    """Raises unless a split has made a module as this stage."""
    description: ModelDescription | None = descriptions.get(module)
    made_as = None if description is None else description.indices.get(module)
    if description is None or made_as is None:
        raise UsageError(
            f"stage {index} ({type(module).__name__}) was not made by split_model, so nothing has "
            "compared the stages with the model: a parameter may be in no stage, or be trained as one in each of "
            "two stages. Pass the model and the stages to shardwell.parallel.ModelSplit.from_modules first"
        )
    if made_as != index or len(description.stages) != num_stages:
        raise UsageError(
            f"the module of stage {index} of {num_stages} ({type(module).__name__}) is stage {made_as} of "
            f"{len(description.stages)} in the split of {description.class_name}: pass split.module({index}) of a "
            f"split into {num_stages} stages"
        )


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


class _ForwardSchedule(schedules._PipelineScheduleRuntime):
    """The forwards of a schedule, in its order, without backwards.

    Torch's own ``eval`` skips the backwards of a schedule when it comes to them, which fails if a trainer has two
    consecutive stages.

    Args:
        stages: This trainer's stages.
        loss: Loss of one micro-batch.
    """

    def __init__(self, plan: SchedulePlan, stages: Sequence[PipelineStage], training: Any, loss: Loss) -> None:
        super().__init__(list(stages), plan.num_micro_batches, loss_fn=loss)  # type: ignore[no-untyped-call]
        self._has_backward = False
        self.stage_index_to_group_rank = dict(enumerate(plan.holders))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        order = _single_stage_forwards(plan, stages[0]) if _KINDS[plan.schedule].is_single else _forwards_of(training)
        self.pipeline_order_with_comms = {self.rank: order}

    def run(self, inputs: Sequence[torch.Tensor], target: torch.Tensor | None, keywords: Mapping[str, Any]) -> Any:
        """Runs the forwards. Returns the losses, if there is a target."""
        losses: list[torch.Tensor] = []
        loss_fn = self._loss_fn
        try:
            self._loss_fn = None if target is None else loss_fn
            self.step(
                *inputs, target=target, losses=None if target is None else losses, return_outputs=False, **keywords
            )
        finally:
            self._loss_fn = loss_fn
        return losses


def _forwards_of(training: Any) -> list[Any]:
    """Returns the actions of this trainer that forwards need."""
    wanted = (schedules.FORWARD, schedules.SEND_F, schedules.RECV_F)
    actions = training.pipeline_order_with_comms[training.rank]
    parts = [part for action in actions for part in action.sub_actions or (action,)]
    return [part for part in parts if part.computation_type in wanted]


def _single_stage_forwards(plan: SchedulePlan, stage: PipelineStage) -> list[Any]:
    kinds = [schedules.FORWARD]
    kinds = kinds if stage.is_first else [schedules.RECV_F, *kinds]
    kinds = kinds if stage.is_last else [*kinds, schedules.SEND_F]
    numbers = range(plan.num_micro_batches)
    return [schedules._Action(stage.stage_index, kind, number) for number in numbers for kind in kinds]


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
        self._description = _description_of(plan, stages)
        plan.note_in(self._description)
        _check_sequence(self._description, stages)
        kind = _KINDS[plan.schedule]
        self.plan = plan
        self._stages, self._context = list(stages), context
        self._has_first = any(stage.is_first for stage in stages)
        self._has_last = any(stage.is_last for stage in stages)
        self._forward_schedule: _ForwardSchedule | None = None
        self.idle_share = 0.0
        self._loss, self._loss_s = loss, 0.0
        self._schedule = kind.make(
            self._stages[0] if kind.is_single else self._stages,
            n_microbatches=plan.num_micro_batches,
            loss_fn=self._measured_loss,
        )

    @overload
    def step(
        self,
        *inputs: torch.Tensor,
        target: torch.Tensor | None = ...,
        return_outputs: Literal[False] = ...,
        **keywords: Any,
    ) -> torch.Tensor | None: ...

    @overload
    def step(
        self, *inputs: torch.Tensor, target: torch.Tensor | None = ..., return_outputs: Literal[True], **keywords: Any
    ) -> tuple[torch.Tensor | None, Any]: ...

    def step(
        self, *inputs: torch.Tensor, target: torch.Tensor | None = None, return_outputs: bool = False, **keywords: Any
    ) -> torch.Tensor | tuple[torch.Tensor | None, Any] | None:
        """Runs all forwards and backwards of one work item. All trainers of the pipeline call it together.

        Args:
            inputs: Arguments of the first stage for the whole work item. Used by the trainer of the first stage.
            target: Target for the loss. Used by the trainer of the last stage; may be None on the others.
            return_outputs: Whether to return the outputs of the last stage, too.
            keywords: Keyword arguments for the whole work item, such as masks. Each stage of this trainer gets those
                that its forward takes. The first dimension of tensors is cut into micro-batches; other values go to
                every micro-batch.

        Returns:
            The mean loss, on the trainer of the last stage. None on the others. With ``return_outputs``, the loss and
            the outputs of all micro-batches, joined and without graph; both None on the others.

        Raises:
            UsageError: The number of samples is not a multiple of the number of micro-batches, or is not that of the
                example; the target is missing; no stage of this trainer takes a keyword argument; or gradients are
                disabled.
            ReplicaLostError: Another trainer of the replica was lost meanwhile.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "schedule.step under torch.no_grad() cannot run backwards: call schedule.eval(...) instead"
            )
        self._check(inputs, target, keywords)
        if target is None and self._has_last:
            raise UsageError("schedule.step(...) needs target= on the trainer of the last stage, to compute the loss")
        started, busy_s = time.perf_counter(), self._busy_s()
        losses: list[torch.Tensor] = []
        try:
            with self._outputs(return_outputs) as outputs, self._raising(), self._context():
                self._schedule.step(
                    *(inputs if self._has_first else ()),
                    target=target if self._has_last else None,
                    losses=losses,
                    return_outputs=False,
                    **keywords,
                )
                loss = _mean(losses) if self._has_last else None
                return (loss, _merged(outputs)) if return_outputs else loss
        finally:
            seconds = time.perf_counter() - started
            idle_s = seconds - (self._busy_s() - busy_s)
            self.idle_share = idle_s / seconds
            parameter = next(self._stages[0].submod.parameters(), None)
            # A GPU runs kernels in the background: the calls of a stage end before its work, so they tell no idle time.
            if parameter is not None and parameter.device.type == "cpu" and (session := session_of(parameter)):
                session.monitor.add(StepPart.PIPELINE_BUBBLE, max(0.0, idle_s))

    @property
    def _session(self) -> Session | None:
        parameters = (parameter for stage in self._stages for parameter in stage.submod.parameters())
        return next((session for parameter in parameters if (session := session_of(parameter)) is not None), None)

    @overload
    def eval(
        self,
        *inputs: torch.Tensor,
        target: torch.Tensor | None = ...,
        return_outputs: Literal[False] = ...,
        **keywords: Any,
    ) -> torch.Tensor | None: ...

    @overload
    def eval(
        self, *inputs: torch.Tensor, target: torch.Tensor | None = ..., return_outputs: Literal[True], **keywords: Any
    ) -> tuple[torch.Tensor | None, Any]: ...

    def eval(
        self, *inputs: torch.Tensor, target: torch.Tensor | None = None, return_outputs: bool = False, **keywords: Any
    ) -> torch.Tensor | tuple[torch.Tensor | None, Any] | None:
        """Runs the forwards only, without gradients, in evaluation mode. All trainers of the pipeline call it together.

        Call it anywhere in a training loop: in a work item, or between steps. It reads the weights that a forward there
        reads, and changes no result of the training. The stages have their former mode afterwards.

        Args:
            inputs: As in ``step``.
            target: Target for the loss. None on the trainer of the last stage: no loss is computed.
            return_outputs: As in ``step``. Required there without a target.
            keywords: As in ``step``.

        Returns:
            As ``step``. The loss is None without a target.

        Raises:
            UsageError: As in ``step``.
            ReplicaLostError: Another trainer of the replica was lost meanwhile.
        """
        self._check(inputs, target, keywords)
        if self._has_last and target is None and not return_outputs:
            raise UsageError(
                "schedule.eval(...) on the trainer of the last stage needs target= to compute the loss, or "
                "return_outputs=True"
            )
        if self._forward_schedule is None:
            self._forward_schedule = _ForwardSchedule(self.plan, self._stages, self._schedule, self._measured_loss)
        with self._outputs(return_outputs) as outputs, self._raising(), ExitStack() as stack:
            for stage in self._stages:
                stack.enter_context(stage.evaluating())
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._context())
            losses = self._forward_schedule.run(
                inputs if self._has_first else (), target if self._has_last else None, keywords
            )
            loss = _mean(losses) if losses else None
            return (loss, _merged(outputs)) if return_outputs else loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of all calls of ``step`` in a work item but the last one.

        The stages stay gathered after these calls, and their gradients stay in this process. The next call after the
        context pushes the sum of the mean gradients of all calls. Divide the loss by the number of calls to train with
        their mean.

        Raises:
            UsageError: A stage is not sharded.
        """
        for stage in self._stages:
            if not stage.is_sharded:
                raise UsageError(
                    f"no_sync: stage {stage.stage_index} is not sharded: call fully_shard or auto_wrap on its module "
                    "before PipelineStage"
                )
        for stage in self._stages:
            stage.defers_push = True
        try:
            yield
        finally:
            for stage in self._stages:
                stage.defers_push = False

    @property
    def stages(self) -> Sequence[PipelineStage]:
        """The stages of this trainer."""
        return tuple(self._stages)

    def _check(self, inputs: Sequence[torch.Tensor], target: torch.Tensor | None, keywords: Mapping[str, Any]) -> None:
        check_names(keywords, [stage.keywords for stage in self._stages])
        size, example = count_samples(inputs, target, keywords), self._description.micro_batch
        if size is not None:
            rows = self.plan.micro_batch_size(size)
            if example is not None and rows != example.batch and self.plan.num_stages > 1:
                count = self.plan.num_micro_batches
                raise UsageError(
                    f"a batch of {size} samples, expected {count * example.batch}: {count} micro-batches with the "
                    f"{example.batch} samples of the example. All work items must have the size of the example"
                )
        for stage in self._stages:
            if stage.is_first and not stage.is_last:
                check_shapes(inputs, stage.example.inputs, count=self.plan.num_micro_batches)

    @contextmanager
    def _outputs(self, wanted: bool) -> Iterator[dict[int, Any]]:
        """Context in which the last stage collects its outputs by micro-batch, if they are wanted."""
        outputs: dict[int, Any] = {}
        for stage in self._stages if wanted else ():
            stage.outputs = outputs
        try:
            yield outputs
        finally:
            for stage in self._stages:
                stage.outputs = None

    @contextmanager
    def _raising(self) -> Iterator[None]:
        """Context that frees the stages after an error, and tells if another trainer was lost."""
        session = self._session
        try:
            with nullcontext() if session is None else session.replica_in_use():
                yield
        except BaseException as error:
            for stage in self._stages:
                stage.abandon()
            if not is_lost_peer(error):
                raise
            raise (lost_peer_error(error) if session is None else session.replica_lost_error(error)) from error

    def _busy_s(self) -> float:
        return self._loss_s + sum(stage.busy_s for stage in self._stages)

    def _measured_loss(self, output: Any, target: Any) -> torch.Tensor:
        started = time.perf_counter()
        loss = self._loss(output, target)
        self._loss_s += time.perf_counter() - started
        return loss


def _mean(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.detach() for loss in losses]).mean()


def _merged(outputs: Mapping[int, Any]) -> Any:
    return merge([outputs[number] for number in sorted(outputs)]) if outputs else None


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


def _description_of(plan: SchedulePlan, stages: Sequence[PipelineStage]) -> ModelDescription:
    """Returns the description of the model. Without pipeline parallelism, describes a model that no split has made."""
    first = stages[0]
    if plan.num_stages == 1 and first.submod not in descriptions:
        kind = type(first.submod)
        name = (kind.__bases__[-1] if isinstance(first.submod, ShardedModule) else kind).__name__
        made = describe_model(first.submod, name, [StageDescription(0, (), tuple(list_layers(first.submod)))])
        made.micro_batch = micro_batch_of(first.example.inputs, first.example.outputs)
    description: ModelDescription = descriptions[first.submod]
    for stage in stages[1:]:
        if descriptions[stage.submod] is not description:
            raise UsageError(
                f"the stages {first.stage_index} and {stage.stage_index} are of two splits: take the modules of all "
                "stages from one split_model or ModelSplit.from_modules"
            )
    if plan.num_stages > 1 and not description.has_examples:
        raise UsageError(
            f"the size of a micro-batch of {description.class_name} is not known, so trainers with another size would "
            "not be noticed: make the examples with split.examples(...), or, if its stages cannot run without values, "
            "pass the examples of all stages to ModelSplit.from_modules(model, stages, examples=...)"
        )
    return description


def _check_sequence(description: ModelDescription, stages: Sequence[PipelineStage]) -> None:
    """Raises if stages send parts of the sequence, but their examples have the whole sequence."""
    size = description.micro_batch
    if not description.sequence_parallel or size is None:
        return
    cut = sends_parts(description.stages, list(description.styles.values()))
    for stage in stages:
        for value in stage.example.outputs if cut[stage.stage_index] else ():
            if value.requires_grad and value.shape[SEQUENCE_DIM : SEQUENCE_DIM + 1] == (size.length,):
                raise UsageError(
                    f"sequence parallelism: stage {stage.stage_index} sends a part of each sequence, but its example "
                    f"has the shape {list(value.shape)} with all {size.length} tokens: make the examples with "
                    "split.examples(..., tensor_plan=plan)"
                )


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
