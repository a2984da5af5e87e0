"""Initial values that a shard server draws, alone and together with streamed values."""

from __future__ import annotations

import pytest
import torch

import shardwell
from shardwell import init
from shardwell.transport.base import into
from shardwell.transport.grpc_transport import GrpcTransport
from shardwell_server.shard.arithmetic import random_values
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import InvalidRequestError, NonFiniteError
from shardwell_wire.v1 import initialization_pb2
from tests.support.module_parity import Gpt
from tests.support.shard_server import OneUnit, ShardServer, error_of, layout_of

LAYOUT = layout_of("u", a=((3, 5), "float32"), b=((7,), "bfloat16"), c=((60_000,), "float32"))


def draw_of(index: int, how: init.Draw) -> initialization_pb2.ParameterDraw:
    return initialization_pb2.ParameterDraw(
        parameter_index=index, distribution=how.distribution, seed=5, stream=LAYOUT.parameters[index].name
    )


def expected(index: int, how: init.Draw) -> torch.Tensor:
    parameter = LAYOUT.parameters[index]
    values = torch.empty(parameter.numel, dtype=getattr(torch, parameter.dtype))
    random_values.fill(values, 0, draw_of(index, how), parameter.box)
    return values


@pytest.mark.parametrize("cut", [4096, 81920])
def test_drawn_and_streamed_values_fill_one_unit(server: ShardServer, cut: int) -> None:
    """The padding is zero even in reused memory."""
    dirty = OneUnit(server, layout_of("v", x=((60_100,), "float32")), run="before")
    dirty.begin(dirty.filled(3.0)).drop()
    draws = [draw_of(0, init.normal()), draw_of(2, init.uniform(-1, 1))]
    got = []
    for run, part in (("r", (0, cut)), ("s", (cut, LAYOUT.size_bytes))):
        one = OneUnit(server, LAYOUT, run=run, part=part)
        one.reserve()
        values = one.filled(2.0)
        one.initialize(
            [value for segment, value in zip(one.segments, values, strict=True) if segment.parameter_index == 1],
            draws=draws,
        )
        one.publish()
        got.append(torch.empty(one.size, dtype=torch.uint8))
        target = memory_at(got[-1].data_ptr(), one.size, got[-1])
        GrpcTransport(server.client).fetch_stream(one.gather_request(0), into(target), timeout_s=20.0)
    flat = torch.cat(got)
    whole = torch.zeros(LAYOUT.size_bytes, dtype=torch.uint8)
    parts = expected(0, init.normal()), torch.full((7,), 2.0, dtype=torch.bfloat16), expected(2, init.uniform(-1, 1))
    for start, values in zip(LAYOUT.starts, parts, strict=True):
        whole[start : start + values.nbytes] = values.view(torch.uint8)
    assert torch.equal(flat, whole)


def test_rejected_draws_leave_no_trace(server: ShardServer) -> None:
    one = OneUnit(server, LAYOUT)
    one.reserve()
    for draws in ([draw_of(0, init.uniform(1, 0))], [draw_of(0, init.normal())] * 2):
        error = error_of(lambda draws=draws: one.initialize(one.zeros()[1:], draws=draws))  # type: ignore[misc]
        assert isinstance(error, InvalidRequestError)
    unknown = initialization_pb2.ParameterDraw(parameter_index=3, distribution=init.normal().distribution)
    assert isinstance(error_of(lambda: one.initialize(one.zeros(), draws=[unknown])), InvalidRequestError)
    huge = error_of(lambda: one.initialize([one.zeros()[0], one.zeros()[2]], draws=[draw_of(1, init.constant(1e300))]))
    assert isinstance(huge, NonFiniteError) and huge.data["parameter"] == "u.b"
    assert server.taken_bytes() == 0


def test_runs_with_one_seed_draw_equal_values(cluster: shardwell.LocalCluster, run_name: str) -> None:
    states = []
    for number, policy in enumerate((shardwell.NoWrapPolicy(), shardwell.SizePolicy(1000))):
        with shardwell.join(cluster.address, run=f"{run_name}-{number}", seed=11) as session:
            with torch.device("meta"):
                model = Gpt()
            shardwell.auto_wrap(model, session, policy, source=init.drawn())
            states.append(shardwell.full_state_dict(model))
            assert session.stats()["sent_bytes"] == 0
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
