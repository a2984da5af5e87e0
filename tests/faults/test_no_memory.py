"""Fault tests of a shard server without memory: committed steps stay, and training continues once memory is free."""

from __future__ import annotations

import resource
import uuid
from pathlib import Path

import pytest
import torch

import shardwell
from shardwell_wire.errors import CapacityError


def address_space_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def test_step_without_memory_for_optimizer_state_is_not_committed() -> None:
    with (
        shardwell.LocalCluster(num_shards=1, memory_budget=1 << 30) as cluster,
        shardwell.join(cluster.address, run=uuid.uuid4().hex, waits=shardwell.WaitOptions(wait_limit_s=30)) as session,
    ):
        model = torch.nn.Linear(4096, 4096)
        reference = torch.nn.Linear(4096, 4096)
        reference.load_state_dict(model.state_dict())
        shardwell.fully_shard(model, session, name="l")
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.1)
        expected = torch.optim.AdamW(reference.parameters(), lr=0.1, fused=True)
        inputs, pid = torch.randn(2, 4096), cluster.shards[0].pid
        model(inputs).square().mean().backward()
        # Twice 64 MiB of moments do not fit into 100 MiB more.
        unlimited = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (address_space_bytes(pid) + (100 << 20), unlimited[1]))
        with pytest.raises(CapacityError, match="for the optimizer's state of unit 'l'"):
            optimizer.step()
        assert session.step == 0
        resource.prlimit(pid, resource.RLIMIT_AS, unlimited)
        optimizer.step()
        assert session.step == 1
        reference(inputs).square().mean().backward()
        expected.step()
        for name, value in shardwell.full_state_dict(model).items():
            assert torch.equal(value, reference.state_dict()[name]), name
