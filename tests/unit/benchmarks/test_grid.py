"""Tests for the benchmark of grids: the bytes of a step in theory, and the comparison of losses."""

from __future__ import annotations

import pytest

from benchmarks.grid import GRIDS, MODES, better_fsdp2, make_grid
from benchmarks.grid_traffic import GridTraffic, UnitBytes, pipeline_traffic, tensor_traffic
from benchmarks.grid_trainer import GridSpec
from benchmarks.measured_steps import Measured, check_losses
from benchmarks.report import Summary
from examples.gpt import GPTConfig

MODEL = GPTConfig(vocab_size=32, context=8, num_layers=2, num_heads=2, width=16, tied=False)
BLOCK = 12 * 16 * 16 + 13 * 16
"""Elements of a block."""


def unit(gathered: int, pushed: int, *, is_block: bool) -> UnitBytes:
    """Returns a unit of elements with 4 bytes."""
    return UnitBytes(gathered=4 * gathered, pushed=4 * pushed, is_block=is_block)


def test_stages_of_a_pipeline_hold_their_blocks_and_the_embeddings_or_the_head() -> None:
    traffic = pipeline_traffic(MODEL, dp=2, pp=2, batch_size=4, length=8)
    embeddings, head = 32 * 16 + 8 * 16, 2 * 16 + 32 * 16
    assert traffic.replica == (
        (unit(BLOCK, BLOCK, is_block=True), unit(embeddings, embeddings, is_block=False)),
        (unit(BLOCK, BLOCK, is_block=True), unit(head, head, is_block=False)),
    )
    assert traffic.activations == 2 * (4 * 8 * 16 * 4), "one tensor forward, its gradient backward"


def test_tensor_parallel_ranks_hold_parts_and_rank_0_pushes_what_is_whole() -> None:
    traffic = tensor_traffic(MODEL, dp=2, tp=2, batch_size=2, length=8)
    in_block, whole_in_block = (BLOCK - 6 * 16) // 2, 6 * 16  # two norms, and the biases of the row-wise layers
    rest, whole_rest = 32 * 16, 8 * 16 + 2 * 16  # halves of embedding and head; positions and the last norm
    for tp_rank, units in enumerate(traffic.replica):
        pushes_whole = tp_rank == 0
        block = unit(in_block + whole_in_block, in_block + whole_in_block * pushes_whole, is_block=True)
        assert units == (block, block, unit(rest + whole_rest, rest + whole_rest * pushes_whole, is_block=False))
    all_reduces, logits = 10 * (2 * 8 * 16 * 4), 2 * 8 * 32 * 4
    assert traffic.activations == 2 * all_reduces + logits


TRAFFIC = GridTraffic(
    dp=2,
    replica=((UnitBytes(gathered=100, pushed=80, is_block=True), UnitBytes(gathered=10, pushed=10, is_block=False)),),
    activations=7,
    keeps_weights=False,
)


@pytest.mark.parametrize(
    ("mode", "exchanged"),
    [
        ("resident", 0),
        ("all_reduce", 110),
        ("fsdp2", 105 + 110),  # half of the weights, those of blocks twice; gradients as in an all-reduce
        ("fsdp2_prefetch", 105 + 110),
        ("shardwell_shm", 0),
        ("shardwell_socket", 210 + 90),
    ],
)
def test_bytes_of_each_mode(mode: str, exchanged: int) -> None:
    assert TRAFFIC.bytes_per_step(mode) == 2 * (7 + exchanged)


def test_bytes_between_hosts_are_those_of_one_replica() -> None:
    assert TRAFFIC.bytes_between_hosts == 210 + 90


@pytest.mark.parametrize("name", list(GRIDS))
def test_every_mode_of_every_grid_has_a_theory(name: str) -> None:
    for tiny in (False, True):
        grid = make_grid(name, tiny=tiny)
        assert all(grid.traffic.bytes_per_step(mode) > 0 for mode in MODES)
        assert GridSpec.from_json(grid.spec.to_json()) == grid.spec


def test_better_fsdp2_is_the_faster_one() -> None:
    slow, fast = Summary(2.0, 2.0, 2.0, 1), Summary(1.0, 1.0, 1.0, 1)
    assert better_fsdp2({"resident": fast, "fsdp2": slow, "fsdp2_prefetch": fast}) is fast
    assert better_fsdp2({"resident": fast}) is None


def test_losses_of_modes_that_average_are_compared_at_their_last_common_step() -> None:
    measured = {
        "resident": Measured(losses={0: {}, 1: {0: 4.0, 1: 3.0}}),
        "fsdp2": Measured(losses={0: {}, 1: {0: 4.0, 1: 3.5, 2: 3.2}}),
        "shardwell_shm": Measured(losses={0: {}, 1: {0: 4.0, 1: 3.6}}),
    }
    assert check_losses(measured, lambda mode: mode != "resident") == [
        "- rank 1, step 0: 3 modes agree: 4.00000 (resident) to 4.00000 (resident)",
        "- rank 1, step 1: 2 modes DISAGREE: 3.50000 (fsdp2) to 3.60000 (shardwell_shm)",
    ]
