"""Whole tensors of what tensor parallelism splits: all ranks that hold parts put them together, and one writes."""

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
    """A copy of a tensor's values on the CPU.

    Args:
        values: Of the tensor; of a ``DTensor`` this rank's part, and all ranks of its mesh must call.
        tensor: It, whatever memory it has.
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
    """The mesh over which some of the tensors are split; None if none is.

    Raises:
        UsageError: There are several, or it has several dims.
    """
    meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if hasattr(tensor, "placements")))
    if len(meshes) > 1 or any(mesh.ndim != 1 for mesh in meshes):
        raise UsageError(
            f"parameters are split over {', '.join(map(str, meshes))}, expected one mesh of one dim: have all ranks "
            "call shardwell.iter_full_state_dict and one write what it yields"
        )
    return meshes[0] if meshes else None


def written_by_one(mesh: DeviceMesh, values: Values, write: Callable[[Values], Result]) -> Result | None:
    """Has the first rank of a mesh write values that all its ranks make together.

    Args:
        mesh: All its ranks must call.
        values: Made by collectives, in the same order on every rank.
        write: Takes the values; called by the first rank only.

    Returns:
        What ``write`` returned; None on the other ranks, where it is complete too.

    Raises:
        ConflictError: On the other ranks: it failed on the first.
        Exception: On the first: what ``write`` raised.
    """
    result, failure, read_failures = None, None, list[Exception]()
    values = _noting(values, read_failures)
    if mesh.get_local_rank() == 0:
        try:
            result = write(values)
        except Exception as error:
            if read_failures:
                raise  # there are no more values: the other ranks' collectives time out
            failure = error
    for _ in values:  # on the other ranks all of them; where writing failed the rest, for which they wait
        pass
    reason = _broadcast_failure(mesh, failure)
    if failure is not None:
        raise failure
    if reason is not None:
        raise ConflictError(f"the rank that writes for all of the tensor group could not: {reason}")
    return result


def _broadcast_failure(mesh: DeviceMesh, failure: Exception | None) -> str | None:
    """Sends the first rank's failure to all ranks of a mesh; returns its message, None if there was none.

    The bytes are plain UTF-8: torch's collectives for objects would unpickle what another process sent.
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


def _noting(values: Values, failures: list[Exception]) -> Values:
    try:
        yield from values
    except Exception as error:
        failures.append(error)
        raise
