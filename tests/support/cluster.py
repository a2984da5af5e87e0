"""Small runs on a cluster, options of ``join``, and waiting for processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from http.client import HTTPConnection
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import shardwell
from shardwell.find_credentials import find_credentials
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2


def join_options(**options: Any) -> dict[str, Any]:
    """Returns the arguments of ``shardwell.join`` for options by field name. None means that an option is not given."""
    given = {name: value for name, value in options.items() if value is not None}
    groups = {"transfers": shardwell.TransferOptions, "waits": shardwell.WaitOptions}
    for name, group in groups.items():
        names = given.keys() & {option.name for option in fields(group)}
        if names:
            given[name] = group(**{option: given.pop(option) for option in names})
    return given


def cluster_fixture(**options: Any) -> Any:
    """Returns a fixture: a cluster of a module's own, which its tests may damage.

    Args:
        **options: Arguments of ``LocalCluster``.
    """

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[shardwell.LocalCluster]:
        with shardwell.LocalCluster(min_shard_bytes=4096, **options) as running:
            yield running

    return cluster


def build_model() -> nn.Sequential:
    """Returns a model of two units with odd sizes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 1))


@contextmanager
def small_run(address: str, run: str, *, steps: int = 2, **options: Any) -> Iterator[shardwell.Session]:
    """Yields the session of a run's only trainer after some commits. Backups are in sync before the first of them."""
    with shardwell.join(address, run=run, trainer="tester", host="here", **options) as session:
        model = build_model()
        shardwell.fully_shard(model[0], session, name="first")
        shardwell.fully_shard(model, session, name="rest")
        if backups := options.get("backups"):
            wait_in_sync(address, run, backups, options.get("token_file"))
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
        for _ in session.steps(steps):
            model(torch.ones(3, 17)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield session


@contextmanager
def silent_connections(address: str, count: int) -> Iterator[None]:
    """Keeps HTTP connections to a server open that send nothing."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(closing(HTTPConnection(address, timeout=60))).connect()
        yield


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = 20.0) -> None:
    """Polls until ``condition()`` is true; fails with ``what`` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def wait_in_sync(address: str, run: str, backups: int = 1, token_file: str | None = None) -> None:
    """Waits until every shard of a run has so many backups in sync and no other copies."""
    request = coordinator_pb2.ListUnitsRequest(run=run)
    with closing(CoordinatorClient(address, find_credentials(address, token_file))) as client:

        def in_sync() -> bool:
            units = client.call("ListUnits", request, timeout_s=30.0).units
            states = [backup.state for unit in units for backup in unit.backups]
            return states == [coordinator_pb2.BACKUP_STATE_IN_SYNC] * backups * sum(len(unit.shards) for unit in units)

        wait_until(in_sync, f"{backups} backups of all shards in sync", timeout_s=60.0)


def events(address: str, run: str) -> list[coordinator_pb2.WatchEventsResponse]:
    """Returns the kept events of a run. An empty name: those of the cluster."""
    request = coordinator_pb2.WatchEventsRequest(run=run, duration_s=0.05)
    with closing(CoordinatorClient(address)) as client:
        return [event for event in client.stream("WatchEvents", request, timeout_s=20.0) if event.run == run]


def descendants(pid: int) -> list[psutil.Process]:
    """Returns all descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


def wait_gone(processes: list[psutil.Process], *, timeout_s: float = 20.0) -> None:
    """Fails if one of the processes still exists after the deadline."""
    wait_until(
        lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes),
        f"end of {processes}",
        timeout_s=timeout_s,
    )
