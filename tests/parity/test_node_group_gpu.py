"""Trainers on GPUs of one node exchange the parts that they fetched, outside the compute stream."""

from __future__ import annotations

import pytest
import torch

import shardwell
from shardwell.memory.device_copies import Arrival
from tests.support.node_group_probe import run_all

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZE, CUT = 1 << 20, 4096


def arrival_of(values: torch.Tensor) -> tuple[Arrival, torch.Tensor]:
    """Returns an ``Arrival`` that copies the values to device memory, and the memory."""
    target = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    arrival = Arrival(target)
    arrival.receive_buffer().copy_(values)
    return arrival, target


def test_copied_part_and_exchanged_rest_arrive_before_compute_reads_them() -> None:
    values = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    arrival, target = arrival_of(values)
    others = values.cuda()

    def exchange(vector: torch.Tensor) -> None:
        torch.cuda._sleep(10_000_000)
        vector[CUT:].copy_(others[CUT:])

    torch.cuda.synchronize()
    arrival.complete(0, CUT, exchange, 60.0)
    arrival.begin()  # there is nothing left to copy
    arrival.order()
    assert torch.equal(target.cpu(), values)


def test_whole_vector_arrives_after_an_exchange_times_out() -> None:
    values = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    arrival, target = arrival_of(values)

    def exchange(vector: torch.Tensor) -> None:
        torch.cuda._sleep(1_000_000_000)
        vector.fill_(0)

    with pytest.raises(TimeoutError, match="took more than 0 s"):
        arrival.complete(0, CUT, exchange, 0.0)
    arrival.begin()
    arrival.order()
    assert torch.equal(target.cpu(), values)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_sharing_over_nccl_changes_no_bit_and_halves_the_received_bytes() -> None:
    with shardwell.LocalCluster(num_shards=2) as cluster:
        alone, shared = (run_all(cluster.address, 2, "nccl", group) for group in ("none", "nccl"))
    assert len({result["sha256"] for result in (*alone, *shared)}) == 1
    for before, after in zip(alone, shared, strict=True):
        assert before["received_bytes"] == after["received_bytes"] + after["node_shared_bytes"]
        assert after["received_bytes"] == pytest.approx(before["received_bytes"] / 2, rel=0.01)
