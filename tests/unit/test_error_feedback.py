"""Error feedback: nothing is lost but one push's rounding, and a work item begun anew pushes the same bits."""

from __future__ import annotations

import pytest
import torch

from shardwell.data_plane.error_feedback import ErrorFeedback
from shardwell_wire.layout import Parameter, UnitLayout
from shardwell_wire.v1.common_pb2 import (
    WIRE_DTYPE_BFLOAT16,
    WIRE_DTYPE_FLOAT16,
    WIRE_DTYPE_INT8,
    WIRE_DTYPE_UNSPECIFIED,
)
from shardwell_wire.wire_dtypes import Piece, WireDType, round_trip_

LAYOUT = UnitLayout(
    "block",
    (
        Parameter("bias", (5,), "float32"),
        Parameter("double", (3,), "float64"),
        Parameter("weight", (37, 41), "float32"),
    ),
)
LOSSY = [WIRE_DTYPE_BFLOAT16, WIRE_DTYPE_FLOAT16, WIRE_DTYPE_INT8]
WEIGHT = 2


def gradient(seed: int, index: int = WEIGHT) -> torch.Tensor:
    parameter = LAYOUT.parameters[index]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, dtype=getattr(torch, parameter.dtype))


def arrived(pushed: torch.Tensor, wire_dtype: WireDType, index: int = WEIGHT) -> torch.Tensor:
    flat = pushed.reshape(-1).clone()
    pieces = [Piece(LAYOUT.starts[index], flat)]
    round_trip_(pieces, wire_dtype, pieces)
    return flat.view_as(pushed)


def push(feedback: ErrorFeedback, value: torch.Tensor, *, dp_rank: int = 0, unit: int = 0) -> torch.Tensor:
    return feedback.compensate(unit, LAYOUT, dp_rank, {WEIGHT: value})[WEIGHT]


@pytest.mark.parametrize("wire_dtype", LOSSY)
def test_every_push_is_the_gradient_and_what_the_one_before_left_out(wire_dtype: WireDType) -> None:
    feedback, left_out = ErrorFeedback(wire_dtype), torch.zeros(37, 41)
    for step in range(5):
        value = gradient(step)
        pushed = push(feedback, value)
        assert torch.equal(value, gradient(step)), "the gradient was changed"
        assert torch.equal(pushed, value + left_out)
        left_out = pushed - arrived(pushed, wire_dtype)
        assert left_out.any()
        feedback.commit()


@pytest.mark.parametrize("wire_dtype", LOSSY)
def test_the_sum_of_what_arrives_follows_the_sum_of_the_gradients(wire_dtype: WireDType) -> None:
    feedback, value = ErrorFeedback(wire_dtype), gradient(0) + 3
    one_error = 2 * (value - arrived(value, wire_dtype)).abs().max().double()
    with_feedback, without, exact = (torch.zeros(37, 41, dtype=torch.float64) for _ in range(3))
    for _ in range(200):
        with_feedback += arrived(push(feedback, value), wire_dtype)
        without += arrived(value, wire_dtype)
        exact += value
        feedback.commit()
    assert (with_feedback - exact).abs().max() < one_error
    assert (without - exact).abs().max() > 50 * one_error


@pytest.mark.parametrize("wire_dtype", LOSSY)
def test_a_work_item_begun_anew_pushes_the_same_bits(wire_dtype: WireDType) -> None:
    feedback = ErrorFeedback(wire_dtype)
    push(feedback, gradient(0))
    feedback.commit()
    first = [push(feedback, gradient(seed)) for seed in (1, 2)]
    feedback.reset(0)
    again = [push(feedback, gradient(seed)) for seed in (1, 2)]
    assert all(map(torch.equal, first, again))
    feedback.commit()
    never_reset = ErrorFeedback(wire_dtype)
    for step in ([0], [1, 2]):
        for seed in step:
            push(never_reset, gradient(seed))
        never_reset.commit()
    assert torch.equal(push(feedback, gradient(3)), push(never_reset, gradient(3)))


def test_a_reset_before_the_first_commit_leaves_nothing() -> None:
    feedback = ErrorFeedback(WIRE_DTYPE_INT8)
    push(feedback, gradient(0))
    feedback.reset(0)
    feedback.reset(7)
    assert torch.equal(push(feedback, gradient(1)), gradient(1))


def test_parts_of_one_step_follow_each_other() -> None:
    feedback = ErrorFeedback(WIRE_DTYPE_INT8)
    first = push(feedback, gradient(0))
    second = push(feedback, gradient(1))
    assert torch.equal(second, gradient(1) + (first - arrived(first, WIRE_DTYPE_INT8)))


def test_ranks_and_units_are_apart() -> None:
    feedback, alone = ErrorFeedback(WIRE_DTYPE_INT8), ErrorFeedback(WIRE_DTYPE_INT8)
    push(feedback, gradient(0))
    push(alone, gradient(0))
    push(feedback, gradient(1), dp_rank=1)
    push(feedback, gradient(2), unit=1)
    feedback.reset(1)
    for each in (feedback, alone):
        each.commit()
    assert torch.equal(push(feedback, gradient(3)), push(alone, gradient(3)))
    assert torch.equal(push(feedback, gradient(4), dp_rank=1), gradient(4))


def test_a_rank_without_a_push_in_a_step_is_forgotten_and_a_parameter_without_one_is_not() -> None:
    feedback = ErrorFeedback(WIRE_DTYPE_INT8)
    first = push(feedback, gradient(0))
    push(feedback, gradient(1), dp_rank=1)
    feedback.commit()
    feedback.compensate(0, LAYOUT, 0, {0: gradient(2, index=0)})
    feedback.commit()
    assert torch.equal(push(feedback, gradient(3)), gradient(3) + (first - arrived(first, WIRE_DTYPE_INT8)))
    assert torch.equal(push(feedback, gradient(4), dp_rank=1), gradient(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_the_servers_refuse_does_not_spoil_the_next_step(bad: float) -> None:
    feedback, value = ErrorFeedback(WIRE_DTYPE_FLOAT16), gradient(0)
    value[0, 0] = bad
    assert not arrived(push(feedback, value), WIRE_DTYPE_FLOAT16)[0, 0].isfinite()
    feedback.commit()
    following = push(feedback, gradient(1))
    assert following[0, 0] == gradient(1)[0, 0]
    assert following.isfinite().all()


@pytest.mark.parametrize("wire_dtype", [WIRE_DTYPE_UNSPECIFIED, *LOSSY])
def test_what_travels_as_it_is_stored_is_left_alone(wire_dtype: WireDType) -> None:
    feedback, double, weight = ErrorFeedback(wire_dtype), gradient(0, index=1), gradient(0)
    for _ in range(2):
        pushed = feedback.compensate(0, LAYOUT, 0, {1: double, WEIGHT: weight})
        feedback.commit()
    assert pushed[1] is double
    assert (pushed[WEIGHT] is weight) == (wire_dtype == WIRE_DTYPE_UNSPECIFIED)
