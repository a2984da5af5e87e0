"""Fixtures of many tests: shared clusters, which tests must not damage, and a unique run per test."""

from __future__ import annotations

import asyncio
import gc
import inspect
import uuid
from collections.abc import Generator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from tempfile import TemporaryDirectory

import pytest

import shardwell
from shardwell_wire.host.server_folders import FolderOwner
from tests.support.forked_servers import forked_servers
from tests.support.left_folders import discard, noted_servers


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the tests without collecting garbage. There is little, and visiting torch's objects takes 12 of 32 s.

    The modules and the tests are never freed. While the tests run, collections skip their objects: each full collection
    would take half a second to visit them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs tests that are coroutines, each on an event loop of its own.

    A fixture that is an asynchronous context manager is entered there, and the test gets what it yields.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run() -> None:
        async with AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    asyncio.run(asyncio.wait_for(run(), 30))
    return True


@pytest.fixture(scope="session", autouse=True)
def _runtime_folder() -> Iterator[None]:
    """Redirects published tokens to a temporary folder, so that killed owners leave nothing behind."""
    with TemporaryDirectory(prefix="shardwell_test-") as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def _units_are_large() -> Iterator[None]:
    """Cuts units into shards and frees them after their forward, as those of large models. Tests have small models."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SHARDWELL_KEEP_BYTES", "0")
        patched.setenv("SHARDWELL_MIN_SHARD_BYTES", "64KiB")
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_servers() -> Iterator[None]:
    """Starts the servers of clusters in a fraction of the time."""
    with forked_servers():
        yield


@pytest.fixture(scope="session", autouse=True)
def _started_servers() -> Iterator[list[FolderOwner]]:
    """Notes the shard servers that tests start."""
    with noted_servers() as started:
        yield started


@pytest.fixture(autouse=True)
def _no_shards_left(_started_servers: list[FolderOwner]) -> Iterator[None]:
    """Fails a test whose shard servers leave shards in shared memory, where they would stay for a day."""
    before = len(_started_servers)
    yield
    left = discard(_started_servers[before:])
    assert not left, f"this test left shards in shared memory, see `discard` in left_folders.py: {left}"


@pytest.fixture(scope="session")
def cluster() -> Iterator[shardwell.LocalCluster]:
    """A coordinator and two shard servers."""
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as running:
        yield running


@pytest.fixture(scope="session")
def cluster_of_one() -> Iterator[shardwell.LocalCluster]:
    """A coordinator and one shard server."""
    with shardwell.LocalCluster(num_shards=1) as running:
        yield running


@pytest.fixture(scope="session")
def cluster_of_three() -> Iterator[shardwell.LocalCluster]:
    """A coordinator and three shard servers."""
    with shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096) as running:
        yield running


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    """A unique name of a run."""
    return f"{request.node.name[:40]}-{uuid.uuid4().hex[:8]}"
