"""One unit: parameters that are gathered and freed together.

A unit owns one flat storage. Its parameters are set to lie in that storage once, when the unit is
made; afterwards gathering resizes the storage and has the store write into it, and freeing resizes it
to nothing, which also frees what autograd saved of the parameters, because that lies in it too.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwell.parameter import adopt, freed_class
from shardwell.store import ParameterStore
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout

if TYPE_CHECKING:
    from shardwell.hooks import ForwardCall


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


@dataclass(slots=True)
class Memory:
    """Bytes that the flat vectors of all units take here."""

    live_bytes: int = 0
    peak_bytes: int = 0
    fetching_bytes: int = 0
    """Of units in the state FETCHING."""

    def take(self, size_bytes: int) -> None:
        """Counts memory taken, or given back if negative."""
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


@dataclass(slots=True)
class UnitSettings:
    """What FSDP2's setters set. None leaves the choice to ``Units``."""

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    forward_prefetch: tuple[Unit, ...] | None = None
    backward_prefetch: tuple[Unit, ...] | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a module holds a parameter."""

    module: nn.Module
    name: str


@dataclass(slots=True)
class Usage:
    """Who needs the unit's memory now; it is freed only when nobody does."""

    forward_calls: list[ForwardCall] = field(default_factory=list)
    """Forwards that are running, innermost last."""
    backward_calls: set[ForwardCall] = field(default_factory=set)
    """Forwards whose backward is running."""
    pinned: bool = False
    """Whether a graph of a backward (``create_graph=True``) needs it until the end of the work item."""

    def clear(self) -> None:
        """Nobody needs it any more."""
        self.forward_calls.clear()
        self.backward_calls.clear()
        self.pinned = False

    def __bool__(self) -> bool:
        return bool(self.forward_calls or self.backward_calls or self.pinned)


class Unit:
    """The parameters of one ``fully_shard`` call.

    Args:
        layout: Names, shapes and places of the parameters.
        parameters: They, in layout order, on one device; their values are uploaded and freed.
        sites: For each parameter all places that hold it.
        modules: The modules whose forward uses it.
        store: Holds the values.
        memory: Counts this unit's memory among others.
    """

    def __init__(
        self,
        layout: UnitLayout,
        parameters: Sequence[nn.Parameter],
        sites: Sequence[Sequence[Site]],
        modules: Sequence[nn.Module],
        store: ParameterStore,
        memory: Memory,
    ) -> None:
        self.layout = layout
        self.parameters = tuple(parameters)
        self.sites = tuple(tuple(places) for places in sites)
        self.modules = tuple(modules)
        self.settings = UnitSettings()
        self.usage = Usage()
        self.pushed = False
        """Whether a gradient was pushed that is not committed yet."""
        self.state = UnitState.FREED
        self._store = store
        self._memory = memory
        self._device = self.parameters[0].device
        self._storage = torch.empty(0, dtype=torch.uint8, device=self._device).untyped_storage()
        self._fetched: Future[int] | None = None
        self._staging: torch.Tensor | None = None
        self._loaded: list[tuple[int, int]] = []
        self._classes = [(parameter, type(parameter), freed_class(type(parameter))) for parameter in self.parameters]
        self._places = [
            (site.module._parameters, site.name, parameter)
            for parameter, places in zip(self.parameters, self.sites, strict=True)
            for site in places
        ]
        self.index = self._upload()

    @property
    def name(self) -> str:
        return self.layout.unit

    @property
    def storage(self) -> torch.UntypedStorage:
        """The flat vector's memory; empty while freed."""
        return self._storage

    def _upload(self) -> int:
        """Moves the parameters into the flat vector, hands it to the store and frees it."""
        self._allocate()
        self._flat_bytes().zero_()
        placed = [self._place(index) for index in range(len(self.parameters))]
        with torch.no_grad():
            for view, parameter in zip(placed, self.parameters, strict=True):
                view.copy_(parameter)
        try:
            index = self._store.declare(self.layout, self._host_memory(copy_values=True))
        except BaseException:
            self._release_memory()
            raise
        for number, (view, parameter) in enumerate(zip(placed, self.parameters, strict=True)):
            parameter.data = view
            adopt(parameter, self, number)
        self._release()
        return index

    def _place(self, index: int) -> torch.Tensor:
        """A tensor of its own, not a view for autograd, on a parameter's part of the flat vector."""
        parameter, spec = self.parameters[index], self.layout.parameters[index]
        tensor = torch.empty(spec.shape, dtype=parameter.dtype, device="meta")
        strides, start = tensor.stride(), self.layout.starts[index] // spec.item_size
        return torch.empty(0, dtype=parameter.dtype, device=self._device).set_(
            self._storage, start, spec.shape, strides
        )

    # Gathering and freeing.

    def start_fetch(self) -> None:
        """Starts to gather, in the background, unless that has been done."""
        if self.state is not UnitState.FREED:
            return
        self._allocate()
        self._set_state(UnitState.FETCHING)
        try:
            self._fetched = self._store.gather(self.index, self._host_memory())
        except BaseException:
            self.free()
            raise

    def unshard(self) -> None:
        """Makes the parameters usable; waits for their bytes.

        Raises:
            UsageError: A module holds another parameter than the one that was sharded.
            ShardwellError: The gather failed; the unit is freed.
        """
        if self.state is UnitState.UNSHARDED:
            return
        self._check_sites()
        self.start_fetch()
        assert self._fetched is not None
        try:
            self._fetched.result()
            if self._staging is not None:
                self._flat_bytes().copy_(self._staging)
        except Exception:
            self.free()
            raise
        self._fetched = self._staging = None
        for parameter, original, _ in self._classes:
            parameter.__class__ = original
        self._loaded = self._fingerprints()
        self._set_state(UnitState.UNSHARDED)

    def free(self) -> None:
        """Gives the memory back; waits for a gather that is under way."""
        if self.state is UnitState.FREED:
            return
        if self._fetched is not None:
            wait([self._fetched])
        self._release()

    def written_parameter(self) -> str | None:
        """The name of a parameter that was written in place, or given other data, since it was gathered, if any."""
        if self.state is not UnitState.UNSHARDED or (now := self._fingerprints()) == self._loaded:
            return None
        changed = [index for index, pair in enumerate(now) if pair != self._loaded[index]]
        for index in changed:
            self.parameters[index].data = self._place(index)
        return self.layout.parameters[changed[0]].name

    def _fingerprints(self) -> list[tuple[int, int]]:
        """Where each parameter lies and how often it was written; gathering counts as no write."""
        return [(parameter.data_ptr(), parameter._version) for parameter in self.parameters]

    def _check_sites(self) -> None:
        for held, name, parameter in self._places:
            if held.get(name) is not parameter:
                full_name = self.layout.parameters[self.parameters.index(parameter)].name
                raise UsageError(
                    f"parameter {full_name!r} of unit {self.name!r} was replaced or removed after fully_shard (by an "
                    "assignment, load_state_dict(assign=True) or functional_call); the values on the shard servers "
                    "are not those: change parameters before fully_shard",
                    unit=self.name,
                    parameter=full_name,
                )

    def _allocate(self) -> None:
        self._storage.resize_(self.layout.size_bytes)
        self._memory.take(self.layout.size_bytes)

    def _release(self) -> None:
        for parameter, _, freed in self._classes:
            parameter.__class__ = freed
        self._release_memory()
        self._set_state(UnitState.FREED)

    def _release_memory(self) -> None:
        self._storage.resize_(0)
        self._memory.take(-self.layout.size_bytes)
        self._fetched = self._staging = None

    def _set_state(self, state: UnitState) -> None:
        was_fetching, is_fetching = self.state is UnitState.FETCHING, state is UnitState.FETCHING
        self._memory.fetching_bytes += (is_fetching - was_fetching) * self.layout.size_bytes
        self.state = state

    def _host_memory(self, *, copy_values: bool = False) -> memoryview:
        """The flat vector as host memory: itself, or a staging buffer if it is on another device."""
        size = self.layout.size_bytes
        if self._device.type == "cpu":
            return memory_at(self._storage.data_ptr(), size)
        self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        if copy_values:
            self._staging.copy_(self._flat_bytes())
        return memory_at(self._staging.data_ptr(), size)

    def _flat_bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(self._storage)

    # Reading beside the training.

    def gather_copy(self) -> torch.Tensor:
        """The flat vector as bytes in memory of its own; the unit's state does not change. [size_bytes]"""
        flat = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
        self._store.gather(self.index, memory_at(flat.data_ptr(), self.layout.size_bytes)).result()
        return flat

    def read(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A parameter's values, as a view of what ``gather_copy`` returned."""
        spec, start = self.layout.parameters[index], self.layout.starts[index]
        return flat[start : start + spec.size_bytes].view(self.parameters[index].dtype).view(spec.shape)

    # Gradients.

    def take_gradients(self) -> list[tuple[int, torch.Tensor]]:
        """The local gradients by parameter index, dense and contiguous; they are not local any more."""
        taken = []
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(self.parameters):
                if (gradient := parameter.grad) is not None:
                    parameter.grad = None
                    taken.append((index, _plain(gradient)))
        return taken

    def drop_gradients(self) -> None:
        """Forgets the local gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                parameter.grad = None


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return gradient.contiguous()
