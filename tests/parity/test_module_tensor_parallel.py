"""Sharding on top of tensor parallelism: two processes split every layer, and each shards its part."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call

from shardwell import MixedPrecisionPolicy
from shardwell.module.fully_shard import fully_shard
from shardwell.module.parameters import FreedParameter
from tests.support import gloo
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Sharded, inputs
from tests.support.processes import run_ranks

STEPS = 3


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Feed(), Feed()])
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def parallel_model(mesh: Any, sequence_parallel: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence_parallel:
        plan |= {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
        if sequence_parallel:
            split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
            parallelize_module(block, mesh, split)
    return model


def wrap(model: Any, session: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, session, **options)
    fully_shard(model, session, **options)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def worker(rank: int, path: str, sequence_parallel: bool) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = parallel_model(mesh, sequence_parallel)
    optimizer = make_optimizer(plain.parameters())
    sharded = Sharded(parallel_model(mesh, sequence_parallel), wrap, store=InMemoryStore(make_optimizer=make_optimizer))
    up: Any = sharded.model.blocks[0].up
    assert isinstance(up.weight, FreedParameter) and isinstance(up.weight, DTensor)
    for step in range(STEPS):
        losses = []
        for model in (plain, sharded.model):
            loss = model(inputs(step, 2, 4, 8)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        optimizer.step()
        optimizer.zero_grad()
        sharded.step()
    got = sharded.state()
    for name, value in plain.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(got[name], whole), name
    gloo.leave()


def mixed_worker(rank: int, path: str, sequence_parallel: bool) -> None:
    """Runs two backwards per step, of which only the second pushes."""
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = parallel_model(mesh, sequence_parallel)
    optimizer = make_optimizer(plain.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    store = InMemoryStore(make_optimizer=make_optimizer)
    sharded = Sharded(parallel_model(mesh, sequence_parallel), partial(wrap, mp_policy=policy), store=store)
    weight: Any = sharded.model.blocks[0].up.weight
    assert isinstance(weight, DTensor) and weight.dtype == torch.float32, (
        "a freed parameter has the dtype of the servers"
    )
    for step in range(STEPS):
        for micro_batch in range(2):
            batch = inputs(2 * step + micro_batch, 2, 4, 8)
            cast = {name: parameter.to(torch.bfloat16) for name, parameter in plain.named_parameters()}
            expected = functional_call(plain, cast, (batch.bfloat16(),)).square().mean()
            expected.backward()
            sharded.model.set_requires_gradient_sync(micro_batch == 1)
            loss = sharded.model(batch).square().mean()
            loss.backward()
            assert torch.equal(loss, expected) and loss.dtype == torch.bfloat16
        optimizer.step()
        optimizer.zero_grad()
        sharded.step()
    got = sharded.state()
    for name, value in plain.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert whole.dtype == torch.float32 and torch.equal(got[name], whole), name
    sharded.model.blocks[0].unshard()
    assert weight.dtype == weight.to_local().dtype == weight.full_tensor().dtype == torch.bfloat16
    gloo.leave()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_mixed_precision_matches_parameters_cast_in_the_forward(tmp_path: Path, sequence_parallel: bool) -> None:
    run_ranks(mixed_worker, str(tmp_path / "store"), sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sharding_matches_tensor_parallelism_alone(tmp_path: Path, sequence_parallel: bool) -> None:
    run_ranks(worker, str(tmp_path / "store"), sequence_parallel)
