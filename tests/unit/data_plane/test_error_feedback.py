"""Tests of error feedback: only one rounding error is lost, and a restarted work item pushes the same bits."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from shardwell.data_plane.error_feedback import ErrorFeedback
from shardwell.memory.buffers import BufferPool
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.streams import InParameters, InVector, StreamPlan
from shardwell_wire.encoding.wire_dtypes import WireDtype
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.v1.common_pb2 import (
    WIRE_DTYPE_BFLOAT16,
    WIRE_DTYPE_FLOAT8,
    WIRE_DTYPE_FLOAT16,
    WIRE_DTYPE_INT8,
    WIRE_DTYPE_LOW_RANK_1,
    WIRE_DTYPE_LOW_RANK_4,
    WIRE_DTYPE_LOW_RANK_16,
    WIRE_DTYPE_TOP_K_1_PERCENT,
    WIRE_DTYPE_TOP_K_10_PERCENT,
    WIRE_DTYPE_UNSPECIFIED,
)

LAYOUT = UnitLayout(
    "block",
    (
        Parameter("bias", (5,), "float32"),
        Parameter("double", (3,), "float64"),
        Parameter("weight", (37, 41), "float32"),
    ),
)
ROUNDED = [WIRE_DTYPE_BFLOAT16, WIRE_DTYPE_FLOAT16, WIRE_DTYPE_INT8, WIRE_DTYPE_FLOAT8]
TOP_K = [WIRE_DTYPE_TOP_K_1_PERCENT, WIRE_DTYPE_TOP_K_10_PERCENT]
LOW_RANK = [WIRE_DTYPE_LOW_RANK_1, WIRE_DTYPE_LOW_RANK_4, WIRE_DTYPE_LOW_RANK_16]
LOSSY = [*ROUNDED, *TOP_K, *LOW_RANK]
BIAS, DOUBLE, WEIGHT = range(3)


def gradient(seed: int, index: int = WEIGHT) -> torch.Tensor:
    parameter = LAYOUT.parameters[index]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, dtype=getattr(torch, parameter.dtype))


def plan_of(wire_dtype: WireDtype, indices: Iterable[int]) -> StreamPlan:
    return StreamPlan(LAYOUT, LAYOUT.packed_segments(indices, 0, LAYOUT.size_bytes), wire_dtype)


def on_the_wire(value: torch.Tensor, wire_dtype: WireDtype, index: int = WEIGHT, *, step: int = 0) -> bytes:
    plan = plan_of(wire_dtype, [index])
    stream, source = torch.zeros(plan.size_bytes, dtype=torch.uint8), InParameters({index: value.reshape(-1)})
    for part in plan.slices:
        part.encode(source.of(part), stream, seed=step)
    return stream.numpy().tobytes()


def arrived(stream: bytes, wire_dtype: WireDtype, index: int = WEIGHT) -> torch.Tensor:
    parameter, vector = LAYOUT.parameters[index], torch.zeros(LAYOUT.size_bytes, dtype=torch.uint8)
    plan_of(wire_dtype, [index]).decode(stream, InVector(memory_at(vector.data_ptr(), vector.numel(), vector), 0))
    own = vector[LAYOUT.starts[index] :][: parameter.size_bytes]
    return own.view(getattr(torch, parameter.dtype)).view(parameter.shape)


def feedback_of(wire_dtype: WireDtype) -> ErrorFeedback:
    return ErrorFeedback(wire_dtype, BufferPool(1 << 20))


def commit(feedback: ErrorFeedback, *dp_ranks: int) -> None:
    """Starts the next step. The trainer has computed the items of these ranks, by default those of 0 and 1."""
    feedback.commit(feedback.step + 1, dp_ranks or (0, 1))


def push(
    feedback: ErrorFeedback, value: torch.Tensor, *, dp_rank: int = 0, unit: int = 0, index: int = WEIGHT
) -> bytes:
    """Returns the encoded bytes of a push."""
    encoded = feedback.encode(unit, LAYOUT, dp_rank, {index: value.view(-1)})
    assert encoded is not None
    assert (encoded.indices, encoded.stored_bytes) == ((index,), value.nbytes)
    stream = bytes(encoded.stream)
    encoded.stream[:] = b"\xff" * len(stream)  # the memory is reused: later reads must not depend on the old bytes
    encoded.release()
    return stream


@pytest.mark.parametrize("wire_dtype", LOSSY)
def test_push_encodes_gradient_plus_previous_residual(wire_dtype: WireDtype) -> None:
    feedback, left_out = feedback_of(wire_dtype), torch.zeros(37, 41)
    for step in range(5):
        value = gradient(step)
        pushed = push(feedback, value)
        assert torch.equal(value, gradient(step)), "the gradient was changed"
        assert pushed == on_the_wire(value + left_out, wire_dtype, step=step)
        left_out = value + left_out - arrived(pushed, wire_dtype)
        assert left_out.any()
        commit(feedback)


@pytest.mark.parametrize("wire_dtype", ROUNDED)
def test_sum_of_pushes_follows_sum_of_gradients(wire_dtype: WireDtype) -> None:
    feedback, value = feedback_of(wire_dtype), gradient(0) + 3
    one_error = 2 * (value - arrived(on_the_wire(value, wire_dtype), wire_dtype)).abs().max().double()
    with_feedback, without, exact = (torch.zeros(37, 41, dtype=torch.float64) for _ in range(3))
    for _ in range(200):
        with_feedback += arrived(push(feedback, value), wire_dtype)
        without += arrived(on_the_wire(value, wire_dtype), wire_dtype)
        exact += value
        commit(feedback)
    assert (with_feedback - exact).abs().max() < one_error
    assert (without - exact).abs().max() > 50 * one_error


@pytest.mark.parametrize("wire_dtype", TOP_K)
def test_top_k_pushes_every_value_in_the_end(wire_dtype: WireDtype) -> None:
    feedback, value, pushed = feedback_of(wire_dtype), gradient(0).sign(), torch.zeros(37, 41)
    for _ in range(150):
        pushed += arrived(push(feedback, value), wire_dtype)
        commit(feedback)
    captured = feedback.capture(150)
    assert captured is not None
    assert bool(pushed.all()), "some value was never pushed"
    torch.testing.assert_close(pushed + captured.residuals[0].values.view(37, 41), 150 * value, rtol=0, atol=1e-3)


@pytest.mark.parametrize("wire_dtype", LOW_RANK)
def test_low_rank_pushes_every_direction_in_the_end(wire_dtype: WireDtype) -> None:
    feedback, value, pushed = feedback_of(wire_dtype), gradient(0), torch.zeros(37, 41)
    for _ in range(150):
        pushed += arrived(push(feedback, value), wire_dtype)
        commit(feedback)
    captured = feedback.capture(150)
    assert captured is not None
    torch.testing.assert_close(pushed + captured.residuals[0].values.view(37, 41), 150 * value, rtol=0, atol=1e-2)
    assert torch.linalg.matrix_rank(pushed) == 37
    assert (pushed / 150 - value).norm() < 0.3 * value.norm()


@pytest.mark.parametrize("wire_dtype", LOSSY)
def test_restarted_work_item_pushes_the_same_bits(wire_dtype: WireDtype) -> None:
    feedback = feedback_of(wire_dtype)
    push(feedback, gradient(0))
    commit(feedback)
    first = [push(feedback, gradient(seed)) for seed in (1, 2)]
    feedback.reset(0)
    assert [push(feedback, gradient(seed)) for seed in (1, 2)] == first
    commit(feedback)
    never_reset = feedback_of(wire_dtype)
    for step in ([0], [1, 2]):
        for seed in step:
            push(never_reset, gradient(seed))
        commit(never_reset)
    assert push(feedback, gradient(3)) == push(never_reset, gradient(3))


def test_reset_before_the_first_commit_clears_the_residuals() -> None:
    feedback = feedback_of(WIRE_DTYPE_INT8)
    push(feedback, gradient(0))
    feedback.reset(0)
    feedback.reset(7)
    assert push(feedback, gradient(1)) == on_the_wire(gradient(1), WIRE_DTYPE_INT8)


def test_parameter_pushed_only_before_a_reset_starts_without_residual() -> None:
    feedback = feedback_of(WIRE_DTYPE_INT8)
    push(feedback, gradient(0, BIAS), index=BIAS)
    feedback.reset(0)
    push(feedback, gradient(1))
    commit(feedback)
    assert push(feedback, gradient(2, BIAS), index=BIAS) == on_the_wire(gradient(2, BIAS), WIRE_DTYPE_INT8, BIAS)


def pushed_after(first: torch.Tensor, second: torch.Tensor) -> bytes:
    """Returns the int8 bytes of ``second``, pushed after ``first`` has left its residual."""
    lost = first - arrived(on_the_wire(first, WIRE_DTYPE_INT8), WIRE_DTYPE_INT8)
    return on_the_wire(second + lost, WIRE_DTYPE_INT8)


@pytest.mark.parametrize("wire_dtype", LOW_RANK)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_matrix_of_low_rank_leaves_no_residual(wire_dtype: WireDtype, bad: float) -> None:
    feedback, value = feedback_of(wire_dtype), gradient(0)
    value[2, 3] = bad
    assert not arrived(push(feedback, value), wire_dtype)[2, 3].isfinite()
    commit(feedback)
    assert push(feedback, gradient(1)) == on_the_wire(gradient(1), wire_dtype, step=1)


def test_parts_of_one_step_share_residuals_in_order() -> None:
    feedback = feedback_of(WIRE_DTYPE_INT8)
    push(feedback, gradient(0))
    assert push(feedback, gradient(1)) == pushed_after(gradient(0), gradient(1))


def test_ranks_and_units_have_separate_residuals() -> None:
    feedback, alone = feedback_of(WIRE_DTYPE_INT8), feedback_of(WIRE_DTYPE_INT8)
    push(feedback, gradient(0))
    push(alone, gradient(0))
    push(feedback, gradient(1), dp_rank=1)
    push(feedback, gradient(2), unit=1)
    feedback.reset(1)
    for each in (feedback, alone):
        commit(each)
    assert push(feedback, gradient(3)) == push(alone, gradient(3))
    assert push(feedback, gradient(4), dp_rank=1) == on_the_wire(gradient(4), WIRE_DTYPE_INT8)


def test_rank_of_another_trainer_is_dropped_but_parameter_without_a_push_is_kept() -> None:
    feedback = feedback_of(WIRE_DTYPE_INT8)
    push(feedback, gradient(0))
    push(feedback, gradient(1), dp_rank=1)
    commit(feedback)
    push(feedback, gradient(2, index=BIAS), index=BIAS)
    commit(feedback, 0)
    assert push(feedback, gradient(3)) == pushed_after(gradient(0), gradient(3))
    assert push(feedback, gradient(4), dp_rank=1) == on_the_wire(gradient(4), WIRE_DTYPE_INT8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_non_finite_push_does_not_spoil_the_next_step(bad: float) -> None:
    feedback, value = feedback_of(WIRE_DTYPE_FLOAT16), gradient(0)
    value[0, 0] = bad
    assert not arrived(push(feedback, value), WIRE_DTYPE_FLOAT16)[0, 0].isfinite()
    commit(feedback)
    following = arrived(push(feedback, gradient(1)), WIRE_DTYPE_FLOAT16)
    assert following[0, 0] == gradient(1)[0, 0].half()
    assert following.isfinite().all()


@pytest.mark.parametrize("wire_dtype", LOSSY)
def test_joint_push_has_the_bits_of_separate_pushes(wire_dtype: WireDtype) -> None:
    together, alone = feedback_of(wire_dtype), feedback_of(wire_dtype)
    for step in range(3):
        gradients = {index: gradient(10 * step + index, index) for index in (WEIGHT, BIAS, DOUBLE)}
        encoded = together.encode(0, LAYOUT, 0, {index: own.view(-1) for index, own in gradients.items()})
        assert encoded is not None
        stored = gradients[DOUBLE].numpy().tobytes()
        # A vector has no low rank.
        is_stored = wire_dtype in LOW_RANK
        bias = gradients[BIAS].numpy().tobytes() if is_stored else push(alone, gradients[BIAS], index=BIAS)
        one_by_one = [bias, stored, push(alone, gradients[WEIGHT])]
        assert encoded.indices == (BIAS, DOUBLE, WEIGHT)
        assert bytes(encoded.stream) == b"".join(one_by_one)
        encoded.release()
        for each in (together, alone):
            commit(each)


@pytest.mark.parametrize("wire_dtype", [WIRE_DTYPE_UNSPECIFIED, *LOSSY])
def test_gradients_that_travel_as_stored_are_unchanged(wire_dtype: WireDtype) -> None:
    assert feedback_of(wire_dtype).encode(0, LAYOUT, 0, {DOUBLE: gradient(0, DOUBLE).view(-1)}) is None
    assert (feedback_of(wire_dtype).encode(0, LAYOUT, 0, {WEIGHT: gradient(0).view(-1)}) is None) == (
        wire_dtype == WIRE_DTYPE_UNSPECIFIED
    )


def test_captured_residuals_stay_as_they_are_while_training_goes_on() -> None:
    feedback, undisturbed = feedback_of(WIRE_DTYPE_INT8), feedback_of(WIRE_DTYPE_INT8)
    for each in (feedback, undisturbed):
        push(each, gradient(0))
        push(each, gradient(1, BIAS), index=BIAS)
        push(each, gradient(2), dp_rank=1)
        commit(each)
    captured = feedback.capture(1)
    assert captured is not None
    assert (captured.step, captured.dp_ranks) == (1, {0, 1})
    assert [(at.dp_rank, at.parameter) for at in captured.residuals] == [(0, "bias"), (0, "weight"), (1, "weight")]
    before = [at.values.clone() for at in captured.residuals]
    for seed in (3, 4, 5):
        assert push(feedback, gradient(seed)) == push(undisturbed, gradient(seed))
        for each in (feedback, undisturbed):
            commit(each)
    assert all(map(torch.equal, (at.values for at in captured.residuals), before))
    assert feedback.capture(1) is None, "the step is over"


def test_captured_residuals_of_a_part_have_the_key_of_the_part() -> None:
    """Several tensor-parallel ranks write residuals of one parameter to a checkpoint."""
    part = Parameter("weight", (37, 41), "float32", whole_shape=(74, 41), offsets=(37, 0))
    feedback = feedback_of(WIRE_DTYPE_INT8)
    encoded = feedback.encode(0, UnitLayout("block@tp1", (part,), tp_rank=1), 0, {0: gradient(0).view(-1)})
    assert encoded is not None
    encoded.release()
    commit(feedback)
    captured = feedback.capture(1)
    assert captured is not None
    assert [at.parameter for at in captured.residuals] == ["weight@37,0"]


@pytest.mark.parametrize("wire_dtype", [WIRE_DTYPE_INT8, WIRE_DTYPE_LOW_RANK_4])
def test_restored_residuals_give_the_pushes_of_the_captured_run(wire_dtype: WireDtype) -> None:
    feedback, resumed = feedback_of(wire_dtype), ErrorFeedback(wire_dtype, BufferPool(1 << 20), step=1)
    push(feedback, gradient(0))
    push(feedback, gradient(1), dp_rank=1)
    commit(feedback)
    captured = feedback.capture(1)
    assert captured is not None
    saved = {(at.dp_rank, at.parameter): at.values.clone() for at in captured.residuals}
    resumed.restore(lambda dp_rank, layout: {WEIGHT: saved[dp_rank, layout.parameters[WEIGHT].name]})
    first = push(resumed, gradient(2))
    resumed.reset(0)
    assert first == push(resumed, gradient(2)) == push(feedback, gradient(2))
    for each in (feedback, resumed):
        commit(each, 0)
    assert push(resumed, gradient(3)) == push(feedback, gradient(3))
    assert push(resumed, gradient(4), dp_rank=1) == on_the_wire(gradient(4), wire_dtype, step=2), "only in its step"


def test_restored_residual_of_a_unit_without_a_push_stays_for_the_next_step() -> None:
    left_out, resumed = gradient(0) / 100, feedback_of(WIRE_DTYPE_INT8)
    resumed.restore(lambda dp_rank, layout: {WEIGHT: left_out.view(-1)})
    push(resumed, gradient(1), unit=1)
    commit(resumed, 0)
    assert push(resumed, gradient(2)) == on_the_wire(gradient(2) + left_out, WIRE_DTYPE_INT8)
