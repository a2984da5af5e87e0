"""The contract of a transport, on a real shard server: every transport gives the same bits and errors.

The transports are those of the client's selector, so a new transport is tested without an edit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwell.data_plane.shard import RemoteShard, ShardFetch, Wire, fetch_together
from shardwell.transport.base import (
    NEARLY_DONE_BYTES,
    ByteCounter,
    PreparedPush,
    ShardAddress,
    ShardRead,
    SharedTransport,
    StreamTransport,
    Transport,
    ignore,
)
from shardwell.transport.grpc_transport import GrpcTransport
from shardwell.transport.server_connection import (
    SHARED_TRANSPORTS,
    STREAM_TRANSPORTS,
    TRANSPORT_NAMES,
    ConnectOptions,
    ServerConnection,
    TransportSelector,
)
from shardwell.transport.shared_vector import SegmentLocation, SharedVector
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import (
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.certificates import TestAuthority
from tests.support.shard_server import (
    BIG,
    MIXED,
    PLAIN,
    OneUnit,
    ShardServer,
    assert_all,
    error_of,
    in_background,
    layout_of,
    train,
    unit,
)
from tests.support.transports import Gradients, Target, address_of, part_header, unsent

EMPTY = layout_of(a=((0,), "float32"))
SESSIONS = (
    *(f"{shared} with {stream}" for shared in SHARED_TRANSPORTS for stream in STREAM_TRANSPORTS),
    *(stream for stream in STREAM_TRANSPORTS if stream != GrpcTransport.name),
)
"""Transports with a session that can end: all but gRPC. For a shared transport, the second name is the transport of its
control messages."""
ALL = (*SESSIONS, GrpcTransport.name)


class Opened:
    """One unit of a server, reached over one transport."""

    def __init__(self, one: OneUnit, name: str) -> None:
        self.one, self.server = one, one.server
        self._ends = ExitStack()
        connection: Any = SimpleNamespace(
            client=self.server.client,
            run=one.identity,
            counter=ByteCounter(),
            open_timeout_s=20.0,
            open_retry_s=20.0,
            relay=None,
        )
        name, _, control = name.partition(" with ")
        if control:
            path = self._ends.enter_context(closing(STREAM_TRANSPORTS[control](connection)))
            connection.control = path.control
            self.transport: Transport = SHARED_TRANSPORTS[name](connection)
        else:
            self.transport = STREAM_TRANSPORTS[name](connection)
        self._ends.callback(self.transport.close)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def address(self, one: OneUnit | None = None) -> ShardAddress:
        """The shard, mapped if the transport shares memory."""
        address = address_of(one or self.one)
        if isinstance(self.transport, SharedTransport):
            file = self.transport.locate(address, None, timeout_s=20.0).segment.file
            place = SegmentLocation(file, address.start_bytes, address.stop_bytes, self.transport.open_file)
            address.window = SharedVector("u", [place])
        return address

    def fetch(
        self, version: int | None = None, *, one: OneUnit | None = None, wait_s: float = 20.0
    ) -> tuple[int, list[torch.Tensor]]:
        target = Target(torch.empty(self.one.size, dtype=torch.uint8))
        address = self.address(one)
        fetched = self.transport.fetch(ShardRead(address, version, target), wait_s=wait_s, timeout_s=20.0)
        return fetched, self.one.split(target.bytes)

    def push(
        self, gradients: Sequence[torch.Tensor], *, step: int = 0, rank: int = 0, epoch: int = 1, **changes: Any
    ) -> None:
        fields = {
            "context": self.one.context(step, epoch),
            "unit": self.one.layout.unit,
            "dp_rank": rank,
            "parameter_indices": [segment.parameter_index for segment in self.one.segments],
            "start_bytes": self.one.start,
            "stop_bytes": self.one.stop,
        }
        header = shard_pb2.ReduceScatterHeader(**{**fields, **changes})
        prepared = unsent(address_of(self.one), header, Gradients(self.one, gradients))
        if isinstance(self.transport, SharedTransport):
            prepared = self.transport.prepare_push(prepared)
        self.transport.push(prepared, timeout_s=20.0)

    def contributions(self) -> dict[int, Any]:
        return self.server.evaluate(lambda: dict(self.one.shard.gradient.contributions.by_rank))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("certs")).make()


@pytest.fixture(params=["plain", "encrypted"])
def server(request: pytest.FixtureRequest, authority: TestAuthority) -> Iterator[ShardServer]:
    tls = authority.server(encrypt="always") if request.param == "encrypted" else None
    with closing(SharedMemory()) as shared, ShardServer(shared=shared, tls=tls) as running:
        yield running
        running.until(lambda: not running.shm._open, "all sessions are closed")


@pytest.fixture(params=ALL)
def opened(server: ShardServer, request: pytest.FixtureRequest) -> Iterator[Opened]:
    with Opened(unit(server, dp=2), request.param) as made:
        yield made


def connected(one: OneUnit, *transports: str) -> ServerConnection:
    client = one.server.client
    return ServerConnection(client.address, one.identity, ConnectOptions(transports, 64 << 10, client.credentials))


@pytest.fixture(params=TRANSPORT_NAMES)
def connection(server: ShardServer, request: pytest.FixtureRequest) -> Iterator[ServerConnection]:
    one = OneUnit(server, MIXED)
    one.begin(values_of(one))
    transports = (request.param, "grpc") if request.param in SHARED_TRANSPORTS else (request.param,)
    made = connected(one, *transports)
    with closing(made):
        yield made


def values_of(one: OneUnit) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(each.shape, generator=generator).to(each.dtype) for each in one.zeros()]


# Weights.


def test_fetch_waits_for_the_version(opened: Opened) -> None:
    waiting = in_background(partial(opened.fetch, 1))
    opened.server.until(lambda: len(opened.one.shard.values._waiting) == 1, "the fetch waits")
    train(opened.one, 0)
    version, values = next(waiting)
    assert version == 1
    assert_all(values, -1.0)


def test_fetch_without_a_version_returns_the_newest(opened: Opened) -> None:
    assert opened.fetch()[0] == 0
    train(opened.one, 0)
    version, values = opened.fetch()
    assert version == 1
    assert_all(values, -1.0)


def test_fetch_of_a_missing_version_ends_at_the_deadline(opened: Opened) -> None:
    error = error_of(lambda: opened.fetch(3, wait_s=0.3))
    assert isinstance(error, DeadlineError)
    assert "version 3 of unit 'u' of run 'r'; the newest is 0" in str(error)
    assert opened.fetch()[0] == 0


def test_fetch_of_a_replaced_version_raises_version_gone(opened: Opened) -> None:
    train(opened.one, 0)
    assert isinstance(error_of(lambda: opened.fetch(0)), VersionGoneError)
    assert opened.fetch(1)[0] == 1


def test_fetch_of_an_unknown_unit_raises_not_found(opened: Opened) -> None:
    other = OneUnit(opened.server, layout_of("other", a=((60_000,), "float32")))
    assert isinstance(error_of(lambda: opened.fetch(one=other)), NotFoundError)


def test_concurrent_fetches_never_return_a_mixture_of_versions(server: ShardServer, opened: Opened) -> None:
    def read(until: int) -> None:
        version = -1
        while version < until:
            try:
                version, values = opened.fetch()
            except VersionGoneError:  # in place: the update came while the values were copied
                continue
            assert_all(values, -float(version))

    readers = [in_background(partial(read, 10)) for _ in range(2)]
    for step in range(10):
        train(opened.one, step)
    for reader in readers:
        next(reader)


@pytest.mark.parametrize("name", STREAM_TRANSPORTS)
def test_streams_report_that_they_are_nearly_done(server: ShardServer, name: str) -> None:
    with Opened(unit(server, BIG), name) as opened:
        transport = opened.transport
        reported: list[bool] = []
        header = shard_pb2.ReduceScatterHeader(
            context=opened.one.context(0), unit="u", parameter_indices=[0], stop_bytes=BIG.size_bytes
        )
        assert isinstance(transport, StreamTransport)
        pushed = unsent(address_of(opened.one), header, Gradients(opened.one, opened.one.filled(1.0)))
        transport.push(pushed, timeout_s=20.0, nearly_done=lambda: reported.append(True))
        assert reported == [True]
        opened.one.prepare(0)
        opened.one.update(0)
        flat, reported = torch.zeros(BIG.size_bytes // 4), []
        transport.fetch(
            ShardRead(address_of(opened.one), 1, Target(flat.view(torch.uint8))),
            wait_s=20.0,
            timeout_s=20.0,
            nearly_done=lambda: reported.append(bool((flat[: -NEARLY_DONE_BYTES // 4] == -1.0).all())),
        )
        assert reported and all(reported)
        assert_all([flat], -1.0)


# Gradients.


@pytest.mark.parametrize("layout", [MIXED, PLAIN, EMPTY], ids=["mixed", "plain", "empty"])
@pytest.mark.parametrize("name", ALL)
def test_pushes_give_the_same_bits_as_rpcs(server: ShardServer, name: str, layout: UnitLayout) -> None:
    """Two parts of two ranks: all by rpcs, all over the transport, and mixed."""
    generator = torch.Generator().manual_seed(1)
    results: list[torch.Tensor] = []
    gradients: list[list[torch.Tensor]] = []
    for run in ("rpcs", "transport", "both"):
        with Opened(unit(server, layout, dp=2, run=run), name) as opened:
            one = opened.one
            gradients = gradients or [
                [torch.randn(each.shape, generator=generator).to(each.dtype) for each in one.zeros()] for _ in range(4)
            ]
            for number, (part, rank) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
                over_transport = run == "transport" or (run == "both" and part != rank)
                push = opened.push if over_transport else one.push
                push(gradients[number], rank=rank, part=part)
            one.prepare(0, (0, 0, 2), (1, 0, 2))
            one.update(0)
            results.append(one.flat(one.gather(1)[1]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_repeated_pushes_count_once(opened: Opened) -> None:
    ones = opened.one.filled(1.0)
    opened.push(ones)
    opened.push(ones)
    opened.one.push(ones)
    opened.push(ones, rank=1)
    opened.one.prepare(0)
    opened.one.update(0)
    assert_all(opened.one.gather(1)[1], -1.0)
    step = opened.server.call("DescribeStep", shard_pb2.DescribeStepRequest(run="r"))
    assert (step.duplicate_count, step.differing_duplicate_count) == (2, 0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"epoch": 4, "attempt": 3}, StaleEpochError),
        ({"epoch": 5, "attempt": 2}, StaleEpochError),
        ({"epoch": 5, "attempt": 3, "step": 1}, StepStateError),
        ({"epoch": 5, "attempt": 3, "part": 1}, StepStateError),
    ],
    ids=["epoch", "attempt", "step", "part"],
)
def test_stale_pushes_are_rejected_without_a_trace(
    opened: Opened, changes: dict[str, Any], error: type[ShardwellError]
) -> None:
    opened.one.fence(0, (0, 5, 3))
    assert type(error_of(lambda: opened.push(opened.one.filled(1.0), **changes))) is error
    opened.server.until(lambda: not opened.one.shard.streams, "no stream is open")
    assert opened.contributions() == {}
    opened.push(opened.one.filled(1.0), epoch=5, attempt=3)
    assert set(opened.contributions()) == {0}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rank": 2}, InvalidRequestError),
        ({"parameter_indices": [1, 0]}, InvalidRequestError),
        ({"parameter_indices": [0, 0]}, InvalidRequestError),
        ({"parameter_indices": [7]}, InvalidRequestError),
    ],
)
def test_malformed_pushes_are_rejected_without_a_trace(
    opened: Opened, changes: dict[str, Any], error: type[ShardwellError]
) -> None:
    assert type(error_of(lambda: opened.push(opened.one.filled(1.0), **changes))) is error
    opened.server.until(lambda: not opened.one.shard.streams, "no stream is open")
    assert opened.contributions() == {}


def test_pushes_to_a_deleted_run_are_rejected(opened: Opened) -> None:
    opened.one.drop()
    assert isinstance(error_of(lambda: opened.push(opened.one.filled(1.0))), ShardwellError)


# Sessions.


def test_measure_returns_a_bandwidth(opened: Opened) -> None:
    assert opened.transport.measure(timeout_s=20.0) > 0
    assert not opened.transport.broke


@pytest.mark.parametrize("name", SESSIONS)
def test_a_closed_transport_is_unusable_but_not_broken(server: ShardServer, name: str) -> None:
    with Opened(unit(server), name) as opened:
        opened.transport.close()
        server.until(lambda: not server.shm._open, "the session is closed")
        assert isinstance(error_of(lambda: opened.push(opened.one.filled(1.0))), ShardwellError)
        assert not opened.transport.broke


@pytest.mark.parametrize("name", SESSIONS)
def test_a_transport_breaks_with_its_connection(server: ShardServer, name: str) -> None:
    with Opened(unit(server), name) as opened:
        transport: Any = opened.transport
        transport.session.cut()
        assert transport.session.broke_within(20.0)
        assert transport.broke


@pytest.mark.parametrize("name", ALL)
def test_a_stopped_server_fails_all_transfers(name: str) -> None:
    with closing(SharedMemory()) as shared:
        with ShardServer(shared=shared) as server:
            opened = Opened(unit(server), name)
        assert isinstance(error_of(lambda: opened.fetch(0)), UnavailableError)
        assert isinstance(error_of(lambda: opened.push(opened.one.filled(1.0))), UnavailableError)


# Rounded values, over the transport selector.


@pytest.mark.parametrize("gather_dtype", [0, common_pb2.WIRE_DTYPE_BFLOAT16, common_pb2.WIRE_DTYPE_INT8])
def test_all_transports_round_values_equally(
    server: ShardServer, connection: ServerConnection, gather_dtype: Any
) -> None:
    one = OneUnit(server, MIXED)
    results = []
    for over in (connection, None):
        reference = over or connected(one, "grpc")
        shard = RemoteShard(one.identity, MIXED, reference, one.start, one.stop, Wire(gather_dtype, wait_limit_s=20.0))
        if (location := shard.locate()) is not None:
            shard.map(location)
        flat = torch.zeros(one.size, dtype=torch.uint8)
        assert shard.fetch(0, memory_at(flat.data_ptr(), flat.numel(), flat)) == 0
        results.append(flat)
        if over is None:
            reference.close()
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "push_dtype",
    [
        0,
        common_pb2.WIRE_DTYPE_BFLOAT16,
        common_pb2.WIRE_DTYPE_INT8,
        common_pb2.WIRE_DTYPE_FLOAT8,
        common_pb2.WIRE_DTYPE_TOP_K_1_PERCENT,
    ],
)
def test_all_transports_round_gradients_equally(
    server: ShardServer, connection: ServerConnection, push_dtype: Any
) -> None:
    one = OneUnit(server, MIXED)
    gradients = dict(enumerate(values_of(one)))
    shard = RemoteShard(one.identity, MIXED, connection, one.start, one.stop, Wire(0, push_dtype, wait_limit_s=20.0))
    shard.prepare_push(part_header(context=one.context(0)), gradients)(ignore)
    other = OneUnit(server, MIXED, run="reference").begin(values_of(one))
    with closing(connected(other, "grpc")) as reference:
        shard = RemoteShard(
            other.identity, MIXED, reference, one.start, one.stop, Wire(0, push_dtype, wait_limit_s=20.0)
        )
        shard.prepare_push(part_header(context=other.context(0)), gradients)(ignore)
    results = []
    for each in (one, other):
        each.prepare(0)
        each.update(0)
        results.append(each.flat(each.gather(1)[1]))
    assert torch.equal(*results)


def test_a_closed_connection_unmaps_its_gradient_buffers(server: ShardServer) -> None:
    """Trainers keep queues for the connections to lost servers, whose buffers must not stay in memory with them."""
    one = unit(server)
    connection = connected(one, "shm", "grpc")
    prepared: Any = prepared_push(one, connection, 1.0)
    mapping = weakref.ref(prepared.buffer.memory)
    connection.transports.require_shared().release()
    del prepared
    assert mapping() is not None, "kept for the next gradient"
    connection.close()
    assert mapping() is None


# Batches.


def prepared_push(
    one: OneUnit, connection: ServerConnection, value: float, *, epoch: int = 1, part: int = 0
) -> PreparedPush:
    shard = RemoteShard(one.identity, one.layout, connection, one.start, one.stop, Wire(wait_limit_s=20.0))
    header = part_header(context=one.context(0, epoch), part=part)
    values = zip(one.segments, one.filled(value), strict=True)
    flats = {segment.parameter_index: values.flatten() for segment, values in values}
    return shard.prepare_push(header, flats).require_prepared()


def test_a_batch_accepts_good_parts_and_rejects_the_others(server: ShardServer, connection: ServerConnection) -> None:
    others = [OneUnit(server, layout_of(f"u{index}", a=((700,), "float32")), index=index).begin() for index in (1, 2)]
    ones = [OneUnit(server, MIXED), *others]
    # Part 0 of the second unit is missing.
    pushes = [prepared_push(one, connection, 1.0, part=part) for one, part in zip(ones, (0, 1, 0), strict=True)]
    assert connection.push_batch(pushes, wait_limit_s=20.0) == [True, False, True]
    assert connection.push_batch(pushes, wait_limit_s=20.0) == [True, False, True], "duplicates are dropped"
    assert server.evaluate(lambda: server.store.run("r").duplicate_count) == 2
    accepted = [0 in server.evaluate(lambda one=one: dict(one.shard.gradient.contributions.by_rank)) for one in ones]
    assert accepted == [True, False, True]


def test_a_batch_names_what_its_parts_have_in_common_once(
    server: ShardServer, connection: ServerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[shard_pb2.ReduceBatchRequest] = []
    push_batch = TransportSelector.push_batch

    def recorded(selector: TransportSelector, request: shard_pb2.ReduceBatchRequest, **options: Any) -> Any:
        sent.append(request)
        return push_batch(selector, request, **options)

    monkeypatch.setattr(TransportSelector, "push_batch", recorded)
    ones = [OneUnit(server, layout_of(f"u{index}", a=((7,), "float32")), index=index).begin() for index in (1, 2, 3)]
    header = part_header(context=ones[0].context(0, 1))
    prepared = [prepared_push(one, connection, 1.0) for one in ones]
    for push in prepared[:2]:
        push.header = header
    assert connection.push_batch(prepared, wait_limit_s=20.0) == [True, True, True]
    (request,) = sent
    assert request.common == header.common
    # The last part is of another attempt.
    assert [part.header.HasField("context") for part in request.parts] == [False, False, True]


def test_a_batch_of_pushes_updates_as_single_pushes_do(server: ShardServer, connection: ServerConnection) -> None:
    one = OneUnit(server, MIXED)
    before = one.flat(one.gather(0)[1])
    assert connection.push_batch([prepared_push(one, connection, 1.0)], wait_limit_s=20.0) == [True]
    one.prepare(0)
    one.update(0)
    batched = one.flat(one.gather(1)[1])
    other = OneUnit(server, MIXED, run="reference").begin(values_of(one))
    assert torch.equal(other.flat(other.gather(0)[1]), before)
    other.push(other.filled(1.0))
    other.prepare(0)
    other.update(0)
    expected = other.flat(other.gather(1)[1])
    assert torch.equal(batched, expected)


def versions_of(connection: ServerConnection, fetches: Sequence[ShardFetch]) -> dict[int, int]:
    """Fetches a batch; returns the versions that arrived, by position."""
    versions: dict[int, int] = {}
    fetch_together(connection, fetches, versions.__setitem__)
    return versions


@pytest.mark.parametrize("gather_dtype", [0, common_pb2.WIRE_DTYPE_BFLOAT16, common_pb2.WIRE_DTYPE_INT8])
def test_a_batch_of_fetches_delivers_the_bits_of_single_fetches(
    server: ShardServer, connection: ServerConnection, gather_dtype: Any
) -> None:
    ones = [OneUnit(server, MIXED), OneUnit(server, layout_of("u1", a=((700,), "float32")), index=1).begin()]
    shards = [
        RemoteShard(one.identity, one.layout, connection, one.start, one.stop, Wire(gather_dtype, wait_limit_s=20.0))
        for one in ones
    ]
    batched, single = ([torch.zeros(one.size, dtype=torch.uint8) for one in ones] for _ in range(2))
    fetches = [
        shard.prepare_fetch(0, memory_at(flat.data_ptr(), flat.numel(), flat))
        for shard, flat in zip(shards, batched, strict=True)
    ]
    assert versions_of(connection, fetches) == {0: 0, 1: 0}
    for shard, flat in zip(shards, single, strict=True):
        assert shard.fetch(0, memory_at(flat.data_ptr(), flat.numel(), flat)) == 0
    assert all(torch.equal(*pair) for pair in zip(batched, single, strict=True))
    assert connection.counter.received_bytes > 0


def test_a_batch_of_fetches_leaves_out_what_cannot_be_read(server: ShardServer, connection: ServerConnection) -> None:
    known, unknown = OneUnit(server, MIXED), OneUnit(server, layout_of("other", a=((700,), "float32")))
    flats = [torch.zeros(one.size, dtype=torch.uint8) for one in (known, unknown)]
    fetches = [
        RemoteShard(one.identity, one.layout, connection, one.start, one.stop, Wire(wait_limit_s=20.0)).prepare_fetch(
            0, memory_at(flat.data_ptr(), flat.numel(), flat)
        )
        for one, flat in zip((known, unknown), flats, strict=True)
    ]
    assert versions_of(connection, fetches) == {0: 0}
    assert torch.equal(flats[0], known.flat(known.gather(0)[1])) and not flats[1].any()


def test_a_late_version_does_not_delay_the_others_of_a_batch(server: ShardServer, connection: ServerConnection) -> None:
    late, *ones = (OneUnit(server, layout_of(f"u{i}", a=((700,), "float32")), index=i).begin() for i in (1, 2, 3, 4))
    train(late, 0)
    wanted = [(late, 2), (ones[0], 1), (late, 1), (ones[1], 1), (ones[2], 1)]  # an update reaches all units
    flats = [torch.zeros(one.size, dtype=torch.uint8) for one, _ in wanted]
    fetches = [
        RemoteShard(one.identity, one.layout, connection, one.start, one.stop, Wire(wait_limit_s=20.0)).prepare_fetch(
            version, memory_at(flat.data_ptr(), flat.numel(), flat)
        )
        for (one, version), flat in zip(wanted, flats, strict=True)
    ]
    arrived: dict[int, int] = {}
    condition = threading.Condition()

    def note(number: int, version: int) -> None:
        with condition:
            arrived[number] = version
            condition.notify()

    fetching = in_background(partial(fetch_together, connection, fetches, note))
    with condition:
        assert condition.wait_for(lambda: len(arrived) == 4, 60.0)
    assert arrived == {1: 1, 2: 1, 3: 1, 4: 1}
    train(late, 1)
    next(fetching)
    assert arrived[0] == 2
    assert torch.equal(flats[0], late.flat(late.gather(2)[1]))
