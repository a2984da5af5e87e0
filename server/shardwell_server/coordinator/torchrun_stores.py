"""Key-value stores in which the agents of torchrun meet, one per rendezvous. See ``docs/running.md``."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardwell_server.coordinator.runs.replica_stores import ReplicaStore
from shardwell_wire.errors import CapacityError, ConflictError
from shardwell_wire.names import check_name

MAX_STORES = 1024
MAX_STORE_KEYS = 4096
MAX_STORE_BYTES = 1 << 20
"""Largest size of one store. The state of a rendezvous has some hundred bytes per agent."""

IDLE_S = 600.0
"""Seconds without a request after which a store ends. The agents of a rendezvous write every few seconds."""


class TorchrunStores:
    """The stores of all rendezvous. They are kept in memory only.

    Args:
        is_protected: True if every rpc needs a token.
        clock: Returns monotonic seconds.
    """

    def __init__(self, *, is_protected: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_protected, self._clock = is_protected, clock
        self._stores: dict[str, ReplicaStore] = {}
        self._used: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._stores)

    def open(self, rendezvous: str) -> ReplicaStore:
        """Returns the store of a rendezvous, and removes stores that are not in use any more.

        Raises:
            InvalidRequestError: The name is invalid.
            ConflictError: The cluster has no token. torchrun's agents unpickle what they read from the store, so a
                client without a token could run code in them.
            CapacityError: There are too many stores.
        """
        check_name("rendezvous", rendezvous)
        if not self._is_protected:
            raise ConflictError(
                f"rendezvous {rendezvous!r}: torchrun's agents unpickle what they read from this store, and this "
                "cluster has no token, so any client could run code in them: start the coordinator and the shard "
                "servers with --token-file"
            )
        now = self._clock()
        for name in [name for name, used in self._used.items() if used < now - IDLE_S]:
            del self._stores[name], self._used[name]
        if rendezvous not in self._stores and len(self._stores) >= MAX_STORES:
            raise CapacityError(
                f"rendezvous {rendezvous!r}: the coordinator has {len(self._stores)} stores of torchrun already, as "
                f"many as it may have; a store ends {IDLE_S:g} s after its last use"
            )
        self._used[rendezvous] = now
        return self._stores.setdefault(rendezvous, ReplicaStore(max_keys=MAX_STORE_KEYS, max_bytes=MAX_STORE_BYTES))
