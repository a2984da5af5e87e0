"""Key-value stores in which processes meet: the trainers of a replica, and the agents of torchrun.

All stores are kept in memory only. A store of a replica ends with the replica's epoch: what its trainers agreed on is
void when one of them is lost. A store of torchrun ends when nobody has used it for a while, see ``docs/one-host.md``.
``rpcs/rendezvous_rpcs.py`` decides which store a request may use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shardwell_server.coordinator.signals import Signal, poll
from shardwell_wire.errors import CapacityError, InvalidRequestError

MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 8 << 20

_MAX_COUNTER, _MAX_COUNTER_DIGITS = 1 << 63, 20


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of one kind of stores."""

    max_keys: int
    """Most keys of one store."""
    max_bytes: int
    """Largest size of all keys and values of one store."""
    max_stores: int | None = None
    """Most stores. None: the caller ends stores."""
    idle_s: float = 0.0
    """Seconds without a request after which a store ends, if ``max_stores`` is set."""


REPLICA = StoreLimits(max_keys=1 << 16, max_bytes=64 << 20)
TORCHRUN = StoreLimits(max_keys=4096, max_bytes=1 << 20, max_stores=1024, idle_s=600.0)
"""The state of a rendezvous has some hundred bytes per agent, and the agents write every few seconds."""


class Stores:
    """All stores of one kind, by name or replica epoch."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._stores: dict[str | int, KeyValueStore] = {}
        self._used_s: dict[str | int, float] = {}
        self.lost: set[str | int] = set()
        """Stores of a former coordinator that are still in use, and whose values are lost."""

    def __len__(self) -> int:
        return len(self._stores)

    def open(self, name: str | int) -> KeyValueStore:
        """Returns a store, which is new if there is none of this name. Removes stores that are not in use any more.

        Raises:
            CapacityError: There are too many stores.
        """
        if self._limits.max_stores is not None:
            now, idle_s = self._clock(), self._limits.idle_s
            for each in [each for each, used_s in self._used_s.items() if used_s < now - idle_s]:
                del self._stores[each], self._used_s[each]
            if name not in self._stores and len(self._stores) >= self._limits.max_stores:
                raise CapacityError(
                    f"rendezvous {name!r}: the coordinator has {len(self._stores)} stores of torchrun already, as "
                    f"many as it may have; a store ends {idle_s:g} s after its last use"
                )
            self._used_s[name] = now
        return self._stores.setdefault(name, KeyValueStore(self._limits))

    def keep(self, names: Collection[str | int]) -> None:
        """Removes all other stores, and wakes the requests that wait on them."""
        self.lost.intersection_update(names)
        for name in self._stores.keys() - set(names):
            self._stores.pop(name).changed.notify()


class KeyValueStore:
    """The values that some processes have set. The semantics are those of ``torch.distributed.Store``."""

    def __init__(self, limits: StoreLimits = REPLICA) -> None:
        self.changed = Signal()
        self._limits = limits
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
        if size > self._limits.max_bytes or (former is None and len(self._values) >= self._limits.max_keys):
            raise CapacityError(
                f"the store has {len(self._values)} keys with {self._size_bytes} bytes: it may have at most "
                f"{self._limits.max_keys} keys with {self._limits.max_bytes} bytes"
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
        if len(self._results) > self._limits.max_keys:
            del self._results[next(iter(self._results))]  # the oldest
