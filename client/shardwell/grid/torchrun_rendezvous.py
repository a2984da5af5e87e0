"""``torchrun --rdzv-backend=shardwell``: the agents of torchrun meet at the coordinator.

Note: [Lost rendezvous state]
    The coordinator keeps the state of a rendezvous in memory. After its restart, the first agent that reads the state
    writes the last one that it knows, so agents whose workers are running notice nothing. Agents that were just about
    to meet may fail with a timeout, because they also lose the keys of the round.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from shardwell.find_credentials import find_credentials
from shardwell.grid.replica_store import CoordinatorStore
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import coordinator_pb2

_STATE_KEY = "torchrun/state"
_CALL_S = 10.0
"""Deadline of one rpc, and how long to retry while the coordinator cannot be reached."""

_POLL_S = 5.0
"""How long one rpc waits for a key."""


def handler_factory() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the function that makes torchrun's handler. The entry point of the group ``torchrun.handlers``."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Returns torch's dynamic rendezvous, whose state the coordinator keeps.

    Args:
        params: Arguments of torchrun: ``--rdzv-endpoint`` is the coordinator's HOST:PORT, ``--rdzv-id`` names the
            rendezvous. ``token_file`` in ``--rdzv-conf`` is the file with the cluster's key or an operator's token; the
            default is as in ``shardwell.join``.

    Raises:
        UsageError: The address is malformed, or the token file cannot be used.
        RendezvousConnectionError: The coordinator cannot be reached, or refuses the rendezvous.
    """
    token_file = params.get("token_file")
    credentials = None if token_file is None else find_credentials(params.endpoint, token_file)
    store = TorchrunStore(CoordinatorClient(params.endpoint, credentials), params.run_id)
    backend = CoordinatorBackend(store)
    backend.get_state()  # an unreachable coordinator is reported at once
    return create_handler(store, backend, params)


class TorchrunStore(CoordinatorStore):
    """The store of one rendezvous.

    All calls raise ``DistStoreError`` if the coordinator cannot be reached, and waits also after the timeout.
    """

    def __init__(self, client: CoordinatorClient, rendezvous: str) -> None:
        super().__init__()
        self._client, self._rendezvous = client, rendezvous

    def find(self, key: str) -> bytes | None:
        """Returns the value of a key without waiting. None: the key has no value."""
        answer = self._call("StoreGet", coordinator_pb2.StoreGetRequest(keys=[key]))
        return answer.values[0] if answer.found else None

    def _call(self, rpc_name: str, request: Any) -> Any:
        request.rendezvous, request.context.request_id = self._rendezvous, uuid.uuid4().hex
        try:
            return self._client.call(rpc_name, request, timeout_s=_CALL_S, retry_for_s=_CALL_S)
        except ShardwellError as error:
            raise DistStoreError(str(error)) from error

    def _wait_for(
        self, request: coordinator_pb2.StoreGetRequest, timeout_s: float | None
    ) -> coordinator_pb2.StoreGetResponse:
        own_s: float = self.timeout.total_seconds()  # type: ignore[attr-defined]  # a property of torch
        limit_s = own_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            request.wait_s = max(0.0, min(_POLL_S, deadline - time.monotonic()))
            answer: coordinator_pb2.StoreGetResponse = self._call("StoreGet", request)
            if answer.found:
                return answer
            if time.monotonic() >= deadline:
                raise DistStoreError(
                    f"rendezvous {self._rendezvous!r}: {', '.join(answer.missing)} had no value after {limit_s:g} s"
                )


class CoordinatorBackend(RendezvousBackend):
    """The state of one rendezvous. See Note: [Lost rendezvous state]. ``store``: holds the state."""

    def __init__(self, store: TorchrunStore) -> None:
        self._store = store
        self._known = b""
        """The last state that was read or written."""

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "shardwell"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Returns the state and its token, which is the state itself. None: there is no state yet."""
        with _connection_errors():
            state = self._store.find(_STATE_KEY)
            if state is None and self._known:
                state = self._store.compare_set(_STATE_KEY, b"", self._known)
        if state is None:
            return None
        self._known = state
        return state, state

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Sets the state if the token is that of the present state, or None and there is no state.

        Returns:
            The present state, its token, and whether it was set.
        """
        expected = token if isinstance(token, bytes) else b""
        with _connection_errors():
            found = self._store.compare_set(_STATE_KEY, expected, state)
            if found == expected and found != state:  # the key has no value
                found = self._store.compare_set(_STATE_KEY, b"", state)
        self._known = found
        return found, found, found == state


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except DistStoreError as error:
        raise RendezvousConnectionError(f"the coordinator does not keep the rendezvous: {error}") from error
