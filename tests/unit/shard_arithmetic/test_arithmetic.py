"""Arithmetic of the shard server: reduction in rank order, exact norms, and torch's kernels."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from shardwell_server import optimizer_checks
from shardwell_server.shard.arithmetic.reduction import (
    block_powers,
    compute_mean,
    exact_partials,
    reduce_shard,
    square_plan,
)
from shardwell_server.shard.arithmetic.shard_optimizer import ShardOptimizer
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import BLOCK_BYTES
from shardwell_wire.model.sum_order import Scratch, SumOrder
from shardwell_wire.v1 import common_pb2

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "amsgrad": 0.0, "maximize": 0.0}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": 1.0, "maximize": 0.0}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def mean(terms: Mapping[int, torch.Tensor] | list[torch.Tensor], dp: int, groups: Sequence[int] = ()) -> torch.Tensor:
    """Returns the mean of the terms of some ranks."""
    ranked = sorted((dict(enumerate(terms)) if isinstance(terms, list) else terms).items())
    out = torch.full_like(ranked[0][1], math.nan)
    compute_mean(ranked, SumOrder(dp, groups), out, Scratch())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_are_added_in_order_and_divided(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(1001, dtype=dtype, generator=generator) for _ in range(3)]
    assert bits(mean(terms, 3)) == bits((terms[0] + terms[1] + terms[2]) / 3)
    # Floating-point addition is not associative, so the order shows in the bits.
    assert bits(mean(terms[::-1], 3)) != bits((terms[0] + terms[1] + terms[2]) / 3)


def test_absent_ranks_count_as_zero() -> None:
    term = torch.randn(10)
    assert bits(mean([term], 4)) == bits(term / 4)


def test_a_single_rank_keeps_its_bits() -> None:
    term = torch.tensor([-0.0, 1.5])
    reduced = reduce_shard([[(0, term)], []], SumOrder(1), None, [0, 64], buffer=None)
    assert reduced.gradients[0] is term
    assert reduced.gradients[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reducing_in_chunks_changes_no_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(700_001, generator=generator).to(dtype) for _ in range(3)]
    out, first_byte = torch.empty_like(terms[0]), 192
    reduced = reduce_shard([list(enumerate(terms))], SumOrder(3), [out], [first_byte], buffer=None)
    assert bits(out) == bits(mean(terms, 3))
    assert reduced.square_partials == exact_partials(block_powers(out, first_byte, 2.0))
    assert reduced.max_abs() == out.abs().max().item()
    assert reduced.power_partials([first_byte], 3.0) == exact_partials(block_powers(out, first_byte, 3.0))


def test_16_bit_terms_are_rounded_once() -> None:
    terms = [torch.tensor([256.0]).bfloat16(), torch.tensor([1.0]).bfloat16(), torch.tensor([1.0]).bfloat16()]
    # In bfloat16 256 + 1 is 256; in fp32 the sum is 258 and the mean 86.
    assert mean(terms, 3).item() == 86.0


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_block_powers_are_the_same_for_every_cut(dtype: torch.dtype, norm_type: float) -> None:
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    first_byte, size = 64 * 7, values.element_size()
    whole = block_powers(values, first_byte, norm_type)
    assert math.fsum(whole) == pytest.approx(float((values.double().abs() ** norm_type).sum()), rel=1e-12)
    blocks = range(BLOCK_BYTES, first_byte + values.nbytes, BLOCK_BYTES)
    rng = random.Random(0)
    for _ in range(30):
        cuts = sorted(rng.sample(blocks, rng.randrange(1, 6)))
        bounds = [0, *((cut - first_byte) // size for cut in cuts), values.numel()]
        parts = [
            block_powers(values[low:high], first_byte + low * size, norm_type)
            for low, high in itertools.pairwise(bounds)
        ]
        assert [power for part in parts for power in part] == whole


def test_exact_partials_sum_exactly() -> None:
    rng = random.Random(0)
    terms = [rng.random() * 10.0 ** rng.randrange(-20, 20) for _ in range(1000)]
    partials = exact_partials(terms)
    assert sum(map(Fraction, partials)) == sum(map(Fraction, terms))
    assert len(partials) < 10
    assert exact_partials([]) == []


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_sum_gives_a_non_finite_partial(bad: float) -> None:
    assert not math.isfinite(sum(exact_partials([1.0, bad])))


def groups(*values: dict[str, float]) -> list[common_pb2.ParameterGroup]:
    return [common_pb2.ParameterGroup(hyperparameters=each) for each in values]


def step_of(algorithm: str, *settings: dict[str, float]) -> common_pb2.OptimizerStep:
    return common_pb2.OptimizerStep(algorithm=algorithm, groups=groups(*settings))


def plain(algorithm: str, values: torch.Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(values.clone())
    if algorithm == "sgd":
        return parameter, torch.optim.SGD(
            [parameter], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True
        )
    cls: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[algorithm]
    return parameter, cls([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


@pytest.mark.parametrize(("algorithm", "settings"), [("adam", ADAM), ("adamw", ADAM), ("sgd", SGD)])
@pytest.mark.parametrize("cut", [16, 1024, 5008])
def test_cut_parameters_update_like_whole_parameters(algorithm: str, settings: dict[str, float], cut: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(7919)
    parameter, reference = plain(algorithm, values)
    parts = [values.clone()[:cut], values.clone()[cut:]]
    served = ShardOptimizer(parts)
    for _ in range(5):
        gradient = torch.randn(7919)
        parameter.grad = gradient.clone()
        reference.step()
        served.step([gradient.clone()[:cut], gradient.clone()[cut:]], step_of(algorithm, settings), [0, 0], 1.0)
    assert bits(torch.cat(parts)) == bits(parameter)


@pytest.mark.parametrize(("algorithm", "settings"), [("adamw", ADAM), ("sgd", SGD)])
def test_parameters_without_a_gradient_are_skipped(algorithm: str, settings: dict[str, float]) -> None:
    torch.manual_seed(0)
    values = [torch.randn(100), torch.randn(50)]
    parameters, served = [value.clone() for value in values], ShardOptimizer(values)
    references = [plain(algorithm, value) for value in parameters]
    for step in range(4):
        gradients: list[torch.Tensor | None] = [torch.randn(100), torch.randn(50) if step % 2 else None]
        for (parameter, reference), gradient in zip(references, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
            reference.step()
        served.step(gradients, step_of(algorithm, settings), [0, 0], 1.0)
    assert [bits(value) for value in values] == [bits(parameter) for parameter, _ in references]
    if algorithm == "adamw":
        assert [served.steps_of(part) for part in (0, 1)] == [4, 2]


def test_groups_apply_and_unoptimised_parameters_stay() -> None:
    values = [torch.ones(4), torch.ones(4), torch.ones(4)]
    served = ShardOptimizer(values)
    two = step_of("sgd", {**SGD, "momentum": 0.0, "nesterov": 0.0, "weight_decay": 0.0}, {**SGD, "lr": 0.0})
    served.step([torch.ones(4)] * 3, two, [0, 1, -1], 1.0)
    assert [value[0].item() for value in values] == [pytest.approx(0.9), 1.0, 1.0]


def test_clipping_scales_the_gradient() -> None:
    values = torch.zeros(4)
    plain_sgd = {**SGD, "momentum": 0.0, "nesterov": 0.0, "weight_decay": 0.0}
    ShardOptimizer([values]).step([torch.ones(4)], step_of("sgd", plain_sgd), [0], 0.5)
    assert values[0].item() == pytest.approx(-0.05)


def test_parameter_restarts_under_another_algorithm() -> None:
    served = ShardOptimizer([torch.zeros(1)])
    served.step([torch.ones(1)], step_of("adamw", ADAM), [0], 1.0)
    served.step([torch.ones(1)], step_of("adamw", ADAM), [-1], 1.0)
    served.step([torch.ones(1)], step_of("sgd", SGD), [0], 1.0)
    assert served.state_names == ["momentum_buffer"]
    assert served.steps_of(0) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "sdg"}, "'sdg' is not known"),
        ({"hyperparameters": {**ADAM, "lr": math.nan}}, "lr=nan is not finite"),
        ({"hyperparameters": {**ADAM, "lr": -1.0}}, "at least 0"),
        ({"hyperparameters": {**ADAM, "beta1": 1.0}}, "0 <= beta1 < 1"),
        ({"hyperparameters": {**ADAM, "amsgrad": 0.5}}, "expected 0 or 1"),
        ({"hyperparameters": {"lr": 1.0}}, "missing or unknown"),
        ({"hyperparameters": {**ADAM, "momentum": 0.9}}, "momentum is missing or unknown"),
        ({"group_indices": [1]}, "parameter group 1"),
        ({"group_indices": [-3]}, "parameter group -3"),
    ],
)
def test_error_names_an_invalid_hyperparameter(change: dict[str, Any], message: str) -> None:
    optimizer = common_pb2.OptimizerStep(
        algorithm=change.get("algorithm", "adamw"),
        groups=groups(change.get("hyperparameters", ADAM)),
        units=[common_pb2.UnitGroups(unit_index=0, group_indices=change.get("group_indices", [0]))],
    )
    with pytest.raises(InvalidRequestError, match=message):
        optimizer_checks.validate(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("algorithm", "settings"), [("adam", ADAM), ("adamw", ADAM), ("sgd", SGD)])
def test_update_changes_every_element_of_every_dtype(
    algorithm: str, settings: dict[str, float], dtype: torch.dtype
) -> None:
    # torch's fused SGD does not change most elements of 16-bit parameters.
    for numel in (1, 15, 16, 64, 997):
        served, wide = torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=torch.float64)
        for values in (served, wide):
            optimizer = ShardOptimizer([values])
            for _ in range(3):
                optimizer.step([torch.full_like(values, 0.5)], step_of(algorithm, settings), [0], 1.0)
        assert torch.allclose(served.double(), wide, atol=0.01), numel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("algorithm", "settings"), [("adamw", ADAM), ("sgd", SGD)])
def test_cuts_on_blocks_change_no_bit_of_16_bit_updates(
    algorithm: str, settings: dict[str, float], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(9_000, generator=generator).to(dtype) for _ in range(4))
    # A parameter can start at any multiple of 64 bytes. Shards then have these numbers of elements.
    results = []
    for cuts in ([9_000], [32, 2048, 6_920], [2048 - 96, 2048, 2048, 9_000 - 3 * 2048 + 96]):
        values = [piece.clone() for piece in start.split(cuts)]
        optimizer = ShardOptimizer(values)
        for gradient in gradients:
            optimizer.step(
                [g.clone() for g in gradient.split(cuts)], step_of(algorithm, settings), [0] * len(cuts), 0.5
            )
        results.append(bits(torch.cat(values)))
    assert results[1:] == results[:1] * 2


def test_amsgrad_enabled_in_one_of_two_groups_updates_both_once() -> None:
    values = [torch.ones(4), torch.ones(4)]
    served, later = ShardOptimizer(values), {**ADAM, "amsgrad": 1.0}
    served.step([torch.ones(4), torch.ones(4)], step_of("adam", ADAM, ADAM), [0, 1], 1.0)
    served.step([torch.ones(4), torch.ones(4)], step_of("adam", ADAM, later), [0, 1], 1.0)
    assert (served.steps_of(0), served.steps_of(1)) == (2, 2)
    assert served.state_names == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert torch.allclose(values[0], values[1])


def cut(buffer: torch.Tensor, places: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[torch.Tensor]:
    return [buffer[start:stop].view(dtype) for start, stop in places]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(12))
def test_adjacent_segments_are_reduced_as_if_each_were_alone(dtype: torch.dtype, seed: int) -> None:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    first, places, stop = choose.randrange(0, 8192, 64), [], 0
    for _ in range(choose.randrange(1, 12)):
        start = -(-stop // 64) * 64
        size_bytes = choose.choice([1, 3, 16, 64, 500, 1023, 1024, 1025, 5000, 300_000]) * dtype.itemsize
        stop = start + size_bytes
        places.append((start, stop))
    dp, size_bytes = choose.choice([2, 3]), -(-stop // 64) * 64

    def garbage() -> torch.Tensor:
        return torch.full((size_bytes,), 255, dtype=torch.uint8)  # NaN between the segments

    own = [cut(garbage(), places, dtype) for _ in range(dp)]
    for segment in (segment for of_rank in own for segment in of_rank):
        segment.copy_(torch.randn(segment.numel(), generator=generator) * choose.choice([1.0, 1e-30, 1e-41, 100.0]))
    missing = {(choose.randrange(dp), choose.randrange(len(places))) for _ in range(choose.choice([0, 0, 2]))}
    terms = [
        [(rank, own[rank][number]) for rank in range(dp) if (rank, number) not in missing]
        for number in range(len(places))
    ]
    apart = [[(rank, term.clone()) for rank, term in each] for each in terms]
    starts = [first + start for start, _ in places]
    outs = cut(garbage(), places, dtype)
    together = reduce_shard(terms, SumOrder(dp), outs, starts, buffer=None)
    alone = reduce_shard(apart, SumOrder(dp), [out.clone() for out in outs], starts, buffer=None)
    squares = []
    for start, found, expected in zip(starts, together.gradients, alone.gradients, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
            squares += block_powers(found, start, 2.0)
    assert together.square_partials == alone.square_partials == exact_partials(squares)


@pytest.mark.parametrize("damaged", [0, 2, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_first_segment_that_is_not_finite_is_found_among_adjacent_ones(damaged: int, dp: int) -> None:
    places = [(0, 20), (64, 64), (64, 6000), (6016, 90_000)]
    buffers = [torch.zeros(90_000, dtype=torch.uint8) for _ in range(dp + 1)]
    own = [cut(buffer, places, torch.float32) for buffer in buffers]
    own[dp - 1][3][-1] = math.inf
    own[0][damaged][-1] = math.nan
    terms = [[(rank, own[rank][number]) for rank in range(dp)] for number in range(len(places))]
    starts = [4096 + start for start, _ in places]
    reduced = reduce_shard(terms, SumOrder(dp), own[dp] if dp > 1 else None, starts, buffer=None)
    assert reduced.non_finite == damaged
    assert [gradient is not None for gradient in reduced.gradients][:damaged] == [True] * damaged


def test_plan_of_a_large_shard_is_small() -> None:
    """Many plans are kept: a step in which other parameters have gradients needs another one."""
    square_plan.cache_clear()
    block_count = 1 << 18  # 1 GiB
    tracemalloc.start()
    try:
        plan = square_plan((0,), (block_count * BLOCK_BYTES // 4,), 4)
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert plan.row_count == block_count
    assert kept_bytes < 2 * block_count
