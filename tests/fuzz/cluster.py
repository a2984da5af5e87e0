"""A cluster in this process whose handlers can be called directly, and the training that is recorded."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardwell
from shardwell.processes.local_cluster import write_key
from shardwell.transport.service_client import CoordinatorClient
from shardwell_server.cli import build_parser
from shardwell_server.coordinator.command import coordinate
from shardwell_server.coordinator.settings import Settings
from shardwell_server.in_process import _Server
from shardwell_server.shard.process.command import serve
from shardwell_wire.errors import ShardwellError
from shardwell_wire.security.credentials import new_key, read_key_file
from shardwell_wire.security.tokens import ClusterKey, Role
from shardwell_wire.v1 import coordinator_pb2
from tests.fuzz.handlers import HANGING_S, Answer, Handler, Handlers
from tests.fuzz.messages import Mutator, Values
from tests.support.cluster import build_model, join_options, small_run
from tests.support.reference import sha256

STEPS = 3
_MAX_BAD = 200
RECORDED, OTHER = "recorded", "other"
"""Names of the run that is recorded, and of another one, whose tokens attackers have."""


class FuzzedCluster:
    """A coordinator and two shard servers on an event loop of this process."""

    def __init__(
        self, address: str, token_file: str, key: ClusterKey, handlers: Handlers, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.address, self.token_file, self.key, self.handlers, self._loop = address, token_file, key, handlers, loop
        self.values = Values()
        """Values of real requests."""

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any:
        """Runs a coroutine on the servers' event loop; returns its result."""
        return self._start(work).result(timeout_s)

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def tokens(self, run: str = OTHER) -> list[str]:
        """Returns the tokens of attackers: none, invalid ones, and those that ``run`` gives out."""
        valid = [self.key.mint(role, run=run, run_id="x") for role in (Role.TRAINER, Role.READER)]
        valid.append(self.key.mint(Role.TRAINER, run=run, run_id="x", member="tester"))
        expired = self.key.mint(Role.TRAINER, run=RECORDED, run_id="x", lifetime_s=-1.0)
        elsewhere = ClusterKey("another secret of 32 characters.").mint(Role.OPERATOR)
        return ["", "x" * 5000, "a.b.c", valid[0][:-1] + "!", expired, elsewhere, *valid, *valid]

    def call(self, handler: Handler, messages: Sequence[bytes], token: str | None) -> Findings:
        """Calls one handler."""
        findings = Findings()
        findings.note(handler, messages, self.run(handler.call(messages, token)))
        return findings

    def attack_while(self, work: Callable[[], str], tokens: Sequence[str]) -> Findings:
        """Fuzzes with the tokens of attackers until ``work`` is done, at least a few thousand calls."""
        done, rng, findings = threading.Event(), random.Random(1), Findings()

        def run() -> None:
            try:
                findings.result = work()
            finally:
                done.set()

        working = threading.Thread(target=run)
        working.start()
        try:
            while not done.is_set() or findings.statuses.total() < 3000:
                findings.add(self.fuzz(rng, self.values, 200, tokens))
        finally:
            working.join()
        return findings

    def delete(self, run: str) -> None:
        """Deletes a run."""
        with closing(CoordinatorClient(self.address, credentials=read_key_file(self.token_file))) as client:
            client.call("DeleteRun", coordinator_pb2.DeleteRunRequest(run=run, force=True))

    def fuzz(self, rng: random.Random, values: Values, count: int, tokens: Sequence[str] | None) -> Findings:
        """Calls random handlers with random messages.

        Args:
            rng: Makes the choices.
            values: Values for the messages.
            count: Number of calls.
            tokens: Tokens of the callers. None: the servers admit every caller, as a cluster without a key does.
        """
        findings, mutator = Findings(), Mutator(rng, values)

        async def work() -> None:
            for _ in range(count):
                handler = rng.choice(self.handlers.all)
                if not handler.is_served():
                    continue  # an admitted caller made the server leave the cluster
                messages = handler.mutated(mutator, rng)
                token = None if tokens is None else rng.choice(tokens)
                findings.note(handler, messages, await asyncio.create_task(handler.call(messages, token)))
                await asyncio.sleep(0)

        with watched(self._loop, findings):
            self.run(work(), timeout_s=600.0)
        return findings


class Findings:
    """What the servers answered."""

    def __init__(self) -> None:
        self.result = ""
        """What the work beside an attack returned."""
        self.statuses: Counter[str] = Counter()
        self.bad: dict[str, str] = {}
        """How calls failed in the server or took too long, with an example. Also stacks of an event loop that did not
        go on."""

    def note(self, handler: Handler, messages: Sequence[bytes], answer: Answer) -> None:
        """Counts an answer. Keeps it if it is bad."""
        self.statuses[answer.status] += 1
        if answer.is_bad:
            shown = ", ".join(message[:100].hex() for message in messages[:3])
            self._add(f"{handler.path}: {answer.status} after {answer.seconds:.1f} s: {answer.details}", shown)

    def add(self, other: Findings) -> None:
        """Adds other findings."""
        self.statuses += other.statuses
        for what, example in other.bad.items():
            self._add(what, example)

    def add_stack(self, lines: Sequence[str]) -> None:
        """Adds where the event loop did not go on."""
        self._add(f"the event loop was occupied for {HANGING_S:g} s at {' < '.join(lines)}", "")

    def _add(self, what: str, example: str) -> None:
        if len(self.bad) < _MAX_BAD:
            self.bad.setdefault(what, example)


@contextmanager
def watched(loop: asyncio.AbstractEventLoop, findings: Findings) -> Iterator[None]:
    """Notes the stack of the event loop's thread if the loop is occupied for longer than ``HANGING_S``."""
    ended = threading.Event()
    thread_id = asyncio.run_coroutine_threadsafe(_thread_id(), loop).result(10.0)

    def watch() -> None:
        while not ended.wait(HANGING_S / 5):
            answered = threading.Event()
            loop.call_soon_threadsafe(answered.set)
            if not answered.wait(HANGING_S):
                frame, lines = sys._current_frames().get(thread_id), []
                while frame is not None and len(lines) < 12:
                    lines.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
                    frame = frame.f_back
                findings.add_stack(lines)
                answered.wait(60.0)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


async def _thread_id() -> int:
    return threading.get_ident()


def _is_served(server: _Server) -> bool:
    return not server._done.done()


def _stop(server: _Server) -> None:
    with suppress(ShardwellError):  # an admitted caller may have made it leave the cluster
        server.stop()


@contextmanager
def fuzzed_cluster(folder: Path, *, shm: bool = True) -> Iterator[FuzzedCluster]:
    """Runs a cluster with a key in this process.

    Args:
        folder: An empty directory.
        shm: True: trainers of this host map the shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", "shm"):
        (folder / name).mkdir()
    secret = new_key()
    token_file = write_key(folder / "token", secret)
    credentials = read_key_file(token_file)
    assert credentials.key is not None
    handlers = Handlers(credentials.key)
    with ExitStack() as stack, handlers.captured():
        settings = Settings(min_servers=2, min_shard_bytes=4096)
        start = partial(coordinate, settings, folder / "state", keeps_state=True, credentials=credentials)
        coordinator = _Server(start)
        stack.callback(_stop, coordinator)
        address = coordinator.wait_ready()
        handlers.note_server(partial(_is_served, coordinator))
        for number in range(2):
            memory = ["--memory-budget", "256MiB", "--shm-dir", str(folder / "shm") if shm else "none"]
            options = [
                "--coordinator",
                address,
                "--id",
                f"shard-{number}",
                "--token-file",
                token_file,
                "--checkpoint-root",
                "any",
                "--drain-s",
                "0",
            ]
            server = _Server(partial(serve, build_parser("shard").parse_args(["shard", *options, *memory])))
            stack.callback(_stop, server)
            server.wait_ready()
            handlers.note_server(partial(_is_served, server))
        yield FuzzedCluster(address, token_file, credentials.key, handlers, coordinator._loop)


def train(cluster: FuzzedCluster, run: str, *, steps: int = STEPS, pause_s: float = 0.0) -> str:
    """Trains a small model; returns a hash of its weights."""
    with shardwell.join(cluster.address, run=run, trainer="tester", token_file=cluster.token_file) as session:
        model = build_model()
        shardwell.fully_shard(model[0], session, name="first")
        shardwell.fully_shard(model, session, name="rest")
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
        for step in session.steps(steps):
            torch.manual_seed(step.number)
            model(torch.randn(3, 17)).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause_s)
        return sha256(shardwell.full_state_dict(model))


def record(cluster: FuzzedCluster, folder: Path) -> None:
    """Records the requests of short trainings over every transport, with backups and a checkpoint."""
    for transport in ("shm", "socket", "grpc"):
        run = f"{RECORDED}-{transport}"
        options = join_options(
            backups=1,
            checkpoint_dir=str(folder / run),
            transports=f"{transport},grpc",
            token_file=cluster.token_file,
        )
        with small_run(cluster.address, run, steps=STEPS, **options) as session:
            session.save_checkpoint(wait=True)
    with shardwell.attach(cluster.address, run, token_file=cluster.token_file) as reader, reader.pin() as pinned:
        assert sum(1 for _ in pinned.values())
    cluster.values = cluster.handlers.values()
