"""The trainers of one node that hold the same units, and what they exchange: gloo on CPUs, NCCL between GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, PrefixStore, Store

from shardwell.data_plane.node_rendezvous import NodeRendezvous, Outcome, Round
from shardwell_wire.layout import ALIGNMENT_BYTES

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
"""What moves bytes, by name, and the type of device it moves them between."""

EXCHANGE_LIMIT_S = 20.0
"""All members stand at an exchange when it begins, so it takes no longer than the bytes need."""

_LOOPBACK = "127.0.0.1"
_NCCL_LIMIT = timedelta(minutes=10)
"""Beyond it torch ends the process: an exchange that takes too long is aborted long before."""


class NodeGroup:
    """One member's end of the group. All collectives are begun by one thread.

    Args:
        rendezvous: Where the members agree; the group closes it.
        backend: Of ``torch.distributed``; on the device that is current, with NCCL.
        store: Through which the members find each other; all of them are there.
        rank: This member, from 0.
        size: How many there are.

    Raises:
        RuntimeError: They cannot be connected.
    """

    def __init__(self, rendezvous: NodeRendezvous, backend: str, store: Store, *, rank: int, size: int) -> None:
        self.device_type = BACKENDS[backend]
        self._rendezvous, self._rank, self._size = rendezvous, rank, size
        store = PrefixStore(backend, store)
        # A backend by itself: a ProcessGroup of torch's would be the process's default group, which is the user's.
        self._backend: Any = _gloo(store, rank, size) if backend == "gloo" else _nccl(store, rank, size)

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._size

    def part(self, size_bytes: int) -> tuple[int, int] | None:
        """The half-open range of a vector that this member brings; None if there is not enough for each."""
        body = self._body(size_bytes)
        if not body:
            return None
        last = self._rank == self._size - 1
        return self._rank * body, size_bytes if last else (self._rank + 1) * body

    def decide(self, this_round: Round, what: int, patience_s: float) -> Outcome:
        """See ``NodeRendezvous.decide``."""
        return self._rendezvous.decide(this_round, what, patience_s)

    def call_off(self, this_round: Round) -> None:
        """See ``NodeRendezvous.call_off``."""
        self._rendezvous.call_off(this_round)

    def exchange(self, vector: torch.Tensor) -> None:
        """Brings every member's part to all of them. On a GPU in the current stream's order; else waits.

        Args:
            vector: With this member's part in place. Contiguous uint8, on the backend's device. [size_bytes]

        Raises:
            RuntimeError: A member died meanwhile, or the group was left.
        """
        if (backend := self._backend) is None:
            raise RuntimeError("this trainer left the node's group")
        body = self._body(vector.numel())
        end = body * self._size
        own = vector[self._rank * body : (self._rank + 1) * body]
        backend._allgather_base(vector[:end], own, AllgatherOptions()).wait()
        if end < vector.numel():  # a collective has parts of one size; the last member brings what is left
            options = BroadcastOptions()
            options.rootRank = self._size - 1
            backend.broadcast([vector[end:]], options).wait()

    def _body(self, size_bytes: int) -> int:
        """Bytes of each member's part, but for what is left over."""
        return size_bytes // (self._size * ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def close(self) -> None:
        """Leaves, and gives back what the members have in common. Harmless to repeat."""
        self.leave()
        self._rendezvous.close()

    def leave(self) -> None:
        """Ends what is under way, and no member waits for this one any more. Harmless to repeat."""
        self._rendezvous.leave()
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
    # The communicator is made by the first collective, which should not be one that somebody waits for.
    device = torch.device("cuda", torch.cuda.current_device())
    ones = torch.ones(size, dtype=torch.uint8, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        backend._allgather_base(ones, ones[rank : rank + 1], AllgatherOptions()).wait()
        torch.cuda.current_stream(device).synchronize()
    return backend
