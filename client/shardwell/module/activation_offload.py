"""Activations that wait for the backward, moved out of the way: from a GPU to host memory, or to files.

Autograd saves tensors in the forward for the backward. What is moved is the part of a storage that a saved tensor has,
once, however many saved tensors have the same; they get their old sizes, strides and alignment back, so the backward
runs the same kernels on the same bits. The weights of sharded units are never touched: what autograd saves of
them lies in the unit's flat vector, which the unit frees.

Note: Files without names
    A file is written, mapped and removed from its directory at once. Its pages are the kernel's to write back and drop;
    its room on the disk is freed with the mapping, when the backward has used it or the graph is dropped, and
    also when the process is killed.

Note: Writes that torch does not count
    Tensors that lie in one storage need not share their count of writes: those of ``unsafe_chunk``, which the CPU's
    LSTM writes its gates with, count their own only. So equal counts say something about equal ranges alone, and
    what was moved for one saved tensor does not serve for another that has other bytes of the storage.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwell.memory.device_copies import to_device, to_host
from shardwell.module.forward_wrapper import wrap_forward
from shardwell.module.hooks import NO_TASK, backward_task
from shardwell.module.tensors import local_part
from shardwell_wire.codec import memory_at
from shardwell_wire.errors import CapacityError, UsageError

_CPU, _DISK = "cpu", "disk"
_PREFIX = "shardwell-activation-"

_ALIGNMENT = 64
"""In bytes: kernels may sum in another order where memory begins elsewhere between two multiples of it."""


class ActivationOffload:
    """What ``offload_activations`` put around a module's forward.

    Attributes:
        enabled: Whether the next forwards move what they save.
        moved_bytes: What was moved so far.
    """

    def __init__(self, module: nn.Module, directory: Path | None, min_bytes: int) -> None:
        self.enabled = True
        self.moved_bytes = 0
        self._module, self._directory, self._min_bytes = module, directory, min_bytes
        self._moved: weakref.WeakValueDictionary[tuple[int, int, object], _Moved] = weakref.WeakValueDictionary()
        self._staying: frozenset[int] = frozenset()

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a forward, moving what it saves."""
        if not self.enabled or not torch.is_grad_enabled() or _saves_nothing():
            return forward(*args, **kwargs)
        self._staying = _storages_of(self._module)
        with saved_tensors_hooks(self._pack, _unpack):
            return forward(*args, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if not self._moves(tensor):
            return _Stayed(tensor, tensor._version)
        storage, place = tensor.untyped_storage(), _Place.of(tensor)
        # See Note: Writes that torch does not count.
        key = storage._cdata, tensor._version, place.identity
        moved = self._moved.get(key)
        if moved is None or moved.source.expired():  # type: ignore[no-untyped-call]
            content = place.content(tensor)
            moved = self._moved[key] = _Moved.from_content(storage, content, self._directory)
            self.moved_bytes += content.nbytes
        return _MovedTensor(moved, place)

    def _moves(self, tensor: torch.Tensor) -> bool:
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        if tensor.device.type != "cuda" and (tensor.device.type != _CPU or self._directory is None):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._min_bytes and storage._cdata not in self._staying


def offload_activations(
    module: nn.Module, *, to: str | os.PathLike[str] = _CPU, min_bytes: int = 1 << 20
) -> ActivationOffload:
    """Moves the activations that a module's forward saves for the backward elsewhere until then.

    The bits of the results do not change. Around a module whose forward calls ``torch.utils.checkpoint`` it moves
    what the checkpoint keeps, its inputs; inside a checkpointed region it does nothing, because that saves nothing.
    Views of parameters and buffers of the module stay where they are, and so do ``DTensor`` activations.

    Args:
        module: Sharded or not, before or after ``fully_shard``; usually each block of a model.
        to: ``"cpu"``: from a GPU to pinned host memory, beside the computation; activations that are on the CPU
            stay. ``"disk"``: to files in the directory for temporary ones (``TMPDIR``), one per activation. Or another
            directory for them. None should be on a file system that is in memory.
        min_bytes: Smaller ones stay.

    Returns:
        Says how much was moved, and turns it off and on.

    Raises:
        UsageError: There is no such directory, or it can not be written to.

    A forward raises CapacityError if the disk is full. Nothing is lost: after ``optimizer.zero_grad()`` the step can
    be run again.
    """
    if min_bytes < 1:
        raise UsageError(f"offload_activations(min_bytes={min_bytes!r}): expected at least 1")
    directory = None if to == _CPU else Path(tempfile.gettempdir() if to == _DISK else to)
    if directory is not None and not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        raise UsageError(
            f"offload_activations(to={os.fspath(to)!r}): expected 'cpu', 'disk' or a directory to write to"
        )
    offload = ActivationOffload(module, directory, min_bytes)
    wrap_forward(module, offload.around)
    return offload


@dataclass(frozen=True, slots=True)
class _Place:
    """How a tensor lies in its storage."""

    first_bytes: int
    """Where its first element begins."""
    stop_bytes: int
    """Where its last element ends."""
    has_gaps: bool
    """Whether bytes in between are not the tensor's; then no two of its elements lie in one place."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        first_bytes, shape, strides = (
            int(tensor.storage_offset()) * tensor.itemsize,
            tuple(tensor.shape),
            tensor.stride(),
        )
        if not tensor.numel():
            return cls(0, 0, False, tensor.dtype, shape, strides)
        last, overlaps = 0, False  # last: the place of the last element, counted from the first one
        for stride, length in sorted(zip(strides, shape, strict=True)):
            overlaps |= length > 1 and stride <= last
            last += (length - 1) * stride
        has_gaps = not overlaps and tensor.numel() <= last
        return cls(first_bytes, first_bytes + (last + 1) * tensor.itemsize, has_gaps, tensor.dtype, shape, strides)

    @property
    def start_bytes(self) -> int:
        """The last multiple of ``_ALIGNMENT`` that is not behind the first element."""
        return self.first_bytes // _ALIGNMENT * _ALIGNMENT

    @property
    def identity(self) -> object:
        """The same for all that have the same bytes."""
        return self if self.has_gaps else (self.first_bytes, self.stop_bytes)

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``put`` needs of a tensor that lies so: its elements, or all bytes from start to stop."""
        if self.has_gaps:
            return tensor
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return storage[self.start_bytes : self.stop_bytes]

    def put(self, content: torch.Tensor) -> torch.Tensor:
        """A tensor that lies as this one did, in memory that begins at ``start_bytes``.

        Args:
            content: The bytes of what ``content`` gave; used as that memory if it can be. uint8. [size_bytes]
        """
        memory = content
        if self.has_gaps:
            memory = torch.empty(self.stop_bytes - self.start_bytes, dtype=torch.uint8, device=content.device)
        offset = (self.first_bytes - self.start_bytes) // self.dtype.itemsize
        put = torch.empty(0, dtype=self.dtype, device=content.device)
        put.set_(memory.untyped_storage(), offset, self.shape, self.strides)
        return put.copy_(content.view(self.dtype).view(self.shape)) if self.has_gaps else put


@dataclass(eq=False)
class _Moved:
    """Bytes of a storage elsewhere, for as long as a graph needs them."""

    source: StorageWeakRef
    """The storage, while it is alive; as long as this is kept, no other storage gets its identity."""
    device: torch.device
    bytes: torch.Tensor
    """In host memory or in a file. uint8. [size_bytes]"""

    @classmethod
    def from_content(cls, storage: torch.UntypedStorage, content: torch.Tensor, directory: Path | None) -> _Moved:
        (copy,), copied = to_host([content])
        copy = copy.view(torch.uint8)
        if directory is not None:
            copied()
            copy = _in_file(copy, directory)
        return cls(StorageWeakRef(storage), storage.device, copy)  # type: ignore[no-untyped-call]

    def load(self) -> torch.Tensor:
        """The bytes on the device they came from. uint8. [size_bytes]"""
        return self.bytes if self.device.type == _CPU else to_device(self.bytes, self.device)


@dataclass(frozen=True, slots=True, eq=False)
class _MovedTensor:
    """A saved tensor whose bytes were moved: all from its start to its end or, if there are gaps, its elements."""

    moved: _Moved
    place: _Place

    def restore(self) -> torch.Tensor:
        return self.place.put(self.moved.load())


@dataclass(frozen=True, slots=True, eq=False)
class _Stayed:
    """A saved tensor as it is. Autograd does not look for later writes where there are hooks."""

    tensor: torch.Tensor
    version: int

    def restore(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


_Saved = _MovedTensor | _Stayed


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.restore()


def _saves_nothing() -> bool:
    """Whether the forward runs in a checkpointed region, which is computed again, or is just that."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return backward_task() != NO_TASK or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint")


def _storages_of(module: nn.Module) -> frozenset[int]:
    """Of the module's parameters and buffers, which would not be freed by moving them."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [local_part(tensor) for tensor in (*module.parameters(), *module.buffers())]
        return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided)


def _in_file(content: torch.Tensor, directory: Path) -> torch.Tensor:
    """The bytes mapped from a file. See Note: Files without names."""
    if not content.numel():
        return torch.empty_like(content)
    try:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(memory_at(content.data_ptr(), content.numel()))
            return torch.from_file(path, shared=False, size=content.numel(), dtype=torch.uint8)
        finally:
            os.unlink(path)
    except OSError as error:
        free = shutil.disk_usage(directory).free
        raise CapacityError(
            f"an activation of {content.numel()} bytes could not be written to {directory} ({error.strerror}; {free} "
            "bytes are free there): make room, offload to another directory, or raise min_bytes. Nothing of the run is "
            "lost: call optimizer.zero_grad() and run the step again"
        ) from error
