"""Pipeline stages of sharded models, for the schedules of ``torch.distributed.pipelining``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from shardwell.module.fully_shard import Accumulation
from shardwell.monitor.step_times import StepPart
from shardwell.parallel.splitting import StageExample
from shardwell.seeds import derive_seed
from shardwell.session.session import session_of
from shardwell_wire.errors import UsageError


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


def report_bubble(module: nn.Module, idle_s: float) -> None:
    """Adds idle time to ``PIPELINE_BUBBLE`` of the session that has a module's parameters, if there is one.

    Reports nothing for a GPU: its kernels run in the background, so the calls of a stage end before its work.

    Args:
        module: A stage's module.
        idle_s: Seconds in which this trainer computed nothing.
    """
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.device.type == "cpu" and (session := session_of(parameter)) is not None:
        session.monitor.add(StepPart.PIPELINE_BUBBLE, max(0.0, idle_s))
