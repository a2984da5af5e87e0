"""Calls the handlers of a service in this process, without a connection, and records the requests of real calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from shardwell_server.serving import process, rpc
from shardwell_server.serving.authentication import Authentication
from shardwell_server.serving.authorization import CALLER
from shardwell_server.serving.call_server import CallServer
from shardwell_server.serving.limits import Rate, RequestLimits
from shardwell_wire.errors import AccessError
from shardwell_wire.security.tokens import ClusterKey
from tests.fuzz.messages import Mutator, Values, decoded

LIMIT_S = 0.02
"""How long a call may wait before it is cancelled. Handlers see a shorter deadline, so most of them do not wait."""

SLOW_S, HANGING_S = 1.0, 5.0
"""A call that occupies the event loop's thread, or takes, longer than this is a finding. The second number is larger,
because other programs may occupy the machine."""

_MAX_RECORDED, _MAX_RECORDED_BYTES = 40, 64 << 10
_PEER = "ipv4:192.0.2.1:1"


class _Failures(logging.Handler):
    """Keeps where the last handler failed. The servers log it, and the caller gets a fixed text."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
            self.last = f"{type(error).__name__} at {places}: {str(error)[:200]}"


FAILURES = _Failures()

BAD_STATUSES = frozenset(("INTERNAL", "UNKNOWN", "UNIMPLEMENTED"))


@dataclass(frozen=True)
class Answer:
    """How one call ended."""

    status: str
    """Name of a gRPC status, or ``WAITING`` if the call was cancelled."""
    details: str
    seconds: float
    cpu_s: float = 0.0
    """CPU time of the event loop's thread."""

    @property
    def is_bad(self) -> bool:
        """True if the server failed, or was occupied for too long."""
        return self.status in BAD_STATUSES or self.cpu_s > SLOW_S or self.seconds > HANGING_S


class _Aborted(Exception):
    pass


class _Context:
    """The part of ``grpc.aio.ServicerContext`` that handlers use."""

    def __init__(self) -> None:
        self.status, self.details = "OK", ""

    def peer(self) -> str:
        return _PEER

    def time_remaining(self) -> float:
        return LIMIT_S / 2

    async def abort(self, status: grpc.StatusCode, details: str, _: object = ()) -> None:
        self.status, self.details = status.name, details
        raise _Aborted


class Handler:
    """One rpc of one server.

    Args:
        method: The rpc.
        handler: What gRPC would call.
        key: Key of the cluster.
    """

    def __init__(self, method: MethodDescriptor, handler: grpc.RpcMethodHandler, key: ClusterKey) -> None:
        self.method = method
        self.path = f"/{method.containing_service.full_name}/{method.name}"
        self._handler, self._authentication = handler, Authentication(key)
        self.is_served: Callable[[], bool] = lambda: True
        """Returns False once the server has stopped."""
        self.recorded: list[list[bytes]] = []
        """Messages of real calls. Calls with equal first messages are kept once."""

    def record(self, messages: list[bytes]) -> None:
        """Keeps the messages of a real call."""
        small = sum(map(len, messages)) <= _MAX_RECORDED_BYTES
        if small and len(self.recorded) < _MAX_RECORDED and messages not in self.recorded:
            self.recorded.append(messages)

    def mutated(self, mutator: Mutator, rng: random.Random) -> list[bytes]:
        """Returns the messages of a call that resembles a recorded one, or none."""
        if not self.recorded or rng.random() < 0.15:
            return [mutator.bytes_of(mutator.make(self.method.input_type))]
        messages = [decoded(self.method.input_type, data) for data in rng.choice(self.recorded)]
        known = [message for message in messages if message is not None]
        if len(known) > 1 and rng.random() < 0.2:
            rng.shuffle(known)
        return [mutator.bytes_of(mutator.changed(each) if rng.random() < 0.9 else each) for each in known]

    async def call(self, messages: Sequence[bytes], token: str | None) -> Answer:
        """Calls the handler. ``token`` None: as in a cluster without a key, which admits every caller."""
        context, start_s, start_cpu_s = _Context(), time.perf_counter(), time.thread_time()
        CALLER.set(None)
        if token is not None:
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            try:
                self._authentication.admit(self.path, metadata)
            except AccessError as error:
                return Answer(error.status.name, str(error), time.perf_counter() - start_s)  # type: ignore[union-attr]
        status = "OK"
        with suppress(_Aborted):
            try:
                async with asyncio.timeout(LIMIT_S):
                    await self._run(messages, context)
            except TimeoutError:
                status = "WAITING"
            except asyncio.CancelledError:  # a stopping server cancels what it has begun
                status = "CANCELLED"
        status = context.status if context.status != "OK" else status
        details = FAILURES.last if status in BAD_STATUSES else context.details
        if status in BAD_STATUSES and any(sign in details for sign in ("Channel is closed", "after shutdown")):
            status = "STOPPING"  # an admitted caller made the server leave the cluster
        return Answer(status, details, time.perf_counter() - start_s, time.thread_time() - start_cpu_s)

    async def _run(self, messages: Sequence[bytes], context: _Context) -> None:
        handler = self._handler
        if handler.unary_unary is not None:
            await handler.unary_unary(messages[0], context)
        elif handler.stream_unary is not None:
            await handler.stream_unary(_stream(messages), context)
        else:
            async with aclosing(handler.unary_stream(messages[0], context)) as responses:
                count = 0
                async for _ in responses:
                    count += 1
                    if count == 8:
                        return


async def _stream(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def _do_not_listen(*_: Any, **__: Any) -> None:
    """Stands for ``CallServer.start``."""


class Handlers:
    """The handlers of all servers that start while ``captured`` is open, with the values of the recorded calls."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key
        self.all: list[Handler] = []
        self._last_count = 0

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Captures the handlers of the servers that start in this process while the block runs.

        The servers have no call connections, so all rpcs go over gRPC and are recorded.
        """
        add_service = process.add_service

        def capture(server: Any, service: ServiceDescriptor, servicer: object, limits: RequestLimits) -> None:
            unlimited = RequestLimits(Rate(1e9, 10**9), Rate(1e9, 10**9))
            table = _Table()
            rpc.add_service(table, service, servicer, unlimited)  # type: ignore[arg-type]
            own = [Handler(method, table.find(service, method), self._key) for method in service.methods]
            self.all.extend(own)
            self._last_count = len(own)
            add_service(_Recording(server, own), service, servicer, limits)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(process, "add_service", capture)
            patched.setattr(CallServer, "start", _do_not_listen)
            rpc.logger.addHandler(FAILURES)
            yield
            rpc.logger.removeHandler(FAILURES)

    def note_server(self, is_served: Callable[[], bool]) -> None:
        """Notes how to find out whether the last server that has started still serves."""
        for handler in self.all[-self._last_count :]:
            handler.is_served = is_served

    def values(self) -> Values:
        """Returns the values of all recorded requests."""
        values = Values()
        for handler in self.all:
            for messages in handler.recorded:
                for data in messages:
                    if (message := decoded(handler.method.input_type, data)) is not None:
                        values.learn(message)
        return values


class _Table:
    """Takes the place of a server, and keeps its handlers."""

    def __init__(self) -> None:
        self._generic: Any = None

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        (self._generic,) = handlers

    def find(self, service: ServiceDescriptor, method: MethodDescriptor) -> grpc.RpcMethodHandler:
        """Returns the handler of an rpc."""
        return self._generic.service(_Details(f"/{service.full_name}/{method.name}"))


@dataclass(frozen=True)
class _Details:
    method: str
    invocation_metadata: tuple[()] = ()


class _Recording:
    """A server whose handlers record their requests."""

    def __init__(self, server: grpc.aio.Server, handlers: Sequence[Handler]) -> None:
        self._server, self._handlers = server, handlers

    def add_generic_rpc_handlers(self, generic_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        (generic,) = generic_handlers
        service = self._handlers[0].method.containing_service.full_name
        recording = {
            each.method.name: _recording(each, generic.service(_Details(each.path))) for each in self._handlers
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, recording),))


def _recording(handler: Handler, real: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    kind = next(each for each in ("unary_unary", "unary_stream", "stream_unary") if getattr(real, each) is not None)
    behaviour: Callable[..., Any] = getattr(real, kind)

    async def of_stream(stream: AsyncIterator[bytes], context: Any) -> Any:
        messages: list[bytes] = []

        async def recorded() -> AsyncIterator[bytes]:
            async for message in stream:
                messages.append(message)
                yield message

        try:
            return await behaviour(recorded(), context)
        finally:
            handler.record(messages)

    async def streaming(data: bytes, context: Any) -> AsyncIterator[Any]:
        handler.record([data])
        async for response in behaviour(data, context):
            yield response

    async def unary(data: bytes, context: Any) -> Any:
        handler.record([data])
        return await behaviour(data, context)

    if kind == "stream_unary":
        return real._replace(stream_unary=of_stream)
    return real._replace(**{kind: streaming if inspect.isasyncgenfunction(behaviour) else unary})
