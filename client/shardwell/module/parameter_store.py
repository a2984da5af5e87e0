"""The interface between the sharded module and the run.

The sharded module (``units.py`` and below) does not handle steps, ranks or servers. The run (``session/``) does not
handle autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwell.module.flat_vector import FlatVector
from shardwell_wire.model.layout import Segment, UnitLayout
from shardwell_wire.v1 import initialization_pb2


class InPlaceVector(Protocol):
    """A unit's flat vector, in memory that the store shares with this process."""

    @property
    def bytes(self) -> torch.Tensor:
        """The vector. Its address never changes. Writes of this process are private to it. uint8. [size_bytes]"""
        ...

    @property
    def exact(self) -> bool:
        """True if the values are those on the servers, False if they are rounded."""
        ...

    def shows(self, version: int) -> bool:
        """Whether the bytes belong to ``version`` now. For bytes read before, call ``order_loads`` first."""
        ...

    def check(self, version: int) -> None:
        """Raises VersionGoneError if the bytes no longer belong to ``version``."""
        ...

    def forget_writes(self) -> int | None:
        """Undoes writes of this process; returns the offset of a byte at or shortly before the first write, if any."""
        ...


class InitialValues(Protocol):
    """The values of a new unit. They are read only if this trainer uploads them."""

    @property
    def draws(self) -> Mapping[int, initialization_pb2.ParameterDraw]:
        """How the servers draw parameters, by parameter index. All other parameters are read."""
        ...

    def read(self, segment: Segment) -> Iterator[bytes | memoryview]:
        """Yields the bytes of a part of a parameter, in pieces that stay valid. Called repeatedly and in any thread."""
        ...


@dataclass(frozen=True, slots=True)
class FlatValues:
    """Initial values in a unit's flat vector, in this process's memory.

    Args:
        flat: The whole vector. [size_bytes]
    """

    flat: memoryview

    @property
    def draws(self) -> Mapping[int, initialization_pb2.ParameterDraw]:
        """An empty mapping: the servers draw nothing."""
        return {}

    def read(self, segment: Segment) -> Iterator[memoryview]:
        """See ``InitialValues.read``."""
        yield self.flat[segment.start_bytes : segment.stop_bytes]


@dataclass(frozen=True, slots=True)
class NewValues:
    """How a new unit gets its values.

    Args:
        elsewhere: The values, unless they are in the parameters or computed by ``initialize``.
        blank: Indices of the parameters without values.
        initialize: Initialises blank parameters, once they have memory, and blank buffers.
    """

    elsewhere: InitialValues | None = None
    blank: frozenset[int] = frozenset()
    initialize: Callable[[], None] = lambda: None


class ParameterStore(Protocol):
    """Stores every unit's parameters.

    Methods are called from the training thread and from autograd's threads, never concurrently.
    """

    @property
    def gradients(self) -> GradientStore:
        """Takes the gradients of the units."""
        ...

    def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
        """Declares a unit to the run. One trainer of the run also uploads the initial values.

        Args:
            layout: Layout of the unit.
            initial_values: Values of version 0.

        Returns:
            The unit's index in the run.

        Raises:
            UnitMismatchError: The run has a unit with this name and another layout.
            CapacityError: The servers have too little memory for the unit.
        """
        ...

    def gather(
        self,
        unit_index: int,
        target: memoryview | None,
        *,
        exact: bool = False,
        layout: UnitLayout | None = None,
        vector: FlatVector | None = None,
    ) -> Future[int]:
        """Starts to fetch the version that the current step reads.

        Args:
            unit_index: The unit.
            target: Receives the flat vector, padding included. The view keeps the memory alive, and the memory is not
                moved or reused until the future is done. None: ``vector`` is on a GPU, and gets the bytes by
                ``FlatVector.copier``, or in a receive buffer that the store asks for. [layout.size_bytes]
            exact: Deliver the stored values, also if the trainer otherwise computes with rounded values.
            layout: The unit's parameters in the dtypes to deliver, if these differ from the stored dtypes. The gaps
                in ``target`` are then undefined.
            vector: The vector whose receive buffer is ``target``, if the store may receive only a part of it there
                and exchange the rest with other processes.

        Returns:
            A future of the version that was fetched.
        """
        ...

    def gathering_together(self) -> AbstractContextManager[None]:
        """Collects the gathers that start while the context is open, and sends them together when it ends.

        The training thread must not wait for any of them before.
        """
        ...

    def gather_average(self, unit_index: int, target: memoryview, version: int | None = None) -> None:
        """Fetches the moving average of a version. None: the one that the current step reads. [layout.size_bytes]

        Raises:
            StepStateError: No step has been averaged.
            VersionGoneError: A later version has replaced it.
            StaleEpochError: This trainer is no member of the run now, and the version of its step was not there.
        """
        ...

    def in_place(self, unit_index: int) -> InPlaceVector | None:
        """Returns the unit's flat vector in the store's memory, if this process can read it; always the same one."""
        ...

    def wrote_in_place(self) -> bool:
        """Returns whether this process has written to a vector that it reads in place.

        If so, ``InPlaceVector.forget_writes`` finds and undoes the writes.
        """
        ...

    def fetches_in_place(self) -> bool:
        """Returns whether a gather of a vector that is read in place may fetch bytes from a server."""
        ...

    def share_on_host(self, unit_index: int) -> bool:
        """Makes the trainers of this host share one copy of a unit, unless they already do.

        No gather of the unit may be running. Afterwards, ``in_place`` returns the copy.

        Returns:
            False if the host has too little shared memory.
        """
        ...

    def present_version(self, unit_index: int) -> int | None:
        """Gathers a vector that is read in place, if its version is there without waiting.

        Returns:
            The version that the current step reads, if the vector has it; otherwise None: see ``await_version``.
        """
        ...

    def await_version(self, unit_index: int) -> Callable[[], int]:
        """Starts to wait until a vector that is read in place has the version that the current step reads.

        Returns:
            A function that waits in the calling thread and returns the version.
        """
        ...

    def abandons_work(self) -> bool:
        """Called when the version that a forward or backward reads was replaced while it was read in place.

        Returns:
            True if the current work item does not count any more: it is then computed to its end without effect.
        """
        ...


class GradientStore(Protocol):
    """Takes the gradients of a ``ParameterStore``'s units. Called as the store is."""

    def streams_gradients(self, unit_index: int) -> bool:
        """True if pushes of a unit are sent in the background, False if they are copied to shared memory at once."""
        ...

    def compare(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Reports gradients of the current work item that other tensor-parallel ranks compute, too, for a comparison.

        Called before ``push`` by the rank that pushes the unit, and by all others.

        Args:
            unit_index: The unit.
            gradients: As for ``push``. Not changed, and not read after the call returns, unless they are on a GPU.

        Raises:
            UsageError: No work item is in progress.
        """
        ...

    def push(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Starts to send one part of the current work item's gradient of a unit.

        Takes ownership of the tensors: the caller must not change them. Blocks while too many bytes are in flight. A
        failure is raised by a later call or by ``drain``.

        Args:
            unit_index: The unit.
            gradients: ``(parameter index, gradient)`` by rising index; dense, of the parameter's shape
                and dtype, on any device.

        Raises:
            UsageError: No work item is in progress, because the step's gradients are complete.
        """
        ...

    def may_keep(self, unit_index: int) -> bool:
        """True if the servers may keep gradients of a unit from earlier steps, for another optimizer."""
        ...

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """Drops the gradients of some parameters of a unit, of the current work item and of earlier steps."""
        ...

    def discard(self) -> None:
        """Withdraws all pushes of the current work item; no effect if there are none."""
        ...
