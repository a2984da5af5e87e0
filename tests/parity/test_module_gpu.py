"""Sharded modules on a GPU match plain PyTorch bit for bit, with copies outside the compute stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwell

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))).cuda()


def inputs(step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).cuda()


@pytest.mark.parametrize("transports", ["shm", "socket", "grpc"])
def test_training_on_a_gpu_matches_plain_pytorch(cluster: shardwell.LocalCluster, transports: str) -> None:
    plain = make_model()
    # The optimizer runs on the servers' CPUs. SGD without momentum has the same bits on a CPU and on a GPU.
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    with shardwell.join(
        cluster.address, run=f"gpu over {transports}", transfers=shardwell.TransferOptions(transports=transports)
    ) as session:
        sharded: Any = make_model()
        for block in sharded:
            shardwell.fully_shard(block, session)
        shardwell.fully_shard(sharded, session)
        optimizer = shardwell.optim.SGD(sharded.parameters(), lr=0.5)
        for step in range(STEPS):
            losses = []
            for model in (plain, sharded):
                loss = model(inputs(step)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            assert torch.equal(*losses)
            reference.step()
            reference.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        got = shardwell.full_state_dict(sharded)
        for name, value in plain.state_dict().items():
            assert torch.equal(got[name].cpu(), value.cpu()), name
