"""One unit: parameters that are gathered and freed together.

A unit's parameters are placed in its flat vector once, when the unit is made. Gathering allocates the vector's memory
and lets the store write into it. Freeing releases the memory. Tensors that autograd saves from the parameters are views
of the vector, so they take no memory while the unit is freed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from shardwell.memory.buffers import VectorMemory, trim
from shardwell.memory.device_copies import Arrival, is_gpu
from shardwell.module.flat_vector import FlatVector
from shardwell.module.mixed_precision import AS_STORED, MixedPrecisionPolicy, Precision, local_part
from shardwell.module.parameter_store import FlatValues, InPlaceVector, NewValues, ParameterStore
from shardwell.module.parameters import OWNER_ATTRIBUTE, FoundParameter, UnitParameters
from shardwell.module.residency import ResidentUnit, UnitState
from shardwell.transport.shared_vector import order_loads
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.model.layout import UnitLayout


class Unit(ResidentUnit):
    """The parameters of one ``fully_shard`` call.

    Args:
        layout: Names, shapes and positions of the parameters.
        found: The parameters, in layout order, on one device. Their values are uploaded and freed.
        modules: The modules whose forward uses the parameters.
        store: Holds the values.
        memory: Provides and counts the memory of flat vectors.
        values: Source of the initial values.
        policy: The dtypes to compute in.
        reading: Context of reads that are independent of training.
    """

    def __init__(
        self,
        layout: UnitLayout,
        found: Sequence[FoundParameter],
        modules: Sequence[nn.Module],
        store: ParameterStore,
        memory: VectorMemory,
        values: NewValues,
        policy: MixedPrecisionPolicy = AS_STORED,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.layout = layout
        self.precision = Precision(policy, layout)
        size_bytes = self.precision.layout.size_bytes
        super().__init__(memory, size_bytes=size_bytes, own_bytes=size_bytes)
        self.parameters = tuple(entry.parameter for entry in found)
        self.sites = tuple(tuple(entry.sites) for entry in found)
        self.modules = tuple(modules)
        self.usage = Usage()
        self.pushed = False
        """True if a gradient was pushed that is not committed yet."""
        self.gradient_read = False
        """True if the script has read a hidden gradient of the unit's model."""
        self.siblings: Callable[[], Iterable[Unit] | None] = lambda: None
        """Returns all units of the session."""
        self.gather_for_reader: Callable[[Owner, FrameType | None], bool] = lambda owner, frame: False
        """See ``outside_reads.py``."""
        self.pushes = True
        """False if another tensor-parallel rank, which computes the same gradients, pushes them."""
        self.tp_replicated = False
        """True if all tensor-parallel ranks compute the same gradients."""
        self.generation = 0
        """Incremented when all earlier graphs become unusable."""
        self.is_current = False
        """True if the servers are known to have the version that the step reads."""
        self._store, self._reading = store, reading
        self._pool = memory.pool
        self._device = self.parameters[0].device
        self.device_type = self._device.type
        """The device that the unit computes on."""
        self._on_gpu = is_gpu(self._device)
        self._flat = FlatVector(self.precision.layout, self._device, memory)
        self.storage = self._flat.storage
        """The flat vector's memory; while freed it is empty or reads as NaN."""
        self.gradients = LocalGradients(self.parameters, self.precision, self._flat)
        self.shared: InPlaceVector | None = None
        """The flat vector, if it is read in place."""
        self.in_flight: Future[int] | None = None
        """The latest gather into memory of this process, until its bytes are used."""
        self._await_version: Callable[[], int] | None = None
        """Waits for the version that a gather in place has requested."""
        self.version = -1
        """The version that was gathered last. Negative: unknown."""
        self.held = UnitParameters(layout, found)
        """The parameter objects, which the modules hold."""
        self.index = self._upload(values, memory)

    @property
    def name(self) -> str:
        return self.layout.unit

    def _upload(self, values: NewValues, memory: VectorMemory) -> int:
        """Uploads the initial values in the dtypes of the servers, frees the parameters and returns the unit index."""
        casts = self.precision.casts
        # With mixed precision, the values are uploaded from a second vector in the dtypes of the servers.
        flat = FlatVector(self.layout, self._device, memory) if casts else self._flat
        flat.allocate()
        places = [flat.place(index) for index in range(len(self.parameters))]
        try:
            for index in values.blank:  # parameters from the meta device get memory here
                self.held.place(index, places[index])
            if values.elsewhere is None:
                self.held.copy_to(places, skip=values.blank)
            values.initialize()
            unit_index = self._store.declare(self.layout, values.elsewhere or FlatValues(flat.send_buffer()))
        except BaseException:
            flat.release()
            raise
        if casts:
            flat.release()
            self._flat.allocate()
            places = [self._flat.place(index) for index in range(len(self.parameters))]
        self.held.place_all(places)
        for index, parameter in enumerate(self.parameters):
            setattr(parameter, OWNER_ATTRIBUTE, Owner(self, index))
        for parts, index in self.held.divided.items():
            setattr(parts.whole, OWNER_ATTRIBUTE, Owner(self, index))
        self._release()
        self._read_in_place(unit_index)
        self._pool.trim()
        trim()  # returns the memory of the original parameters to the system
        return unit_index

    def _read_in_place(self, unit_index: int) -> None:
        """Moves the flat vector of a freed unit to the store's memory, if this process can read the memory."""
        can_read = self.device_type == "cpu" and not self._on_gpu and not self.precision.casts
        shared = self._store.in_place(unit_index) if can_read else None
        if shared is None or self.shared is not None:
            return
        self._flat.use_shared(shared.bytes)
        self.storage, self.own_bytes = self._flat.storage, 0
        self.shared = shared
        self.held.place_all([self._flat.place(index) for index in range(len(self.parameters))])

    def share_on_host(self) -> bool:
        """Moves the values of a freed unit to memory that the trainers of this host share.

        Existing graphs become unusable.

        Returns:
            False if the host has no shared memory for the unit.
        """
        assert self.state is UnitState.FREED
        if not self._store.share_on_host(self.index):
            return False
        self._read_in_place(self.index)
        return True

    # Gathering and freeing.

    def unshard_at_once(self) -> bool:
        """Makes the parameters usable without waiting, if the values are present. Returns whether it did."""
        state = self.state
        if state is UnitState.FREED or state is UnitState.STALE:
            version = None if self.shared is None else self._store.present_version(self.index)
            if version is None:
                return False
            self.version, self.is_current = version, True
        elif state is not UnitState.KEPT:
            self.unshard()
            return True
        self.held.allow()
        if self.own_bytes:
            self._set_state(UnitState.UNSHARDED)
        else:  # no memory to count
            self.state = UnitState.UNSHARDED
        return True

    def start_gather(self) -> None:
        """Starts to gather in the background, unless the values are gathered or being fetched."""
        state = self.state
        if state is UnitState.FREED:
            self._flat.allocate()
        # A stale replica keeps its memory; in all other states the values are present or being fetched.
        elif state is not UnitState.STALE:
            return
        self._set_state(UnitState.FETCHING)
        try:
            if self.shared is not None:
                self._await_version = self._store.await_version(self.index)
            else:
                flat = self._flat
                arrival = flat.expect() if self._on_gpu else None
                buffer = None if arrival is not None else flat.receive_buffer()
                self.in_flight = self._store.gather(self.index, buffer, layout=self.precision.layout, vector=flat)
                if arrival is not None:
                    # The thread that fetched the unit starts the copy to the GPU, so the training thread does not wait
                    # for the bytes.
                    self.in_flight.add_done_callback(partial(_begin_device_copy, arrival))
        except BaseException as error:
            # After Ctrl-C, a gather may be running although there is no future to wait for.
            self.in_flight = None
            self._release(reusable=isinstance(error, Exception))
            raise

    def unshard(self) -> None:
        """Waits for the values and makes the parameters usable.

        Raises:
            UsageError: A module holds another parameter than the one that was sharded.
            ShardwellError: The gather failed; the unit is freed.
        """
        state = self.state
        if state is UnitState.UNSHARDED:
            self.held.end_watch()
            return
        if state is not UnitState.KEPT:
            self.held.check_holders()  # before the wait for the values
            self._receive()
        self.held.allow()
        if self.own_bytes:
            self._set_state(UnitState.UNSHARDED)
        else:  # no memory to count
            self.state = UnitState.UNSHARDED

    def _receive(self) -> None:
        if self.state is not UnitState.FETCHING:
            self.start_gather()
        try:
            if self._await_version is not None:
                self.version = self._await_version()
            else:
                assert self.in_flight is not None
                self.version = self.in_flight.result()
            self.is_current = True
            self._flat.receive()
        except Exception:  # not KeyboardInterrupt: then the gather continues, and the next use waits for it
            self.free()
            raise
        self.in_flight = self._await_version = None

    def require_current(self) -> None:
        """Waits until the servers have the version that the step reads, as a gather does.

        Before that, a server may still read the last step's gradients in the buffer that the next push overwrites.
        """
        if not self.is_current:
            if self.shared is not None:
                self._store.await_version(self.index)()
            else:
                self.gather_copy()
            self.is_current = True

    @property
    def hides_gradients(self) -> bool:
        """True if the unit has gradients that ``.grad`` does not show: pushed, or summed in another dtype."""
        return self.pushed or self.gradients.hidden

    def watch_gradients(self) -> None:
        """Makes ``.grad`` of gathered parameters warn until their next use, if it does not show their gradients."""
        if self.state is UnitState.UNSHARDED and self.hides_gradients:
            self.held.watch()

    def end_watch(self) -> None:
        """Ends ``watch_gradients``."""
        self.held.end_watch()

    def drop_kept_gradients(self) -> None:
        """Drops the gradients of earlier steps that the servers keep because no optimizer has used them."""
        gradients = self._store.gradients
        if self.pushes and gradients.may_keep(self.index):
            gradients.drop(self.index, range(len(self.parameters)))

    def keep(self) -> None:
        """Makes the parameters unusable and keeps the values for the next use in the step."""
        assert self.state is UnitState.UNSHARDED
        self.held.forbid()
        if self.own_bytes:
            self._set_state(UnitState.KEPT)
        else:  # no memory to count
            self.state = UnitState.KEPT

    def free(self) -> None:
        """Releases the memory, after waiting for a gather that is running."""
        if self.state is UnitState.FREED:
            return
        if self.in_flight is not None or self._await_version is not None:
            self._end_gather()
        self._release()

    def expire(self) -> None:
        """Makes a replica stale: the values are old, and the memory stays for the next version."""
        self._end_gather()
        self.held.forbid()
        self.held.mark_freed()
        self._flat.abandon()
        self._set_state(UnitState.STALE)

    def _end_gather(self) -> None:
        if self.in_flight is not None:
            wait([self.in_flight])  # the gather writes into the memory
        self.in_flight = self._await_version = None

    def forget_graphs(self) -> None:
        """Makes all existing graphs unusable."""
        self.generation += 1
        self.held.forget_graphs()
        if self.state is UnitState.UNSHARDED:
            self.held.allow()

    def _release(self, *, reusable: bool = True) -> None:
        in_place = self._flat.in_place
        if not in_place:
            self.gradients.leave_memory()
        if self.state is not UnitState.KEPT:  # the parameters of a kept unit are unusable already
            self.held.forbid()
        self.held.mark_freed()
        if in_place:  # no memory to release or to count
            self.state = UnitState.FREED
        else:
            self._flat.release(reusable=reusable)
            self._set_state(UnitState.FREED)

    def detach_parameters(self, device: torch.device | str | None) -> None:
        """Makes the parameters ordinary ones, with the values that the step reads. The unit must not be used again.

        Args:
            device: Where to put the values. None: the device that the unit computes on.
        """
        self.free()
        flat = self.gather_copy()
        self.held.detach(
            # The values are copied, because a parameter must not keep the memory of the whole unit.
            [self.read(flat, index).to(device or self._device, copy=True) for index in range(len(self.parameters))]
        )

    # Checks.

    def written_parameter(self) -> str | None:
        """Returns the name of a parameter that was written in place, or given other data, since it was gathered."""
        if self.state is not UnitState.UNSHARDED or not (changed := self.held.written()):
            return None
        for index in changed:  # parameters that were given other data return to the flat vector
            self.held.place(index, self._flat.place(index))
        self.written_page()
        return self.layout.parameters[changed[0]].name

    def note_data_read(self, index: int) -> None:
        """Called before ``parameter.data`` is read. ``written_parameter`` then also finds writes to the result."""
        if self.state is UnitState.UNSHARDED and self.shared is None:  # `written_page` finds all writes otherwise
            self.held.note_data_read(index)

    def written_page(self) -> str | None:
        """Returns the name of a parameter that was written in the store's shared memory, and undoes the write.

        Also finds writes that torch does not count.
        """
        byte = None if self.shared is None else self.shared.forget_writes()
        if byte is None:
            return None
        return next(
            specification.name
            for specification, start in zip(self.layout.parameters, self.layout.starts, strict=True)
            if start + specification.size_bytes > byte
        )

    def check_version(self) -> None:
        """Checks that bytes that are read in place did not change while in use. See also ``check_versions``.

        Raises:
            VersionGoneError: They changed, and the result of the current work item counts. The unit is freed.
        """
        order_loads()
        if self.shared is None or self.shared.shows(self.version):
            return
        if self.version < 0 or self.state not in (UnitState.UNSHARDED, UnitState.KEPT):
            return
        try:
            self.shared.check(self.version)
        except VersionGoneError:
            if not self._store.abandons_work():
                self.free()
                raise
            self.version = -1  # a forward or backward may be using the unit

    # Reads that are independent of training.

    def gather_copy(self) -> torch.Tensor:
        """Gathers the flat vector into new memory; the unit's state does not change. uint8. [size_bytes]"""
        return self.gather_version()[1]

    def gather_version(self) -> tuple[int, torch.Tensor]:
        """As ``gather_copy``. Also returns the version: that of the step, or the newest if the step does not count."""
        with self._reading():
            if self.shared is not None and self.shared.exact:
                version = self._store.await_version(self.index)()
                copy = self.shared.bytes.clone()
                self.shared.check(version)
                return version, copy
            flat = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
            # The memoryview keeps the memory alive: after Ctrl-C here, the gather continues in the background.
            version = self._store.gather(self.index, flat.numpy().data, exact=True).result()
            return version, flat

    def gather_average(self, version: int | None = None) -> torch.Tensor:
        """Gathers the moving average of the values into new memory. uint8. [size_bytes]

        Args:
            version: The version. None: that of the step.
        """
        flat = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
        with self._reading():
            self._store.gather_average(self.index, memory_at(flat.data_ptr(), self.layout.size_bytes, flat), version)
        return flat

    def read(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Returns a parameter's values as a view of a result of ``gather_copy``."""
        spec, start = self.layout.parameters[index], self.layout.starts[index]
        return flat[start : start + spec.size_bytes].view(self.precision.stored_dtypes[index]).view(spec.shape)


def _begin_device_copy(arrival: Arrival, gather: Future[int]) -> None:
    # Runs in the thread that completes the gather, so that a copy to a GPU does not wait for the training thread.
    if not gather.cancelled() and gather.exception() is None:
        arrival.begin()


def check_versions(units: Iterable[Unit]) -> None:
    """Checks all units; see ``Unit.check_version``."""
    order_loads()  # once: every vector is read afterwards
    for unit in units:
        if unit.shared is not None and not unit.shared.shows(unit.version):
            unit.check_version()


class ForwardCall:
    """One call of a unit's forward. Hooks on the autograd nodes that were made during the call refer to this object.

    A group of operations outside of every forward that read the unit's weights also gets such an object.

    Args:
        unit: The unit.
        generation: ``Unit.generation`` at the time of the call. A graph is valid for one generation.
        first_node_number: The lowest number of the nodes made during the call; by default the number of the next node.
    """

    __slots__ = ("first_node_number", "generation", "has_backward", "outer", "stop_node_number", "unit")

    def __init__(self, unit: Unit, generation: int, first_node_number: int | None = None) -> None:
        self.unit = unit
        self.generation = generation
        if first_node_number is None:
            first_node_number = torch._C._autograd._get_sequence_nr()
        self.first_node_number: int = first_node_number
        self.stop_node_number: float = math.inf
        """Nodes made during the call have a lower number."""
        self.has_backward = False
        """True if a result has a graph through the call."""
        self.outer: ForwardCall | None = None
        """The forward call that made this call."""


@dataclass(slots=True)
class Usage:
    """The current users of a unit's memory. The unit is freed only when there are none."""

    forward_calls: list[ForwardCall] = field(default_factory=list)
    """Forwards that are running, innermost last."""
    backward_calls: set[ForwardCall] = field(default_factory=set)
    """Forwards whose backward is running."""
    in_backward_graph: bool = False
    """True if the graph of a backward (``create_graph=True``) reads the weights until the end of the work item."""

    def clear(self) -> None:
        """Removes all users."""
        self.forward_calls.clear()
        self.backward_calls.clear()
        self.in_backward_graph = False

    def __bool__(self) -> bool:
        return bool(self.forward_calls or self.backward_calls or self.in_backward_graph)


Gradients = Sequence[tuple[int, torch.Tensor]]
"""``(parameter index, gradient)`` by rising index."""


class LocalGradients:
    """The gradients of one unit that are not pushed: in ``parameter.grad``, or in sums of another dtype.

    Args:
        parameters: Parameters of the unit.
        precision: Dtypes of gradients and sums.
        memory: Memory of the parameters. A gradient may be a view of a parameter, if a hook or an autograd function of
            the user returns one. It is copied before the memory is released.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], precision: Precision, memory: FlatVector) -> None:
        self._parameters, self._precision, self._memory = parameters, precision, memory
        self.sums: dict[int, torch.Tensor] = {}
        """Sums in the reduce dtype, as FSDP2 makes them, by parameter index. Empty if autograd's gradients have it."""
        self.deferred: dict[int, torch.Tensor] = {}
        """Means of earlier calls of a schedule, which the next push contains, by parameter index. See ``defer``."""
        self._distributed = {
            index for index, parameter in enumerate(parameters) if getattr(parameter, "placements", None) is not None
        }
        """Indices of the parameters that are DTensors."""
        self._accumulated: dict[int, int] = {}
        """Version counters of the gradients that ``accumulate`` left in ``parameter.grad``, by parameter index."""

    def take(self, indices: Iterable[int] | None = None) -> list[tuple[int, torch.Tensor]]:
        """Removes and returns the gradients of all or some parameters, dense and in the dtypes of the servers."""
        taken = []
        accumulated, memory = self._accumulated, self._memory
        sums, dtypes, reduce_dtype = self.sums, self._precision.stored_dtypes, self._precision.reduce_dtype
        with torch._C.DisableTorchFunctionSubclass():
            for index in range(len(self._parameters)) if indices is None else indices:
                if accumulated:
                    accumulated.pop(index, None)
                parameter = self._parameters[index]
                gradient = parameter.grad
                if gradient is not None and (
                    gradient.requires_grad
                    or gradient.layout is not torch.strided
                    or gradient.is_neg()
                    or not gradient.is_contiguous()
                ):
                    gradient = _plain(gradient)
                total = sums.pop(index, None) if sums else None
                if gradient is None:
                    if total is None:
                        continue
                    gradient = total
                elif total is not None:
                    gradient = total.add_(gradient)  # in the dtype of the sum
                elif reduce_dtype is not None:
                    gradient = gradient.to(reduce_dtype)
                if gradient.dtype != dtypes[index]:
                    gradient = gradient.to(dtypes[index])
                parameter.grad = None
                if index in self._distributed:
                    gradient = _local(gradient, parameter)
                if not memory.in_place and memory.holds(gradient):
                    gradient = gradient.clone()  # the push reads it in the background, when the unit may be freed
                taken.append((index, gradient))
        return self._with_deferred(taken, indices) if self.deferred else taken

    def _with_deferred(self, taken: Gradients, indices: Iterable[int] | None) -> list[tuple[int, torch.Tensor]]:
        """Returns gradients together with those that ``defer`` has moved away."""
        gradients = dict(taken)
        for index in sorted(self.deferred if indices is None else self.deferred.keys() & set(indices)):
            total = self.deferred.pop(index)
            if index in gradients:
                total.add_(gradients[index])
            gradients[index] = total.to(self._precision.stored_dtypes[index])
        return sorted(gradients.items())

    def defer(self) -> None:
        """Moves the gradients to sums that ``divide`` does not change. The next push contains them."""
        deferred, self.deferred = self.deferred, {}
        for index, gradient in self.take():
            if index in deferred:
                deferred[index].add_(gradient)
            else:  # servers add 16-bit gradients in fp32, too
                deferred[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        self.deferred = deferred

    @property
    def hidden(self) -> bool:
        """True if there are gradients that ``.grad`` does not show."""
        return bool(self.sums or self.deferred)

    def leave_memory(self) -> None:
        """Copies the gradients that are in the parameters' memory. Called before the memory is released."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                if self._memory.holds(local_part(gradient)):
                    parameter.grad = gradient.clone()

    def are_complete(self) -> bool:
        """Returns False if the running backward has not reached a parameter with an accumulated gradient.

        The accumulated gradient must be pushed together with the new one: servers add pushes in another dtype.
        """
        sums, accumulated = self.sums, self._accumulated
        if not sums and not accumulated:
            return True
        with torch._C.DisableTorchFunctionSubclass():
            for index in (*sums, *accumulated):
                gradient = self._parameters[index].grad
                if gradient is None or accumulated.get(index) == gradient._version:
                    return False
        return True

    def accumulate(self) -> None:
        """Adds the gradients to sums in the reduce dtype, if it differs from the gradients' dtype."""
        precision, sums = self._precision, self.sums
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(self._parameters):
                if (gradient := parameter.grad) is None:
                    continue
                version, dtype = gradient._version, precision.reduce_dtype or precision.stored_dtypes[index]
                if not precision.sums_apart or (gradient := _plain(gradient)).dtype == dtype:
                    self._accumulated[index] = version
                    continue
                if index in sums:
                    sums[index] += gradient
                else:
                    sums[index] = gradient.to(dtype)
                parameter.grad = None

    def divide(self, divisor: int) -> None:
        """Divides all gradients, also those that are summed in another dtype."""
        self.accumulate()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for total in self.sums.values():
                total.div_(divisor)
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)

    def drop(self, indices: Iterable[int] | None = None) -> None:
        """Drops the gradients of all or some parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            for index in range(len(self._parameters)) if indices is None else indices:
                self.sums.pop(index, None)
                self.deferred.pop(index, None)
                self._accumulated.pop(index, None)
                self._parameters[index].grad = None


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient without a graph, dense and contiguous, whose memory has its values."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_neg():  # of the imaginary part of a complex number, as autograd may return it
        gradient = gradient.resolve_neg()
    # A torch operation without effect still costs time, because it releases the interpreter lock.
    return gradient if gradient.is_contiguous() else gradient.contiguous()


def _local(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns the part of a DTensor's gradient that this process stores."""
    # A DTensor's gradient may be a partial sum, such as a norm's gradient under sequence parallelism. The sum is
    # reduced after the cast: autograd uses this order for a parameter that is cast in the forward.
    local: torch.Tensor = cast(Any, gradient).redistribute(placements=cast(Any, parameter).placements).to_local()
    return _plain(local)


@dataclass(frozen=True, slots=True)
class Owner:
    """The unit that a parameter belongs to."""

    unit: Unit
    index: int
    """Index of the parameter in the unit's layout."""

    @property
    def name(self) -> str:
        """The parameter's name for messages."""
        return self.unit.layout.parameters[self.index].shown_name

    @property
    def unit_name(self) -> str:
        """The unit's name."""
        return self.unit.name

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the parameter on the servers."""
        return self.unit.precision.stored_dtypes[self.index]

    @property
    def is_pushed(self) -> bool:
        """True if a gradient of the unit was pushed and not committed yet."""
        return self.unit.pushed

    @property
    def hidden_gradient(self) -> str:
        """Where the gradient is that ``.grad`` does not show. Empty: ``.grad`` shows it, or there is none."""
        if self.unit.pushed:
            return "was pushed to the shard servers"
        if self.index in self.unit.gradients.deferred:
            return "waits in this process for the next push (no_sync)"
        return "is summed in another dtype (mixed precision)" if self.index in self.unit.gradients.sums else ""

    def note_gradient_read(self) -> bool:
        """Records that the script reads a hidden gradient. Returns True the first time for the model.

        The units of a model are those whose gradients are hidden at the same time.
        """
        is_first = not self.unit.gradient_read
        for unit in self.unit.siblings() or ():
            unit.gradient_read |= unit.hides_gradients
        return is_first

    def gather_for_reader(self, frame: FrameType | None) -> bool:
        """Gathers the unit for the running forward that reads the freed parameter in a frame, if there is one."""
        return self.unit.gather_for_reader(self, frame)


def owner_of(tensor: torch.Tensor) -> Owner | None:
    """Returns the unit that holds a parameter, freed or not; None for any other tensor."""
    owner: Owner | None = getattr(tensor, OWNER_ATTRIBUTE, None)
    return owner
