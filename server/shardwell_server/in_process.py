"""A coordinator, shard servers and a relay in a thread of this process, for tests of training scripts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from shardwell_server.cli import build_parser
from shardwell_server.coordinator.command import coordinate
from shardwell_server.coordinator.settings import Settings
from shardwell_server.serving.process import Endpoint
from shardwell_server.shard.process.command import serve
from shardwell_wire.security.credentials import read_key_file

_START_S = _STOP_S = 30.0
_LISTEN = "127.0.0.1:0"
_MIN_SHARD_BYTES = 4 << 10
"""Tests have small models, whose units are cut into shards like those of large models."""

_Serve = Callable[[Endpoint], Coroutine[Any, Any, None]]


class InProcessServers:
    """A coordinator, shard servers without shared memory, and a relay, on an event loop of this process.

    Args:
        state_dir: An empty directory for the coordinator's state.
        token_file: File with the cluster's key.
        num_shards: Number of shard servers. They are called ``shard-0``, ``shard-1`` and so on.
        memory_budget: Memory budget of each shard server in bytes.
    """

    def __init__(self, state_dir: Path, token_file: str, *, num_shards: int, memory_budget: int) -> None:
        self._servers: list[_Server] = []
        settings = Settings(min_servers=num_shards, min_shard_bytes=_MIN_SHARD_BYTES)
        credentials = read_key_file(token_file)
        try:
            self.address = self._start(
                partial(coordinate, settings, state_dir, keeps_state=True, credentials=credentials)
            )
            for name in (f"shard-{index}" for index in range(num_shards)):
                options = ["--coordinator", self.address, "--id", name, "--token-file", token_file]
                own = [
                    "--memory-budget",
                    str(memory_budget),
                    "--shm-dir",
                    "none",
                    "--state-dir",
                    "",
                    "--checkpoint-root",
                    "any",
                ]
                arguments = build_parser("shard").parse_args(["shard", *options, *own])
                self._start(partial(serve, arguments))
            relay = ["relay", "--coordinator", self.address, "--token-file", token_file]
            self._start(partial(serve, build_parser("relay").parse_args(relay)))
        except BaseException:
            self.stop()
            raise

    def _start(self, run: _Serve) -> str:
        server = _Server(run)
        self._servers.append(server)
        return server.wait_ready()

    def stop(self) -> None:
        """Stops the servers, the coordinator first, so that it does not report the shard servers as lost."""
        for server in self._servers:
            server.stop()
        self._servers.clear()


class _Server:
    """One server, on the event loop that all servers share."""

    def __init__(self, run: _Serve) -> None:
        self._loop = _shared_loop()
        self._stop = asyncio.Event()
        self._address: Future[str] = Future()
        endpoint = Endpoint(bind=_LISTEN, stop=self._stop, on_ready=self._note_ready)
        self._done = asyncio.run_coroutine_threadsafe(run(endpoint), self._loop)
        self._done.add_done_callback(self._note_end)

    def _note_ready(self, service: ServiceDescriptor, address: str, over_http: Mapping[str, str]) -> None:
        self._address.set_result(address)

    def _note_end(self, done: Future[None]) -> None:
        if not self._address.done():
            self._address.set_exception(done.exception() or RuntimeError("the server ended before it was ready"))

    def wait_ready(self) -> str:
        """Returns the server's address when it is ready. Raises the error that ended the server earlier."""
        return self._address.result(_START_S)

    def stop(self) -> None:
        """Stops the server and waits until it has ended."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._done.result(_STOP_S)


@cache
def _shared_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop for all servers of this process: grpc.aio supports only one per process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="shardwell-servers", daemon=True).start()
    return loop
