"""A trainer of ``benchmarks.grid``: ``python -m benchmarks.grid_trainer SPEC``. Commands are those of ``trainers``.

All modes train the same GPT from the same weights on the same data, divided over the replica in the same way. The
baselines use torch's schedule and stage, Shardwell its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import shardwell
from benchmarks.models import compute, make_model, make_tokens
from benchmarks.trainers import ADAMW, StepResult, do_nothing, gather_one_block_ahead, serve_steps, totals_of
from examples.gpt import Block, GPTConfig
from shardwell.parallel import PipelineSchedule, PipelineStage, SchedulePlan, plan_tensor_parallel, split_model

_RUN = "benchmark"

Train = Callable[[Tensor], float | None]
"""``tokens -> loss``: runs forward and backward of one work item. None: another trainer has the loss."""


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """The task of one trainer process."""

    model: GPTConfig
    batch_size: int
    """Sequences per work item."""
    length: int
    num_micro_batches: int
    """Micro-batches of the pipeline."""
    dp: int
    tp: int
    pp: int
    """One of ``tp`` and ``pp`` is 1."""
    mode: str = "shardwell"
    """``resident``, ``all_reduce``, ``fsdp2``, ``fsdp2_prefetch`` or ``shardwell``."""
    rank: int = 0
    """Global rank."""
    address: str = ""
    """Address of the coordinator; for the baselines, the ``init_method`` of ``torch.distributed``."""
    transports: str = ""
    """See ``shardwell.TransferOptions``."""

    @property
    def world(self) -> shardwell.World:
        return shardwell.World(dp=self.dp, tp=self.tp, pp=self.pp)

    def tokens(self, step: int, dp_rank: int) -> Tensor:
        """Returns the work item of a data-parallel rank. [batch_size, length + 1]"""
        return make_tokens(self.model, step=step, dp_rank=dp_rank, batch_size=self.batch_size, length=self.length)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GridSpec:
        values = json.loads(text)
        return cls(**{**values, "model": GPTConfig(**values["model"])})


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pipeline:
    """One stage of the model, and how to train it.

    Attributes:
        module: The stage's module. Wrap its units before ``torch_schedule`` or ``schedule``.

    Args:
        spec: The task.
        mesh: Mesh with the axis ``pp``.
    """

    def __init__(self, spec: GridSpec, mesh: DeviceMesh) -> None:
        self._plan = SchedulePlan(schedule="1F1B", pp=spec.pp, num_micro_batches=spec.num_micro_batches)
        self._group = mesh["pp"].get_group()
        self._index = mesh["pp"].get_local_rank()
        split = split_model(make_model(spec.model), spec.pp)
        micro_batch = torch.zeros(self._plan.micro_batch_size(spec.batch_size), spec.length, dtype=torch.int64)
        self._example = split.examples(micro_batch)[self._index]
        self.module = split.module(self._index)

    def torch_schedule(self) -> Train:
        """Returns a function that runs torch's own schedule."""
        example, count = self._example, self._plan.num_stages
        stage = pipelining.PipelineStage(
            self.module,
            self._index,
            count,
            torch.device("cpu"),
            input_args=example.inputs,
            output_args=example.outputs,
            group=self._group,
        )
        schedule = pipelining.Schedule1F1B(stage, n_microbatches=self._plan.num_micro_batches, loss_fn=loss_of)

        def train(tokens: Tensor) -> float | None:
            losses: list[Tensor] = []
            inputs = (tokens[:, :-1],) if stage.is_first else ()
            target = tokens[:, 1:] if stage.is_last else None
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
            return torch.stack(losses).mean().item() if stage.is_last else None

        return train

    def schedule(self) -> Train:
        """Returns a function that runs Shardwell's schedule."""
        stage = PipelineStage(
            self.module, self._index, self._plan.num_stages, "cpu", example=self._example, group=self._group
        )
        schedule = PipelineSchedule(self._plan, [stage], loss_of)

        def train(tokens: Tensor) -> float | None:
            loss = schedule.step(tokens[:, :-1], target=tokens[:, 1:])
            return None if loss is None else loss.item()

        return train


def split_over_tensor_ranks(spec: GridSpec, mesh: DeviceMesh) -> nn.Module:
    """Returns the model, split over the axis ``tp`` of a mesh."""
    model = make_model(spec.model)
    return plan_tensor_parallel(model, spec.tp, fused_by_head=True).apply(model, mesh["tp"])


def blocks_of(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, Block)]


# ---- baselines ----


def baseline_steps(spec: GridSpec) -> Generator[StepResult, None, None]:
    """Trains without Shardwell, one step per item."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=spec.address, rank=spec.rank, world_size=spec.world.size)
    mesh = init_device_mesh("cpu", (spec.dp, spec.tp, spec.pp), mesh_dim_names=("dp", "tp", "pp"))
    pipeline = Pipeline(spec, mesh) if spec.pp > 1 else None
    module = pipeline.module if pipeline is not None else split_over_tensor_ranks(spec, mesh)
    if spec.mode.startswith("fsdp2"):
        # A pipeline keeps its weights for all micro-batches, as Shardwell does.
        shard_as_fsdp2(module, mesh["dp"], reshard_after_forward=False if pipeline is not None else None)
    prefetches = spec.mode == "fsdp2_prefetch"
    begin_step = gather_one_block_ahead(module, blocks_of(module)) if prefetches else do_nothing
    train: Train = pipeline.torch_schedule() if pipeline is not None else lambda tokens: compute(module, tokens)
    optimizer = torch.optim.AdamW(groups_for_fused_kernels(module.parameters()), fused=True, **ADAMW)
    dp_rank = mesh["dp"].get_local_rank()
    for step in range(sys.maxsize):
        begin_step()
        loss = train(spec.tokens(step, dp_rank))
        if spec.mode == "all_reduce":
            average_gradients(module, mesh["dp"])
        optimizer.step()
        optimizer.zero_grad()
        yield StepResult(loss)


def shard_as_fsdp2(module: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool | None) -> None:
    for part in (*blocks_of(module), module):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)


def groups_for_fused_kernels(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Returns a parameter group for each mesh, and one for plain tensors: fused kernels cannot mix them."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": group} for group in groups.values()]


def average_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Averages the gradients over a mesh: one all-reduce per parameter, all in flight together."""
    in_flight = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        in_flight.append(dist.all_reduce(gradient.div_(mesh.size()), group=mesh.get_group(), async_op=True))
    for work in in_flight:
        work.wait()


# ---- Shardwell ----


def shardwell_steps(spec: GridSpec) -> Generator[StepResult, None, None]:
    """Trains with Shardwell, with the units of the baselines: one per block and one for the rest."""
    with shardwell.join(
        spec.address,
        run=_RUN,
        world=spec.world,
        global_rank=spec.rank,
        transfers=shardwell.TransferOptions(transports=spec.transports),
    ) as session:
        mesh = session.replica_mesh()
        pipeline = Pipeline(spec, mesh) if spec.pp > 1 else None
        module = pipeline.module if pipeline is not None else split_over_tensor_ranks(spec, mesh)
        names = {id(part): name for name, part in module.named_modules()}
        for block in blocks_of(module):
            shardwell.fully_shard(block, session, name=names[id(block)])
        shardwell.fully_shard(module, session, name=f"rest-{mesh['pp'].get_local_rank()}")
        train: Train = pipeline.schedule() if pipeline is not None else lambda tokens: compute(module, tokens)
        optimizer = shardwell.optim.AdamW(module.parameters(), **ADAMW)
        for step in session.steps(sys.maxsize):
            losses = [train(tokens) for tokens in step.batches(spec.tokens)]
            optimizer.step()
            optimizer.zero_grad()
            yield StepResult(losses[0] if losses else None, totals_of(session))


def main() -> None:
    torch.set_num_threads(1)
    spec = GridSpec.from_json(sys.argv[1])
    serve_steps(shardwell_steps(spec) if spec.mode == "shardwell" else baseline_steps(spec))


if __name__ == "__main__":
    main()
