"""The remote parameters as a sharded module sees them.

The seam between the sharded module (``units.py`` and what it uses) and the run (``session.py`` and
what it uses): the module knows nothing of steps, ranks and servers, the run nothing of autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from shardwell.memory.completion import Completable
from shardwell_wire.layout import Segment, UnitLayout
from shardwell_wire.v1 import initialization_pb2


class InPlaceVector(Protocol):
    """A unit's flat vector in memory that the store shares with this process."""

    @property
    def bytes(self) -> torch.Tensor:
        """Stays where it is; what this process writes there stays its own. uint8. [size_bytes]"""
        ...

    @property
    def exact(self) -> bool:
        """Whether the values are those that the store holds, not rounded."""
        ...

    def check(self, version: int) -> None:
        """Raises VersionGoneError unless the bytes have been of this version since they were waited for."""
        ...

    def forget_writes(self) -> int | None:
        """Drops what this process wrote; returns a byte at or shortly before the first write, if there was one."""
        ...


class InitialValues(Protocol):
    """The values of a new unit; asked for them only where this trainer is the one to upload them."""

    @property
    def draws(self) -> Mapping[int, initialization_pb2.ParameterDraw]:
        """By parameter index: what the servers draw; the other parameters are read."""
        ...

    def read(self, segment: Segment) -> Iterator[bytes | memoryview]:
        """The bytes of a part of a parameter, in pieces that stay valid; from any thread, and again if asked again."""
        ...


class ParameterStore(Protocol):
    """Holds every unit's parameters and takes their gradients.

    Methods are called from the training thread and from autograd's threads, never concurrently.
    """

    def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
        """Makes a unit known and, where this trainer is the one to do it, uploads its values.

        Args:
            layout: The unit.
            initial_values: What it holds at first.

        Returns:
            The unit's index in the run.

        Raises:
            UnitMismatchError: The run has a unit of this name with another layout.
            CapacityError: The servers have no room for it.
        """
        ...

    def gather(
        self,
        unit_index: int,
        target: memoryview,
        *,
        exact: bool = False,
        layout: UnitLayout | None = None,
        vector: Completable | None = None,
    ) -> Future[int]:
        """Starts to fetch the version that the current step reads.

        Args:
            unit_index: The unit.
            target: Receives the flat vector, padding included; the caller keeps the memory alive and
                in place until the future is done. [layout.size_bytes]
            exact: As it is stored, also where the trainer computes with rounded values.
            layout: The unit's parameters in the dtypes to deliver, if those are others than it is stored in;
                then the gaps in ``target`` have no meaning.
            vector: What ``target`` is the receive buffer of, if the store may also have a part of it received, and
                the rest come from other processes to the vector's own memory.

        Returns:
            A future of the version fetched.
        """
        ...

    def gather_average(self, unit_index: int, target: memoryview) -> None:
        """Fetches the moving average of the version that the current step reads. [layout.size_bytes]

        Raises:
            StepStateError: No step was averaged.
        """
        ...

    def in_place(self, unit_index: int) -> InPlaceVector | None:
        """The unit's flat vector where the store keeps it, if this process can read it there; never another."""
        ...

    def share_on_host(self, unit_index: int) -> bool:
        """Has the processes of this host keep one copy of a unit together, unless they do; returns whether they can.

        Nothing of the unit is being gathered. Afterwards ``in_place`` may return what it did not before.
        """
        ...

    def streams_gradients(self, unit_index: int) -> bool:
        """Whether a push of a unit travels in the background, rather than being copied to shared memory at once."""
        ...

    def await_version(self, unit_index: int) -> Future[int]:
        """Starts to wait until a vector that is read in place is of the version that the current step reads."""
        ...

    def push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Starts to send one part of the current work item's gradient of a unit.

        Takes over the tensors: the caller does not change them any more. Waits while too many bytes
        are in flight. A failure is raised by a later call or by ``drain``.

        Args:
            unit_index: The unit.
            gradients: ``(parameter index, gradient)`` by rising index; dense, of the parameter's shape
                and dtype, on any device.

        Raises:
            UsageError: No work item is in progress: the step's gradients are complete.
        """
        ...

    def may_keep(self, unit_index: int) -> bool:
        """Whether the servers may have gradients of a unit that earlier steps left for another optimizer's."""
        ...

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """Drops the gradients of some parameters of a unit: of the current work item, and of earlier steps."""
        ...

    def drain(self) -> None:
        """Waits until everything pushed is acknowledged; raises what went wrong."""
        ...

    def discard(self) -> None:
        """Withdraws everything pushed for the current work item; harmless if nothing was."""
        ...
