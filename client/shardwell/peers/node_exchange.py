"""Shows gradients to the other trainers of a node, in shared memory.

Note: [Gradient slots]
    Every member has two slots, which the rounds of a group use in turn. A member writes the gradient of a unit into its
    slot before it arrives at the round. When the round takes place, all slots are complete, and every member reads
    them. Afterwards the member records that it is done with the round. A slot is written again when all members are
    done with the last round in which it was read. A slot stays readable when its member dies.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from shardwell.data_plane.shard import RemoteUnit
from shardwell.peers.gradient_sums import Shown, WholeGradient
from shardwell.peers.node_group import PATIENCE_S, NodeRendezvous, NodeRounds, Round
from shardwell.transport.shared_vector import map_shared
from shardwell_wire.encoding.quantization_blocks import bytes_tensor
from shardwell_wire.host.shared_memory import open_file, opened
from shardwell_wire.model.layout import ALIGNMENT_BYTES, UnitLayout
from shardwell_wire.security.tokens import PROOF_BYTES

_SLOTS = 2
_HEADER = struct.Struct(f"<4q{PROOF_BYTES}s")
_DONE = "done"
_ROUNDS_PER_VERSION = 1 << 24


class SharedGradients:
    """The slots of all members. See Note: [Gradient slots]. For one thread.

    Args:
        folder: Shared by the members and by no other process.
        position: Index of this member.
        size: Number of members.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, folder: Path, position: int, size: int) -> None:
        self._folder, self._position, self._size = folder, position, size
        self._maps: dict[tuple[int, int], memoryview] = {}
        """Mapped slots, by member and slot."""
        self._last_read = [0] * _SLOTS
        """The last round in which each own slot was read."""
        with opened(open_file(folder / _DONE, write=True, create=True)) as descriptor:
            size_bytes = size * np.dtype(np.int64).itemsize
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._done = np.frombuffer(map_shared(descriptor, size_bytes, _READ_WRITE), np.int64)

    def is_free(self, this_round: Round) -> bool:
        """True if all members are done with this member's slot of the round."""
        last = self._last_read[this_round.number % _SLOTS]
        return bool((np.delete(self._done, self._position) >= last).all())

    def write(self, this_round: Round, layout: UnitLayout, gradient: WholeGradient) -> None:
        """Writes the gradient of a unit into this member's slot, which is free.

        Raises:
            OSError: There is not enough shared memory.
        """
        offset, indices = _offset(layout), sorted(gradient.flats)
        memory = self._own_slot(this_round.number % _SLOTS, offset + layout.size_bytes)
        _HEADER.pack_into(
            memory, 0, gradient.epoch, gradient.attempt, gradient.cuts, len(indices), gradient.lease_proof
        )
        np.frombuffer(memory, np.int32, len(indices), _HEADER.size)[:] = indices
        for index in indices:
            _view(memory, offset, layout, index).copy_(gradient.flats[index])

    def read_all(self, this_round: Round, layout: UnitLayout) -> list[WholeGradient]:
        """Returns the gradients of all members, after all of them arrived at the round. Valid until ``end_round``.

        Raises:
            OSError: The memory of another member cannot be mapped.
        """
        self._last_read[this_round.number % _SLOTS] = _position_of(this_round)
        return [self._read(member, this_round.number % _SLOTS, layout) for member in range(self._size)]

    def end_round(self, this_round: Round) -> None:
        """Records that this member does not read the slots of the round any more."""
        self._done[self._position] = _position_of(this_round)

    def _read(self, member: int, slot: int, layout: UnitLayout) -> WholeGradient:
        offset = _offset(layout)
        memory = self._slot(member, slot, offset + layout.size_bytes)
        epoch, attempt, cuts, count, lease_proof = _HEADER.unpack_from(memory, 0)
        indices = np.frombuffer(memory, np.int32, count, _HEADER.size).tolist()
        flats = {index: _view(memory, offset, layout, index) for index in indices}
        return WholeGradient(epoch, lease_proof, attempt, cuts, flats)

    def _own_slot(self, slot: int, size_bytes: int) -> memoryview:
        """Returns this member's slot, enlarged to at least ``size_bytes``."""
        memory = self._maps.get((self._position, slot))
        if memory is None or len(memory) < size_bytes:
            with opened(open_file(self._path(self._position, slot), write=True, create=True)) as descriptor:
                os.posix_fallocate(descriptor, 0, size_bytes)  # writes to memory that does not exist would kill
                memory = self._maps[self._position, slot] = map_shared(descriptor, size_bytes, _READ_WRITE)
        return memory

    def _slot(self, member: int, slot: int, size_bytes: int) -> memoryview:
        """Returns a member's slot, which has at least ``size_bytes``."""
        memory = self._maps.get((member, slot))
        if memory is None or len(memory) < size_bytes:
            with opened(open_file(self._path(member, slot))) as descriptor:
                size_bytes = os.fstat(descriptor).st_size
                memory = self._maps[member, slot] = map_shared(descriptor, size_bytes, mmap.PROT_READ)
        return memory

    def _path(self, member: int, slot: int) -> Path:
        return self._folder / f"gradient-{member}-{slot}"


_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def _position_of(this_round: Round) -> int:
    """Returns a number above 0 that rises with the rounds."""
    return this_round.version * _ROUNDS_PER_VERSION + this_round.number + 1


def _offset(layout: UnitLayout) -> int:
    """Returns the start of the flat vector in a slot, after the header and the indices."""
    size_bytes = _HEADER.size + len(layout.parameters) * np.dtype(np.int32).itemsize
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _view(memory: memoryview, offset: int, layout: UnitLayout, index: int) -> torch.Tensor:
    parameter, start = layout.parameters[index], offset + layout.starts[index]
    dtype: torch.dtype = getattr(torch, parameter.dtype)
    return bytes_tensor(memory)[start : start + parameter.size_bytes].view(dtype)


logger = logging.getLogger(__name__)


class NodeExchange:
    """An ``Exchange`` in shared memory. If a member is late or has another unit, the round does not take place.

    Args:
        rendezvous: The rendezvous of the members. Closed with this object.
        memory: The memory in which the members show each other their gradients.
        patience_s: How long to wait for live members.
    """

    def __init__(self, rendezvous: NodeRendezvous, memory: SharedGradients, *, patience_s: float = PATIENCE_S) -> None:
        self._rendezvous, self._memory, self._patience_s = rendezvous, memory, patience_s
        self._rounds = NodeRounds(rendezvous, name="sum", alone="pushes its own gradients", patience_s=patience_s)

    @property
    def active(self) -> bool:
        """See ``Exchange``."""
        return not self._rounds.left

    def start_round(self, version: int) -> Round | None:
        """See ``Exchange``."""
        return self._rounds.next(version)

    def offer(
        self,
        this_round: Round,
        unit: RemoteUnit,
        own: WholeGradient,
        copied: Callable[[], None],
        sent: Callable[[], None],
    ) -> None:
        """See ``Exchange``. The gradient is written to shared memory by ``collect``, when a slot is free."""
        sent()

    def collect(
        self, this_round: Round, unit: RemoteUnit, own: WholeGradient, is_over: Callable[[], bool]
    ) -> Sequence[Shown] | None:
        """See ``Exchange``."""
        if is_over():
            self._rounds.skip(this_round.version)
        if self._rounds.is_closed(this_round.version):
            return None
        if not self._rendezvous.wait_for(lambda: self._memory.is_free(this_round), self._patience_s):
            self._rounds.cancel(this_round)
            return None
        try:
            self._memory.write(this_round, unit.layout, own)
        except OSError as error:  # shared memory is full
            logger.warning("node group: the gradient of %s cannot be shared: %s", unit.layout.unit, error)
            self._rounds.cancel(this_round)
            return None
        return self._memory.read_all(this_round, unit.layout) if self._rounds.agree(this_round, unit.index) else None

    def end_round(self, this_round: Round) -> None:
        """See ``Exchange``."""
        self._memory.end_round(this_round)

    def finish_version(self, version: int) -> None:
        """See ``Exchange``. Nothing to do: a member that expects more waits for a limited time."""

    def skip(self, version: int) -> None:
        """See ``Exchange``."""
        self._rounds.skip(version)

    def leave(self, reason: BaseException | str) -> None:
        """See ``Exchange``."""
        self._rounds.leave(reason)

    def stop(self) -> None:
        """See ``Exchange``."""
        self._rounds.left = True
        self._rendezvous.leave()

    def close(self) -> None:
        """See ``Exchange``."""
        self._rendezvous.close()
