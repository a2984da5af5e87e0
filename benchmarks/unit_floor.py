"""The floor of ``benchmarks.unit_cost``: the same bytes with the same number of wake-ups, and nothing else.

Trainers, two kinds of servers and the order of a step are those of Shardwell. The processes send fixed structs over
loopback, and numpy adds and updates. There are no leases, retries, checks or records, so a process that ends stops the
others. The difference between Shardwell and the floor is what exactness and features cost; the floor itself is what the
machine needs for any parameter service in Python.

``python -m benchmarks.unit_floor ROLE SPEC`` runs one process. A server answers the first command with its port. The
processes that connect to it get the port in their specification.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks import workers
from benchmarks.unit_cost_trainer import BATCH_SIZE, LEARNING_RATE, UnitSpec, answer_steps
from benchmarks.workers import Group, Worker

UNITS_PER_MESSAGE = 32
_HEADER = struct.Struct("<III")
"""Kind, first number, second number."""
_SHARED_MEMORY = Path("/dev/shm")


class Kind(IntEnum):
    """Kinds of messages."""

    ANSWER = 0
    FETCH = 1
    """First unit of the server and number of units. The answer is their values."""
    PUSH = 2
    """First unit of the server and number of units; over a socket, the gradients follow."""
    AWAIT = 3
    """Version that is awaited."""
    FINISH = 4
    PREPARE = 5
    UPDATE = 6


@dataclass(frozen=True, kw_only=True)
class FloorSpec:
    """The task of one process."""

    model: UnitSpec
    servers: int
    rank: int = 0
    """Rank of a trainer, or number of a server."""
    folder: str = ""
    """Folder of the shared memory."""
    shared: bool = True
    """True: weights are read in place, and gradients are left in shared memory."""
    server_ports: Sequence[int] = ()
    coordinator_port: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FloorSpec:
        values = json.loads(text)
        return cls(**{**values, "model": UnitSpec(**values["model"])})

    @property
    def unit_size(self) -> int:
        """Number of elements of a unit: a weight and a bias."""
        return self.model.width * (self.model.width + 1)

    def units_of(self, server: int) -> int:
        """Returns the number of units of a server. Units are dealt in turn."""
        return len(range(server, self.model.units, self.servers))

    def memory(self, name: str, server: int) -> npt.NDArray[np.float32]:
        """Maps a file of shared memory with the units of a server. [units_of(server), unit_size]"""
        shape = self.units_of(server), self.unit_size
        path = Path(self.folder, f"{name}-{server}")
        with path.open("a+b") as file:
            os.ftruncate(file.fileno(), 4 * shape[0] * shape[1])
            mapped = mmap.mmap(file.fileno(), 4 * shape[0] * shape[1])
        return np.frombuffer(mapped, np.float32).reshape(shape)


# ---- messages ----


def _send(connection: socket.socket, kind: Kind, first: int = 0, second: int = 0, *body: memoryview) -> None:
    pieces = [memoryview(_HEADER.pack(kind, first, second)), *body]
    while pieces:
        sent = connection.sendmsg(pieces)
        while pieces and sent >= pieces[0].nbytes:
            sent -= pieces.pop(0).nbytes
        if sent:
            pieces[0] = pieces[0][sent:]


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    while buffer.nbytes:
        received = connection.recv_into(buffer, 0, socket.MSG_WAITALL)
        if not received:
            raise ConnectionError("the peer has ended")
        buffer = buffer[received:]


def _receive(connection: socket.socket) -> tuple[Kind, int, int]:
    header = bytearray(_HEADER.size)
    _receive_into(connection, memoryview(header))
    kind, first, second = _HEADER.unpack(header)
    return Kind(kind), first, second


def _bytes(array: npt.NDArray[np.float32]) -> memoryview:
    return array.data.cast("B")


class _Listener:
    """Serves connections one message at a time. ``serve`` ends with the process."""

    def __init__(self, on_message: Callable[[socket.socket], None]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._on_message = on_message

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._listening:
                        connection, _ = self._listening.accept()
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        selector.register(connection, selectors.EVENT_READ, connection)
                        continue
                    try:
                        self._on_message(key.data)
                    except ConnectionError:
                        selector.unregister(key.data)
                        key.data.close()


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


# ---- processes ----


class Server:
    """Adds the gradients of all ranks, and updates when the coordinator says so."""

    def __init__(self, spec: FloorSpec) -> None:
        self._dp = spec.model.dp
        self._shared = spec.shared
        self._weights = spec.memory("weights", spec.rank)
        for row, layer in zip(self._weights, list(spec.model.make_model())[spec.rank :: spec.servers], strict=True):
            row[:] = nn.utils.parameters_to_vector(layer.parameters()).detach().numpy()
        ranks = range(self._dp)
        if spec.shared:
            self._gradients = [spec.memory(f"gradients-{rank}", spec.rank) for rank in ranks]
        else:
            self._gradients = [np.empty_like(self._weights) for _ in ranks]
        self._means = np.empty_like(self._weights)
        self._pushed = [0] * len(self._weights)
        self._ranks: dict[socket.socket, int] = {}
        self._version = 0
        self._waiting: list[tuple[socket.socket, Kind, int, int]] = []
        self.listener = _Listener(self._on_message)

    def _on_message(self, connection: socket.socket) -> None:
        kind, first, second = _receive(connection)
        if kind is Kind.PUSH:
            self._push(connection, first, second)
        elif kind is Kind.PREPARE:
            squares = float(sum(np.dot(mean, mean) for mean in self._means))
            _send(connection, Kind.ANSWER, int(squares) & 1)
        elif kind is Kind.UPDATE:
            self._update(first)
        else:
            self._waiting.append((connection, kind, first, second))
            self._answer_waiting()

    def _push(self, connection: socket.socket, first: int, count: int) -> None:
        rank = self._ranks.setdefault(connection, len(self._ranks) % self._dp)
        if not self._shared:
            _receive_into(connection, _bytes(self._gradients[rank][first : first + count]))
        for unit in range(first, first + count):
            self._pushed[unit] += 1
            if self._pushed[unit] == self._dp:
                mean = self._means[unit]
                mean[:] = self._gradients[0][unit]
                for gradients in self._gradients[1:]:
                    mean += gradients[unit]
                mean /= self._dp
        _send(connection, Kind.ANSWER)

    def _update(self, version: int) -> None:
        for unit, mean in enumerate(reversed(self._means)):  # gradients are in the order of the backward
            self._weights[unit] -= LEARNING_RATE * mean
        self._pushed = [0] * len(self._pushed)
        self._version = version
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection, kind, first, second in waiting:
            version = first if kind is Kind.AWAIT else second >> 16
            if version > self._version:
                self._waiting.append((connection, kind, first, second))
            elif kind is Kind.AWAIT:
                _send(connection, Kind.ANSWER)
            else:
                count = second & 0xFFFF
                _send(connection, Kind.ANSWER, first, count, _bytes(self._weights[first : first + count]))


class Coordinator:
    """Commits a step when all trainers have finished: prepare, a durable record, answers, update."""

    def __init__(self, spec: FloorSpec) -> None:
        self._dp = spec.model.dp
        self._servers = [_connect(port) for port in spec.server_ports]
        self._finished: list[socket.socket] = []
        self._version = 0
        self._records = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open until the process ends)
        self.listener = _Listener(self._on_message)

    def _on_message(self, connection: socket.socket) -> None:
        _receive(connection)
        self._finished.append(connection)
        if len(self._finished) < self._dp:
            return
        for server in self._servers:
            _send(server, Kind.PREPARE)
        for server in self._servers:
            _receive(server)
        self._records.write(bytes(256))
        os.fdatasync(self._records.fileno())
        self._version += 1
        for trainer in self._finished:
            _send(trainer, Kind.ANSWER)
        for server in self._servers:
            _send(server, Kind.UPDATE, self._version)
        self._finished = []


class Trainer:
    """Trains the model of the benchmark. Hooks copy each gradient to the place where it is sent from."""

    def __init__(self, spec: FloorSpec) -> None:
        self._spec = spec
        self._model = spec.model.make_model()
        self._servers = [_connect(port) for port in spec.server_ports]
        self._coordinator = _connect(spec.coordinator_port)
        name = "weights" if spec.shared else f"private-{spec.rank}"
        self._weights = [spec.memory(name, server) for server in range(spec.servers)]
        self._gradients = [spec.memory(f"gradients-{spec.rank}", server) for server in range(spec.servers)]
        self._ready = [[0, 0] for _ in range(spec.servers)]
        """By server: number of units whose gradients are complete, and number of units that have been pushed."""
        self._unanswered = [0] * spec.servers
        for unit, layer in enumerate(self._model):
            assert isinstance(layer, nn.Linear)
            self._attach(unit, layer)

    def _attach(self, unit: int, layer: nn.Linear) -> None:
        server, row = unit % self._spec.servers, unit // self._spec.servers
        weights = torch.from_numpy(self._weights[server][row])
        # The backward runs from the last unit to the first, so gradients are stored in reverse order.
        gradients = torch.from_numpy(self._gradients[server][self._spec.units_of(server) - 1 - row])
        missing = [2]
        split = layer.weight.numel()
        for parameter, part in ((layer.weight, slice(0, split)), (layer.bias, slice(split, None))):
            parameter.data = weights[part].view_as(parameter)
            target = gradients[part].view_as(parameter)

            def copy(parameter: torch.Tensor, target: torch.Tensor = target) -> None:
                assert parameter.grad is not None
                target.copy_(parameter.grad)
                parameter.grad = None
                missing[0] -= 1
                if not missing[0]:
                    missing[0] = 2
                    self._complete(server)

            parameter.register_post_accumulate_grad_hook(copy)

    def _complete(self, server: int) -> None:
        ready = self._ready[server]
        ready[0] += 1
        if ready[0] - ready[1] == UNITS_PER_MESSAGE or ready[0] == self._spec.units_of(server):
            first, count = ready[1], ready[0] - ready[1]
            body = [] if self._spec.shared else [_bytes(self._gradients[server][first : first + count])]
            _send(self._servers[server], Kind.PUSH, first, count, *body)
            self._unanswered[server] += 1
            ready[1] = ready[0]

    def steps(self) -> Iterator[torch.Tensor]:
        """Trains. Each item is the loss of a step."""
        batch = torch.ones(BATCH_SIZE, self._spec.model.width)
        version = 0
        while True:
            self._fetch(version)
            loss = self._model(batch).square().mean()
            if not self._spec.shared:
                self._fetch(version)  # a unit is freed after the forward and fetched again for the backward
            loss.backward()
            for server, connection in enumerate(self._servers):
                for _ in range(self._unanswered[server]):
                    _receive(connection)
                self._unanswered[server] = 0
                self._ready[server] = [0, 0]
            _send(self._coordinator, Kind.FINISH)
            _receive(self._coordinator)
            version += 1
            yield loss.detach()

    def _fetch(self, version: int) -> None:
        if self._spec.shared:
            for connection in self._servers:
                _send(connection, Kind.AWAIT, version)
            for connection in self._servers:
                _receive(connection)
            return
        for server, connection in enumerate(self._servers):
            for first in range(0, self._spec.units_of(server), UNITS_PER_MESSAGE):
                count = min(UNITS_PER_MESSAGE, self._spec.units_of(server) - first)
                _send(connection, Kind.FETCH, first, version << 16 | count)
        for server, connection in enumerate(self._servers):
            for first in range(0, self._spec.units_of(server), UNITS_PER_MESSAGE):
                count = min(UNITS_PER_MESSAGE, self._spec.units_of(server) - first)
                _receive(connection)
                _receive_into(connection, _bytes(self._weights[server][first : first + count]))


# ---- groups ----

MODULE = "benchmarks.unit_floor"


@contextmanager
def start_floor(model: UnitSpec, *, servers: int, shared: bool) -> Iterator[Group]:
    """Starts the processes of the floor. The first server is the coordinator, as in a cluster."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unit-floor-", dir=_SHARED_MEMORY))
        spec = FloorSpec(model=model, servers=servers, folder=folder, shared=shared)

        def start(role: str, spec: FloorSpec) -> tuple[Worker, int]:
            group = stack.enter_context(workers.start_group(MODULE, [[role, spec.to_json()]]))
            return group.workers[0], group.run()[0]["port"]

        shards = [start("server", replace(spec, rank=number)) for number in range(servers)]
        spec = replace(spec, server_ports=[port for _, port in shards])
        coordinator, port = start("coordinator", spec)
        spec = replace(spec, coordinator_port=port)
        ranks = [["trainer", replace(spec, rank=rank).to_json()] for rank in range(model.dp)]
        pids = [coordinator.pid, *(worker.pid for worker, _ in shards)]
        yield stack.enter_context(workers.start_group(MODULE, ranks, server_pids=pids))


def main() -> None:
    role, spec = sys.argv[1], FloorSpec.from_json(sys.argv[2])
    torch.set_num_threads(1)
    if role == "trainer":
        workers.serve(answer_steps(Trainer(spec).steps()))
        return
    listener = (Server(spec) if role == "server" else Coordinator(spec)).listener
    threading.Thread(target=listener.serve, daemon=True).start()
    workers.serve(lambda _: {"port": listener.port})


if __name__ == "__main__":
    main()
