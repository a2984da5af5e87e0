"""Tests of background gathers and pushes: ranges, order, limits in flight, errors and interrupts."""

from __future__ import annotations

import gc
import inspect
import itertools
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest
import torch

from shardwell.data_plane.error_feedback import EncodedGradients
from shardwell.data_plane.fetch import Fetches
from shardwell.data_plane.push import Pushes
from shardwell.data_plane.shard import RemoteShard, RemoteUnit, Wire
from shardwell.data_plane.transfers import TrafficStats, TransferQueue
from shardwell.transport.base import Place, PreparedPush
from shardwell_wire.encoding.streams import InParameters, StreamPlan
from shardwell_wire.errors import CapacityError, UnavailableError
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import shard_pb2
from shardwell_wire.v1.common_pb2 import WIRE_DTYPE_INT8
from tests.support.processes import ROOT
from tests.support.transports import FakeStream, StreamedServer, part_header

LAYOUT = UnitLayout("u", (Parameter("a", (3000,), "float32"), Parameter("b", (7,), "float32")))
CUT = 8192


class FakeServer(FakeStream):
    """A transport that records pushes. A gate can hold transfers back, and an error can be raised instead."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes: list[tuple[shard_pb2.ReduceScatterHeader, bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        """Released by every push that starts."""
        self.error: Exception | None = None

    def fetch_stream(self, request: Any, place: Place, **_: float) -> int:
        assert self.gate.wait(10)
        if self.error:
            raise self.error
        target = place(request.version, None)
        target[:] = bytes([request.start_bytes % 251]) * len(target)
        return int(request.version)

    def push_stream(self, header: Any, pieces: Sequence[memoryview], **_: float) -> None:
        self.started.release()
        assert self.gate.wait(10)
        if self.error:
            raise self.error
        self.pushes.append((header, b"".join(pieces)))


@pytest.fixture
def client() -> FakeServer:
    return FakeServer()


def unit_on(client: FakeServer) -> RemoteUnit:
    server: Any = StreamedServer(client)
    wire, cuts = Wire(wait_limit_s=5), ((0, CUT), (CUT, LAYOUT.size_bytes))
    return RemoteUnit(
        0,
        LAYOUT,
        tuple(RemoteShard(RunIdentity("r", "id-of-r"), LAYOUT, server, start, stop, wire) for start, stop in cuts),
    )


def gradients() -> list[tuple[int, torch.Tensor]]:
    return [(0, torch.arange(3000.0)), (1, torch.ones(7))]


def test_gather_fills_the_range_of_every_shard(client: FakeServer) -> None:
    fetches, target = Fetches(TrafficStats()), bytearray(LAYOUT.size_bytes)
    assert fetches.gather(unit_on(client), 4, memoryview(target)).result(5) == 4
    assert target == bytes([0]) * CUT + bytes([CUT % 251]) * (LAYOUT.size_bytes - CUT)
    assert fetches.stats.gathered_bytes == LAYOUT.size_bytes
    fetches.close()


def test_failed_gather_raises(client: FakeServer) -> None:
    fetches = Fetches(TrafficStats())
    client.error = CapacityError("no")
    future: Future[int] = fetches.gather(unit_on(client), 0, memoryview(bytearray(LAYOUT.size_bytes)))
    with pytest.raises(CapacityError):
        future.result(5)
    fetches.close()


def test_interrupted_gather_returns_after_its_last_write(client: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches, target, submit = (
        Fetches(TrafficStats(), max_batched_bytes=None),
        bytearray(LAYOUT.size_bytes),
        TransferQueue.submit,
    )

    def interrupted(queue: TransferQueue, size_bytes: int, work: Any, ended: Any) -> None:
        # Interrupts the submission of the second shard, when the first shard's transfer is in flight.
        if size_bytes != CUT:
            raise KeyboardInterrupt
        submit(queue, size_bytes, work, ended)

    def gather() -> None:
        with pytest.raises(KeyboardInterrupt):
            fetches.gather(unit_on(client), 4, memoryview(target))

    monkeypatch.setattr(TransferQueue, "submit", interrupted)
    client.gate.clear()
    gathering = threading.Thread(target=gather)
    gathering.start()
    gathering.join(0.2)
    assert gathering.is_alive(), "the first shard is being written to the target"
    client.gate.set()
    gathering.join(20)
    assert not gathering.is_alive()
    fetches.close()


def test_push_sends_its_range_to_each_server(client: FakeServer) -> None:
    pushes = Pushes(TrafficStats(), push_bytes=1 << 20)
    pushes.push(unit_on(client), part_header(part=0), gradients())
    pushes.drain()
    whole = torch.arange(3000.0).numpy().tobytes()
    ones = torch.ones(7).numpy().tobytes()
    sent = {header.start_bytes: data for header, data in client.pushes}
    assert sent == {0: whole[:CUT], CUT: whole[CUT:] + ones}
    assert all(list(header.parameter_indices) == [0, 1] for header, _ in client.pushes)
    pushes.close()


def encoded(give_back: Callable[[], None]) -> EncodedGradients:
    """Returns both gradients of the unit, encoded as int8."""
    plan = StreamPlan(LAYOUT, LAYOUT.segments(0, LAYOUT.size_bytes), WIRE_DTYPE_INT8)
    stream = memoryview(bytearray(plan.size_bytes))
    plan.encode(InParameters(dict(gradients())), stream)
    return EncodedGradients((0, 1), WIRE_DTYPE_INT8, stream, 3007 * 4, give_back)


def test_encoded_gradients_are_split_between_the_servers(client: FakeServer) -> None:
    pushes, given = Pushes(TrafficStats(), push_bytes=1 << 20), threading.Event()
    unit, pushed = unit_on(client), encoded(given.set)
    client.gate.clear()
    pushes.push_encoded(unit, part_header(part=0), pushed)
    assert not given.is_set(), "the gradients are still being read"
    client.gate.set()
    pushes.drain()
    assert given.is_set()
    sent = {header.start_bytes: data for header, data in client.pushes}
    assert sent[0] + sent[CUT] == bytes(pushed.stream)
    for start, stop in ((0, CUT), (CUT, LAYOUT.size_bytes)):
        alone = StreamPlan(LAYOUT, LAYOUT.segments(start, stop), WIRE_DTYPE_INT8)
        out = bytearray(alone.size_bytes)
        alone.encode(InParameters(dict(gradients())), out)
        assert sent[start] == out
    assert {(header.wire_dtype, *header.parameter_indices) for header, _ in client.pushes} == {(WIRE_DTYPE_INT8, 0, 1)}
    assert pushes.stats.pushed_bytes == 3007 * 4
    pushes.close()


def test_encoded_gradients_are_released_after_a_failed_push(client: FakeServer) -> None:
    pushes, given = Pushes(TrafficStats(), push_bytes=1 << 20), threading.Event()
    client.error = CapacityError("no room")
    pushes.push_encoded(unit_on(client), part_header(part=0), encoded(given.set))
    with pytest.raises(CapacityError, match="no room"):
        pushes.drain()
    assert given.is_set()
    pushes.close()


def test_parts_reach_each_server_in_order(client: FakeServer) -> None:
    pushes = Pushes(TrafficStats(), push_bytes=1 << 30)
    for part in range(20):
        pushes.push(unit_on(client), part_header(part=part), gradients())
    pushes.drain()
    for start in (0, CUT):
        assert [header.part for header, _ in client.pushes if header.start_bytes == start] == list(range(20))
    pushes.close()


def test_push_waits_while_the_byte_limit_is_exceeded(client: FakeServer) -> None:
    pushes = Pushes(TrafficStats(), push_bytes=20_000)
    client.gate.clear()
    pushes.push(unit_on(client), part_header(part=0), gradients())
    second = threading.Thread(target=pushes.push, args=(unit_on(client), part_header(part=1), gradients()))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "24 kB are over the limit of 20 kB while the first 12 kB are in flight"
    client.gate.set()
    second.join(5)
    assert not second.is_alive()
    pushes.drain()
    assert len(client.pushes) == 4
    pushes.close()


def test_drain_raises_a_failed_push_once(client: FakeServer) -> None:
    pushes = Pushes(TrafficStats(), push_bytes=1 << 20)
    client.error = CapacityError("no room")
    pushes.push(unit_on(client), part_header(part=0), gradients())
    with pytest.raises(CapacityError, match="no room"):
        pushes.drain()
    pushes.drain()
    pushes.close()


@pytest.mark.parametrize("started", [[], [0]])
def test_drain_does_not_wait_for_an_interrupted_push(
    client: FakeServer, monkeypatch: pytest.MonkeyPatch, started: list[int]
) -> None:
    prepare_push = RemoteShard.prepare_push

    def interrupt(shard: RemoteShard, **arguments: Any) -> Callable[..., None]:
        if shard.start_bytes not in started:
            raise KeyboardInterrupt
        return prepare_push(shard, **arguments)

    monkeypatch.setattr(RemoteShard, "prepare_push", interrupt)
    pushes = Pushes(TrafficStats(), push_bytes=1)
    with pytest.raises(KeyboardInterrupt):
        pushes.push(unit_on(client), part_header(part=0), gradients())
    drained = threading.Thread(target=pushes.drain, daemon=True)
    drained.start()
    drained.join(5)
    assert not drained.is_alive(), "drain waits for parts that were never started"
    assert [header.start_bytes for header, _ in client.pushes] == started
    pushes.close()


def test_gradient_that_is_streamed_because_memory_is_short_counts_as_in_flight(
    client: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushes, unit = Pushes(TrafficStats(), push_bytes=1), unit_on(client)
    server: Any = unit.shards[0].server
    server.copies_gradients = True

    def stream(push: PreparedPush) -> PreparedPush:
        server.copies_gradients = False
        return push

    monkeypatch.setattr(server, "prepare_push", stream)
    client.gate.clear()
    pushes.push(unit, part_header(part=0), gradients())
    assert not pushes._in_flight._has_room(1), "the next push waits"
    client.gate.set()
    pushes.drain()
    assert pushes._in_flight._has_room(1)
    pushes.close()


@pytest.mark.parametrize("error", [CapacityError("no room"), RuntimeError("unexpected")])
def test_discard_drops_the_error_of_a_failed_push(client: FakeServer, error: Exception) -> None:
    pushes = Pushes(TrafficStats(), push_bytes=1 << 20)
    client.error = error
    pushes.push(unit_on(client), part_header(part=0), gradients())
    pushes.discard()
    pushes.drain()
    pushes.close()


def test_join_waits_for_transfers_in_flight(client: FakeServer) -> None:
    pushes = Pushes(TrafficStats(), push_bytes=1 << 20, max_batched_bytes=None)
    client.gate.clear()
    pushes.push(unit_on(client), part_header(part=0), gradients())
    assert client.started.acquire(timeout=10)
    pushes.close()
    pushes.join(0.01)
    assert not client.pushes, "the push is in flight, and the limit has passed"
    client.gate.set()
    pushes.join(20)
    assert client.pushes


def ends(pushes: Pushes) -> bool:
    """Returns whether all pushes end."""
    waiter = threading.Thread(target=pushes._in_flight.wait, daemon=True)
    waiter.start()
    waiter.join(5)
    return not waiter.is_alive()


@pytest.mark.parametrize("max_batched_bytes", [None, 1 << 20])
def test_an_error_while_an_error_is_judged_ends_the_push(client: FakeServer, max_batched_bytes: int | None) -> None:
    """Otherwise ``drain`` waits for ever."""
    pushes = Pushes(TrafficStats(), push_bytes=1 << 20, max_batched_bytes=max_batched_bytes)
    client.error = CapacityError("no room")
    client.gate.clear()

    def excuse(_: BaseException) -> bool:
        raise RuntimeError("a defect")

    for part in range(3):
        pushes.push(unit_on(client), part_header(part=part), gradients(), excuse)
    client.gate.set()
    assert ends(pushes)
    with pytest.raises(CapacityError, match="no room"):
        pushes.drain()
    pushes.close()


@pytest.mark.parametrize("max_batched_bytes", [None, 1 << 20])
def test_an_error_at_the_end_of_a_push_does_not_stop_other_pushes(
    client: FakeServer, max_batched_bytes: int | None
) -> None:
    pushes = Pushes(TrafficStats(), push_bytes=1 << 20, max_batched_bytes=max_batched_bytes)
    unit, ended = unit_on(client), threading.Event()
    client.gate.clear()

    def release() -> None:
        raise RuntimeError("a defect")

    pushes.push_encoded(unit, part_header(part=0), encoded(release))
    pushes.push_encoded(unit, part_header(part=1), encoded(ended.set))
    client.gate.set()
    assert ends(pushes)
    assert ended.is_set()
    with pytest.raises(RuntimeError, match="a defect"):
        pushes.drain()
    pushes.push(unit, part_header(part=2), gradients())
    pushes.drain()
    pushes.close()


@pytest.mark.parametrize("max_batched_bytes", [None, 1 << 20])
def test_an_error_of_an_alternative_ends_the_gather(client: FakeServer, max_batched_bytes: int | None) -> None:
    fetches = Fetches(TrafficStats(), max_batched_bytes=max_batched_bytes)
    client.error = CapacityError("no")

    def alternative(_: BaseException) -> Future[int] | None:
        raise RuntimeError("a defect")

    target = memoryview(bytearray(LAYOUT.size_bytes))
    for _ in range(3):
        gather = fetches.gather(unit_on(client), 0, target, alternative=alternative)
        with pytest.raises(RuntimeError, match="a defect"):
            gather.result(5)
    fetches.close()


WAITING = """
import atexit, threading
from tests.unit.data_plane.test_transfers import LAYOUT, FakeServer, gradients, part_header, unit_on
from shardwell.data_plane.fetch import Fetches
from shardwell.data_plane.push import Pushes
from shardwell.data_plane.transfers import TrafficStats

started = threading.Semaphore(0)

class SilentServer(FakeServer):
    def fetch_stream(self, *_, **__):
        started.release()
        threading.Event().wait()

    push_stream = fetch_stream

fetches = Fetches(TrafficStats(), max_batched_bytes=None)
pushes = Pushes(TrafficStats(), push_bytes=1 << 20, max_batched_bytes=None)
unit = unit_on(SilentServer())
atexit.register(print, "closed at exit")
fetches.gather(unit, 0, memoryview(bytearray(LAYOUT.size_bytes)))
pushes.push(unit, part_header(part=0), gradients())
for _ in range(2 * len(unit.shards)):
    started.acquire()
raise KeyboardInterrupt
"""


def test_interrupted_process_exits_without_waiting_for_servers() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WAITING], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "closed at exit\n" and "KeyboardInterrupt" in ended.stderr


def test_drain_returns_after_an_interrupt_at_any_line_of_a_push(client: FakeServer) -> None:
    """Each round interrupts one line later, in functions of the data plane or of ``threading``."""

    def push_after(line_count: int) -> bool:
        """Pushes, and sends SIGINT before the given line. Returns False if the push has fewer lines."""
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            # Lines of generators do not count.
            lines += event == "line" and not frame.f_code.co_flags & inspect.CO_GENERATOR
            if lines == line_count:
                lines += 1
                signal.raise_signal(signal.SIGINT)
            return trace

        sys.settrace(trace)
        try:
            pushes.push(unit, part_header(part=0), gradients())
            pushes.drain()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return lines > line_count

    before = sys.gettrace()
    pushes, unit = Pushes(TrafficStats(), push_bytes=1), unit_on(client)
    gc.disable()  # the collector runs callbacks of `threading` at any line and swallows their interrupts
    try:
        for line_count in itertools.count(1):
            was_interrupted = push_after(line_count)
            drained = threading.Thread(target=pushes.drain, daemon=True)
            drained.start()
            drained.join(10)
            assert not drained.is_alive(), f"drain waits for a push that was interrupted at line {line_count}"
            if not was_interrupted:
                break
    finally:
        gc.enable()
        sys.settrace(before)
    assert line_count > 100
    pushes.close()


def test_pushes_that_start_while_another_thread_waits_are_sent(
    client: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwell.data_plane.batches._MAX_AGE_S", 1e9)
    pushes, unit = Pushes(TrafficStats(), push_bytes=1 << 20), unit_on(client)
    flats = dict(gradients())
    release = pushes.hold(100)
    drained = threading.Thread(target=pushes.drain, daemon=True)
    drained.start()
    drained.join(0.1)
    assert drained.is_alive(), "a push is held"
    pushes.push_held(unit, part_header(part=0), flats, lambda _: False, release)
    drained.join(10)
    assert not drained.is_alive()
    assert len(client.pushes) == 2
    pushes.close()


@pytest.mark.parametrize("max_batched_bytes", [None, 64 << 10])
def test_a_push_to_another_server_after_close_fails(client: FakeServer, max_batched_bytes: int | None) -> None:
    pushes = Pushes(TrafficStats(), push_bytes=1 << 20, max_batched_bytes=max_batched_bytes)
    pushes.push(unit_on(client), part_header(part=0), gradients())
    pushes.drain()
    pushes.close()
    with pytest.raises(UnavailableError, match="closed"):
        pushes.push(unit_on(FakeServer()), part_header(part=0), gradients())
    pushes.drain()


def test_a_push_that_has_ended_keeps_no_gradient(client: FakeServer) -> None:
    pushes, gradient = Pushes(TrafficStats(), push_bytes=1 << 20), torch.arange(3000.0)
    ended = weakref.ref(gradient)
    pushes.push(unit_on(client), part_header(part=0), [(0, gradient)])
    pushes._in_flight.wait()  # `drain` also forgets the parts
    del gradient
    assert len(client.pushes) == 2 and ended() is None
    pushes.close()


def test_small_parts_of_several_units_share_a_message(client: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwell.data_plane.batches._MAX_AGE_S", 1e9)
    sizes: list[int] = []
    push_batch = StreamedServer.push_batch

    def counted(server: StreamedServer, prepared: Sequence[Any], *, wait_limit_s: float) -> list[bool]:
        sizes.append(len(prepared))
        return push_batch(server, prepared, wait_limit_s=wait_limit_s)

    monkeypatch.setattr(StreamedServer, "push_batch", counted)
    pushes, unit = Pushes(TrafficStats(), push_bytes=1 << 20), unit_on(client)
    for part in range(4):
        pushes.push(unit, part_header(part=part), gradients())
    assert not client.pushes
    pushes.drain()
    assert sizes == [8]
    for start in (0, CUT):
        assert [header.part for header, _ in client.pushes if header.start_bytes == start] == list(range(4))
    pushes.close()


def test_small_shards_that_are_requested_together_are_fetched_in_one_message(
    client: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    fetch_batch = StreamedServer.fetch_batch

    def counted(server: StreamedServer, fetches: Sequence[Any], arrived: Any, *, wait_limit_s: float) -> None:
        sizes.append(len(fetches))
        fetch_batch(server, fetches, arrived, wait_limit_s=wait_limit_s)

    monkeypatch.setattr(StreamedServer, "fetch_batch", counted)
    fetches, unit = Fetches(TrafficStats()), unit_on(client)
    with fetches.together():
        gathers = [fetches.gather(unit, 4, memoryview(bytearray(LAYOUT.size_bytes))) for _ in range(5)]
        assert not any(gather.done() for gather in gathers)
    assert [gather.result(5) for gather in gathers] == [4] * 5
    assert sizes == [5 * len(unit.shards)]
    assert fetches.gather(unit, 4, memoryview(bytearray(LAYOUT.size_bytes))).result(5) == 4
    fetches.close()


def test_small_shards_of_several_units_are_fetched_in_one_message(
    client: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    fetch_batch = StreamedServer.fetch_batch

    def counted(server: StreamedServer, fetches: Sequence[Any], arrived: Any, *, wait_limit_s: float) -> None:
        sizes.append(len(fetches))
        fetch_batch(server, fetches, arrived, wait_limit_s=wait_limit_s)

    monkeypatch.setattr(StreamedServer, "fetch_batch", counted)
    fetches, unit = Fetches(TrafficStats()), unit_on(client)
    client.gate.clear()
    targets = [bytearray(LAYOUT.size_bytes) for _ in range(8)]
    gathers = [fetches.gather(unit, 4, memoryview(target)) for target in targets]
    client.gate.set()
    assert [gather.result(5) for gather in gathers] == [4] * 8
    expected = bytes([0]) * CUT + bytes([CUT % 251]) * (LAYOUT.size_bytes - CUT)
    assert all(target == expected for target in targets)
    assert max(sizes) >= 7, "two messages are in flight, and the other fetches wait for the next"
    fetches.close()
