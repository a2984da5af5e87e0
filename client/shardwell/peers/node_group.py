"""The trainers of one node that hold the same units: how they agree on an exchange, and their shared gathers.

Each member fetches a part of a unit, and they exchange the parts. Fetches run ahead; one thread takes their results in
the order of the rounds and exchanges them.

Note: [Order of rounds]
    Members exchange units in the order in which their training threads asked for them, numbered from 0 in every
    version. If a member is late or asks for a different unit, the round is cancelled for all members, and each of them
    works alone for the rest of the version. They exchange again from the next version.

Note: [Node rendezvous]
    A collective cannot be cancelled, and it hangs if a member is missing. So no member starts one before all members
    are known to be at the same exchange. Each exchange is a round. A member records its arrival in a page of shared
    memory, and the last member to arrive decides that the round takes place. A member that waited too long cancels the
    round, and later members see that. A lock makes the two decisions exclusive.

    Each member also holds a lock on a file of its own. The kernel releases the lock of a process that dies, so waiting
    members notice its death.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import logging
import mmap
import os
import queue
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, PrefixStore, Store

from shardwell.data_plane.fetch import Alternative, Fetches, Gather
from shardwell.data_plane.shard import RemoteUnit
from shardwell.module.flat_vector import FlatVector
from shardwell.peers.host_folder import HostFolder, locked, polls, try_lock
from shardwell.transport.shared_vector import map_shared
from shardwell_wire.host.shared_memory import open_file
from shardwell_wire.model.layout import ALIGNMENT_BYTES, UnitLayout

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long to wait for live members. If they arrive later, each member works alone for the rest of the version."""

MAX_FAILURES = 3
"""Consecutive versions with a cancelled round after which the group is disabled."""


class NodeRounds:
    """The rounds of one member. See Note: [Order of rounds].

    Args:
        group: The group, whose members decide together whether a round takes place.
        patience_s: How long to wait for live members.
    """

    def __init__(self, group: NodeGroup, *, patience_s: float = PATIENCE_S) -> None:
        self._group, self._patience_s = group, patience_s
        self._last = Round(-1, 0)
        self._separate_version, self._num_failures = -1, 0
        """The last version with a cancelled round, and the number of such versions in a row."""
        self.left = False
        """True if this member works alone for good."""

    def next(self, version: int) -> Round | None:
        """Starts the next round of a version. None: this member works alone. Called by the training thread."""
        number = self._last.number + 1 if self._last.version == version else 0
        self._last = Round(version, number)
        return None if self.is_closed(version) else self._last

    def is_closed(self, version: int) -> bool:
        """True if this member works alone for the rest of a version, or for good."""
        return self.left or self._separate_version == version

    def agree(self, this_round: Round, unit: int) -> bool:
        """Waits for the other members; returns whether all of them exchange the unit in this round.

        Raises:
            MemberGoneError, OSError: A member is gone, or the members cannot agree. This member has left the group.
        """
        if self.is_closed(this_round.version):
            return False
        try:
            if self._group.rendezvous.decide(this_round, unit, self._patience_s) is Outcome.EXCHANGE:
                return True
        except BaseException as error:
            self.leave(error)
            raise
        if not self.is_closed(this_round.version):
            self._separate(this_round)
        return False

    def cancel(self, this_round: Round) -> None:
        """Cancels a round that this member cannot take part in, and works alone for the rest of the version.

        The other members do not wait for it then.
        """
        self._separate_version = this_round.version
        try:
            self._group.rendezvous.cancel(this_round)
        except OSError as error:
            self.leave(error)

    def leave(self, reason: BaseException | str) -> None:
        """Leaves the group for good."""
        if not self.left:
            self.left = True
            why = str(reason).partition("\n")[0] or type(reason).__name__
            logger.warning("node group: this trainer fetches whole units from now on: %s", why)
            self._group.leave()

    def _separate(self, this_round: Round) -> None:
        """Works alone for the rest of the version, and for good after ``MAX_FAILURES``."""
        version = this_round.version
        self._num_failures = self._num_failures + 1 if self._separate_version == version - 1 else 1
        self._separate_version = version
        if self._num_failures >= MAX_FAILURES:
            self.leave(
                f"in {MAX_FAILURES} consecutive steps its trainers asked for different units, or one was too late"
            )
            return
        logger.warning(
            "node group: gather %d of step %d was cancelled: the trainers of this node asked for different units, or "
            "one did not arrive within %.0f s; each of them fetches whole units for the rest of the step",
            this_round.number,
            version,
            self._patience_s,
        )


BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
"""Backends of ``torch.distributed`` and the types of device between which they move bytes."""

EXCHANGE_LIMIT_S = 20.0
"""Timeout of an exchange. All members are ready when it starts, so only the transfer takes time."""

_LOOPBACK = "127.0.0.1"
_NCCL_LIMIT = timedelta(minutes=10)
"""Timeout after which torch ends the process. An exchange that takes too long is aborted long before."""

_PAGE, _MEMBER = "rendezvous", "member-"
_RECORD = struct.Struct("<7q")
_LOCK_LIMIT_S = 5.0
"""Timeout of the page's lock. It is held for microseconds, unless its holder is suspended."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.001
_LIVENESS_INTERVAL_S = 0.05
"""How often a waiting member checks that the others are alive."""


class Outcome(enum.IntEnum):
    """The outcome of a round."""

    OPEN = 0
    """Some members have not arrived yet."""
    EXCHANGE = 1
    """All members arrived with the same unit, and all of them exchange it."""
    CANCELLED = 2
    """A member was late or had another unit. No member exchanges anything."""


class MemberGoneError(Exception):
    """A member died or left."""


@dataclass(order=True, frozen=True, slots=True)
class Round:
    """Identifies an exchange. A member that is at a round has passed all lower ones."""

    version: int
    number: int
    """Index of the round within the version."""


CONNECTED = Round(-1, 1)
"""The round before all versions, which shows that all members can reach each other."""

_BEFORE_ALL = Round(-1, 0)


@dataclass(slots=True)
class _Record:
    """The contents of the page: the highest round at which any member has arrived, and the last one that took place."""

    version: int
    number: int
    unit: int
    num_arrived: int
    outcome: int
    exchanged_version: int
    exchanged_count: int
    """Number of the last round that took place, plus 1. 0: no round took place."""

    @property
    def round(self) -> Round:
        blank = not self.num_arrived and self.outcome == Outcome.OPEN  # a new file is all zeros
        return _BEFORE_ALL if blank else Round(self.version, self.number)

    def outcome_of(self, former: Round) -> Outcome:
        """Returns the outcome of a round at which the caller arrived, and after which other members are at a later one.

        No later round takes place before the caller arrives there, so the last one that did is still recorded.
        """
        took_place = Round(self.exchanged_version, self.exchanged_count - 1) == former
        return Outcome.EXCHANGE if took_place else Outcome.CANCELLED


class NodeRendezvous:
    """One member's view of the rendezvous. For one thread, except ``close``. See Note: [Node rendezvous].

    Args:
        folder: Shared by the members and by no other process. Closed with the rendezvous.
        rank: Rank of this member in the node.

    Raises:
        OSError: The memory cannot be mapped, or another process has this rank.
    """

    def __init__(self, folder: HostFolder, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._closed, self._is_inside = threading.Event(), True
        self._leaving = threading.Lock()
        self._presence = open_file(self._member_path(rank), write=True, create=True)
        try:
            descriptor = open_file(folder.path / _PAGE, write=True, create=True)
        except BaseException:
            os.close(self._presence)
            raise
        try:
            # Retried, because another member holds the lock for a moment when it checks whether this one is alive.
            if not any(try_lock(self._presence) for _ in polls(_LOCK_LIMIT_S, self._closed)):
                raise BlockingIOError(errno.EWOULDBLOCK, "another process has this rank", self._member_path(rank))
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._memory = map_shared(descriptor, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self._presence)
            raise
        finally:
            os.close(descriptor)

    def meet(self, limit_s: float) -> bool:
        """Waits until all members are present; returns False after ``limit_s``."""
        return any(not self._missing() for _ in polls(limit_s, self._closed))

    def decide(self, this_round: Round, unit: int, patience_s: float) -> Outcome:
        """Arrives at a round and waits for the other members.

        Args:
            this_round: Higher than all rounds at which this member arrived before.
            unit: The unit to exchange. All members must have the same.
            patience_s: How long to wait for the other members.

        Returns:
            ``EXCHANGE`` for all members, or ``CANCELLED`` for all.

        Raises:
            MemberGoneError: A member is gone, so the round is cancelled.
            TimeoutError: The lock of the page could not be acquired.
        """
        with self._changing() as record:
            if record.round < this_round:
                record.version, record.number = this_round.version, this_round.number
                record.unit, record.num_arrived, record.outcome = unit, 0, Outcome.OPEN
            elif record.round > this_round or record.outcome != Outcome.OPEN:
                return Outcome.CANCELLED
            record.num_arrived += 1
            if record.unit != unit:
                record.outcome = Outcome.CANCELLED
            elif record.num_arrived == self._size:
                record.outcome = Outcome.EXCHANGE
                record.exchanged_version, record.exchanged_count = this_round.version, this_round.number + 1
        return self._await(this_round, patience_s)

    def _require_all(self) -> None:
        if self._closed.is_set():
            raise MemberGoneError("this trainer left")
        if missing := self._missing():
            raise MemberGoneError(f"member {missing[0]} of {self._size} is gone")

    def cancel(self, this_round: Round) -> Outcome:
        """Cancels a round unless all members have arrived; returns its outcome. Raises as ``decide``.

        May be called in any thread.
        """
        with self._changing() as record:
            if record.round < this_round:
                record.version, record.number, record.num_arrived = this_round.version, this_round.number, 0
                record.outcome = Outcome.CANCELLED
            elif record.round > this_round:
                return record.outcome_of(this_round)
            elif record.outcome == Outcome.OPEN:
                record.outcome = Outcome.CANCELLED
            return Outcome(record.outcome)

    def leave(self) -> None:
        """Ends the membership. The others notice at their next round. Harmless to repeat."""
        with self._leaving:  # a second close of the descriptor could close another file
            if not self._closed.is_set():
                self._closed.set()
                fcntl.flock(self._presence, fcntl.LOCK_UN)
                os.close(self._presence)

    def close(self) -> None:
        """Leaves the rendezvous and the folder. Harmless to repeat.

        Do not call this as soon as a member is found dead. The kernel may still hold some of its locks, and only the
        last process in the folder removes it.
        """
        self.leave()
        if self._is_inside:
            self._is_inside = False
            self._folder.close()

    def _await(self, this_round: Round, patience_s: float) -> Outcome:
        started = checked = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while True:
            record = self._read()
            if record.round != this_round:
                # The others are at a later round, whose record overwrote this one.
                return record.outcome_of(this_round)
            if record.outcome != Outcome.OPEN:
                return Outcome(record.outcome)
            if self._closed.is_set():
                raise MemberGoneError("this trainer left")
            now = time.monotonic()
            if now - checked > _LIVENESS_INTERVAL_S:
                checked = now
                if missing := self._missing():
                    if self.cancel(this_round) == Outcome.EXCHANGE:
                        # The missing member arrived before it ended, so the other members exchange their parts.
                        return Outcome.EXCHANGE
                    raise MemberGoneError(f"member {missing[0]} of {self._size} is gone")
            if now - started > patience_s:
                return self.cancel(this_round)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank and not self._is_present(rank)]

    def _is_present(self, rank: int) -> bool:
        try:
            descriptor = open_file(self._member_path(rank), write=True)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _member_path(self, rank: int) -> str:
        return str(self._folder.path / f"{_MEMBER}{rank}")

    @contextmanager
    def _changing(self) -> Iterator[_Record]:
        with locked(self._folder.path / _PAGE, _LOCK_LIMIT_S, self._closed):
            record = self._read()
            yield record
            # The record is written in one copy: pack_into clears the fields first, and waiting members read without
            # the lock.
            self._memory[: _RECORD.size] = _RECORD.pack(*astuple(record))

    def _read(self) -> _Record:
        return _Record(*_RECORD.unpack_from(self._memory, 0))


class NodeGroup:
    """One member of the group. A single thread starts all collectives.

    Args:
        rendezvous: The rendezvous of the members. Closed with the group.
        backend: Backend of ``torch.distributed``. With NCCL, on the current device.
        store: Store through which the members find each other. All members are present.
        rank: Rank of this member in the node.

    Raises:
        RuntimeError: The members cannot be connected.
    """

    def __init__(self, rendezvous: NodeRendezvous, backend: str, store: Store, *, rank: int, size: int) -> None:
        self.device_type = BACKENDS[backend]
        self.rendezvous, self._rank, self._size = rendezvous, rank, size
        store = PrefixStore(backend, store)
        # A bare backend, because a ProcessGroup would become the default group of the process, which is the user's.
        self._backend: Any = _gloo(store, rank, size) if backend == "gloo" else _nccl(store, rank, size)

    def part(self, size_bytes: int) -> tuple[int, int] | None:
        """Returns the half-open range of a vector that this member contributes; None if the vector is too small."""
        body = self._body(size_bytes)
        if not body:
            return None
        last = self._rank == self._size - 1
        return self._rank * body, size_bytes if last else (self._rank + 1) * body

    def exchange(self, vector: torch.Tensor) -> None:
        """Distributes every member's part to all members. Blocks on a CPU. Runs in the current stream on a GPU.

        Args:
            vector: With this member's part in place. Contiguous uint8, on the backend's device. [size_bytes]

        Raises:
            RuntimeError: A member died meanwhile, or this member left the group.
        """
        if (backend := self._backend) is None:
            raise RuntimeError("this trainer left the node's group")
        body = self._body(vector.numel())
        end = body * self._size
        own = vector[self._rank * body : (self._rank + 1) * body]
        backend._allgather_base(vector[:end], own, AllgatherOptions()).wait()
        if end < vector.numel():  # an all-gather has parts of equal size; the last member broadcasts the rest
            options = BroadcastOptions()
            options.rootRank = self._size - 1
            backend.broadcast([vector[end:]], options).wait()

    def _body(self, size_bytes: int) -> int:
        """Returns the size of each member's part, without the rest."""
        return size_bytes // (self._size * ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def close(self) -> None:
        """Leaves the group and releases the shared folder. Harmless to repeat."""
        self.leave()
        self.rendezvous.close()

    def leave(self) -> None:
        """Aborts an exchange in flight and ends the membership. Harmless to repeat."""
        self.rendezvous.leave()
        backend, self._backend = self._backend, None
        if backend is not None and self.device_type == "cuda":
            backend.abort()


def _gloo(store: Store, rank: int, size: int) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timedelta(seconds=EXCHANGE_LIMIT_S)
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NCCL_LIMIT
    backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    # The first collective creates the communicator, which takes long. Do it here, where no transfer waits for it.
    device = torch.device("cuda", torch.cuda.current_device())
    ones = torch.ones(size, dtype=torch.uint8, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        backend._allgather_base(ones, ones[rank : rank + 1], AllgatherOptions()).wait()
        torch.cuda.current_stream(device).synchronize()
    return backend


@dataclass(frozen=True, slots=True)
class _SharedGather:
    """A gather in flight."""

    unit: RemoteUnit
    this_round: Round
    target: memoryview
    layout: UnitLayout
    """The dtypes to deliver."""
    vector: FlatVector
    start_bytes: int
    """Half-open range of this member's part."""
    stop_bytes: int
    part: Future[int]
    whole: Gather


class NodeGathers:
    """Shares gathers with the other members of a group. Called by the training thread.

    Args:
        group: The members. Closed with this object.
        fetches: Fetches parts and whole units.
        patience_s: How long to wait for live members.
    """

    def __init__(self, group: NodeGroup, fetches: Fetches, *, patience_s: float = PATIENCE_S) -> None:
        self.shared_bytes = 0
        """Bytes received from other members."""
        self._group, self._fetches = group, fetches
        self._rounds = NodeRounds(group, patience_s=patience_s)
        self._jobs: queue.SimpleQueue[_SharedGather | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._exchange_in_order, name="shardwell-node", daemon=True)
        self._thread.start()

    def gather(
        self,
        unit: RemoteUnit,
        version: int,
        target: memoryview,
        layout: UnitLayout,
        vector: FlatVector,
        alternative: Alternative | None = None,
    ) -> Future[int]:
        """Starts to fetch a unit: this member's part if the group can share the gather, else the whole unit.

        Args:
            unit: The unit. None of its shards is read in place.
            target: The receive buffer of the vector. [layout.size_bytes]
            layout: The dtypes to deliver.
            vector: The vector that the exchange completes.
            alternative: See ``Alternative``.
        """
        part = self._group.part(layout.size_bytes)
        if part is None or vector.device_type != self._group.device_type:
            return self._fetches.gather(unit, version, target, layout, alternative=alternative)
        if (this_round := self._rounds.next(version)) is None:
            return self._fetches.gather(unit, version, target, layout, alternative=alternative)
        own = _part_of(unit, layout, *part)
        gather = _SharedGather(
            unit,
            this_round,
            target,
            layout,
            vector,
            *part,
            part=self._fetches.gather(own, version, target, layout),
            whole=Gather(self._fetches.stats, alternative),
        )
        self._jobs.put(gather)
        return gather.whole

    def leave(self, reason: str) -> None:
        """Leaves the group for good: every unit is fetched whole from now on."""
        self._rounds.leave(reason)

    def close(self) -> None:
        """Leaves the group. Gathers in flight fail once the fetches are closed."""
        self._rounds.left = True
        self._group.close()
        self._jobs.put(None)
        self._thread.join(EXCHANGE_LIMIT_S)

    # ---- in the thread of this object ----

    def _exchange_in_order(self) -> None:
        while (gather := self._jobs.get()) is not None:
            try:
                version = Future.result(gather.part)  # not counted: the training thread does not wait here
            except BaseException as error:
                self._rounds.cancel(gather.this_round)  # the other members do not wait for this part
                gather.whole.fail(error)
                continue
            if self._is_exchanged(gather):
                self.shared_bytes += len(gather.target) - (gather.stop_bytes - gather.start_bytes)
                gather.whole.set_result(version)
            else:
                self._fetch_whole(gather)

    def _is_exchanged(self, gather: _SharedGather) -> bool:
        """Exchanges a gather if all members can; returns whether they did."""
        try:
            if not self._rounds.agree(gather.this_round, gather.unit.index):
                return False
            gather.vector.complete(gather.start_bytes, gather.stop_bytes, self._group.exchange, EXCHANGE_LIMIT_S)
        except Exception as error:  # any error: the training thread waits for this gather
            self._rounds.leave(error)
            return False
        return True

    def _fetch_whole(self, gather: _SharedGather) -> None:
        try:
            whole = self._fetches.gather(gather.unit, gather.this_round.version, gather.target, gather.layout)
        except BaseException as error:
            gather.whole.fail(error)
        else:
            whole.add_done_callback(gather.whole.finish_as)


def _part_of(unit: RemoteUnit, layout: UnitLayout, start_bytes: int, stop_bytes: int) -> RemoteUnit:
    """Returns the part of a unit that fills a range of the delivered vector."""
    start, stop = (_stored_byte(unit.layout, layout, byte) for byte in (start_bytes, stop_bytes))
    shards = (
        shard.narrowed(max(start, shard.start_bytes), min(stop, shard.stop_bytes))
        for shard in unit.shards
        if max(start, shard.start_bytes) < min(stop, shard.stop_bytes)
    )
    return replace(unit, shards=tuple(shards))


def _stored_byte(stored: UnitLayout, delivered: UnitLayout, byte: int) -> int:
    """Returns the offset in ``stored`` of the element at a byte of ``delivered``.

    A byte in the padding after a parameter's last element maps to the end of that parameter.
    """
    if stored == delivered or byte == 0:
        return byte
    if byte == delivered.size_bytes:
        return stored.size_bytes
    index = bisect_right(delivered.starts, byte) - 1
    element = min(
        (byte - delivered.starts[index]) // delivered.parameters[index].item_size, stored.parameters[index].numel
    )
    return stored.starts[index] + element * stored.parameters[index].item_size
