"""Key-value stores in which the trainers of a replica meet, for example to form a process group.

There is one store per replica epoch. It is kept in memory only, and ends with the epoch: what the trainers agreed on is
void when one of them is lost. See Note: [Lost replica stores] in ``rendezvous.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from shardwell_server.coordinator.settings import Signal, poll
from shardwell_wire.errors import CapacityError, InvalidRequestError

MAX_KEYS = 1 << 16
"""Most keys of one store."""

MAX_STORE_BYTES = 64 << 20
"""Largest size of all keys and values of one store."""

MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 8 << 20

_MAX_COUNTER, _MAX_COUNTER_DIGITS = 1 << 63, 20


class ReplicaStore:
    """The values that the trainers of one replica have set. The semantics are those of ``torch.distributed.Store``.

    Args:
        max_keys: Most keys.
        max_bytes: Largest size of all keys and values.
    """

    def __init__(self, *, max_keys: int = MAX_KEYS, max_bytes: int = MAX_STORE_BYTES) -> None:
        self.changed = Signal()
        self._max_keys, self._max_bytes = max_keys, max_bytes
        self._values: dict[str, bytes] = {}
        self._size_bytes = 0
        self._results: dict[str, int] = {}
        """Results of ``add`` and ``delete``, and 1 for values that were set, by request id: a repeated request gets the
        result of the first."""

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes, request_id: str = "") -> None:
        """Sets a value. A repeated request sets nothing: the key may have a newer value.

        Raises:
            CapacityError: The store is full.
        """
        if request_id in self._results:
            return
        former = self._values.get(key)
        size = self._size_bytes + len(value) - len(former or b"") + (len(key.encode()) if former is None else 0)
        if len(key.encode()) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            raise InvalidRequestError(
                f"key {key[:MAX_KEY_BYTES]!r} with a value of {len(value)} bytes: expected at most {MAX_KEY_BYTES} and "
                f"{MAX_VALUE_BYTES} bytes"
            )
        if size > self._max_bytes or (former is None and len(self._values) >= self._max_keys):
            raise CapacityError(
                f"the store has {len(self._values)} keys with {self._size_bytes} bytes: it may have at most "
                f"{self._max_keys} keys with {self._max_bytes} bytes"
            )
        self._values[key], self._size_bytes = value, size
        self._note_result(request_id, 1)
        self.changed.notify()

    def compare_set(self, key: str, expected: bytes, value: bytes, request_id: str = "") -> bytes:
        """Sets a value if the key has the expected value, or has none and ``expected`` is empty.

        Returns:
            The value of the key afterwards, or ``expected`` if it has none. A repeated request that had set the value
            returns it again.
        """
        if request_id in self._results:
            return value
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self.set(key, value, request_id)
            return value
        return expected if current is None else current

    def get(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns the values of all keys. None: a key has no value."""
        if any(key not in self._values for key in keys):
            return None
        return [self._values[key] for key in keys]

    async def wait(self, keys: Sequence[str], wait_s: float) -> list[bytes] | None:
        """Waits until all keys have values, and returns them. None: a key has none after ``wait_s``."""

        async def check() -> list[bytes] | None:
            return self.get(keys)

        return await poll(self.changed, check, wait_s)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Returns the keys that have no value."""
        return [key for key in keys if key not in self._values]

    def add(self, key: str, amount: int, request_id: str) -> int:
        """Adds to a counter, which is stored as decimal text. A missing counter is 0.

        Returns:
            The sum. A repeated request returns the same sum and adds nothing.

        Raises:
            InvalidRequestError: The key has a value that is not a number, or the sum is too large.
        """
        if request_id in self._results:
            return self._results[request_id]
        text = self._values.get(key, b"0")
        try:
            if len(text) > _MAX_COUNTER_DIGITS:
                raise ValueError(f"{len(text)} characters")
            total = int(text) + amount
        except ValueError as error:
            raise InvalidRequestError(f"key {key!r} cannot be added to: its value is not a number") from error
        if not -_MAX_COUNTER <= total < _MAX_COUNTER:
            raise InvalidRequestError(f"key {key!r} cannot be added to: {total} is not a 64-bit number")
        self.set(key, str(total).encode())
        self._note_result(request_id, total)
        return total

    def delete(self, key: str, request_id: str) -> bool:
        """Deletes a key. Returns True if it had a value. A repeated request returns the same."""
        if request_id in self._results:
            return bool(self._results[request_id])
        value = self._values.pop(key, None)
        if value is not None:
            self._size_bytes -= len(value) + len(key.encode())
        self._note_result(request_id, int(value is not None))
        return value is not None

    def _note_result(self, request_id: str, result: int) -> None:
        if request_id:
            self._results[request_id] = result
        if len(self._results) > self._max_keys:
            del self._results[next(iter(self._results))]  # the oldest


class ReplicaStores:
    """The stores of a run's replicas, by replica epoch."""

    def __init__(self) -> None:
        self._stores: dict[int, ReplicaStore] = {}
        self._lost: set[int] = set()

    def note_lost(self, replica_epochs: Iterable[int]) -> None:
        """Records the epochs of a former coordinator, whose stores are lost."""
        self._lost.update(replica_epochs)

    def is_lost(self, replica_epoch: int) -> bool:
        """True if the store of an epoch may have had values that a coordinator restart has lost."""
        return replica_epoch in self._lost

    def open(self, replica_epoch: int) -> ReplicaStore:
        """Returns the store of a replica epoch, which must be current."""
        return self._stores.setdefault(replica_epoch, ReplicaStore())

    def keep(self, replica_epochs: Collection[int]) -> None:
        """Removes the stores of all other epochs, and wakes the requests that wait on them."""
        self._lost.intersection_update(replica_epochs)
        for epoch in self._stores.keys() - set(replica_epochs):
            self._stores.pop(epoch).changed.notify()
