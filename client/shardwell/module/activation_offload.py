"""Activations that wait for the backward, moved out of the way: from a GPU to host memory, or to files.

Autograd saves tensors in the forward for the backward. What is moved is the whole storage a saved tensor lies in, once,
however many saved tensors are views of it; they get their old sizes, strides and offsets back, so the backward
runs the same kernels on the same bits. The weights of sharded units are never touched: what autograd saves of
them lies in the unit's flat vector, which the unit frees.

Note: Files without names
    A file is written, mapped and removed from its directory at once. Its pages are the kernel's to write back and drop;
    its room on the disk is freed with the mapping, when the backward has used it or the graph is dropped, and
    also when the process is killed.
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
        self._moved: weakref.WeakValueDictionary[tuple[int, int], _Moved] = weakref.WeakValueDictionary()
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
        storage = tensor.untyped_storage()
        # The same memory with the same count of writes holds the same bytes, as long as it is the same memory.
        key = storage._cdata, tensor._version
        moved = self._moved.get(key)
        if moved is None or moved.source.expired():  # type: ignore[no-untyped-call]
            moved = self._moved[key] = _Moved.from_storage(storage, self._directory)
            self.moved_bytes += storage.nbytes()
        return _View(moved, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

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


@dataclass(eq=False)
class _Moved:
    """A storage's bytes elsewhere, for as long as a graph needs them."""

    source: StorageWeakRef
    """The storage, while it is alive; as long as this is kept, no other storage gets its identity."""
    device: torch.device
    bytes: torch.Tensor
    """In host memory or in a file. uint8. [size_bytes]"""

    @classmethod
    def from_storage(cls, storage: torch.UntypedStorage, directory: Path | None) -> _Moved:
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        (copy,), copied = to_host([content])
        if directory is not None:
            copied()
            copy = _in_file(copy, directory)
        return cls(StorageWeakRef(storage), storage.device, copy)  # type: ignore[no-untyped-call]

    def load(self) -> torch.UntypedStorage:
        """The bytes in a storage of the device they came from."""
        return (self.bytes if self.device.type == _CPU else to_device(self.bytes, self.device)).untyped_storage()


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """A saved tensor whose storage was moved."""

    moved: _Moved
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def restore(self) -> torch.Tensor:
        storage = self.moved.load()
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.strides
        )


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


_Saved = _View | _Stayed


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
