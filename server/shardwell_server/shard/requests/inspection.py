"""Inspection of a shard server: summaries, the step in flight, a few values, metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version as installed_version
from typing import NamedTuple

import torch
from prometheus_client.core import Metric

from shardwell_server.serving.metrics import counter, gauge
from shardwell_server.shard.shard_spec import Role
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire.errors import InvalidRequestError, NotFoundError, StepStateError
from shardwell_wire.model.layout import DTYPE_NUMBERS
from shardwell_wire.v1 import shard_pb2

DEFAULT_PEEK_COUNT, MAX_PEEK_COUNT = 8, 1024

_PEEKED_ELEMENTS = 1 << 18
"""Number of elements that Peek reads at a time."""

_PEEK_ATTEMPTS = 3
"""Number of attempts of Peek when the values change while it reads them."""


class ServerProcess(NamedTuple):
    """One process of a shard server."""

    server_id: str
    """Name of the server."""
    incarnation: str
    """Random id of the process."""


def describe_server(store: ShardStore, process: ServerProcess, uptime_s: float) -> shard_pb2.DescribeServerResponse:
    """Describes the server, its memory and its runs."""
    return shard_pb2.DescribeServerResponse(
        server_id=process.server_id,
        incarnation=process.incarnation,
        shardwell_version=installed_version("shardwell"),
        budget_bytes=store.memory.budget_bytes,
        reserved_bytes=store.memory.reserved_bytes,
        used_bytes=store.memory.used_bytes,
        uptime_s=uptime_s,
        runs=[
            shard_pb2.RunOnServer(
                run=run.name,
                shard_count=len(run.shards),
                parameter_bytes=sum(shard.size_bytes for shard in run.shards.values()),
                version=run.step,
                run_id=run.identity.run_id,
            )
            for run in store.runs.values()
        ],
    )


def summarize(shard: UnitShard) -> shard_pb2.ShardSummary:
    """Returns the summary of a shard that ListShards reports."""
    return shard_pb2.ShardSummary(
        unit=shard.unit,
        unit_index=shard.index,
        start_bytes=shard.start_bytes,
        stop_bytes=shard.stop_bytes,
        unit_bytes=shard.layout.size_bytes,
        dtypes=sorted({DTYPE_NUMBERS[parameter.dtype] for parameter in shard.layout.parameters}),
        version=shard.version,
        parameter_bytes=shard.size_bytes,
        optimizer_bytes=shard.optimizer_bytes,
        contribution_bytes=shard.gradient.contributions.size_bytes + shard.gradient.twins.size_bytes,
        role=shard_pb2.SHARD_ROLE_PRIMARY if shard.role is Role.PRIMARY else shard_pb2.SHARD_ROLE_BACKUP,
        out_of_sync=shard.out_of_sync,
        backup_server_ids=[backup.server_id for backup in shard.backups.in_sync],
    )


def describe_shard(shard: UnitShard) -> shard_pb2.DescribeShardResponse:
    """Describes a shard with its parameters and their ranges."""
    pieces = []
    for number, segment in enumerate(shard.segments):
        parameter = shard.layout.parameters[segment.parameter_index]
        pieces.append(
            shard_pb2.ParameterPiece(
                name=parameter.name,
                shape=parameter.shape,
                dtype=DTYPE_NUMBERS[parameter.dtype],
                start_element=segment.start_element,
                stop_element=segment.stop_element,
                optimizer_step=0 if shard.optimizer is None else shard.optimizer.steps_of(number),
            )
        )
    names = [] if shard.optimizer is None else shard.optimizer.state_names
    return shard_pb2.DescribeShardResponse(summary=summarize(shard), parameters=pieces, optimizer_state=names)


def describe_step(run: HostedRun) -> shard_pb2.DescribeStepResponse:
    """Describes which contributions the step in flight has and lacks."""
    return shard_pb2.DescribeStepResponse(
        step=run.step,
        prepared=run.prepared is not None,
        duplicate_count=run.duplicate_count,
        differing_duplicate_count=run.differing_duplicate_count,
        shards=[
            shard_pb2.ShardContributions(
                unit=shard.unit,
                present_dp_ranks=[rank for rank in range(shard.dp) if _has_pushed(shard, rank)],
                missing_dp_ranks=[rank for rank in range(shard.dp) if not _has_pushed(shard, rank)],
                bytes=shard.gradient.contributions.size_bytes,
            )
            for shard in run.shards.values()
            if shard.role is Role.PRIMARY
        ],
    )


def _has_pushed(shard: UnitShard, dp_rank: int) -> bool:
    """True if all pipeline stages of a data rank that hold the unit have pushed a gradient."""
    return all(
        contributor in shard.gradient.contributions.by_rank for contributor in shard.spec.contributors_of(dp_rank)
    )


async def peek(store: ShardStore, request: shard_pb2.PeekRequest) -> shard_pb2.PeekResponse:
    """Returns a few values of a parameter, and statistics over the part of it on this server.

    Raises:
        NotFoundError: This server does not hold the parameter, or the state with this name.
        InvalidRequestError: ``start`` or ``count`` is out of range.
        StepStateError: The unit has no values yet, or has no reduced gradient now.
    """
    count = request.count or DEFAULT_PEEK_COUNT
    if count > MAX_PEEK_COUNT:
        raise InvalidRequestError(f"count is {count}, expected at most {MAX_PEEK_COUNT}")
    run = store.run(request.run)
    all_found = _shards_with(run, request.parameter)
    unit = request.unit or all_found[0].unit
    found = [shard for shard in all_found if shard.unit == unit]
    if not found:
        units = ", ".join(repr(name) for name in dict.fromkeys(shard.unit for shard in all_found))
        raise NotFoundError(
            f"this server has no element of parameter {request.parameter!r} in unit {unit!r}, only in {units}",
            parameter=request.parameter,
            unit=unit,
        )
    wanted = request.shard_start_bytes if request.HasField("shard_start_bytes") else found[0].start_bytes
    shard = next((shard for shard in found if shard.start_bytes == wanted), None)
    if shard is None:
        starts = ", ".join(str(shard.start_bytes) for shard in found)
        raise NotFoundError(
            f"no shard of parameter {request.parameter!r} on this server starts at byte {wanted}; its shards start at "
            f"{starts}",
            parameter=request.parameter,
        )
    number = shard.segment_of[shard.layout.index_by_name[request.parameter]]

    response: shard_pb2.PeekResponse | None = None
    for _ in range(_PEEK_ATTEMPTS):
        if (response := await _peek_once(store, run, shard, number, request)) is not None:
            break
    if response is None:
        raise StepStateError(
            f"{shard.what} changed {_PEEK_ATTEMPTS} times while parameter {request.parameter!r} was read: try again, "
            "or pin a version with PinVersion"
        )
    response.shard_start_bytes.extend(shard.start_bytes for shard in found)
    response.unit = unit
    response.units.extend(dict.fromkeys(shard.unit for shard in all_found))
    response.offsets.extend(shard.layout.parameters[shard.layout.index_by_name[request.parameter]].offsets)
    return response


async def _peek_once(
    store: ShardStore, run: HostedRun, shard: UnitShard, number: int, request: shard_pb2.PeekRequest
) -> shard_pb2.PeekResponse | None:
    """Returns the answer of ``peek``, or None if the values changed during the call.

    The tensor may be large. It is read in chunks, and other work on the run may proceed between two chunks.
    """
    statistics, values, count = _Statistics(), list[float](), request.count or DEFAULT_PEEK_COUNT
    source, element, complete = None, 0, False
    while not complete:
        async with run.exclusively():  # no update changes the values within a chunk
            tensor, version = _peeked(shard, number, request), shard.version
            if tensor.is_complex():
                raise InvalidRequestError(f"parameter {request.parameter!r} is complex: only real values can be shown")
            if request.start >= tensor.numel():
                raise InvalidRequestError(
                    f"start is {request.start}, but this server has {tensor.numel()} elements of parameter "
                    f"{request.parameter!r}"
                )
            now = (tensor.data_ptr(), version, shard.partitions.generation)
            if source is None:
                source = now
                values = tensor[request.start : request.start + count].double().tolist()
            if source != now:
                return None
            part = tensor[element : element + _PEEKED_ELEMENTS]
            await store.memory.in_thread(partial(statistics.add, part))
            element += part.numel()
            complete = element == tensor.numel()
    segment = shard.segments[number]
    assert source is not None
    response = statistics.response()
    response.values.extend(values)
    response.version = source[1] or 0
    response.start_element, response.stop_element = segment.start_element, segment.stop_element
    return response


def _peeked(shard: UnitShard, number: int, request: shard_pb2.PeekRequest) -> torch.Tensor:
    shard.values.check_not_dropped()
    if shard.version is None or shard.values.current is None:
        raise StepStateError(f"{shard.what} has no published values yet")
    if shard.values.updating:
        raise StepStateError(f"the update of {shard.what} failed and is being repeated: try again")
    if request.source in (shard_pb2.PEEK_SOURCE_UNSPECIFIED, shard_pb2.PEEK_SOURCE_PARAMETER):
        return shard.views(shard.values.current.buffer)[number]
    if request.source == shard_pb2.PEEK_SOURCE_GRADIENT:
        gradient = None if shard.gradient.reduced is None else shard.gradient.reduced.gradients[number]
        if gradient is None:
            raise StepStateError(
                f"parameter {request.parameter!r} has no reduced gradient now: one exists only between "
                "PrepareStep and Update"
            )
        return gradient
    if request.source == shard_pb2.PEEK_SOURCE_OPTIMIZER_STATE:
        names = [] if shard.optimizer is None else shard.optimizer.state_names
        state = {} if shard.optimizer is None else shard.optimizer.state(number)
        if request.state_name not in names or request.state_name not in state:
            raise NotFoundError(
                f"parameter {request.parameter!r} has no optimizer state {request.state_name!r}; "
                f"it has {', '.join(names) or 'none yet'}"
            )
        tensor: torch.Tensor = state[request.state_name]
        return tensor.reshape(-1)
    raise InvalidRequestError(f"source is {request.source}, expected a PeekSource")


class _Statistics:
    """Statistics over a tensor that is read in chunks."""

    def __init__(self) -> None:
        self._norms: list[float] = []
        self._bounds: list[float] = []
        self._non_finite_count = 0

    def add(self, values: torch.Tensor) -> None:
        """Adds the next chunk."""
        wide = values.double()
        finite = wide[torch.isfinite(wide)]
        self._norms.append(float(torch.linalg.vector_norm(wide)))
        if finite.numel():
            self._bounds += [float(bound) for bound in torch.aminmax(finite)]
        self._non_finite_count += wide.numel() - finite.numel()

    def response(self) -> shard_pb2.PeekResponse:
        """Returns the statistics over all chunks."""
        return shard_pb2.PeekResponse(
            norm=float(torch.linalg.vector_norm(torch.tensor(self._norms, dtype=torch.float64))),
            min=min(self._bounds, default=0.0),
            max=max(self._bounds, default=0.0),
            non_finite_count=self._non_finite_count,
        )


def _shards_with(run: HostedRun, name: str) -> list[UnitShard]:
    """Returns the shards that have a part of a parameter, primaries first, and then by their ranges."""
    of_unit = [shard for shard in run.shards.values() if name in shard.layout.index_by_name]
    found = [shard for shard in of_unit if shard.layout.index_by_name[name] in shard.segment_of]
    if found:
        return sorted(found, key=lambda shard: (shard.role is not Role.PRIMARY, shard.start_bytes))
    if of_unit:
        raise NotFoundError(
            f"this server holds no element of parameter {name!r}: ask another owner of its unit", parameter=name
        )
    names = list({parameter.name: None for shard in run.shards.values() for parameter in shard.layout.parameters})
    some = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    raise NotFoundError(
        f"run {run.name!r} has no parameter {name!r} on this server; it has {some or 'none'}", parameter=name
    )


def server_metrics(store: ShardStore) -> Iterator[Metric]:
    """Yields the metrics of a shard server."""
    memory = store.memory
    for name, text, value in (
        ("budget", "Memory budget for all runs.", memory.budget_bytes),
        ("reserved", "Memory that shards have reserved, and that is set aside for readers.", memory.reserved_bytes),
        ("used", "Memory in use for parameters, gradients, streams and optimizer state.", memory.used_bytes),
    ):
        yield gauge(f"shardwell_server_memory_{name}_bytes", text, [(value,)])
    yield gauge(
        "shardwell_server_lease_valid",
        "1 while the server may serve trainers: its coordinator has acknowledged a heartbeat lately.",
        [(store.lease.valid,)],
    )
    # A deleted run may be here beside the one that has its name now.
    runs: dict[str, list[HostedRun]] = {}
    for run in store.runs.values():
        runs.setdefault(run.name, []).append(run)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for run in store.runs.values():
        for shard in run.shards.values():
            counts[run.name, shard.role.value] += 1
            sizes[run.name, shard.role.value] += shard.size_bytes
    for name, text, found in (("shards", "Shards", counts), ("shard_bytes", "Bytes of shards", sizes)):
        samples = ((run, role, value) for (run, role), value in found.items())
        yield gauge(f"shardwell_server_{name}", f"{text} on this server, by role.", samples, "run", "role")
    yield gauge(
        "shardwell_server_version",
        "Lowest version of the run's shards on this server.",
        ((name, found[-1].step) for name, found in runs.items()),
        "run",
    )
    yield gauge(
        "shardwell_server_pins",
        "Versions that readers have pinned on this server, one for each reader.",
        ((name, sum(run.pins.total() for run in found)) for name, found in runs.items()),
        "run",
    )
    yield gauge(
        "shardwell_server_oldest_pin_lag_versions",
        "Versions by which the oldest pinned version is behind the newest; 0 without pins.",
        ((name, max(run.step - min(run.pins, default=run.step) for run in found)) for name, found in runs.items()),
        "run",
    )
    yield counter(
        "shardwell_server_gathered_bytes_total",
        "Bytes of weights sent over connections. Weights that trainers read in shared memory are not counted.",
        [(store.traffic.gathered_bytes,)],
    )
    yield counter(
        "shardwell_server_reduced_bytes_total",
        "Bytes of gradients that were accepted, over connections (stream) or in shared memory (shm).",
        [("stream", store.traffic.streamed_bytes), ("shm", store.traffic.adopted_bytes)],
        "transport",
    )
    yield counter(
        "shardwell_server_replicated_bytes_total",
        "Bytes of copies of shards, and of steps, that this server has sent to backups.",
        [(store.replicated_bytes,)],
    )
