"""Fault test of a shard server killed before the first commit: trainers wait for it as long as they may."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

import shardwell
from shardwell_wire.errors import UnavailableError
from tests.support.cluster import build_model, join_options

WAIT_LIMIT_S, LIMIT_S = 8.0, 30.0
"""How long trainers wait for a new process of the server, and the test for their errors."""


def declared(session: shardwell.Session) -> Callable[[], object]:
    """Declares a unit. Returns a function that declares another one."""
    model = build_model()
    shardwell.fully_shard(model[0], session, name="first")
    return lambda: shardwell.fully_shard(model, session, name="rest")


def ready(session: shardwell.Session) -> Callable[[], object]:
    """Declares the units of a model. Returns a function that trains a step."""
    model = build_model()
    shardwell.fully_shard(model, session, name="all")
    optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(3, 17)).sum().backward()
        optimizer.step()

    return step


def test_server_killed_before_the_first_step_is_waited_for_in_every_run() -> None:
    cases = [(declared, None), *((ready, transport) for transport in ("shm", "socket", "grpc"))]
    with (
        shardwell.LocalCluster(num_shards=1, lease_s=1.0) as cluster,
        ExitStack() as sessions,
        ThreadPoolExecutor(len(cases)) as threads,
    ):
        actions = []
        for prepare, transports in cases:
            options = join_options(transports=transports, wait_limit_s=WAIT_LIMIT_S)
            session = sessions.enter_context(shardwell.join(cluster.address, run=uuid.uuid4().hex, **options))
            actions.append(prepare(session))
        cluster.shards[0].kill()
        errors = [future.exception(LIMIT_S) for future in [threads.submit(action) for action in actions]]
        for error, (_, transports) in zip(errors, cases, strict=True):
            assert isinstance(error, UnavailableError), (transports, error)
        # The other trainers were in a transfer, and name the server's address.
        for expected in (
            "server 'shard-0' has ended and has left its shards of unit 'first' of this run on its host",
            "The run continues when server 'shard-0' is started again on its host, under its id",
        ):
            assert expected in str(errors[0]), errors[0]
