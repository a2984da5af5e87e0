"""Readers and engines follow a run while everything is killed and connections are cut: each has one version.

``READER_KILLS=1000 pytest -s -m long tests/faults/test_readers_under_kills.py`` injects more faults.

The run is deterministic. Plain PyTorch repeats it afterwards, and every digest that a reader has written, and every
answer of an engine, is compared with those of the version that it names.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.command.cli import main as command
from shardwell.seeds import derive_seed
from shardwell.transport.service_client import Endpoint
from shardwell.weights import pinned_version
from shardwell.weights.digest import pinned_digest
from shardwell_wire.connection.channel import retry
from shardwell_wire.errors import DeadlineError, UnavailableError, VersionGoneError
from tests.support.cluster import wait_in_sync, wait_until
from tests.support.processes import TrainerProcess
from tests.support.reference import ADAMW, one_thread
from tests.support.tcp_proxy import TcpProxy, connect_through

FAULTS = int(os.environ.get("READER_KILLS", "30"))
KEPT, DP, WIDTH, BATCH = 8, 2, 300, 8
OPTIMIZER = ADAMW | {"lr": 1e-4}
"""So small that many 16-bit weights do not change in a step, and changes are sent instead of shards."""
PROMPTS = 16
RUN, PUBLISHED = "followed", "eval"
LARGEST_READ_BYTES = 8 * WIDTH * WIDTH
PASSING = (UnavailableError, VersionGoneError, DeadlineError)

State = dict[str, torch.Tensor]


class Model(nn.Module):
    """A model with statistics, large enough that a read takes some transfers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.enter(x)).tanh())


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def loss_of(model: Model, data: torch.Tensor) -> torch.Tensor:
    return (model(data[0]) - data[1]).square().mean()


def batch() -> torch.Tensor:
    """Inputs and targets, from the generator, which a trainer seeds for each item. [2, BATCH, WIDTH]"""
    return torch.randn(2, BATCH, WIDTH)


@cache
def prompt(number: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))


def answer(model: Model, number: int) -> str:
    """Returns the digest of a model's answer to a prompt."""
    model.eval()
    with torch.no_grad():
        return shardwell.weights_digest({"answer": model(prompt(number))})


def rounded(state: State) -> State:
    """Returns a state as a reader with ``gather_dtype="bfloat16"`` has it, which rounds no buffers."""
    parameters = dict(build().named_parameters())
    return {name: value.bfloat16().float() if name in parameters else value for name, value in state.items()}


def train(options: argparse.Namespace) -> None:
    with shardwell.join(
        options.address, run=RUN, world=shardwell.World(dp=DP), keep_versions=KEPT, backups=1
    ) as session:
        model = build()
        shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({nn.BatchNorm1d}))
        optimizer = shardwell.optim.AdamW(model.parameters(), **OPTIMIZER)
        for step in session.steps(10**9):
            for data in step.batches(lambda step, rank: batch()):
                loss_of(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()


def plain_versions(last: int) -> Iterator[Model]:
    """Yields plain models that have been trained 0, 1, ... ``last`` steps. The same object each time."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    for step in range(last + 1):
        yield model
        model.train()
        gradients, buffers = list[list[torch.Tensor]](), {name: each.clone() for name, each in model.named_buffers()}
        kept = State()
        for rank in range(DP):
            torch.manual_seed(derive_seed(0, step, rank))
            model.load_state_dict(buffers, strict=False)
            loss_of(model, batch()).backward()
            gradients.append([each.grad for each in model.parameters() if each.grad is not None])
            optimizer.zero_grad()
            kept = kept or {name: each.clone() for name, each in model.named_buffers()}
        model.load_state_dict(kept, strict=False)  # those of rank 0
        for parameter, first, second in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (first + second) / DP
        optimizer.step()
        optimizer.zero_grad()


def read(reader: shardwell.Reader, write: Callable[..., None]) -> None:
    """Reads new, published and older versions in turn."""
    for number in range(10**9):
        version = None
        try:
            version = (None, PUBLISHED, reader.version - 1)[number % 3]
            with reader.pin(version) as pinned:
                digest = pinned_digest(pinned)
            write("read", pinned.version, digest)
        except PASSING as error:
            if version == PUBLISHED and isinstance(error, VersionGoneError):
                raise  # it is promised


def patch(reader: shardwell.Reader, write: Callable[..., None]) -> None:
    """Brings tensors from version to version by changes, and reads them anew only when the older version is gone."""
    tensors, version = State(), -1
    while True:
        with suppress(*PASSING), reader.pin() as pinned:
            if version >= 0:
                try:
                    pinned.patch(tensors, since=version)
                    write("patch", pinned.version, shardwell.weights_digest(tensors))
                    version = pinned.version
                    continue
                except VersionGoneError:
                    version = -1
            found = dict(pinned.values())
            tensors, version = found, pinned.version
            write("read", version, shardwell.weights_digest(tensors))


def serve(reader: shardwell.Reader, write: Callable[..., None]) -> None:
    """Answers prompts with the version that the model has. The first read must succeed, whatever happens meanwhile."""
    model = Model()
    live = shardwell.engines.LiveModel(reader, model)
    with live.following(pause_s=0.05):
        for number in range(10**9):
            with live.use() as version:
                write("answer", version, answer(model, number % PROMPTS), number % PROMPTS)
                write("weights", version, shardwell.weights_digest(model.state_dict()))
            threading.Event().wait(0.02)


TASKS = {"read": read, "patch": patch, "serve": serve}


class Process(TrainerProcess):
    """A process of this module: a trainer, or one that writes what it has read as lines of a file."""

    module = "tests.faults.test_readers_under_kills"

    def stacks(self) -> str:
        """Returns what the process has written to standard error, with the stacks of its threads."""
        os.kill(self.pid, signal.SIGUSR1)
        threading.Event().wait(1.0)
        return self._errors.read_text()


def main() -> None:
    """Trains or follows a run until it is killed."""
    parser = argparse.ArgumentParser()
    for name in ("--address", "--run", "--task", "--file", "--proxy", "--transports", "--dtype"):
        parser.add_argument(name, default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    if options.task == "train":
        train(options)
        return
    if proxy := options.proxy:
        # gRPC reads these variables. The second one replaces `no_proxy`, which may name this host.
        os.environ |= {"grpc_proxy": f"http://{proxy}", "no_grpc_proxy": "none.invalid"}

        def connect(endpoint: Endpoint, port: int, timeout_s: float) -> Any:
            return connect_through(proxy, f"{endpoint.address.rpartition(':')[0]}:{port}", timeout_s)

        Endpoint.connect = connect  # type: ignore[method-assign]
    if options.transports:
        pinned_version.TRANSPORT_NAMES = tuple(options.transports.split(","))

    def attach() -> shardwell.Reader:
        dtype, name = options.dtype or "float32", Path(options.file).name
        return shardwell.attach(options.address, options.run, gather_dtype=dtype, name=name)

    # The coordinator may be starting again.
    with Path(options.file).open("a") as file, retry(attach, limit_s=60.0) as reader:

        def write(*fields: object) -> None:
            file.write(" ".join(map(str, (os.getpid(), *fields, "\n"))))
            file.flush()

        TASKS[options.task](reader, write)


class Lines:
    """The lines that processes write to a file while it grows. One that is killed may leave half a line.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.found, self._offset = path, list[list[str]](), 0
        path.touch()

    def read(self) -> list[list[str]]:
        """Returns all complete lines up to now: process id, kind, version, digest, and the prompt of an answer."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.decode().splitlines():
            fields = line.split(" ")
            if fields[-1] == "" and len(fields) in (5, 6) and len(fields[3]) == 64:
                self.found.append(fields[:-1])
        return self.found


class Attack:
    """A cluster with trainers, readers and engines, and the faults that it suffers.

    Args:
        folder: Folder for what readers and engines write.
        stack: Ends everything.
        kinds: Kinds of faults. A kind that is named twice is twice as frequent.
    """

    def __init__(self, folder: Path, stack: ExitStack, kinds: Collection[str]) -> None:
        self._rng, self._stack, self._kinds = random.Random(0), stack, tuple(kinds)
        self.faults, self.seconds, self.joins = Counter[str](), Counter[str](), 0
        cluster = shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096, log_dir=folder / "logs")
        self.cluster = stack.enter_context(cluster)
        self.proxy = stack.enter_context(TcpProxy())
        proxied = ("--proxy", self.proxy.address)
        self._commands: dict[str, tuple[object, ...]] = {
            "trainer-a": ("--task", "train"),
            "trainer-b": ("--task", "train"),
            "reader-a": ("--task", "read"),
            "reader-b": ("--task", "read", *proxied, "--transports", "socket,grpc"),
            "reader-c": ("--task", "patch", *proxied, "--transports", "socket,grpc", "--dtype", "bfloat16"),
            "engine-a": ("--task", "serve"),
            "engine-b": ("--task", "serve", *proxied, "--transports", "grpc"),
        }
        self.lines = {name: Lines(folder / name) for name in self._commands if "trainer" not in name}
        self._processes: dict[str, Process] = {}
        stack.callback(lambda: [each.__exit__() for each in self._processes.values()])
        for name in ("trainer-a", "trainer-b"):
            self._start(name)
        self.reader = self._attach()
        self.reader.wait_for(KEPT, 60.0)
        wait_in_sync(self.cluster.address, RUN)
        assert command(["publish", RUN, PUBLISHED, "--address", self.cluster.address]) == 0
        for name in self.lines:
            self._start(name)
        for name in self.lines:
            self._wait_lines(name)

    def _attach(self) -> shardwell.Reader:
        deadline = time.monotonic() + 60.0
        while True:  # the run begins when a trainer joins
            try:
                reader = shardwell.attach(self.cluster.address, RUN)
                return self._stack.enter_context(reader)
            except shardwell.ShardwellError:
                assert time.monotonic() < deadline
                self.check_alive()

    def _start(self, name: str) -> None:
        file = self.lines[name].path if name in self.lines else ""
        self._processes[name] = Process(self.cluster.address, RUN, *self._commands[name], "--file", file)

    def _wait_lines(self, name: str) -> None:
        """Waits until the process that has this name now has written something."""
        pid = str(self._processes[name].pid)

        def has_written() -> bool:
            self.check_alive()
            return any(line[0] == pid for line in self.lines[name].read()[-100:])

        wait_until(has_written, f"a line of {name}", timeout_s=90.0)
        self.joins += name.startswith("engine")

    def check_alive(self) -> None:
        """Asserts that nothing has ended by itself."""
        ended = {name: each.finish(1.0) for name, each in self._processes.items() if not each.process.is_alive()}
        assert not ended, "\n".join(f"{name} ended: {each['stderr']}" for name, each in ended.items())

    def inject(self) -> None:
        """Injects a fault at a random instant."""
        threading.Event().wait(self._rng.uniform(0.0, 0.3))
        self.check_alive()
        kind = self._rng.choice(self._kinds)
        self.faults[kind] += 1
        begun = time.monotonic()
        self._inject(kind)
        self.seconds[kind] += time.monotonic() - begun

    def _inject(self, kind: str) -> None:
        if kind == "server":
            self._rng.choice(self.cluster.shards).restart(time.monotonic() + 90.0)
        elif kind == "coordinator":
            self.cluster.restart_coordinator()
        elif kind == "cut":
            self.proxy.cut_after(int(LARGEST_READ_BYTES ** self._rng.random()))
            wait_until(lambda: not self.proxy.is_cutting, "a cut connection", timeout_s=90.0)
        else:
            name = self._rng.choice([each for each in self._commands if each.startswith(kind)])
            process = self._processes[name]
            process.process.kill()
            process.finish(30.0)
            process.__exit__()
            self._start(name)
            if kind == "engine":
                self._wait_lines(name)  # it joins, in whatever state the last faults have left the cluster

    def wait_recovered(self) -> None:
        """Waits until the run has gone on, and every reader and engine has read a version of afterwards."""
        newest = self.reader.version

        def has_committed() -> bool:
            self.check_alive()
            return self.reader.version >= newest + 2

        try:
            wait_until(has_committed, "commits after the last fault", timeout_s=90.0)
        except AssertionError:
            command(["stall", RUN, "--address", self.cluster.address])
            print("\n".join(f"{name}: {each.stacks()}" for name, each in self._processes.items()))
            raise

        def have_read() -> bool:
            self.check_alive()
            return all(any(int(line[2]) > newest for line in each.read()[-100:]) for each in self.lines.values())

        wait_until(have_read, "reads after the last fault", timeout_s=90.0)


@one_thread()
def wrong_lines(lines: Mapping[str, Lines]) -> list[list[str]]:
    """Returns the lines that plain PyTorch contradicts."""
    by_version, wrong = defaultdict[int, list[list[str]]](list), list[list[str]]()
    for name, each in lines.items():
        for line in each.read():
            by_version[int(line[2])].append([name, *line])
    for version, model in enumerate(plain_versions(max(by_version))):
        state, known = dict(model.state_dict()), dict[tuple[str, ...], str]()
        for line in by_version[version]:
            name, _, _, _, digest, *number = line
            key = (*number, "rounded" if name == "reader-c" else "exact")
            if key not in known:
                if number:
                    known[key] = answer(model, int(number[0]))
                else:
                    known[key] = shardwell.weights_digest(rounded(state) if key == ("rounded",) else state)
            if digest != known[key]:
                wrong.append(line)
    return wrong


def attack(folder: Path, faults: int, kinds: Collection[str]) -> None:
    """Injects faults, and compares everything that was read with the versions."""
    with ExitStack() as stack:
        attack = Attack(folder, stack, kinds)
        for number in range(faults):
            attack.inject()
            if number % 50 == 49:
                attack.wait_recovered()
                print(f"{number + 1} faults, version {attack.reader.version}", flush=True)
        attack.wait_recovered()
        version = attack.reader.version
    print({kind: f"{attack.seconds[kind] / count:.1f} s" for kind, count in attack.faults.items()})
    counts = Counter(line[1] for each in attack.lines.values() for line in each.read())
    versions = {line[2] for each in attack.lines.values() for line in each.read()}
    wrong = wrong_lines(attack.lines)
    by_kind = Counter(line[2] for line in wrong)
    print(
        f"faults: {dict(attack.faults)}, {version} commits; joins of engines: {attack.joins}; {dict(counts)} of "
        f"{len(versions)} versions; mixed: {by_kind.total() - by_kind['answer']}, wrong answers: {by_kind['answer']}"
    )
    assert not wrong, wrong[:20]
    assert set(counts) == {"read", "patch", "answer", "weights"}
    assert len({line[2] for line in attack.lines["reader-c"].read() if line[1] == "patch"}) > 1


@pytest.mark.timeout(600)
def test_engines_and_readers_behind_connections_that_are_cut_have_one_version(tmp_path: Path) -> None:
    attack(tmp_path, 6, ("cut", "cut", "engine"))


@pytest.mark.long
@pytest.mark.timeout(300 + 10 * FAULTS)
def test_everything_that_is_read_is_one_version_as_it_was_trained(tmp_path: Path) -> None:
    attack(
        tmp_path, FAULTS, ("server", "server", "coordinator", "trainer", "trainer", "reader", "engine", "cut", "cut")
    )
