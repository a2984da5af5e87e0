"""A worker that gathers a layer and pushes a gradient: ``python -m benchmarks.transfers SPEC``.

The worker answers ``{"repeats": n}`` with the seconds of n rounds. A round gathers the layer (``gather``), reads all of
it once (``read``) and pushes a gradient of its size (``push``). ``in_place`` is true if the gather moved no bytes,
because the layer is read from the server's memory. The worker compares received with sent data outside the timed parts,
and ends at a difference.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash
from torch import Tensor, distributed, nn

import shardwell
from benchmarks import workers
from shardwell_wire.connection import socket_frames
from shardwell_wire.encoding.chunk_streams import memory_at

_RUN = "transfers"
_FLIGHT_BATCH_BYTES = 4 << 20
_CHECKED_BYTES = socket_frames.DATA_BYTES
"""Bytes per call of the checksum, as in the socket transport."""


class WrongBytesError(Exception):
    """Raised when received data differs from the sent data."""


@dataclass(frozen=True, kw_only=True)
class TransferSpec:
    """The task of one worker."""

    kind: str
    """``memcpy``, ``checksum``, ``tcp``, ``checked_tcp``, ``gloo``, ``flight`` or ``shardwell``."""
    size_bytes: int
    """Size of the layer, a multiple of 8."""
    num_trainers: int = 1
    dp_rank: int = 0
    address: str = ""
    """Address of the coordinator; for gloo, the ``init_method`` of ``torch.distributed``."""
    transport: str = ""
    """Transport of Shardwell: ``shm``, ``socket`` or ``grpc``."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


# ---- the data ----


def make_layer(size_bytes: int) -> Tensor:
    """Returns small integers, so that sums are exact. Their pattern reveals misplaced chunks. [numel]"""
    return torch.arange(size_bytes // 4).remainder_(997).float()


def make_gradient(size_bytes: int) -> Tensor:
    """Returns a gradient of small integers. [numel]"""
    return torch.arange(size_bytes // 4).remainder_(31).add_(1).float()


def view_of(tensor: Tensor) -> memoryview:
    """Returns a view of a contiguous tensor's memory. The view does not keep the memory alive."""
    return memory_at(tensor.data_ptr(), tensor.nbytes, tensor)


def digest(tensor: Tensor) -> int:
    """Reads all of a contiguous tensor and returns its hash."""
    return xxhash.xxh3_64_intdigest(view_of(tensor))


def require_equal(actual: int, expected: int, what: str) -> None:
    """Compares two digests.

    Raises:
        WrongBytesError: The digests differ.
    """
    if actual != expected:
        raise WrongBytesError(f"{what}: digest {actual:016x}, expected {expected:016x}")


def timed(work: Callable[[], Any]) -> float:
    """Runs ``work`` and returns its duration in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


Rounds = Iterator[dict[str, float]]
"""An iterator that runs one round per item and yields the seconds of each part."""


# ---- baselines ----


def memcpy(spec: TransferSpec) -> Rounds:
    """Copies into mapped memory, the upper bound for transfers that copy."""
    layer, gradient = make_layer(spec.size_bytes), make_gradient(spec.size_bytes)
    here, there, expected = torch.ones_like(layer), torch.ones_like(gradient), digest(layer)
    while True:
        gather = timed(lambda: here.copy_(layer))
        read = timed(lambda: require_equal(digest(here), expected, "memcpy"))
        yield {"gather": gather, "read": read, "push": timed(lambda: there.copy_(gradient))}


def checksum(spec: TransferSpec) -> Rounds:
    """Moves nothing: computes one end's checksum over all bytes, in the pieces of the socket transport."""
    layer, gradient = make_layer(spec.size_bytes), make_gradient(spec.size_bytes)
    expected = digest(layer)
    while True:
        gather = timed(lambda: require_equal(_checksum(view_of(layer)), expected, "checksum by pieces"))
        read = timed(lambda: require_equal(digest(layer), expected, "checksum"))
        yield {"gather": gather, "read": read, "push": timed(lambda: _checksum(view_of(gradient)))}


def _checksum(view: memoryview) -> int:
    hasher = xxhash.xxh3_64()
    for start in range(0, len(view), _CHECKED_BYTES):
        hasher.update(view[start : start + _CHECKED_BYTES])
    return hasher.intdigest()


def tcp(spec: TransferSpec, *, checked: bool = False) -> Rounds:
    """Uses one connection over the loopback interface and receives into mapped memory.

    Args:
        spec: The task.
        checked: Both ends compute a checksum in the pieces of the socket transport. The checksum follows the bytes.
    """
    here, gradient = torch.ones(spec.size_bytes // 4), make_gradient(spec.size_bytes)
    expected = digest(make_layer(spec.size_bytes))
    port = _start_server(partial(serve_tcp, checked=checked), spec.size_bytes)
    send, receive = (_send_checked, _receive_checked) if checked else (_send, _receive)
    with socket.create_connection(("127.0.0.1", port)) as connection:

        def gather() -> None:
            connection.sendall(b"g")
            receive(connection, view_of(here))

        def push() -> None:
            connection.sendall(b"p")
            send(connection, view_of(gradient))
            acknowledgement = bytearray(1)
            _receive(connection, memoryview(acknowledgement))

        while True:
            gather_s = timed(gather)
            read_s = timed(lambda: require_equal(digest(here), expected, "TCP gather"))
            yield {"gather": gather_s, "read": read_s, "push": timed(push)}


def serve_tcp(size_bytes: int, ready: Connection, *, checked: bool) -> None:
    """Runs the other end, which sends the layer and receives gradients."""
    layer, received = make_layer(size_bytes), torch.ones(size_bytes // 4)
    expected = digest(make_gradient(size_bytes))
    send, receive = (_send_checked, _receive_checked) if checked else (_send, _receive)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            while command := connection.recv(1):
                if command == b"g":
                    send(connection, view_of(layer))
                    continue
                receive(connection, view_of(received))
                connection.sendall(b"k")
                require_equal(digest(received), expected, "TCP push")


def _send(connection: socket.socket, source: memoryview) -> None:
    connection.sendall(source)


def _send_checked(connection: socket.socket, source: memoryview) -> None:
    hasher = xxhash.xxh3_64()
    for start in range(0, len(source), _CHECKED_BYTES):
        piece = source[start : start + _CHECKED_BYTES]
        hasher.update(piece)
        connection.sendall(piece)
    connection.sendall(hasher.digest())


def _receive(connection: socket.socket, target: memoryview) -> None:
    for _ in _arriving(connection, target, len(target)):
        pass


def _receive_checked(connection: socket.socket, target: memoryview) -> None:
    hasher = xxhash.xxh3_64()
    for part in _arriving(connection, target, _CHECKED_BYTES):
        hasher.update(part)
    announced = bytearray(hasher.digest_size)
    _receive(connection, memoryview(announced))
    require_equal(hasher.intdigest(), int.from_bytes(announced, "big"), "checked TCP")


def _arriving(connection: socket.socket, target: memoryview, most_bytes: int) -> Iterator[memoryview]:
    """Fills ``target`` and yields each received part."""
    filled = 0
    while filled < len(target):
        count = connection.recv_into(target[filled : filled + most_bytes])
        if not count:
            raise ConnectionError(f"the other end closed the connection after {filled} of {len(target)} bytes")
        yield target[filled : filled + count]
        filled += count


def gloo(spec: TransferSpec) -> Rounds:
    """Runs all-gather and reduce-scatter of the layer. Each rank owns an equal part."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=spec.address, rank=spec.dp_rank, world_size=spec.num_trainers)
    layer, gradient = make_layer(spec.size_bytes), make_gradient(spec.size_bytes)
    own = layer.chunk(spec.num_trainers)[spec.dp_rank].clone()
    own_gradient = gradient.chunk(spec.num_trainers)[spec.dp_rank] * spec.num_trainers
    here, reduced, expected = torch.ones_like(layer), torch.ones_like(own), digest(layer)
    while True:
        gather = timed(lambda: distributed.all_gather_into_tensor(here, own))
        read = timed(lambda: require_equal(digest(here), expected, "gloo all-gather"))
        push = timed(lambda: distributed.reduce_scatter_tensor(reduced, gradient))
        require_equal(digest(reduced), digest(own_gradient), "gloo reduce-scatter")
        yield {"gather": gather, "read": read, "push": push}


def flight(spec: TransferSpec) -> Rounds:
    """Uses Arrow Flight's DoGet and DoPut. Received data stays in Arrow's batches and is not copied into one vector."""
    from pyarrow import flight as arrow_flight

    batches = _flight_batches(make_gradient(spec.size_bytes))
    expected = digest(make_layer(spec.size_bytes))
    client = arrow_flight.connect(("127.0.0.1", _start_server(serve_flight, spec.size_bytes)))
    descriptor = arrow_flight.FlightDescriptor.for_path("gradient")
    arrived: list[Any] = []

    def gather() -> None:
        arrived[:] = client.do_get(arrow_flight.Ticket(b"layer")).read_all().column(0).chunks

    def read() -> None:
        require_equal(_flight_digest(arrived), expected, "Flight DoGet")

    def push() -> None:
        writer, _ = client.do_put(descriptor, batches[0].schema)
        for batch in batches:
            writer.write_batch(batch)
        writer.close()

    while True:
        seconds = {"gather": timed(gather), "read": timed(read), "push": timed(push)}
        list(client.do_action("verify"))
        yield seconds


def serve_flight(size_bytes: int, ready: Connection) -> None:
    """Runs the other end, which sends the layer, receives gradients and compares the last one on request."""
    import pyarrow
    from pyarrow import flight as arrow_flight

    batches = _flight_batches(make_layer(size_bytes))
    expected = digest(make_gradient(size_bytes))

    class Server(arrow_flight.FlightServerBase):  # type: ignore[misc, unused-ignore]
        received: Any = None

        def do_get(self, context: Any, ticket: Any) -> Any:
            return arrow_flight.RecordBatchStream(pyarrow.RecordBatchReader.from_batches(batches[0].schema, batches))

        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            self.received = reader.read_all().column(0).chunks

        def do_action(self, context: Any, action: Any) -> list[bytes]:
            require_equal(_flight_digest(self.received), expected, "Flight DoPut")
            return []

    server = Server(("127.0.0.1", 0))
    ready.send(server.port)
    server.serve()


def _flight_batches(tensor: Tensor) -> list[Any]:
    import pyarrow

    arrays = (pyarrow.array(part.numpy()) for part in tensor.split(_FLIGHT_BATCH_BYTES // 4))
    return [pyarrow.RecordBatch.from_arrays([array], ["values"]) for array in arrays]


def _flight_digest(chunks: list[Any]) -> int:
    state = xxhash.xxh3_64()
    for chunk in chunks:
        state.update(chunk.to_numpy(zero_copy_only=True))
    return state.intdigest()


def _start_server(serve: Callable[[int, Connection], None], size_bytes: int) -> int:
    """Starts the other end as a process that ends with this one, and returns its port."""
    context = multiprocessing.get_context("spawn")
    ready, theirs = context.Pipe(duplex=False)
    context.Process(target=serve, args=(size_bytes, theirs), daemon=True).start()
    theirs.close()
    port: int = ready.recv()
    return port


# ---- Shardwell ----


class Layer(nn.Module):
    """A module with one parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        return self.weight


def shardwell_transport(spec: TransferSpec) -> Rounds:
    """Runs ``module.unshard()`` and pushes the gradient until every server has acknowledged it, as after a backward.

    Each round is a step of a run. SGD subtracts the gradient in even steps and adds it in odd steps, so the next
    round's weights show whether the gradient arrived. The commit and the update are not timed.
    """
    gradient = make_gradient(spec.size_bytes)
    layer = make_layer(spec.size_bytes)
    signed = (gradient, -gradient)
    expected = (digest(layer), digest(layer - gradient))
    world = shardwell.World(dp=spec.num_trainers)
    with shardwell.join(
        spec.address,
        run=_RUN,
        world=world,
        global_rank=spec.dp_rank,
        transfers=shardwell.TransferOptions(transports=spec.transport),
    ) as session:
        module = shardwell.fully_shard(Layer(layer), session)
        assert isinstance(module, shardwell.ShardedModule)
        del layer
        optimizer = shardwell.optim.SGD(module.parameters(), lr=1.0)
        unit = next(iter(session.units))

        def push(gradient: Tensor) -> None:
            session.store.gradients.push(unit.index, [(0, gradient)])
            session.store.gradients.drain()

        def take(odd: int) -> dict[str, float]:
            module.unshard()  # waits for the update of the previous step
            module.reshard()
            gather = timed(module.unshard)
            read = timed(lambda: require_equal(digest(module.weight), expected[odd], "Shardwell"))
            module.reshard()
            in_place = session.store.in_place(unit.index) is not None
            return {"gather": gather, "read": read, "push": timed(lambda: push(signed[odd])), "in_place": in_place}

        for step in session.steps(sys.maxsize):
            (seconds,) = [take(step.number % 2) for _ in step.batches(lambda step, dp_rank: None)]
            optimizer.step()
            yield seconds


# ---- the process ----

KINDS: Mapping[str, Callable[[TransferSpec], Rounds]] = {
    "memcpy": memcpy,
    "checksum": checksum,
    "tcp": tcp,
    "checked_tcp": partial(tcp, checked=True),
    "gloo": gloo,
    "flight": flight,
    "shardwell": shardwell_transport,
}


def main() -> None:
    torch.set_num_threads(1)
    spec = TransferSpec(**json.loads(sys.argv[1]))
    rounds = KINDS[spec.kind](spec)
    workers.serve(lambda command: {"rounds": [next(rounds) for _ in range(command["repeats"])]})


if __name__ == "__main__":
    main()
