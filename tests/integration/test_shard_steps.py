"""Steps on a shard server over gRPC: prepare."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import pytest

from shardwell_wire.errors import (
    IncompleteStepError,
    InvalidRequestError,
    NonFiniteError,
    StepStateError,
)
from tests.support.shard_server import (
    SERVICE,
    ShardServer,
    assert_all,
    error_of,
    in_background,
    train,
    unit,
)


def test_prepare_names_missing_and_surplus_contributions(server: ShardServer) -> None:
    one = unit(server, dp=3)
    one.push(one.filled(1.0))
    one.push(one.filled(1.0), rank=2)
    error = error_of(lambda: one.prepare(0, (0, 0, 1), (1, 0, 1), (2, 0, 0)))
    assert isinstance(error, IncompleteStepError)
    assert "unit 'u': rank 1: expected 1 parts of attempt 0, have none" in str(error)
    assert "unit 'u': rank 2: expected 0 parts of attempt 0, have 1 of attempt 0" in str(error)
    wrong_attempt = error_of(lambda: one.prepare(0, (0, 3, 1), (1, 0, 0), (2, 0, 1)))
    assert isinstance(wrong_attempt, IncompleteStepError)
    for ranks in (((0, 0, 1),), ((0, 0, 1), (1, 0, 0), (3, 0, 1))):
        assert isinstance(error_of(partial(one.prepare, 0, *ranks)), InvalidRequestError)
    assert isinstance(error_of(lambda: one.prepare(0, (0, 0, 1), (1, 0, 0), dp=2)), InvalidRequestError)
    request = one.prepare_request(0, (0, 0, 1), (1, 0, 0), (2, 0, 1))
    request.ranks[1].units.add(unit_index=7, part_count=1)
    error = error_of(lambda: server.call("PrepareStep", request))
    assert isinstance(error, IncompleteStepError)
    assert "unit 7" in str(error)
    assert isinstance(error_of(lambda: one.prepare(1, (0, 0, 1), (1, 0, 0), (2, 0, 1))), StepStateError)
    one.prepare(0, (0, 0, 1), (1, 0, 0), (2, 0, 1))


def test_prepare_is_idempotent_and_can_add_norms(server: ShardServer) -> None:
    one = unit(server, dp=2)
    before = server.taken_bytes()
    one.push(one.filled(1.0))
    one.push(one.filled(-4.0), rank=1)
    first = one.prepare(0)
    assert one.prepare(0) == first
    assert (first.version, sum(first.units[0].square_partials), first.units[0].max_abs) == (0, 60_000 * 2.25, 0.0)
    assert one.prepare(0, norm_type=math.inf).units[0].max_abs == 1.5
    assert server.taken_bytes() == before + 3 * one.size, "two contributions and their mean"
    one.update(0)
    assert_all(one.gather(1)[1], 1.5)


def test_rejected_requests_keep_a_prepared_step(server: ShardServer) -> None:
    """The commit record may be written already."""
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    for rejected in (
        lambda: one.prepare(0, dp=2),
        lambda: one.prepare(0, (0, 0, 2)),
        lambda: one.prepare(1),
        lambda: one.prepare(0, norm_type=math.nan),
    ):
        error_of(rejected)
    one.update(0)
    assert_all(one.gather(1)[1], -1.0)


def test_cancelled_norm_keeps_a_prepared_step(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwell_server.shard.arithmetic.reduction import Reduced

    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    started, resume = threading.Event(), threading.Event()

    def slowly(*_: Any) -> list[float]:
        started.set()
        assert resume.wait(20)
        return [1.0]

    monkeypatch.setattr(Reduced, "power_partials", slowly)
    call: Any = server.client._channel.unary_unary(f"/{SERVICE.full_name}/PrepareStep")
    future = call.future(one.prepare_request(0, norm_type=3.0).SerializeToString())
    assert started.wait(20)
    future.cancel()
    # The update waits for the thread of the cancelled prepare.
    updating = in_background(lambda: one.update(0))
    resume.set()
    assert next(updating).version == 1


def test_nan_error_names_parameter_and_ranks_and_the_step_can_be_repeated(server: ShardServer) -> None:
    one = unit(server, dp=3)
    bad = one.filled(1.0)
    bad[1][5] = float("inf")
    before = server.taken_bytes()
    one.push(one.filled(3.0))
    one.push(bad, rank=1)
    one.push(one.filled(2.0), rank=2)
    for _ in range(2):
        error = error_of(lambda: one.prepare(0))
        assert isinstance(error, NonFiniteError)
        assert (error.data["parameter"], error.data["dp_ranks"]) == ("u.b", "1")
    assert isinstance(error_of(lambda: one.update(0)), StepStateError)
    assert server.taken_bytes() == before + 4 * one.size, "three contributions and their mean"
    one.fence(0, (1, 1, 1))
    assert server.taken_bytes() == before + 2 * one.size
    one.push(one.filled(1.0), rank=1, attempt=1)
    one.prepare(0, (0, 0, 1), (1, 1, 1), (2, 0, 1))
    one.update(0)
    assert_all(one.gather(1)[1], -2.0)


def test_skipped_step_makes_the_next_version_with_equal_values(server: ShardServer) -> None:
    one = unit(server, dp=2)
    before = server.taken_bytes()
    one.push(one.filled(float("inf")))
    one.push(one.filled(1.0), rank=1)
    assert isinstance(error_of(lambda: one.prepare(0)), NonFiniteError)
    skip = one.prepare_request(0, (0, 0, 1), (1, 0, 1))
    skip.skip = True
    assert not server.call("PrepareStep", skip).units
    # A restarted coordinator prepares the step again and gets the same error.
    assert isinstance(error_of(lambda: one.prepare(0)), NonFiniteError)
    server.call("PrepareStep", skip)
    one.update(0)
    version, values = one.gather(1)
    assert version == 1
    assert_all(values, 0.0)
    assert server.taken_bytes() == before
    one.push(one.filled(1.0), step=1)
    one.push(one.filled(3.0), rank=1, step=1)
    one.prepare(1)
    one.update(1)
    assert_all(one.gather(2)[1], -2.0)


def test_overflow_of_the_sum_names_no_rank(server: ShardServer) -> None:
    one = unit(server, dp=2)
    for rank in range(2):
        one.push(one.filled(3e38), rank=rank)
    error = error_of(lambda: one.prepare(0))
    assert isinstance(error, NonFiniteError)
    assert "overflow" in str(error)


def test_repeated_update_keeps_the_next_prepared_step(server: ShardServer) -> None:
    """The commit record of the next step may be written already."""
    one = unit(server)
    train(one, 0)
    one.update(0)
    one.push(one.filled(1.0), step=1)
    one.prepare(1)
    one.update(0)
    one.update(1)
    assert_all(one.gather(2)[1], -2.0)


def test_cancelled_prepare_leaves_no_trace(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwell_server.shard.unit import step_gradient

    one = unit(server, dp=2)
    before = server.taken_bytes()
    started, resume, reduce_shard = threading.Event(), threading.Event(), step_gradient.reduce_shard

    def slowly(*arguments: Any, **options: Any) -> Any:
        started.set()
        assert resume.wait(20)
        return reduce_shard(*arguments, **options)

    monkeypatch.setattr(step_gradient, "reduce_shard", slowly)
    one.push(one.filled(1.0))
    one.push(one.filled(3.0), rank=1)
    assert started.wait(20), "the mean is computed ahead of prepare"

    def num_waiting() -> int:
        # Requests that wait for the run's lock.
        return len(server.store.run("r")._lock._waiters or ())

    call: Any = server.client._channel.unary_unary(f"/{SERVICE.full_name}/PrepareStep")
    future = call.future(one.prepare_request(0).SerializeToString())
    server.until(lambda: num_waiting() == 1, "the prepare waits for the thread")
    future.cancel()
    server.until(lambda: num_waiting() == 0, "the prepare is cancelled")
    fencing = in_background(lambda: one.fence(0, (0, 1, 1)))
    server.until(lambda: num_waiting() == 1, "the fence waits for the thread")
    resume.set()
    assert next(fencing) is None
    server.until(lambda: server.store.memory.pool.taken_bytes == before + one.size, "only rank 1's gradient is left")
    one.push(one.filled(1.0), attempt=1)
    one.prepare(0, (0, 1, 1), (1, 0, 1))
    one.update(0)
    assert_all(one.gather(1)[1], -2.0)
