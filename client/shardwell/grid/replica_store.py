"""A ``torch.distributed.Store`` that the coordinator serves, and the one in which the trainers of a replica meet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from shardwell.membership.membership import Membership
from shardwell_wire.errors import DeadlineError
from shardwell_wire.v1 import coordinator_pb2


class CoordinatorStore(Store):
    """A store that no trainer hosts, so it outlives each of them. Calls from several threads may run at once."""

    def _call(self, rpc_name: str, request: Any) -> Any:
        """Calls an rpc, with the fields that tell the coordinator which store is meant."""
        raise NotImplementedError

    def _wait_for(
        self, request: coordinator_pb2.StoreGetRequest, timeout_s: float | None
    ) -> coordinator_pb2.StoreGetResponse:
        """Calls ``StoreGet`` until all keys have values.

        Args:
            timeout_s: Longest wait. ``DistStoreError`` ends it. None: that of the store.
        """
        raise NotImplementedError

    def _values(self, keys: Sequence[str], timeout_s: float | None) -> list[bytes]:
        """Waits until all keys have values, and returns them."""
        return list(self._wait_for(coordinator_pb2.StoreGetRequest(keys=keys), timeout_s).values)

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._call("StoreSet", coordinator_pb2.StoreSetRequest(key=key, value=_to_bytes(value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Sets a key if it has the expected value, or none and the expected value is empty. Returns the key's value."""
        request = coordinator_pb2.StoreSetRequest(
            key=key, value=_to_bytes(desired_value), expected=_to_bytes(expected_value)
        )
        value: bytes = self._call("StoreSet", request).value
        return value

    def get(self, key: str) -> bytes:
        """Waits until a key has a value, and returns it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits until all keys have values, and returns them."""
        return self._values(keys, None)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Sets the values of several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, and returns the sum."""
        total: int = self._call("StoreAdd", coordinator_pb2.StoreAddRequest(key=key, amount=value)).value
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys have values."""
        return not self._call("StoreCheck", coordinator_pb2.StoreCheckRequest(keys=keys)).missing

    def num_keys(self) -> int:
        """Returns the number of keys."""
        count: int = self._call("StoreCheck", coordinator_pb2.StoreCheckRequest()).key_count
        return count

    def delete_key(self, key: str) -> bool:
        """Deletes a key. Returns whether it had a value."""
        deleted: bool = self._call("StoreDelete", coordinator_pb2.StoreDeleteRequest(key=key)).deleted
        return deleted

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys have values.

        Args:
            timeout: Longest wait. None: as ``get``.

        Raises:
            DistStoreError: A key has no value after the timeout.
        """
        self._values(keys, None if timeout is None else timeout.total_seconds())

    def clone(self) -> Self:
        """Returns this store, which serves several threads.

        Torch keeps only the C++ half of a store. Another object would lose its Python half at once.
        """
        return self

    # The names under which torch calls these methods from C++.
    deleteKey, getNumKeys = delete_key, num_keys


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_DUMP_KEY = "exception_dump"
"""Key by which NCCL asks other processes to write what they know about a collective that hangs. Each process checks it
once a second, in a thread of its own, for as long as it has a process group."""


class ReplicaStore(CoordinatorStore):
    """The store of the trainers of one replica. It ends when the trainers of the replica change.

    NCCL's ``exception_dump`` stays in this process: no rpc, and no error when the epoch has ended.

    Waits end with ``DeadlineError`` after ``wait_limit_s``, and with ``DistStoreError`` after a shorter timeout of
    ``wait``. All calls end with ``StaleEpochError`` when the trainers of the replica have changed.
    """

    def __init__(self, membership: Membership, replica_epoch: int) -> None:
        super().__init__()
        self._membership, self._replica_epoch = membership, replica_epoch
        self._dumps: dict[str, bytes] = {}
        """Values of NCCL's keys for dumps."""

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        if key.endswith(_DUMP_KEY):
            self._dumps[key] = _to_bytes(value)
        else:
            super().set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys have values."""
        others = [key for key in keys if not key.endswith(_DUMP_KEY)]
        has_dumps = all(key in self._dumps for key in keys if key.endswith(_DUMP_KEY))
        return has_dumps and (not others or super().check(others))

    def _values(self, keys: Sequence[str], timeout_s: float | None) -> list[bytes]:
        others = [key for key in keys if key not in self._dumps]
        found = dict(zip(others, super()._values(others, timeout_s), strict=True)) if others else {}
        return [found[key] if key in found else self._dumps[key] for key in keys]

    def set_timeout(self, timeout: timedelta) -> None:
        """Has no effect: waits without a timeout of their own end after ``wait_limit_s``."""

    def _call(self, rpc_name: str, request: Any) -> Any:
        self._address(request)
        return self._membership.call(rpc_name, request)

    def _wait_for(
        self, request: coordinator_pb2.StoreGetRequest, timeout_s: float | None
    ) -> coordinator_pb2.StoreGetResponse:
        self._address(request)
        # Torch passes the timeout of the process group, which is the limit of all waits, in whole milliseconds.
        is_shorter = timeout_s is not None and timeout_s + 0.001 < self._membership.wait_limit_s
        try:
            found: coordinator_pb2.StoreGetResponse = self._membership.poll(
                "StoreGet",
                request,
                lambda answer: answer.found,
                what=f"the other trainers of the replica ({request.keys[0]!r})",
                limit_s=timeout_s if is_shorter else None,
            )
        except DeadlineError as error:
            if not is_shorter:
                raise
            raise DistStoreError(str(error)) from error
        return found

    def _address(self, request: Any) -> None:
        request.context.CopyFrom(self._membership.context(0))
        request.trainer, request.replica_epoch = self._membership.trainer, self._replica_epoch
