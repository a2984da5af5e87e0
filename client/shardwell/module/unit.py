"""One unit: parameters that are gathered and freed together.

A unit's parameters are set to lie in its flat vector once, when the unit is made. Gathering gives the
vector memory and has the store write into it; freeing takes the memory, and with it what autograd
saved of the parameters, because that lies in the vector too.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from concurrent.futures import Future, wait

import torch
from torch import nn

from shardwell.memory.allocator import trim
from shardwell.module.collect import FoundParameter
from shardwell.module.flat_vector import FlatVector, Memory
from shardwell.module.initialization import FlatValues, NewValues
from shardwell.module.local_gradients import LocalGradients
from shardwell.module.mixed_precision import AS_STORED, MixedPrecisionPolicy, Precision
from shardwell.module.parameter import adopt
from shardwell.module.placed_parameters import PlacedParameters
from shardwell.module.store import InPlaceVector, ParameterStore
from shardwell.module.strategy import ShardingStrategy, UnitSettings
from shardwell.module.usage import Usage
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.layout import UnitLayout


class UnitState(enum.Enum):
    """Where a unit is in its life, and what memory it holds here.

    Gradients that are not pushed yet are held in ``parameter.grad``, in any state.
    """

    FREED = enum.auto()
    """No memory. Using a parameter raises ``FreedParameterError``."""
    FETCHING = enum.auto()
    """The flat vector is allocated and bytes arrive in it, or all have. Using a parameter still raises."""
    UNSHARDED = enum.auto()
    """The flat vector is complete and the parameters are usable."""
    KEPT = enum.auto()
    """The flat vector is complete and waits for its next use in the step. Using a parameter raises."""
    STALE = enum.auto()
    """The flat vector of a replica has its memory, with bytes of an older version. Using a parameter raises."""


class Unit:
    """The parameters of one ``fully_shard`` call.

    Args:
        layout: Names, shapes and places of the parameters.
        found: They, in layout order, on one device; their values are uploaded and freed.
        modules: The modules whose forward uses them.
        store: Holds the values.
        memory: Counts this unit's memory among others.
        values: Where the values come from.
        policy: What to compute in.
    """

    def __init__(
        self,
        layout: UnitLayout,
        found: Sequence[FoundParameter],
        modules: Sequence[nn.Module],
        store: ParameterStore,
        memory: Memory,
        values: NewValues,
        policy: MixedPrecisionPolicy = AS_STORED,
    ) -> None:
        self.layout = layout
        self.precision = Precision(policy, layout)
        self.parameters = tuple(entry.parameter for entry in found)
        self.gradients = LocalGradients(self.parameters, self.precision)
        self.sites = tuple(tuple(entry.sites) for entry in found)
        self.modules = tuple(modules)
        self.settings = UnitSettings()
        self.usage = Usage()
        self.pushed = False
        """Whether a gradient was pushed that is not committed yet."""
        self.generation = 0
        """How often graphs made before became unusable."""
        self.is_current = False
        """Whether the servers are known to have the version that the step reads."""
        self.state = UnitState.FREED
        self._store = store
        self._memory = memory
        self._device = self.parameters[0].device
        self._flat = FlatVector(self.precision.layout, self._device, memory)
        self._shared: InPlaceVector | None = None
        self._fetched: Future[int] | None = None
        self._version = -1
        """Of what was gathered last."""
        self._placed = PlacedParameters(layout, found)
        self.index = self._upload(values)

    @property
    def name(self) -> str:
        return self.layout.unit

    @property
    def device_type(self) -> str:
        """Where it computes."""
        return self._device.type

    @property
    def storage(self) -> torch.UntypedStorage:
        """The flat vector's memory; while freed it is empty or reads as NaN."""
        return self._flat.storage

    def _upload(self, values: NewValues) -> int:
        """Hands the unit's values to the store, as they are stored, and frees the parameters."""
        casts = self.precision.casts
        flat = FlatVector(self.layout, self._device, self._memory) if casts else self._flat
        flat.allocate()
        placed = [flat.place(index) for index in range(len(self.parameters))]
        try:
            for number in values.blank:
                self._placed.lie_at(number, placed[number])
            if values.elsewhere is None:
                self._placed.copy_to(placed, but=values.blank)
            values.initialize()
            index = self._store.declare(self.layout, values.elsewhere or FlatValues(flat.send_buffer()))
        except BaseException:
            flat.release()
            raise
        if casts:
            flat.release()
            self._flat.allocate()
            placed = [self._flat.place(number) for number in range(len(self.parameters))]
        self._placed.lie_in(placed)
        for number, parameter in enumerate(self.parameters):
            adopt(parameter, self, number)
        self._release()
        self._read_in_place(index)
        self._memory.pool.trim()
        trim()  # of what the module's own memory was until now
        return index

    def _read_in_place(self, index: int) -> None:
        """While freed: from now on the flat vector lies where the store keeps it, if this process can read it there."""
        can_read = self.device_type == "cpu" and not self.precision.casts
        shared = self._store.in_place(index) if can_read else None
        if shared is None or self._shared is not None:
            return
        self._flat.lie_in(shared.bytes)
        self._shared = shared
        self._placed.lie_in([self._flat.place(number) for number in range(len(self.parameters))])

    def share_on_host(self) -> bool:
        """While freed: moves the values to memory that the processes of this host share; returns whether there is any.

        Graphs that were made before can not be used any more.
        """
        assert self.state is UnitState.FREED
        if not self._store.share_on_host(self.index):
            return False
        self._read_in_place(self.index)
        return True

    # Gathering and freeing.

    @property
    def is_replica(self) -> bool:
        """Whether the weights stay here."""
        return self.settings.strategy is ShardingStrategy.NO_SHARD

    @property
    def needs_gather(self) -> bool:
        """Whether the values are not here, nor on their way."""
        return self.state in (UnitState.FREED, UnitState.STALE)

    @property
    def in_flight(self) -> Future[int] | None:
        """The gather into memory of this process that was started last, until its bytes are used."""
        return None if self._flat.in_place else self._fetched

    def start_fetch(self) -> None:
        """Starts to gather, in the background, unless that has been done."""
        if not self.needs_gather:
            return
        if self.state is UnitState.FREED:
            self._flat.allocate()
        self._set_state(UnitState.FETCHING)
        try:
            if self._shared is not None:
                self._fetched = self._store.await_version(self.index)
            else:
                self._fetched = self._store.gather(
                    self.index, self._flat.receive_buffer(), layout=self.precision.layout, vector=self._flat
                )
                self._fetched.add_done_callback(self._note_received)
        except BaseException:
            self.free()
            raise

    def _note_received(self, fetched: Future[int]) -> None:
        if not fetched.cancelled() and fetched.exception() is None:
            self._flat.received()

    def unshard(self) -> None:
        """Makes the parameters usable; waits for their bytes.

        Raises:
            UsageError: A module holds another parameter than the one that was sharded.
            ShardwellError: The gather failed; the unit is freed.
        """
        if self.state is UnitState.UNSHARDED:
            return
        self._placed.check_holders()
        if self.state is not UnitState.KEPT:
            self._receive()
        self._placed.allow()
        self._set_state(UnitState.UNSHARDED)

    def _receive(self) -> None:
        self.start_fetch()
        assert self._fetched is not None
        try:
            self._version = self._fetched.result()
            self.is_current = True
            self._flat.receive()
        except Exception:
            self.free()
            raise
        self._fetched = None

    def require_current(self) -> None:
        """Waits until the servers have the version that the step reads, as a gather does.

        Until then they may still be reading the last step's gradients, where those of this step will lie.
        """
        if not self.is_current:
            if self._shared is not None:
                self._store.await_version(self.index).result()
            else:
                self.gather_copy()
            self.is_current = True

    def drop_kept_gradients(self) -> None:
        """Drops the gradients that earlier steps left for another optimizer's."""
        if self._store.may_keep(self.index):
            self._store.drop(self.index, range(len(self.parameters)))

    def keep(self) -> None:
        """Makes the parameters unusable, but keeps their bytes for the next use in the step."""
        assert self.state is UnitState.UNSHARDED
        self._placed.forbid()
        self._set_state(UnitState.KEPT)

    def free(self) -> None:
        """Gives the memory back; waits for a gather that is under way."""
        if self.state is UnitState.FREED:
            return
        self._end_fetch()
        self._release()

    def expire(self) -> None:
        """The values are of an older version: a replica keeps its memory for the next one, another unit is freed."""
        if self.is_replica and self.state is not UnitState.FREED:
            self._end_fetch()
            self._placed.forbid()
            self._placed.depart()
            self._flat.abandon()
            self._set_state(UnitState.STALE)
        else:
            self.free()

    def _end_fetch(self) -> None:
        if self._fetched is not None and self._shared is None:
            wait([self._fetched])  # it is writing into the memory
        self._fetched = None

    def forget_graphs(self) -> None:
        """Graphs that were made before can not be used any more."""
        self.generation += 1
        self._placed.forget_graphs()
        if self.state is UnitState.UNSHARDED:
            self._placed.allow()

    def _release(self) -> None:
        self._placed.forbid()
        self._placed.depart()
        self._flat.release()
        self._set_state(UnitState.FREED)

    def _set_state(self, state: UnitState) -> None:
        size_bytes, before = 0 if self.is_replica else self.own_bytes, self.state
        self._memory.fetching_bytes += ((state is UnitState.FETCHING) - (before is UnitState.FETCHING)) * size_bytes
        self._memory.kept_bytes += ((state is UnitState.KEPT) - (before is UnitState.KEPT)) * size_bytes
        self.state = state

    @property
    def own_bytes(self) -> int:
        """What the flat vector takes of this process's memory while gathered."""
        return 0 if self._flat.in_place else self.precision.layout.size_bytes

    # Checks.

    def written_parameter(self) -> str | None:
        """The name of a parameter that was written in place, or given other data, since it was gathered, if any."""
        if self.state is not UnitState.UNSHARDED or not (changed := self._placed.written()):
            return None
        for index in changed:
            self._placed.lie_at(index, self._flat.place(index))
        self.written_page()
        return self.layout.parameters[changed[0]].name

    def written_page(self) -> str | None:
        """Drops what was written to memory that the store shares; returns the name of a parameter there, if any.

        Finds also what torch does not count as a write.
        """
        byte = None if self._shared is None else self._shared.forget_writes()
        if byte is None:
            return None
        return next(
            specification.name
            for specification, start in zip(self.layout.parameters, self.layout.starts, strict=True)
            if start + specification.size_bytes > byte
        )

    def check_version(self) -> None:
        """Frees the unit and raises VersionGoneError if bytes that are read in place have changed in use."""
        if self._shared is not None and self.state in (UnitState.UNSHARDED, UnitState.KEPT):
            try:
                self._shared.check(self._version)
            except VersionGoneError:
                self.free()
                raise

    # Reading beside the training.

    def gather_copy(self) -> torch.Tensor:
        """The flat vector as bytes in memory of its own; the unit's state does not change. [size_bytes]"""
        if self._shared is not None and self._shared.exact:
            version = self._store.await_version(self.index).result()
            copy = self._shared.bytes.clone()
            self._shared.check(version)
            return copy
        flat = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
        # A view that keeps the memory: after Ctrl-C here the gather goes on.
        self._store.gather(self.index, flat.numpy().data, exact=True).result()
        return flat

    def gather_average(self) -> torch.Tensor:
        """``gather_copy`` of the values' moving average. [size_bytes]"""
        flat = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
        self._store.gather_average(self.index, memory_at(flat.data_ptr(), self.layout.size_bytes))
        return flat

    def read(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A parameter's values, as a view of what ``gather_copy`` returned."""
        spec, start = self.layout.parameters[index], self.layout.starts[index]
        return flat[start : start + spec.size_bytes].view(self.precision.stored_dtype(index)).view(spec.shape)
