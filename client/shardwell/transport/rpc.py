"""Blocking calls to a Shardwell service, with errors as exceptions and bounded retries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from shardwell.credentials import find_credentials
from shardwell_wire.channel import open_channel
from shardwell_wire.credentials import Credentials
from shardwell_wire.errors import DeadlineError, UnavailableError, from_rpc_error

Result = TypeVar("Result")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 1.0


def retry(
    action: Callable[[], Result],
    *,
    retry_for_s: float,
    while_open: Callable[[], bool] = lambda: True,
    check: Callable[[], None] = lambda: None,
) -> Result:
    """Runs ``action``, again while it raises UnavailableError.

    Args:
        action: May be repeated.
        retry_for_s: For how long.
        while_open: And until this is false.
        check: Called before every repetition; raises when that is pointless.
    """
    give_up, delay = time.monotonic() + retry_for_s, _FIRST_DELAY_S
    while True:
        try:
            return action()
        except UnavailableError:
            check()
            if time.monotonic() + delay > give_up or not while_open():
                raise
        time.sleep(delay * random.uniform(0.5, 1.0))
        delay = min(delay * 2, _LONGEST_DELAY_S)


@dataclass(slots=True)
class StandingRpc:
    """An rpc that has answered and stands until one side ends it."""

    answer: Any
    """Its one response message."""
    _call: Any
    _ended: bool = False

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called once the rpc is over, in another thread, or here if it is over already."""
        if not self._call.add_callback(callback):
            callback()

    def end(self) -> None:
        """Ends it from this side."""
        self._ended = True
        self._call.cancel()

    @property
    def broke(self) -> bool:
        """Whether it is over though neither side ended it."""
        return not self._ended and not self._call.is_active() and self._call.code() is not grpc.StatusCode.OK

    def broke_within(self, timeout_s: float) -> bool:
        """Whether it broke, or does before so much time has passed."""
        over = threading.Event()
        self.when_ended(over.set)
        over.wait(timeout_s)
        return self.broke


class ServiceClient:
    """Calls the rpcs of one service at one address; may be shared between threads.

    Args:
        address: host:port.
        service: The service, from the generated module's ``DESCRIPTOR``.
        check: Called while the peer is unavailable; raises when trying again is pointless.
        credentials: What every rpc carries. None: what ``find_credentials`` finds for the address.

    Raises:
        UsageError: The address is none, or the token file cannot be used.
    """

    def __init__(
        self,
        address: str,
        service: ServiceDescriptor,
        check: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
    ) -> None:
        self.address, self._check = address, check
        self.credentials = find_credentials(address) if credentials is None else credentials
        self.peer = f"{service.name} at {address}"
        self._service = service
        self._channel = open_channel(address)
        self._unary: dict[str, Any] = {}
        self._is_closed = False

    def call(self, rpc_name: str, request: Any, *, timeout_s: float = 10.0, retry_for_s: float = 0.0) -> Any:
        """Calls a unary rpc.

        Args:
            rpc_name: Its name in the proto file.
            request: Its request message.
            timeout_s: Deadline of one try.
            retry_for_s: While the peer is unavailable, try again for this long. Every rpc of
                Shardwell may be repeated.

        Returns:
            Its response message.

        Raises:
            ShardwellError: What the peer raised, or UnavailableError, or DeadlineError.
        """
        stub = self._unary.get(rpc_name) or self._unary_stub(rpc_name)
        return self.attempt(lambda: stub(request, timeout=timeout_s), retry_for_s=retry_for_s)

    def stream(self, rpc_name: str, request: Any, *, timeout_s: float | None) -> Iterator[Any]:
        """Calls an rpc that answers with a stream of messages; raises as ``call`` does."""
        method = self._service.methods_by_name[rpc_name]
        stub = self._with_credentials(
            self._channel.unary_stream(
                self._path(rpc_name),
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
        )
        try:
            yield from stub(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.peer) from error

    def open(self, rpc_name: str, request: Any, *, timeout_s: float) -> StandingRpc:
        """Calls an rpc that answers once and then stands until one side ends it; raises as ``call`` does.

        Args:
            rpc_name: Its name in the proto file.
            request: Its request message.
            timeout_s: How long the answer may take, and how long to try again while the peer is unavailable.
        """
        return self.attempt(lambda: self._open(rpc_name, request, timeout_s), retry_for_s=timeout_s)

    def _open(self, rpc_name: str, request: Any, timeout_s: float) -> StandingRpc:
        call = self.byte_response_stub(rpc_name)(request)
        # Not the rpc's deadline: that would end it after the answer too.
        timer, give_up = threading.Timer(timeout_s, call.cancel), time.monotonic() + timeout_s
        timer.start()
        try:
            answer = GetMessageClass(self._service.methods_by_name[rpc_name].output_type).FromString(next(call))
        except grpc.RpcError as error:
            if time.monotonic() >= give_up:
                raise DeadlineError(f"{self.peer} did not answer {rpc_name} within {timeout_s:g} s") from error
            raise
        finally:
            timer.cancel()
        return StandingRpc(answer, call)

    def byte_response_stub(self, rpc_name: str) -> Callable[..., Any]:
        """A stub whose response messages stay bytes, for ``codec``."""
        method = self._service.methods_by_name[rpc_name]
        serializer = GetMessageClass(method.input_type).SerializeToString
        return self._with_credentials(self._channel.unary_stream(self._path(rpc_name), request_serializer=serializer))

    def byte_request_stub(self, rpc_name: str) -> Callable[..., Any]:
        """A stub whose request messages are bytes already, from ``codec``."""
        method = self._service.methods_by_name[rpc_name]
        deserializer = GetMessageClass(method.output_type).FromString
        return self._with_credentials(
            self._channel.stream_unary(self._path(rpc_name), response_deserializer=deserializer)
        )

    def attempt(self, action: Callable[[], Result], *, retry_for_s: float) -> Result:
        """Runs ``action``, again while the peer is unavailable, and maps what grpc raises."""

        def mapped() -> Result:
            try:
                return action()
            except grpc.RpcError as error:
                raise from_rpc_error(error, self.peer) from error
            except ValueError as error:  # which gRPC raises for a channel that is closed
                if not self._is_closed:
                    raise
                raise UnavailableError(f"{self.peer}: the connection was closed here", peer=self.peer) from error

        return retry(mapped, retry_for_s=retry_for_s, check=self._check)

    def close(self) -> None:
        """Cancels what is in flight and closes the connection."""
        self._is_closed = True
        self._channel.close()

    def _path(self, rpc_name: str) -> str:
        return f"/{self._service.full_name}/{rpc_name}"

    def _unary_stub(self, rpc_name: str) -> Any:
        method = self._service.methods_by_name[rpc_name]
        stub = self._with_credentials(
            self._channel.unary_unary(
                self._path(rpc_name),
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
        )
        self._unary[rpc_name] = stub
        return stub

    def _with_credentials(self, stub: Callable[..., Any]) -> Callable[..., Any]:
        """A stub whose every call carries the credentials."""
        credentials = self.credentials
        if not credentials:
            return stub

        # Not functools.partial, whose repr would show the token wherever somebody prints a stub.
        def call(*arguments: Any, **options: Any) -> Any:
            return stub(*arguments, metadata=credentials.metadata, **options)

        return call
