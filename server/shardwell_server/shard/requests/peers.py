"""The interface by which a shard server calls other shard servers, and the messages of shard states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from google.protobuf.message import Message

from shardwell_server.shard.state.portable_state import PartState, ShardState
from shardwell_server.shard.state.trainer_state import TrainerState
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.layout import DTYPE_NAMES, DTYPE_NUMBERS
from shardwell_wire.optimizers import OPTIMIZERS
from shardwell_wire.partitions import check_state_tensor, state_size
from shardwell_wire.v1 import shard_pb2


class Peers(Protocol):
    """Performs rpcs to other shard servers."""

    async def call(self, address: str, rpc_name: str, request: Message, *, timeout_s: float) -> Any:
        """Calls a unary rpc of ``ShardService``.

        Args:
            address: host:port of the server.
            rpc_name: Name of the rpc in the proto file.
            request: Its request.
            timeout_s: Deadline in seconds.

        Returns:
            The response.

        Raises:
            ShardwellError: The error that the server raised, or UnavailableError or DeadlineError.
        """
        ...

    async def stream(self, address: str, rpc_name: str, messages: Iterator[bytes], *, timeout_s: float) -> Any:
        """Calls an rpc of ``ShardService`` with a stream of serialised messages. Arguments and errors as ``call``.

        An error that ``messages`` raises ends the rpc and is raised.
        """
        ...


class NoPeers:
    """``Peers`` of a server that has no other servers."""

    async def call(self, address: str, rpc_name: str, request: Message, *, timeout_s: float) -> Any:
        """Raises InvalidRequestError."""
        raise InvalidRequestError("this server cannot call other shard servers")

    async def stream(self, address: str, rpc_name: str, messages: Iterator[bytes], *, timeout_s: float) -> Any:
        """Raises InvalidRequestError."""
        raise InvalidRequestError("this server cannot call other shard servers")


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    assert tensor.is_contiguous()
    return memory_at(tensor.data_ptr(), tensor.nbytes, owner=tensor)


def write_content(state: ShardState, header: shard_pb2.ReceiveShardStateHeader) -> None:
    """Describes a state in the header of a stream that has its tensors in the order of ``ShardState.tensors``."""
    for part in state.parts:
        header.parts.add(
            algorithm=part.algorithm or "",
            step_count=part.step_count,
            state=[
                shard_pb2.StateTensor(
                    parameter_index=part.parameter_index,
                    name=name,
                    dtype=DTYPE_NUMBERS[str(tensor.dtype).removeprefix("torch.")],
                    shape=tensor.shape,
                )
                for name, tensor in sorted(part.state.items())
            ],
            has_average=part.average is not None,
            kept_contributors=sorted(part.kept),
        )
    header.averages_begun = state.averages_begun
    for partition in sorted(state.partitions, key=lambda partition: partition.dp_rank):
        header.partitions.add(dp_rank=partition.dp_rank, state=partition.tensors)


def read_content(shard: UnitShard, header: shard_pb2.ReceiveShardStateHeader) -> ShardState:
    """Returns the state that a header describes, with tensors on the meta device.

    Raises:
        InvalidRequestError: The header does not fit the shard.
    """
    if len(header.parts) != len(shard.segments):
        raise InvalidRequestError(
            f"{shard.what} has {len(shard.segments)} parts here, the header describes {len(header.parts)}"
        )
    parts = []
    for segment, content in zip(shard.segments, header.parts, strict=True):
        dtype = getattr(torch, shard.layout.parameters[segment.parameter_index].dtype)
        values = torch.empty(segment.stop_element - segment.start_element, dtype=dtype, device="meta")
        known = OPTIMIZERS.get(content.algorithm)
        names = {tensor.name for tensor in known.state} if known is not None else set()
        if (content.algorithm and known is None) or not names.issuperset(tensor.name for tensor in content.state):
            raise InvalidRequestError(
                f"{shard.what}: the state of optimizer {content.algorithm!r} has tensors that this server does not know"
            )
        parts.append(
            PartState(
                parameter_index=segment.parameter_index,
                start_element=segment.start_element,
                stop_element=segment.stop_element,
                values=values,
                algorithm=content.algorithm or None,
                step_count=content.step_count,
                state={tensor.name: _meta(tensor, shard.what) for tensor in content.state},
                average=values if content.has_average else None,
                kept=dict.fromkeys(content.kept_contributors, values),
            )
        )
    state = ShardState(
        layout=shard.layout,
        start_bytes=shard.start_bytes,
        stop_bytes=shard.stop_bytes,
        dp=shard.dp,
        parts=parts,
        averages_begun=header.averages_begun,
    )
    ranks = [partition.dp_rank for partition in header.partitions]
    if sorted(set(ranks)) != ranks or (ranks and ranks[-1] >= shard.dp):
        raise InvalidRequestError(
            f"{shard.what}: the header has partitions of ranks {ranks[:10]}, expected strictly rising ranks below "
            f"{shard.dp}"
        )
    partitions = []
    for partition in header.partitions:
        for tensor in partition.state:
            check_state_tensor(tensor, shard.what)
        start, stop = shard.partitions.bounds(partition.dp_rank)
        data = [torch.empty(state_size(tensor), dtype=torch.uint8, device="meta") for tensor in partition.state]
        partitions.append(
            TrainerState(
                dp_rank=partition.dp_rank,
                start_bytes=start,
                stop_bytes=stop,
                tensors=list(partition.state),
                data=data,
            )
        )
    return replace(state, partitions=partitions)


def _meta(tensor: shard_pb2.StateTensor, what: str) -> torch.Tensor:
    check_state_tensor(tensor, what)
    return torch.empty(tuple(tensor.shape), dtype=getattr(torch, DTYPE_NAMES[tensor.dtype]), device="meta")
