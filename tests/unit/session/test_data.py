"""Seeds and batches depend on (run seed, step, dp_rank) only."""

import pytest
import torch

from shardwell.seeds import derive_seed, seed_generators
from shardwell.training.training_step import batch_function, sample_indices
from shardwell_wire.errors import UsageError


def test_seed_depends_on_all_parts_only() -> None:
    assert derive_seed(1, 2, 3) == 5338250718792807630
    assert len({derive_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}) == 125
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_generators_are_seeded_as_by_torch() -> None:
    for seed in (0, 1, derive_seed(1, 2, 3)):
        torch.manual_seed(seed)
        expected = torch.rand(4)
        seed_generators(seed)
        assert torch.equal(torch.rand(4), expected)


def test_epoch_repeats_no_sample_and_epochs_differ() -> None:
    def epoch(number: int) -> list[int]:
        steps = range(number * 4, number * 4 + 4)
        return [
            index
            for step in steps
            for rank in range(3)
            for index in sample_indices(50, batch_size=4, dp=3, seed=9, step=step, dp_rank=rank)
        ]

    first, second = epoch(0), epoch(1)
    assert len(first) == len(set(first)) == 48
    assert set(first) <= set(range(50))
    assert first != second


def test_other_data_ranks_with_equally_large_steps_draw_the_same_samples() -> None:
    def step(number: int, dp: int) -> list[int]:
        sizes = {"batch_size": 12 // dp, "dp": dp}
        return [index for rank in range(dp) for index in sample_indices(50, **sizes, seed=9, step=number, dp_rank=rank)]

    assert all(step(number, 3) == step(number, 2) == step(number, 1) for number in range(9))


def test_dataset_smaller_than_a_step_is_rejected() -> None:
    with pytest.raises(UsageError, match="10 samples; a step takes batch_size 4 x dp 3"):
        sample_indices(10, batch_size=4, dp=3, seed=0, step=0, dp_rank=0)


def test_batches_come_from_functions_and_datasets() -> None:
    def own(step: int, dp_rank: int) -> str:
        return f"{step}/{dp_rank}"

    assert batch_function(own, seed=0, dp=1, batch_size=None, collate_fn=None)(3, 1) == "3/1"
    draw = batch_function(list(range(100)), seed=0, dp=2, batch_size=5, collate_fn=sorted)
    assert draw(0, 0) == sorted(sample_indices(100, batch_size=5, dp=2, seed=0, step=0, dp_rank=0))


@pytest.mark.parametrize(
    ("source", "batch_size"), [([1, 2], None), (iter([1]), 2), (lambda s, r: 0, 2), ([1, 2, 3], 0)]
)
def test_invalid_batch_arguments_are_named(source: object, batch_size: int | None) -> None:
    with pytest.raises(UsageError):
        batch_function(source, seed=0, dp=1, batch_size=batch_size, collate_fn=None)
