"""The way of weights and gradients between servers and a GPU, on a GPU that is not there: the bits of a CPU's run."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.memory import device_copies
from shardwell.memory.buffers import VectorMemory
from shardwell.module.flat_vector import FlatVector
from shardwell_wire.model.layout import Parameter, UnitLayout
from tests.support.fake_gpu import FakeGpu, fake_gpu

STEPS = 3
BF16 = shardwell.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(33, 33), nn.LayerNorm(33), nn.Tanh()) for _ in range(3)))


def train(address: str, run: str, policy: shardwell.MixedPrecisionPolicy | None, transports: str) -> dict[str, Any]:
    """Trains a few steps; returns the weights and the losses."""
    transfers = shardwell.TransferOptions(transports=transports)
    with shardwell.join(address, run=run, transfers=transfers) as session:
        model: Any = make_model()
        options = {} if policy is None else {"mp_policy": policy}
        for block in model:
            shardwell.fully_shard(block, session, **options)
        shardwell.fully_shard(model, session, **options)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.5)
        found: dict[str, Any] = {}
        for step in range(STEPS):
            loss = model(torch.randn(8, 33, generator=torch.Generator().manual_seed(step))).float().square().mean()
            loss.backward()
            found[f"loss {step}"] = loss.detach().clone()
            optimizer.step()
            optimizer.zero_grad()
        found.update(shardwell.full_state_dict(model))
    return found


@pytest.mark.parametrize("policy", [None, BF16], ids=["stored", "bf16"])
@pytest.mark.parametrize("way", ["registered", "refused", "socket"])
def test_a_gpu_gets_and_gives_the_bits_of_a_cpu(
    cluster: shardwell.LocalCluster, run_name: str, way: str, policy: shardwell.MixedPrecisionPolicy | None
) -> None:
    transports = "socket" if way == "socket" else "shm"
    expected = train(cluster.address, f"{run_name}-cpu", policy, transports)
    with fake_gpu(error=801 if way == "refused" else 0) as gpu:
        got = train(cluster.address, run_name, policy, transports)
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
        block_bytes = 4 * (33 * 33 + 3 * 33)
        pushes = [size for size in gpu.pinned_bytes if block_bytes <= size < block_bytes + 4 * 64]
        assert len(pushes) >= 3 * STEPS, "one buffer for the gradients of each unit in each step"
        if way == "registered":
            assert gpu.registered
            assert len(gpu.pinned_bytes) == 3 * STEPS, "no gather is staged"
        else:
            assert not gpu.registered
            assert len(gpu.pinned_bytes) > 3 * STEPS
        assert gpu.flags == (set() if way == "socket" else {1 | 8}), "portable, and mapped for reading"
    gc.collect()


def test_registered_memory_is_unregistered_before_it_is_unmapped(cluster: shardwell.LocalCluster) -> None:
    with fake_gpu() as gpu:
        train(cluster.address, "unregistered", None, "shm")
        gc.collect()
        assert gpu.flags
        assert not gpu.registered


def test_a_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with fake_gpu(error=801), caplog.at_level(logging.WARNING):
        assert not device_copies.register(4096, 4096)
        assert not device_copies.register(8192, 4096)
    assert [record.message for record in caplog.records] == [
        "CUDA cannot register the servers' shared memory, so copies to the GPU are staged: CUDA error 801"
    ]


@pytest.mark.parametrize("count", [0, 1, 6])
def test_gradients_of_a_unit_reach_the_host_in_one_copy(count: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float32, torch.float32)
    sizes = (7, 8, 9, 1, 0, 11)
    tensors = [torch.randn(sizes[number], 3).to(dtypes[number]).T for number in range(count)]
    with fake_gpu() as gpu:
        copies, wait = device_copies.to_host(tensors)
        wait()
        assert len(gpu.pinned_bytes) == min(count, 1)
        pushes: Any = device_copies._push_stream(torch.device("cpu"))
        assert pushes.waited_for == [gpu.compute] * min(count, 1), "the copy follows the kernels that made the values"
        assert pushes is not device_copies._gather_stream(torch.device("cpu"))
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor.contiguous().view(-1))


def test_a_copy_to_the_gpu_follows_the_work_before_it_and_compute_follows_the_copy() -> None:
    for is_registered in (False, True):
        with fake_gpu() as gpu:
            arrival, values = arrival_of(gpu, 64)
            if is_registered:
                arrival.copy(values, arrival._target.copy_)
            else:
                arrival.receive_buffer().copy_(values)
                arrival.begin()
            stream: Any = device_copies._gather_stream(torch.device("cpu"))
            assert stream.waited_for == [arrival._reusable]
            assert not gpu.compute.waited_for
            arrival.order()
            assert gpu.compute.waited_for == [arrival._copied]
            assert torch.equal(arrival._target, values)


def test_a_receive_buffer_replaces_a_copy_that_failed_halfway() -> None:
    with fake_gpu() as gpu:
        arrival, values = arrival_of(gpu, 64)
        arrival.copy(values[:32] + 1, arrival._target[:32].copy_)
        arrival.receive_buffer().copy_(values)
        arrival.begin()
        arrival.order()
        assert torch.equal(arrival._target, values)


def test_an_abandoned_arrival_copies_nothing() -> None:
    with fake_gpu() as gpu, nullcontext():
        arrival, values = arrival_of(gpu, 64)
        arrival.abandon()
        arrival.copy(values, arrival._target.copy_)
        arrival.receive_buffer().copy_(values)
        arrival.begin()
        assert not arrival._target.any()


def test_a_gather_that_ctrl_c_left_running_does_not_change_the_next_transfer() -> None:
    layout = UnitLayout("u", (Parameter("p", (16,), "float32"),))
    values = torch.arange(1, layout.size_bytes + 1, dtype=torch.uint8)
    vector = FlatVector(layout, torch.device("cpu"), VectorMemory())
    with fake_gpu():
        vector.allocate()
        vector.expect()
        former = vector.copier(layout)
        vector.release(reusable=False)
        vector.allocate()
        vector.expect()
        vector.copier(layout)(0, values)
        former(0, values + 1)
        assert torch.equal(vector._bytes(), values)
        vector.release()


def arrival_of(gpu: FakeGpu, size_bytes: int) -> tuple[device_copies.Arrival, torch.Tensor]:
    """Returns an arrival, and values to copy, none of which is 0."""
    values = torch.arange(1, size_bytes + 1, dtype=torch.uint8)
    return device_copies.Arrival(torch.zeros(size_bytes, dtype=torch.uint8)), values
