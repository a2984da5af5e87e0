"""Assembles tensors that tensor parallelism splits, on all ranks with parts, and writes them on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shardwell_wire.errors import ConflictError, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")
Values = Iterator[tuple[str, Any]]

_FAILURE_BYTES = 1024
"""Size of the message that reports a failed write: a flag, then the error's text, cut to fit."""


def whole(values: torch.Tensor, tensor: Any) -> torch.Tensor:
    """Returns a copy of a tensor's values on the CPU.

    Args:
        values: The values; for a ``DTensor``, the values of this rank's part. All ranks of the mesh must call this.
        tensor: The tensor, whose memory is not read.
    """
    if not hasattr(tensor, "placements"):
        return values.cpu().clone()
    from torch.distributed.tensor import DTensor

    part = DTensor.from_local(
        values.to(tensor.device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    full: torch.Tensor = part.full_tensor()
    return full.cpu().clone()


def mesh_of(tensors: Iterable[Any]) -> DeviceMesh | None:
    """Returns the mesh over which tensors are split; None if no tensor is split.

    Raises:
        UsageError: There are several meshes, or the mesh has several dims.
    """
    meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if hasattr(tensor, "placements")))
    if len(meshes) > 1 or any(mesh.ndim != 1 for mesh in meshes):
        raise UsageError(
            f"parameters are split over {', '.join(map(str, meshes))}, expected one mesh of one dim: call "
            "shardwell.iter_full_state_dict on all ranks and write the values on one"
        )
    return meshes[0] if meshes else None


def written_by_one(mesh: DeviceMesh, values: Values, write: Callable[[Values], Result]) -> Result | None:
    """Writes values on the first rank of a mesh. All ranks compute the values with collectives.

    Args:
        mesh: The mesh. All its ranks must call this function.
        values: Values in the same order on every rank.
        write: Writes the values. Called on the first rank only.

    Returns:
        The result of ``write`` on the first rank, None on other ranks. The write is complete on all ranks.

    Raises:
        ConflictError: On other ranks: ``write`` failed on the first rank.
        Exception: On the first rank: the error of ``write``.
    """
    result, failure, read_failures = None, None, list[Exception]()
    values = _recording_failures(values, read_failures)
    if mesh.get_local_rank() == 0:
        try:
            result = write(values)
        except Exception as error:
            if read_failures:
                raise  # no more values can be read, so the collectives of the other ranks time out
            failure = error
    # Reading a value runs a collective. Read all values on other ranks, and the remaining values after a failed write.
    for _ in values:
        pass
    reason = _broadcast_failure(mesh, failure)
    if failure is not None:
        raise failure
    if reason is not None:
        raise ConflictError(f"the rank that writes for the tensor group failed: {reason}")
    return result


def _broadcast_failure(mesh: DeviceMesh, failure: Exception | None) -> str | None:
    """Broadcasts the first rank's failure to all ranks of a mesh. Returns its message, or None.

    The message is plain UTF-8: torch's collectives for objects would unpickle data from another process.
    """
    data = bytearray(_FAILURE_BYTES)
    if failure is not None:
        text = str(failure).encode()[: _FAILURE_BYTES - 1]
        data[: 1 + len(text)] = b"\1" + text
    tensor = torch.frombuffer(data, dtype=torch.uint8).to(mesh.device_type)
    group = mesh.get_group()
    dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
    received = bytes(tensor.tolist())
    return received[1:].rstrip(b"\0").decode(errors="replace") if received[0] else None


def _recording_failures(values: Values, failures: list[Exception]) -> Values:
    try:
        yield from values
    except Exception as error:
        failures.append(error)
        raise
