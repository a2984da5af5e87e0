"""Memory that reads as NaN, for views of freed parameters.

torch reads a tensor without memory at address 0, which is a segmentation fault. Autograd and parameters raise before
that (see Note: [Version counters]), but a view that the user keeps, such as ``parameter.detach()``, is an ordinary
tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import torch

from shardwell_wire.chunk_streams import memory_at

_MAP_FIXED = 0x10
_CHUNK_BYTES = 2 << 20
"""Size of the physical memory, which is allocated once per process and mapped repeatedly."""

CAN_MAP = hasattr(os, "memfd_create")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_lock = threading.Lock()
_regions: list[memoryview] = []
"""Mapped regions, by rising size."""


def nan_storage(size_bytes: int) -> torch.UntypedStorage:
    """Returns a storage whose bytes are all 0xff: NaN in every floating-point dtype. Empty if mapping fails.

    All such storages share their memory. A write to one storage is lost or visible in all.
    """
    if not CAN_MAP or not size_bytes:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    try:
        region = _region(size_bytes)
    except OSError:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(region, dtype=torch.uint8, count=size_bytes).untyped_storage()


def _region(size_bytes: int) -> memoryview:
    """Returns a region of at least this size. Regions stay mapped until the process ends."""
    with _lock:
        if not _regions or len(_regions[-1]) < size_bytes:
            _regions.append(_map(-(-size_bytes // _CHUNK_BYTES) * _CHUNK_BYTES))
        return _regions[-1]


def _map(size_bytes: int) -> memoryview:
    descriptor = os.memfd_create("shardwell-nan", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, b"\xff" * _CHUNK_BYTES)
        address = _checked(_libc.mmap(None, size_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        for start in range(0, size_bytes, _CHUNK_BYTES):
            _checked(_libc.mmap(address + start, _CHUNK_BYTES, protection, flags, descriptor, 0))
    finally:
        os.close(descriptor)
    return memory_at(address, size_bytes)


def _checked(address: int) -> int:
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address
