"""Moves activations that autograd saved for the backward to host memory or to files.

Autograd saves tensors in the forward for the backward. The bytes of a saved tensor are moved once, even if several
saved tensors share them. Restored tensors have the same sizes, strides and alignment, so the backward runs the same
kernels on the same bits. Weights of sharded units are never moved: when autograd saves a weight, the saved tensor is a
view of the unit's flat vector, which the unit frees.

Note: [Unlinked files]
    A file is written, mapped and then unlinked. The kernel writes back and drops its pages. The disk space is freed
    with the mapping: when the backward has used the file, when the graph is dropped, or when the process is killed.

Note: [Uncounted writes]
    Tensors in one storage need not share a version counter: each result of ``unsafe_chunk`` has its own, and the CPU's
    LSTM writes its gates to such results. Equal counters prove equal content only for the same range of a storage. A
    copy that was made for one saved tensor is therefore not reused for a saved tensor with a different range.
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
from shardwell.module.hooks import wrap_forward
from shardwell.module.mixed_precision import local_part
from shardwell.module.passes import NO_TASK, backward_task
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CapacityError, UsageError

_CPU, _DISK = "cpu", "disk"
_PREFIX = "shardwell-activation-"

_ALIGNMENT = 64
"""Alignment in bytes. Each tensor's offset modulo this value is preserved: kernels may otherwise sum in another
order."""


class ActivationOffload:
    """Handle of ``offload_activations`` for one module.

    Attributes:
        enabled: Whether the next forwards move their activations.
        moved_bytes: Bytes moved so far.
    """

    def __init__(self, module: nn.Module, directory: Path | None, min_bytes: int) -> None:
        self.enabled = True
        self.moved_bytes = 0
        self._module, self._directory, self._min_bytes = module, directory, min_bytes
        self._moved: weakref.WeakValueDictionary[tuple[int, int, object], _Moved] = weakref.WeakValueDictionary()
        self._excluded: frozenset[int] = frozenset()

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a forward and moves the activations that it saves."""
        if not self.enabled or not torch.is_grad_enabled() or _saves_nothing():
            return forward(*args, **kwargs)
        self._excluded = _storages_of(self._module)
        with saved_tensors_hooks(self._pack, lambda saved: saved.restore()):
            return forward(*args, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if not self._is_moved(tensor):
            return _InPlace(tensor, tensor._version)
        storage, extent = tensor.untyped_storage(), _Extent.of(tensor)
        # See Note: [Uncounted writes].
        key = storage._cdata, tensor._version, extent.identity
        moved = self._moved.get(key)
        if moved is None or moved.source.expired():  # type: ignore[no-untyped-call]
            content = extent.content(tensor)
            moved = self._moved[key] = _Moved.from_content(storage, content, self._directory)
            self.moved_bytes += content.nbytes
        return _MovedTensor(moved, extent)

    def _is_moved(self, tensor: torch.Tensor) -> bool:
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
        return storage.nbytes() >= self._min_bytes and storage._cdata not in self._excluded


def offload_activations(
    module: nn.Module, *, to: str | os.PathLike[str] = _CPU, min_bytes: int = 1 << 20
) -> ActivationOffload:
    """Moves the activations that a module's forward saves to host memory or disk until the backward needs them.

    Results stay bit-identical. For a module whose forward calls ``torch.utils.checkpoint``, the inputs that the
    checkpoint keeps are moved. Inside a checkpointed region nothing is saved, so nothing is moved. Views of the
    module's parameters and buffers, and ``DTensor`` activations, are not moved.

    Args:
        module: Any module, before or after ``fully_shard``; usually each block of a model.
        to: ``"cpu"``: from a GPU to pinned host memory, in parallel with the computation; activations on the CPU are
            not moved. ``"disk"``: to files in the directory for temporary files (``TMPDIR``), one per activation. Or
            the path of another directory. The directory should not be on a file system in memory.
        min_bytes: Smaller activations are not moved.

    Returns:
        A handle that counts the moved bytes, and turns offloading off and on.

    Raises:
        UsageError: The directory does not exist or is not writable.

    A forward raises CapacityError if the disk is full. After ``optimizer.zero_grad()`` the step can be run again.
    """
    if min_bytes < 1:
        raise UsageError(f"offload_activations(min_bytes={min_bytes!r}): expected at least 1")
    directory = None if to == _CPU else Path(tempfile.gettempdir() if to == _DISK else to)
    if directory is not None and not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        raise UsageError(f"offload_activations(to={os.fspath(to)!r}): expected 'cpu', 'disk' or a writable directory")
    offload = ActivationOffload(module, directory, min_bytes)
    wrap_forward(module, offload.run)
    return offload


@dataclass(frozen=True, slots=True)
class _Extent:
    """The bytes of its storage that a tensor uses."""

    first_bytes: int
    """Offset of its first element."""
    stop_bytes: int
    """End of its last element."""
    has_gaps: bool
    """True if bytes in between do not belong to the tensor. Its elements do not overlap then."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Extent:
        first_bytes, shape, strides = (
            int(tensor.storage_offset()) * tensor.itemsize,
            tuple(tensor.shape),
            tensor.stride(),
        )
        if not tensor.numel():
            return cls(0, 0, False, tensor.dtype, shape, strides)
        last, overlaps = 0, False  # last: index of the last element relative to the first
        for stride, length in sorted(zip(strides, shape, strict=True)):
            overlaps |= length > 1 and stride <= last
            last += (length - 1) * stride
        has_gaps = not overlaps and tensor.numel() <= last
        return cls(first_bytes, first_bytes + (last + 1) * tensor.itemsize, has_gaps, tensor.dtype, shape, strides)

    @property
    def start_bytes(self) -> int:
        """The largest multiple of ``_ALIGNMENT`` up to the first element."""
        return self.first_bytes // _ALIGNMENT * _ALIGNMENT

    @property
    def identity(self) -> object:
        """Key that is equal for extents with the same bytes."""
        return self if self.has_gaps else (self.first_bytes, self.stop_bytes)

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the bytes that ``restore`` needs: the tensor's elements if there are gaps, or the whole range."""
        if self.has_gaps:
            return tensor
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return storage[self.start_bytes : self.stop_bytes]

    def restore(self, content: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with this extent, in new memory that begins at ``start_bytes``.

        Args:
            content: The bytes that ``content`` returned. Used as the memory if there are no gaps. uint8. [size_bytes]
        """
        memory = content
        if self.has_gaps:
            memory = torch.empty(self.stop_bytes - self.start_bytes, dtype=torch.uint8, device=content.device)
        offset = (self.first_bytes - self.start_bytes) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=content.device)
        tensor.set_(memory.untyped_storage(), offset, self.shape, self.strides)
        return tensor.copy_(content.view(self.dtype).view(self.shape)) if self.has_gaps else tensor


@dataclass(eq=False)
class _Moved:
    """A copy of bytes of a storage, kept while a graph needs it."""

    source: StorageWeakRef
    """Weak reference to the storage. While it exists, no other storage gets the same ``_cdata``."""
    device: torch.device
    bytes: torch.Tensor
    """The copy, in host memory or in a file. uint8. [size_bytes]"""

    @classmethod
    def from_content(cls, storage: torch.UntypedStorage, content: torch.Tensor, directory: Path | None) -> _Moved:
        (copy,), copied = to_host([content])
        copy = copy.view(torch.uint8)
        if directory is not None:
            copied()
            copy = _in_file(copy, directory)
        return cls(StorageWeakRef(storage), storage.device, copy)  # type: ignore[no-untyped-call]

    def load(self) -> torch.Tensor:
        """Returns the bytes on their original device. uint8. [size_bytes]"""
        return self.bytes if self.device.type == _CPU else to_device(self.bytes, self.device)


@dataclass(frozen=True, slots=True, eq=False)
class _MovedTensor:
    """A saved tensor whose bytes were moved."""

    moved: _Moved
    extent: _Extent

    def restore(self) -> torch.Tensor:
        return self.extent.restore(self.moved.load())


@dataclass(frozen=True, slots=True, eq=False)
class _InPlace:
    """A saved tensor that was not moved. Detects later writes: autograd does not check tensors with hooks."""

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


_Saved = _MovedTensor | _InPlace


def _saves_nothing() -> bool:
    """True if the forward runs in a checkpointed region, or recomputes one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return backward_task() != NO_TASK or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint")


def _storages_of(module: nn.Module) -> frozenset[int]:
    """Returns the storages of the module's parameters and buffers, which moving would not free."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [local_part(tensor) for tensor in (*module.parameters(), *module.buffers())]
        return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided)


def _in_file(content: torch.Tensor, directory: Path) -> torch.Tensor:
    """Writes bytes to a file and returns them mapped from it. See Note: [Unlinked files]."""
    if not content.numel():
        return torch.empty_like(content)
    try:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(memory_at(content.data_ptr(), content.numel(), content))
            return torch.from_file(path, shared=False, size=content.numel(), dtype=torch.uint8)
        finally:
            os.unlink(path)
    except OSError as error:
        free = shutil.disk_usage(directory).free
        raise CapacityError(
            f"an activation of {content.numel()} bytes could not be written to {directory} ({error.strerror}; {free} "
            "bytes are free on the disk): free disk space, offload to another directory, or raise min_bytes. Then call "
            "optimizer.zero_grad() and run the step again"
        ) from error
