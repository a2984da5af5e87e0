"""Exports of tensor-parallel models: every rank sends its parts, and the first rank writes whole tensors."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwell
from shardwell.weights import dcp
from shardwell.weights.state_dict import mesh_of
from shardwell_wire.errors import ConflictError, UsageError
from tests.parity.test_module_tensor_parallel import Model, make_optimizer, parallel_model, wrap
from tests.support import gloo
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Sharded, inputs
from tests.support.processes import run_ranks


def worker(rank: int, path: str, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = parallel_model(mesh, sequence_parallel=True)
    optimizer = make_optimizer(plain.parameters())
    sharded = Sharded(
        parallel_model(mesh, sequence_parallel=True), wrap, store=InMemoryStore(make_optimizer=make_optimizer)
    )
    for model, step in ((plain, optimizer.step), (sharded.model, sharded.step)):
        model(inputs(0, 2, 4, 8)).square().mean().backward()
        step()
    state = plain.state_dict()
    expected = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
    check_files(rank, sharded.model, expected, folder)
    check_failed_write(rank, sharded.model, folder / "full")
    whole_mesh = init_device_mesh("cpu", (1, 2))
    other = distribute_tensor(torch.ones(2), whole_mesh)
    with pytest.raises(UsageError, match="expected one mesh of one dim"):
        mesh_of([other])
    with pytest.raises(UsageError, match=r"split over .*, .*, expected one mesh"):
        mesh_of([other, *plain.parameters()])
    gloo.leave()


def check_files(rank: int, model: Any, expected: dict[str, torch.Tensor], folder: Path) -> None:
    paths = shardwell.save_safetensors(model, folder / "safetensors", max_shard_bytes=700)
    assert len(paths) > 1 if rank == 0 else not paths
    shardwell.save_dcp(model, folder / "dcp")
    # The call returns on every rank only after the files are written.
    loaded: dict[str, torch.Tensor] = {}
    for path in (folder / "safetensors").glob("*.safetensors"):
        loaded |= safetensors.torch.load_file(path)
    from_dcp = {name: torch.zeros_like(value) for name, value in expected.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        checkpoint.load(from_dcp, checkpoint_id=folder / "dcp", no_dist=True)
    for state in (loaded, from_dcp):
        assert sorted(state) == sorted(expected)
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
    Model().load_state_dict(loaded)


def check_failed_write(rank: int, model: Any, folder: Path) -> None:
    """A failed write raises on every rank, and no rank waits forever."""

    def failing(folder: Path, tensors: Any, values: Iterator[Any]) -> None:
        next(values)
        raise OSError(errno.ENOSPC, "No space left on device")

    original, dcp.write_dcp = dcp.write_dcp, failing  # type: ignore[assignment]
    if rank == 0:
        with pytest.raises(OSError, match="No space left"):
            shardwell.save_dcp(model, folder)
    else:
        with pytest.raises(ConflictError, match=r"writes for the tensor group failed: .*No space left"):
            shardwell.save_dcp(model, folder)
    dcp.write_dcp = original
    shardwell.save_dcp(model, folder)


def test_tensor_parallel_model_is_saved_as_whole_tensors(tmp_path: Path) -> None:
    run_ranks(worker, str(tmp_path / "store"), tmp_path)
