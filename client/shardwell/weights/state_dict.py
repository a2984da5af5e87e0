"""State dicts of a whole model and of parts of it, gathered unit by unit, and the files that a model is saved to.

All ranks that hold a part of a split tensor take part in assembling it; one of them writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardwell.memory.buffers import trim
from shardwell.module.mixed_precision import local_part
from shardwell.module.unit import Unit, owner_of
from shardwell.session.session import Session, session_of, settle
from shardwell.weights.pinned_version import RunConnections, describe_weights, pinned_version
from shardwell.weights.weight_files import write_safetensors
from shardwell_wire.errors import ConflictError, ShardwellError, StaleEpochError, UsageError, VersionGoneError
from shardwell_wire.model.names import RunIdentity

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
            "shardwell.weights.iter_full_state_dict on all ranks and write the values on one"
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


logger = logging.getLogger(__name__)

ReadUnit = Callable[[Unit], torch.Tensor]
"""Returns a unit's flat vector, as stored. uint8. [size_bytes]"""

_ATTEMPTS = 8
"""How often the newest version is read, if steps are committed faster than it is read."""


def full_state_dict(model: nn.Module, *, ema: bool = False) -> dict[str, Any]:
    """Returns the model's state as a plain PyTorch ``state_dict``: same names, same order, on the CPU.

    Args:
        model: A model with sharded modules.
        ema: Return the moving average of the weights (``optimizer.ema_decay``) instead of the weights. Buffers and
            parameters that are not optimised have no average; their values are returned.

    Returns:
        Copies of all parameters, also under tied names, and of persistent buffers. ``load_state_dict`` of the model
        before ``fully_shard`` accepts them. Parameters that tensor parallelism splits are assembled, so all ranks with
        parts must call this function. All parameters have one version: that of this trainer's step, or the newest if
        other trainers have replaced it, or if the run was rolled back.

    Raises:
        StepStateError: ``ema`` is set and no step has updated averages.
        UsageError: Another thread uses the model at the same time.
        VersionGoneError: Parameters are split by tensor parallelism, and the version of the step was replaced. Or steps
            are committed faster than the servers can be asked for the newest version.
    """
    state = model.state_dict(keep_vars=True)
    return of_one_version(state, lambda newest: dict(read_values(state, ema=ema, newest=newest)))


def of_one_version(state: Mapping[str, Any], read: Callable[[bool], Result]) -> Result:
    """Reads a state of the version of the step or, if it is gone, of the newest version.

    Args:
        state: The parameters.
        read: Reads the whole state. Its argument is ``newest`` of ``read_values``. Called again after a failure.
    """
    try:
        return read(False)
    except ShardwellError as error:
        session = _session_of(state.values())
        if session is None or session.world.tp > 1:
            raise  # the ranks of a tensor group must agree on the version
        if not isinstance(error, VersionGoneError | StaleEpochError) and not session.store.has_lapsed:
            raise
        logger.warning("the newest version is read instead of that of step %d: %s", session.step, error)
    for _ in range(_ATTEMPTS - 1):
        with suppress(VersionGoneError):
            return read(True)
    return read(True)


def iter_full_state_dict(model: nn.Module, *, ema: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields the entries of ``full_state_dict`` one by one. Holds one unit at a time, however large the model is.

    Args:
        model: A model with sharded modules.
        ema: As in ``full_state_dict``.

    Yields:
        Names and values in the order of ``state_dict``. A unit is gathered more than once if its parameters are not
        adjacent in that order.

    Raises:
        VersionGoneError: The version of this trainer's step was replaced during the iteration.
    """
    # With keep_vars the parameters are not read, and modules that extend or rename their state still do so.
    yield from read_values(model.state_dict(keep_vars=True), ema=ema)


def read_values(state: Mapping[str, Any], *, ema: bool = False, newest: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields the values of a state dict that contains the parameters themselves. Holds one unit at a time.

    Args:
        ema: As in ``full_state_dict``.
        newest: Whether to read the newest version. Otherwise that of the step, unless nothing keeps it: a trainer of an
            asynchronous run without a work item reads the newest version, too.

    Raises:
        VersionGoneError: The version was replaced.
    """
    with _reading(state, ema=ema, newest=newest) as (_, read):
        yield from _values(state, read)


def _values(state: Mapping[str, Any], read: ReadUnit) -> Iterator[tuple[str, Any]]:
    gathered: Unit | None = None
    flat = torch.empty(0)
    for name, value in state.items():
        owner = owner_of(value) if isinstance(value, torch.Tensor) else None
        if owner is not None:
            if owner.unit is not gathered:
                gathered, flat = None, torch.empty(0)
                trim()  # transfers fragment the heap, which would add up over the units
                gathered, flat = owner.unit, read(owner.unit)
            yield name, whole(owner.unit.read(flat, owner.index), value)
        elif isinstance(value, torch.Tensor):
            yield name, whole(local_part(value.detach()), value)
        else:
            yield name, value


@contextmanager
def _reading(
    state: Mapping[str, Any], *, ema: bool = False, newest: bool = False
) -> Iterator[tuple[int | None, ReadUnit]]:
    """Yields the version to read, and how to read a unit at this version; see ``read_values``."""
    settle(value for value in state.values() if isinstance(value, torch.Tensor))
    session = _session_of(state.values())
    # Servers may replace the version of the step at any time while an asynchronous trainer has no work item.
    is_kept = session is None or (
        not session.consistency.asynchronous or session.world.tp > 1 or bool(session.in_flight.state.items)
    )
    if session is None or (is_kept and not newest):
        version = None if session is None else session.step
        yield version, lambda unit: _of_step(unit, version, ema=ema)
    elif ema:
        newest_committed = describe_weights(session.coordinator, session.run).version
        yield newest_committed, lambda unit: unit.gather_average(newest_committed)
    else:
        identity = RunIdentity(session.run, session.run_id)
        with (
            closing(RunConnections(identity, session.coordinator.credentials)) as connections,
            pinned_version(
                session.coordinator,
                session.run,
                timeout_s=session.config.waits.wait_limit_s,
                connections=connections,
                waits=True,
            ) as pinned,
        ):
            yield pinned.version, lambda unit: pinned.read(pinned.units[unit.name])


def _of_step(unit: Unit, step: int | None, *, ema: bool) -> torch.Tensor:
    """Reads a unit at the version that this trainer's step reads. None: at any version."""
    if ema:
        return unit.gather_average(step)
    version, flat = unit.gather_version()
    if step is not None and version != step:
        raise VersionGoneError(
            f"unit {unit.name!r} has version {version}, and this trainer's step reads version {step}: the step was "
            "committed without this trainer, or the run was rolled back. shardwell.full_state_dict(model) reads the "
            "newest version instead",
            unit=unit.name,
            version=step,
        )
    return flat


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Consecutive rows of a tensor."""

    values: torch.Tensor
    """A copy on the CPU. May have no rows."""
    offsets: tuple[int, ...]
    """Index of the first element in the whole tensor. All entries but the first are 0."""
    whole_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    version: int | None = None
    """Number of committed steps. None: not known."""


def sharded_state_dict(
    model: nn.Module, *, part: int | None = None, num_parts: int | None = None
) -> dict[str, TensorSlice | Any]:
    """Returns one part of the model's state. The parts of all trainers together are ``full_state_dict``.

    Tensors are cut along dim 0, as FSDP2's ``Shard(0)`` and ``torch.chunk`` do. Part 0 has the scalars and extra state
    that is not a tensor. Holds one unit at a time. All values have the version that the current step reads.

    Args:
        model: A model with sharded modules.
        part: Index of the part. Default: this trainer's logical dp rank.
        num_parts: Number of parts. Default: the world's dp.

    Returns:
        Slices by the names of ``full_state_dict``. ``join_state_dicts`` joins the parts.

    Raises:
        UsageError: The part does not exist, or it is not given and the trainer has no rank.
    """
    session = _session_of(model.parameters())
    if part is None or num_parts is None:
        if session is None or session.dp_rank is None:
            raise UsageError("this trainer has no logical dp rank in the model's run: pass part= and num_parts=")
        part, num_parts = session.dp_rank, session.world.dp
    if not 0 <= part < num_parts:
        raise UsageError(f"part {part} of {num_parts}: expected a part from 0 to {num_parts - 1}")
    values, state = model.state_dict(keep_vars=True), dict[str, TensorSlice | Any]()
    with _reading(values) as (version, read):
        for name, value in _values(values, read):
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = _cut(value, part, num_parts, version)
            elif part == 0:
                is_scalar = isinstance(value, torch.Tensor)
                state[name] = TensorSlice(value, (), (), version) if is_scalar else value
    return state


def _session_of(values: Iterable[Any]) -> Session | None:
    """Returns the session of the first sharded parameter. None: there is none, or it is closed."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    first = next((tensor for tensor in tensors if owner_of(tensor) is not None), None)
    return None if first is None else session_of(first)


def _cut(value: torch.Tensor, part: int, num_parts: int, version: int | None) -> TensorSlice:
    length = -(-value.shape[0] // num_parts)
    start = min(part * length, value.shape[0])
    rows = value[start : start + length].clone()  # a view would keep the memory of the whole tensor
    return TensorSlice(rows, (start, *(0 for _ in value.shape[1:])), tuple(value.shape), version)


def join_state_dicts(parts: Sequence[Mapping[str, TensorSlice | Any]]) -> dict[str, Any]:
    """Joins all parts of ``sharded_state_dict`` into one state with the bits of ``full_state_dict``.

    Args:
        parts: All parts of one step with the same ``num_parts``, in any order.

    Returns:
        Tensors, and extra state that is not a tensor, by name in the order of ``state_dict``.

    Raises:
        UsageError: Rows are missing or duplicated, or the parts belong to different steps or models.
    """
    if not parts:
        raise UsageError("join_state_dicts([]): expected at least one part")
    _check_versions(parts)
    in_order = max(parts, key=len)  # part 0 has every name
    found: dict[str, list[TensorSlice | Any]] = {name: [] for name in in_order}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {name: _join(name, values, len(parts)) for name, values in found.items()}


def _check_versions(parts: Sequence[Mapping[str, TensorSlice | Any]]) -> None:
    slices = ((n, value) for n, part in enumerate(parts) for value in part.values() if isinstance(value, TensorSlice))
    versions = {value.version: number for number, value in slices}
    if len(versions) > 1:
        two = " and ".join(f"part {number} of step {version}" for version, number in list(versions.items())[:2])
        raise UsageError(f"the parts belong to different steps: {two}; take all parts in the same step")


def _join(name: str, values: Sequence[TensorSlice | Any], num_parts: int) -> Any:
    is_cut = all(isinstance(value, TensorSlice) and value.whole_shape for value in values)
    if not is_cut:
        if len(values) > 1:
            raise UsageError(
                f"{name!r} is in {len(values)} of the parts, expected one: a part was passed twice", name=name
            )
        return values[0].values.clone() if isinstance(values[0], TensorSlice) else values[0]
    if len({(each.whole_shape, each.values.dtype) for each in values}) > 1:
        kinds = ", ".join(sorted({f"{each.whole_shape} of {each.values.dtype}" for each in values}))
        raise UsageError(f"{name!r} is {kinds} in different parts: the parts belong to different models", name=name)
    slices, position = sorted(values, key=lambda each: (each.offsets, each.values.shape)), 0
    for each in slices:
        if len(each.values):
            _check_rows(name, position, each.offsets[0], num_parts)
            position += len(each.values)
    _check_rows(name, position, slices[0].whole_shape[0], num_parts)
    return torch.cat([each.values for each in slices])


def _check_rows(name: str, expected: int, found: int, num_parts: int) -> None:
    """Raises UsageError unless the next rows of a tensor start where the rows before end."""
    if found > expected:
        raise UsageError(
            f"rows [{expected}, {found}) of {name!r} are in none of the {num_parts} parts: pass all parts of one "
            "sharded_state_dict(..., num_parts=)",
            name=name,
        )
    if found < expected:
        raise UsageError(
            f"row {found} of {name!r} is in two of the {num_parts} parts: a part was passed twice, or the parts "
            "have different num_parts",
            name=name,
        )


# ---- saving ----


def save_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes a model's parameters and persistent buffers as Hugging Face's libraries do.

    Writes ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with
    ``model.safetensors.index.json``. Files of an earlier export are removed. The new files appear when all of them are
    complete. All values have the version that the current step reads. Call it on one trainer, between steps. If tensor
    parallelism splits parameters, call it on all trainers of one tensor group; the first of them writes.

    Args:
        model: A model with sharded modules.
        folder: Created if it does not exist.
        max_shard_bytes: Largest size of the tensors in one file. A larger tensor gets its own file.
        metadata: Additional strings for the headers of the files.

    Returns:
        The files with tensors. Empty on trainers that do not write.

    Raises:
        UsageError: A value cannot be stored (extra state that is not a tensor, or a dtype that the format does not
            support), or parameters are split over several meshes or mesh dims.
        VersionGoneError: As ``full_state_dict``.
        OSError: The files cannot be written, for example because the disk is full. The folder is unchanged.
        ConflictError: The trainer that writes for the tensor group failed.
    """
    tensors = _grouped_by_unit(_unique_tensors(model))

    def write(values: Values) -> list[Path]:
        return write_safetensors(
            Path(folder), tensors, values, max_shard_bytes=max_shard_bytes, metadata=metadata or {}
        )

    return _save(tensors, write) or []


def save_dcp(model: nn.Module, folder: str | Path) -> None:
    """Writes a model's parameters and persistent buffers as ``torch.distributed.checkpoint``.

    ``torch.distributed.checkpoint.load`` reads the checkpoint in any number of processes, and ``dcp_to_torch_save``
    converts it to a ``torch.load`` file. Names are those of ``state_dict``; tied parameters are stored once. As with
    ``save_safetensors``, call it on one trainer or one tensor group, between steps. The files appear together.

    Args:
        model: A model with sharded modules.
        folder: Created if it does not exist.

    Raises:
        Exception: As ``save_safetensors``.
    """
    from shardwell.weights.dcp import write_dcp

    tensors = _grouped_by_unit(_unique_tensors(model))
    _save(tensors, lambda values: write_dcp(Path(folder), tensors, values))


def _save(tensors: Mapping[str, torch.Tensor], write: Callable[[Values], Result]) -> Result | None:
    mesh = mesh_of(tensors.values())
    if mesh is None:
        return of_one_version(tensors, lambda newest: write(read_values(tensors, newest=newest)))
    return written_by_one(mesh, read_values(tensors), write)


def _unique_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by name. Tied parameters have their first name only."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name!r} is {type(value).__name__}, expected a tensor: save "
                "shardwell.full_state_dict(model) with torch.save",
                name=name,
            )
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors


def _grouped_by_unit(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sorts tensors by unit, in the order of their first tensors, so that each unit is gathered once."""
    groups: dict[Any, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        owner = owner_of(tensor)
        groups.setdefault(owner.unit if owner else None, {})[name] = tensor
    return {name: tensor for group in groups.values() for name, tensor in group.items()}
