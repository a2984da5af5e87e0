"""Seeds and batches depend on (run seed, step, dp_rank) only."""

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from shardwell.seeds import derive_seed, seed_generators
from shardwell.training.batch_sources import BatchOptions, batch_function, read_loader, sample_indices
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

    assert batch_function(own, BatchOptions(), seed=0, dp=1)(3, 1) == "3/1"
    draw = batch_function(list(range(100)), BatchOptions(batch_size=5, collate_fn=sorted), seed=0, dp=2)
    assert draw(0, 0) == sorted(sample_indices(100, batch_size=5, dp=2, seed=0, step=0, dp_rank=0))


@pytest.mark.parametrize(
    ("source", "batch_size"), [([1, 2], None), (iter([1]), 2), (lambda s, r: 0, 2), ([1, 2, 3], 0)]
)
def test_invalid_batch_arguments_are_named(source: object, batch_size: int | None) -> None:
    with pytest.raises(UsageError):
        batch_function(source, BatchOptions(batch_size=batch_size), seed=0, dp=1)


@pytest.mark.parametrize(("size", "dp"), [(50, 3), (49, 3), (48, 4), (13, 4), (2, 4), (1, 1)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_last_step_of_an_epoch_is_even(size: int, dp: int, shuffle: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "dp": dp, "seed": 9, "shuffle": shuffle, "drop_last": False}
    steps = -(-size // (4 * dp))
    found = [
        [sample_indices(size, **options, step=step, dp_rank=rank) for rank in range(dp)] for step in range(steps + 1)
    ]
    assert all(len(samples) == len(step[0]) for step in found for samples in step), "no rank's samples weigh more"
    drawn = [index for step in found[:steps] for samples in step for index in samples]
    assert set(drawn) == set(range(size)) and len(drawn) < size + dp
    assert shuffle or drawn[:size] == list(range(size))
    assert shuffle or found[steps] == found[0], "the next epoch"


def test_one_rank_reads_a_loader_without_shuffling_in_its_order() -> None:
    loader = DataLoader(list(range(11)), batch_size=4, collate_fn=list)  # type: ignore[arg-type]
    draw = batch_function(*read_loader(loader, BatchOptions()), seed=0, dp=1)
    assert [draw(step, 0) for step in range(3)] == list(loader)


def test_settings_of_a_loader_are_taken() -> None:
    loader = DataLoader(
        list(range(9)),
        batch_size=2,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        prefetch_factor=5,
        pin_memory=True,  # type: ignore[arg-type]
    )
    dataset, options = read_loader(loader, BatchOptions(name="train"))
    assert dataset is loader.dataset
    assert options == BatchOptions(
        batch_size=2, collate_fn=loader.collate_fn, num_workers=2, prefetch=5, pin_memory=True, name="train"
    )


DATA: Any = list(range(8))


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": DistributedSampler(DATA, num_replicas=2, rank=0)},
        {"sampler": WeightedRandomSampler([1.0] * 8, 8)},
        {"sampler": RandomSampler(DATA, replacement=True)},
        {"sampler": RandomSampler(DATA, num_samples=4)},
        {"sampler": [1, 2]},
        {"batch_size": 1, "batch_sampler": type("Own", (BatchSampler,), {})(SequentialSampler(DATA), 2, False)},
        {"batch_size": None},
    ],
    ids=lambda settings: type(next(reversed(settings.values()))).__name__,
)
def test_own_choice_of_samples_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"step.batches cannot use the \w+ of the DataLoader: .* shuffle=True"):
        read_loader(DataLoader(DATA, **settings), BatchOptions())


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(UsageError, match=r"step.batches\(loader, batch_size=...\): the DataLoader has this setting"):
        read_loader(DataLoader(DATA), BatchOptions(batch_size=2))
    with pytest.raises(UsageError, match=r"prefetch=2, num_workers=0: .* needs num_workers=1"):
        BatchOptions(prefetch=2)
    with pytest.raises(UsageError, match="num_workers must be at least 0, got -1"):
        BatchOptions(num_workers=-1)
