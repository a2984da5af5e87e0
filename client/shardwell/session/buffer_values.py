"""Buffers of a model and their values, as a run knows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy

from shardwell_wire import codec
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import ITEM_SIZES, Parameter, Segment
from shardwell_wire.v1 import initialization_pb2


@dataclass(frozen=True, slots=True)
class BufferValue:
    """A buffer's value at one moment: a dense copy on the CPU, with the digest of its bytes."""

    tensor: torch.Tensor
    digest: int


class LiveBuffer:
    """A buffer as the model has it now, with its names in the run."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.names = tensor, list[str]()

    def describe(self) -> Parameter:
        """Raises UsageError for a buffer that a run cannot store."""
        name, dtype = self.names[0], str(self.tensor.dtype).removeprefix("torch.")
        if is_lazy(self.tensor):
            raise UsageError(f"buffer {name!r} has no shape yet: run a forward before fully_shard")
        if dtype not in ITEM_SIZES or self.tensor.layout != torch.strided:
            raise UsageError(
                f"buffer {name!r} has dtype {dtype} and layout {self.tensor.layout}, which a run cannot store: "
                f"expected a dense tensor of dtype {', '.join(ITEM_SIZES)}. Register it with persistent=False if "
                "every process makes the same values",
                buffer=name,
            )
        return Parameter(name, tuple(self.tensor.shape), dtype, tuple(self.names[1:]))


@dataclass(slots=True)
class RunBuffer:
    """One declared buffer."""

    described: Parameter
    unit_index: int
    index: int
    """In the unit's layout."""
    committed: BufferValue
    written: BufferValue | None = None
    """What the training script wrote since the commit: what the items of the step begin with."""
    pushed: BufferValue | None = None
    """What rank 0's item left behind, if the item or the training script has changed it since the commit."""
    spare: torch.Tensor | None = None
    """Memory of a former value, for the next."""

    @property
    def start(self) -> BufferValue:
        """What a work item begins with."""
        return self.written or self.committed

    @property
    def present(self) -> BufferValue:
        """What the module's buffer holds after the last item that ended here."""
        return self.pushed or self.start

    def fits(self, live: LiveBuffer) -> bool:
        """Whether a buffer of the model is still the one that was declared."""
        declared, tensor = self.described, live.tensor
        return (
            tensor.dtype == self.committed.tensor.dtype
            and tensor.shape == declared.shape
            and (*live.names,) == (declared.name, *declared.aliases)
        )

    def take_room(self) -> torch.Tensor:
        """Memory for another value."""
        room, self.spare = self.spare, None
        return torch.empty_like(self.committed.tensor) if room is None else room

    def commit(self, value: BufferValue) -> None:
        """Another value is the run's; the former one's memory is used again."""
        self.committed, self.spare = value, self.committed.tensor


class InitialBuffers:
    """``InitialValues`` of buffers that are here."""

    draws: Mapping[int, initialization_pb2.ParameterDraw] = {}

    def __init__(self, values: Sequence[BufferValue]) -> None:
        self._values = values

    def read(self, segment: Segment) -> Iterator[bytes | memoryview]:
        tensor = self._values[segment.parameter_index].tensor
        yield codec.memory_at(
            tensor.data_ptr() + segment.start_element * tensor.element_size(), segment.size_bytes, tensor
        )


def find_buffers(modules: Iterable[tuple[str, nn.Module]]) -> list[LiveBuffer]:
    """The persistent buffers of the model, a tied one once."""
    found: dict[int, LiveBuffer] = {}
    named: set[int] = set()
    for prefix, module in modules:
        owners = {
            path: owner
            for path, owner in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False)
            if id(owner) not in named  # of nested sharded modules the inner one names it
        }
        named.update(map(id, owners.values()))
        for path, owner in owners.items():
            for name, buffer in owner._buffers.items():
                if buffer is not None and name not in owner._non_persistent_buffers_set:
                    found.setdefault(id(buffer), LiveBuffer(buffer)).names.append(f"{path}.{name}" if path else name)
    return list(found.values())


def text_of(parameter: Parameter) -> str:
    """A buffer's dtype, shape and further names, for messages."""
    also = f", also named {', '.join(map(repr, parameter.aliases))}" if parameter.aliases else ""
    return f"{parameter.dtype} {list(parameter.shape)}{also}"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values side by side on the CPU; itself if they are."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def memory_of(values: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor on the CPU."""
    return codec.memory_at(values.data_ptr(), values.nbytes, values)


def digest_of(tensor: torch.Tensor) -> int:
    """Two values with the same digest have the same bytes; NaN and -0.0 count as other values do."""
    return xxhash.xxh3_128_intdigest(memory_of(dense(tensor)))


def copy_value(tensor: torch.Tensor) -> BufferValue:
    """A copy of a buffer's present value."""
    copy = dense(tensor).clone()
    return BufferValue(copy, digest_of(copy))


def new_value(tensor: torch.Tensor, buffer: RunBuffer) -> BufferValue | None:
    """A copy of what rank 0's item left behind; None if neither the item nor the script has changed the buffer."""
    digest = digest_of(tensor)
    if digest == buffer.committed.digest and buffer.written is None:
        return None
    return BufferValue(buffer.take_room().copy_(tensor.detach()), digest)


def set_value(live: torch.Tensor, value: BufferValue) -> None:
    """Sets a buffer unless it holds the value already: then its version counter stays."""
    if digest_of(live) != value.digest:
        write_value(live, value)


def write_value(live: torch.Tensor, value: BufferValue) -> None:
    """Sets a buffer."""
    with torch.no_grad():
        live.copy_(value.tensor)
