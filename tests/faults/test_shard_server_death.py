"""Fault test of a shard server killed before the first commit: every trainer's error names it and its shards."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

import shardwell
from shardwell_wire.errors import ConflictError
from tests.support.cluster import build_model, join_options

LIMIT_S = 120.0
"""The run waits for a new process of the server first. Far below ``wait_limit_s``, with a margin for slow machines."""


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


def test_server_killed_before_the_first_step_is_reported_to_every_run() -> None:
    cases = [(declared, None, "first"), *((ready, transport, "all") for transport in ("shm", "socket", "grpc"))]
    with (
        shardwell.LocalCluster(num_shards=1, lease_s=1.0) as cluster,
        ExitStack() as sessions,
        ThreadPoolExecutor(len(cases)) as threads,
    ):
        actions = []
        for prepare, transports, _ in cases:
            options = join_options(transports=transports)
            session = sessions.enter_context(shardwell.join(cluster.address, run=uuid.uuid4().hex, **options))
            actions.append(prepare(session))
        cluster.shards[0].kill()
        errors = [future.exception(LIMIT_S) for future in [threads.submit(action) for action in actions]]
        for error, (_, transports, unit) in zip(errors, cases, strict=True):
            assert isinstance(error, ConflictError), (transports, error)
            expected = f"and its shards of unit {unit!r} of this run are lost: delete the run"
            assert expected in str(error) and "server 'shard-0' at " in str(error), (transports, error)
