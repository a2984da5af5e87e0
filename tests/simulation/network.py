"""A network between simulated processes, in place of gRPC's channels and servers.

Everything above the channel is real: the clients inside coordinator and shard servers, serialisation, the servicers,
and the mapping of errors to statuses and back.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc.aio import Metadata

from shardwell_server.serving.rpc import add_service
from tests.simulation.loop import Process, VirtualLoop, current_process

_MEAN_DELAY_S, _MEAN_SLOW_DELAY_S, _SLOW_CHANCE = 0.0008, 0.04, 0.03
_RECONNECT_S = 0.1
_END = object()


class Refused(Exception):
    """The status of a call that failed.

    Args:
        code: The status.
        details: Its message.
        metadata: Trailing metadata.
    """

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, bytes]] = ()) -> None:
        super().__init__(details)
        self.code, self.details, self.metadata = code, details, tuple(metadata)

    def to_rpc_error(self) -> grpc.aio.AioRpcError:
        """Returns the error as grpc raises it."""
        trailing = cast("Metadata", Metadata(*self.metadata))  # type: ignore[arg-type]
        return grpc.aio.AioRpcError(self.code, Metadata(), trailing, self.details)


class _Context:
    """The part of ``grpc.aio.ServicerContext`` that handlers use."""

    def __init__(self, peer: str, deadline: float | None, loop: VirtualLoop) -> None:
        self._peer, self._deadline, self._loop = peer, deadline, loop
        self.status: Refused | None = None

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.status = Refused(code, details, trailing_metadata)
        raise grpc.aio.AbortError


class _CapturingServer:
    """Receives the handlers that ``add_service`` registers."""

    handlers: Any

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        (self.handlers,) = handlers


class _CallDetails:
    def __init__(self, method: str) -> None:
        self.method, self.invocation_metadata = method, ()


class Endpoint:
    """A process that serves one service.

    Args:
        process: The process.
        service: The service.
        servicer: Its servicer.
    """

    def __init__(self, process: Process, service: ServiceDescriptor, servicer: Any) -> None:
        self.process = process
        server: Any = _CapturingServer()
        add_service(server, service, servicer)
        self._handlers = server.handlers

    def handler(self, path: str) -> Any:
        """Returns grpc's handler of an rpc."""
        return self._handlers.service(_CallDetails(path))


class _Mailbox:
    """Messages for one task that waits for them. Cheaper than ``asyncio.Queue``."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: Any) -> None:
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        while not self._messages:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._messages.popleft()


class _Rpc:
    """One call between two processes, which may break at any time."""

    def __init__(self, network: Network, source: Process, address: str, path: str, timeout_s: float | None) -> None:
        self._network, self._loop = network, network.loop
        self.source, self.path = source, path
        self.endpoint = network.endpoints.get(address)
        self.target = network.name_of(address)
        self._deadline = None if timeout_s is None else self._loop.time() + timeout_s
        self._answers, self._requests = _Mailbox(self._loop), _Mailbox(self._loop)
        self._task: asyncio.Task[Any] | None = None
        self._in_flight: tuple[deque[Callable[[], None]], ...] = (deque(), deque())
        """Messages in each direction. Those of one call arrive in order."""
        self._last_s = [0.0, 0.0]
        """Arrival of the last message in each direction."""
        self.open = True
        self._executed_late = self._unanswered = False

    # ---- the caller ----

    def begin(self, *messages: bytes) -> None:
        """Sends the request, or opens a client stream."""
        fate = self._network.draw_fate()
        if fate is not None:
            self._network.trace(f"{self.source.name} -> {self.target} {self.path.rpartition('/')[2]}: {fate}")
        if fate == "lost":
            self._network.loop.call_later(
                self._network.delay(), self.fail, "connection lost", context=self._loop.outside
            )
            return
        if fate == "late":
            self._executed_late = True
            self._network.loop.call_later(
                self._network.delay(), self.fail, "connection lost", context=self._loop.outside
            )
            self._send(0, partial(self._arrive, messages), extra_s=self._network.rng.uniform(0.0, 1.0))
            return
        if fate in ("cut", "unanswered"):
            # "cut": at a random moment, probably while the handler runs. "unanswered": after the handler has run.
            self._unanswered = fate == "unanswered"
            if fate == "cut":
                when_s = self._network.rng.expovariate(1 / 0.004)
                self._loop.call_later(when_s, self.fail, "connection reset", context=self._loop.outside)
        self._send(0, partial(self._arrive, messages))

    def send(self, message: Any) -> None:
        """Sends the next message of a client stream; ``_END`` ends it."""
        self._send(0, lambda: self._requests.put(message))

    async def answer(self) -> Any:
        """Waits for the next message of the answer; ``_END`` ends it. Raises what the call ended with."""
        timer = None if self._deadline is None else self._loop.call_at(self._deadline, self._expire)
        try:
            answer = await self._answers.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if isinstance(answer, Refused):
            raise answer.to_rpc_error()
        return answer

    def cancel(self) -> None:
        """Ends the call on behalf of the caller. The handler is cancelled when the news arrives."""
        if self.open:
            self._close()
            self._send(0, self._cancel_handler)

    def _expire(self) -> None:
        self.cancel()
        self._answers.put(Refused(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    # ---- failures ----

    def fail(self, reason: str) -> None:
        """Breaks the call. Both ends notice it."""
        if not self.open:
            return
        self._close()
        if not self._executed_late:
            self._cancel_handler()
        self._answers.put(Refused(grpc.StatusCode.UNAVAILABLE, reason))

    def involves(self, process: Process) -> bool:
        return self.source is process or (self.endpoint is not None and self.endpoint.process is process)

    def _close(self) -> None:
        self.open = False
        self._network.rpcs.pop(self, None)

    def _cancel_handler(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    # ---- the messages ----

    def _send(self, direction: int, deliver: Callable[[], None], extra_s: float = 0.0) -> None:
        """Delivers a message after a random delay, and after the partition between the processes has healed."""

        in_flight = self._in_flight[direction]
        in_flight.append(deliver)

        def arrive() -> None:
            if self._network.is_cut(self.source.name, self.target):
                self._network.hold(arrive)
            else:
                in_flight.popleft()()

        when = max(self._last_s[direction], self._loop.time() + self._network.delay() + extra_s)
        self._last_s[direction] = when
        self._loop.call_at(when, arrive, context=self._loop.outside)

    def _arrive(self, messages: tuple[bytes, ...]) -> None:
        endpoint = self.endpoint
        if endpoint is None or endpoint.process.dead:
            self._send(1, lambda: self.fail("connection refused"))
            return
        if not self.open and not self._executed_late:
            return
        context = _Context(f"sim:{self.source.name}", self._deadline, self._loop)
        handler = endpoint.handler(self.path)
        if handler is None:
            self._finish_with(Refused(grpc.StatusCode.UNIMPLEMENTED, f"{self.path} is unknown"))
            return
        if handler.response_streaming:
            work = self._stream_answers(handler.unary_stream(*messages, context))
        elif handler.request_streaming:
            work = handler.stream_unary(self._received_requests(), context)
        else:
            work = handler.unary_unary(*messages, context)
        self._task = endpoint.process.start(work)
        done = partial(self._handled, context, streamed=handler.response_streaming)
        self._task.add_done_callback(done, context=endpoint.process.context.copy())

    async def _received_requests(self) -> AsyncIterator[bytes]:
        while (message := await self._requests.get()) is not _END:
            yield message

    async def _stream_answers(self, messages: AsyncIterator[bytes]) -> None:
        async for message in messages:
            self._reply(message)

    def _reply(self, message: Any) -> None:
        self._send(1, lambda: self._answers.put(message) if self.open else None)

    def _handled(self, context: _Context, task: asyncio.Task[Any], *, streamed: bool) -> None:
        """Sends the outcome of the handler to the caller. Runs in the process of the handler."""
        if task.cancelled():
            self._finish_with(Refused(grpc.StatusCode.CANCELLED, "cancelled by the server"))
        elif (error := task.exception()) is None:
            self._finish_with(_END if streamed else task.result())
        elif isinstance(error, grpc.aio.AbortError):
            assert context.status is not None
            if context.status.code is grpc.StatusCode.INTERNAL:
                self._loop.problems.append(f"{self.path}: {context.status.details}")
            self._finish_with(context.status)
        else:
            self._loop.problems.append(f"{self.path} raised {error!r}")

    def _finish_with(self, outcome: Any) -> None:
        def finish() -> None:
            if self.open:
                if self._unanswered:
                    self.fail("connection reset")
                    return
                self._close()
                self._answers.put(outcome)

        self._send(1, finish)


class Channel:
    """``grpc.aio.Channel`` of one process to one address.

    Args:
        network: The network.
        address: host:port.
    """

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address

    def unary_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        async def call(
            request: Any, timeout: float | None = None, metadata: Any = None, wait_for_ready: bool = False
        ) -> Any:
            rpc = self._network.open(self._address, path, timeout)
            rpc.begin(_apply(request_serializer, request))
            return _apply(response_deserializer, await rpc.answer())

        return call

    def stream_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        async def call(
            requests: Any, timeout: float | None = None, metadata: Any = None, wait_for_ready: bool = False
        ) -> Any:
            rpc = self._network.open(self._address, path, timeout)
            rpc.begin()

            async def send() -> None:
                async for request in _iterate(requests):
                    rpc.send(_apply(request_serializer, request))
                rpc.send(_END)

            sending = asyncio.ensure_future(send())
            try:
                return _apply(response_deserializer, await rpc.answer())
            finally:
                sending.cancel()

        return call

    def unary_stream(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        def call(
            request: Any, timeout: float | None = None, metadata: Any = None, wait_for_ready: bool = False
        ) -> _AnswerStream:
            data = _apply(request_serializer, request)
            return _AnswerStream(
                self._network, self._address, path, data, timeout, response_deserializer, waits=wait_for_ready
            )

        return call

    async def close(self, grace: float | None = None) -> None:
        """Nothing to close."""


class _AnswerStream:
    """The answers of a call that streams them. The call begins with the first read."""

    def __init__(
        self,
        network: Network,
        address: str,
        path: str,
        data: bytes,
        timeout_s: float | None,
        decode: Any,
        *,
        waits: bool,
    ) -> None:
        self._network, self._address, self._path, self._data = network, address, path, data
        self._timeout_s, self._decode, self._waits = timeout_s, decode, waits
        self._rpc: _Rpc | None = None
        self._cancelled = False

    def __aiter__(self) -> _AnswerStream:
        return self

    async def __anext__(self) -> Any:
        answer = await self._next()
        if answer is _END:
            raise StopAsyncIteration
        return _apply(self._decode, answer)

    async def read(self) -> Any:
        answer = await self._next()
        return grpc.aio.EOF if answer is _END else _apply(self._decode, answer)

    async def _next(self) -> Any:
        if self._rpc is None:
            while self._waits and not self._network.is_running(self._address):
                await asyncio.sleep(_RECONNECT_S)
            if self._cancelled:
                raise asyncio.CancelledError
            self._rpc = self._network.open(self._address, self._path, self._timeout_s)
            self._rpc.begin(self._data)
        return await self._rpc.answer()

    def cancel(self) -> bool:
        self._cancelled = True
        if self._rpc is not None:
            self._rpc.cancel()
        return True


class Network:
    """All endpoints and calls.

    Args:
        loop: The event loop.
        rng: Decides delays and losses.
        trace: Called with a line for each event.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, trace: Callable[[str], None]) -> None:
        self.loop, self.rng, self.trace = loop, rng, trace
        self.endpoints: dict[str, Endpoint] = {}
        self.rpcs: dict[_Rpc, None] = {}
        """Calls in flight, in the order of their beginning."""
        self.loss = 0.0
        """Chance that a call fails in one of several ways."""
        self._names: dict[str, str] = {}
        self._cut: list[tuple[frozenset[str], frozenset[str]]] = []
        self._held: list[Callable[[], None]] = []

    def listen(self, address: str, process: Process, service: ServiceDescriptor, servicer: Any) -> None:
        """Makes a process reachable at an address."""
        self.endpoints[address] = Endpoint(process, service, servicer)
        self._names[address] = process.name

    def register_name(self, address: str, name: str) -> None:
        """Names the process of an address before it listens."""
        self._names[address] = name

    def name_of(self, address: str) -> str:
        return self._names.get(address, address)

    def is_running(self, address: str) -> bool:
        """Returns whether a process listens at an address."""
        endpoint = self.endpoints.get(address)
        return endpoint is not None and not endpoint.process.dead

    def open(self, address: str, path: str, timeout_s: float | None) -> _Rpc:
        """Begins a call of the process that is running."""
        rpc = _Rpc(self, current_process(), address, path, timeout_s)
        self.rpcs[rpc] = None
        return rpc

    # ---- faults ----

    def delay(self) -> float:
        """Returns the travelling time of one message."""
        mean_s = _MEAN_SLOW_DELAY_S if self.rng.random() < _SLOW_CHANCE else _MEAN_DELAY_S
        return self.rng.expovariate(1 / mean_s)

    def draw_fate(self) -> str | None:
        """Returns how a new call fails; None: it does not."""
        if self.loss and self.rng.random() < self.loss:
            return self.rng.choice(("lost", "late", "cut", "unanswered"))
        return None

    def break_calls(self, process: Process) -> None:
        """Closes the connections of a process, with all calls in flight."""
        for rpc in self._open_calls(process):
            rpc.fail("connection reset")

    def lose(self, process: Process) -> None:
        """Breaks the calls of a process that died. Its peers learn it a moment later."""
        for rpc in self._open_calls(process):
            self.loop.call_later(self.delay(), rpc.fail, "connection reset", context=self.loop.outside)

    def _open_calls(self, process: Process) -> list[_Rpc]:
        return [rpc for rpc in self.rpcs if rpc.involves(process)]

    def cut(self, one: Iterable[str], others: Iterable[str]) -> Callable[[], None]:
        """Holds all messages between two groups of processes, by name; returns a function that heals the partition."""
        partition = frozenset(one), frozenset(others)
        self._cut.append(partition)

        def heal() -> None:
            self._cut.remove(partition)
            held, self._held = self._held, []
            for arrive in held:
                self.loop.call_later(self.delay(), arrive, context=self.loop.outside)

        return heal

    def is_cut(self, one: str, other: str) -> bool:
        return any((one in a and other in b) or (one in b and other in a) for a, b in self._cut)

    def hold(self, arrive: Callable[[], None]) -> None:
        """Keeps a message until a partition heals."""
        self._held.append(arrive)


def _apply(function: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if function is None else function(value)


async def _iterate(items: Any) -> AsyncIterator[Any]:
    if hasattr(items, "__aiter__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
