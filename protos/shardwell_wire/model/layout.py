"""The flat layout of a unit, its cuts into shards, and rectangular parts of tensors. Imports no torch.

A unit's flat vector contains the bytes of its parameters in declaration order. Each parameter starts at a multiple of
``ALIGNMENT_BYTES``; gaps are filled with zeros. Shards are half-open byte ranges whose inner cuts are at multiples of
``BLOCK_BYTES``. Both numbers are part of the wire format.

A unit of placement ``tensor`` aligns parameters to ``BLOCK_BYTES``, so that it can be cut between parameters.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor, as tensor parallelism and sharded state dicts cut tensors."""

    whole: tuple[int, ...]
    """Shape of the tensor."""
    offsets: tuple[int, ...]
    """First index along each dim."""
    shape: tuple[int, ...]
    """Size along each dim."""

    @property
    def is_whole(self) -> bool:
        """True if the part is the whole tensor."""
        return self.whole == self.shape

    @property
    def is_inside(self) -> bool:
        """True if the numbers describe a part: equally many dims, and no index beyond the tensor."""
        return len(self.whole) == len(self.offsets) == len(self.shape) and all(
            offset + size <= total for offset, size, total in zip(self.offsets, self.shape, self.whole, strict=True)
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices of the part in the tensor, one slice per dim."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.shape, strict=True))

    def overlaps(self, other: Box) -> bool:
        """True if two parts of one tensor have an element in common."""
        return all(
            max(ours.start, theirs.start) < min(ours.stop, theirs.stop)
            for ours, theirs in zip(self.slices, other.slices, strict=True)
        )

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return math.prod(self.shape)

    @property
    def whole_numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.whole)

    def inside(self, other: Box) -> Box:
        """Returns a part that lies within another part of the same tensor, as a part of the other part."""
        offsets = tuple(ours - theirs for ours, theirs in zip(self.offsets, other.offsets, strict=True))
        return Box(other.shape, offsets, self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Returns what two parts of one tensor have in common. None: nothing."""
        if not self.numel or not other.numel or not self.overlaps(other):
            return None
        first = [max(pair) for pair in zip(self.offsets, other.offsets, strict=True)]
        ends = ((ours.stop, theirs.stop) for ours, theirs in zip(self.slices, other.slices, strict=True))
        return Box(self.whole, tuple(first), tuple(min(pair) - begin for pair, begin in zip(ends, first, strict=True)))

    def position(self, element: int) -> int:
        """Returns the place in the flattened tensor of an element of the flattened part."""
        return next(self.runs(element, element + 1))[0]

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Maps the elements ``[start, stop)`` of the flattened part to the flattened tensor.

        Yields:
            ``(first element, number of elements)`` of each consecutive run in the tensor.
        """
        outer, length = len(self.shape), 1
        while outer and (outer == len(self.shape) or self.shape[outer] == self.whole[outer]):
            outer -= 1
            length *= self.shape[outer]
        while start < stop:
            number, within = divmod(start, length)
            count = min(length - within, stop - start)
            yield self._first(number, outer) + within, count
            start += count

    def _first(self, number: int, outer: int) -> int:
        """Returns the first element of a run, by its number. Each run covers all dims from ``outer`` on."""
        position, stride = 0, math.prod(self.whole[outer + 1 :])
        for dim in reversed(range(outer + 1) if self.shape else range(0)):
            index = 0
            if dim < outer:
                number, index = divmod(number, self.shape[dim])
            position += (self.offsets[dim] + index) * stride
            stride *= self.whole[dim]
        return position


def common_runs(
    ours: Box, our_range: tuple[int, int], theirs: Box, their_range: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Finds the elements that ranges of two parts of one tensor have in common.

    Args:
        our_range: Half-open range of elements of this part, flattened.
        theirs: Another part of the same tensor.
        their_range: Half-open range of elements of the other part, flattened.

    Yields:
        ``(first element in our part, first element in the other part, number of elements)`` of each run of elements
        that is consecutive in both flattened parts, in rising order.
    """
    if ours == theirs:
        start, stop = max(our_range[0], their_range[0]), min(our_range[1], their_range[1])
        if start < stop:
            yield start, start, stop - start
        return
    if (common := ours.intersection(theirs)) is None:
        return
    sides = (common.inside(ours), our_range), (common.inside(theirs), their_range)
    # Positions rise with the elements of the common part, so each range contains consecutive elements of it.
    bounds = [[bisect_left(range(common.numel), at, key=side.position) for at in limits] for side, limits in sides]
    start, stop = max(first for first, _ in bounds), min(last for _, last in bounds)
    left, right = (side.runs(start, max(start, stop)) for side, _ in sides)
    mine = other = (0, 0)
    while start < stop:
        mine = mine if mine[1] else next(left)
        other = other if other[1] else next(right)
        count = min(mine[1], other[1])
        yield mine[0], other[0], count
        mine, other = ((first + count, rest - count) for first, rest in (mine, other))
        start += count


ALIGNMENT_BYTES = 64
"""Alignment of parameters, with which views of the flat vector use the same CPU kernels as ordinary tensors."""

BLOCK_BYTES = 4096
"""Granularity of cuts. Gradient norms are summed per block, so cuts do not change the bits of a norm."""

MAX_UNIT_BYTES = 1 << 40
MAX_UNIT_PARAMETERS = 1 << 16

MAX_DIMS = 64
"""Maximum number of dims, as in torch. The product of very many sizes would occupy a server for minutes."""

PARAMETER_ITEM_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes that optimizers update, by torch's names."""

ITEM_SIZES = {
    **PARAMETER_ITEM_SIZES,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
"""Bytes per element of the dtypes that a buffer or frozen parameter may have."""

DTYPE_NAMES: dict[int, str] = {
    number: name.removeprefix("DTYPE_").lower() for name, number in common_pb2.Dtype.items() if number
}
"""torch's names of all dtypes, by wire number."""

DTYPE_NUMBERS: dict[str, common_pb2.Dtype.ValueType] = {
    name: common_pb2.Dtype.Value(f"DTYPE_{name.upper()}") for name in DTYPE_NAMES.values()
}


PLACEMENT_NUMBERS: dict[str, common_pb2.Placement.ValueType] = {
    "flat": common_pb2.PLACEMENT_UNSPECIFIED,
    "tensor": common_pb2.PLACEMENT_TENSOR,
}
"""Placements by the names in user options."""

_PLACEMENT_NAMES: dict[int, str] = {number: name for name, number in PLACEMENT_NUMBERS.items()}

KIND_NUMBERS: dict[str, common_pb2.UnitKind.ValueType] = {
    "parameters": common_pb2.UNIT_KIND_UNSPECIFIED,
    "buffers": common_pb2.UNIT_KIND_BUFFERS,
}
"""Kinds of units by name."""

_KIND_NAMES: dict[int, str] = {number: name for name, number in KIND_NUMBERS.items()}


RESHAPED = ":reshaped"
"""End of the stored name of a buffer that took its shape in the first step. It replaces the one without this end."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter or buffer as declared, or a part of a parameter that tensor parallelism splits."""

    name: str
    """Name in the run. All parts of a parameter have the same name."""
    shape: tuple[int, ...]
    """Shape of what is stored: of the parameter, or of its part."""
    dtype: str
    """torch's name of the dtype, such as ``float32``."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tied parameter."""
    whole_shape: tuple[int, ...] = ()
    """For a part: shape of the whole parameter. Otherwise empty."""
    offsets: tuple[int, ...] = ()
    """For a part: first index along each dim. Otherwise empty."""
    frozen: bool = field(default=False, compare=False)
    """True if the trainer that declares the parameter does not train it. Its initial values may be NaN or infinite."""
    model_names: tuple[str, ...] = field(default=(), compare=False)
    """Names in the model, the first one first. Empty: not known, or ``name`` and ``aliases``. See ``shown_names``."""
    exact: bool = False
    """True: the values are neither trained nor cast to another dtype."""

    @property
    def is_trainable(self) -> bool:
        """True if optimizers may update the parameter."""
        return self.dtype in PARAMETER_ITEM_SIZES and not self.exact

    @property
    def is_part(self) -> bool:
        """True for a part of a parameter, False for a whole one."""
        return bool(self.offsets)

    @property
    def box(self) -> Box:
        """What is stored, as a part of the whole parameter."""
        if self.is_part:
            return Box(self.whole_shape, self.offsets, self.shape)
        return Box(self.shape, (0,) * len(self.shape), self.shape)

    @property
    def shown_name(self) -> str:
        """The name for messages: that in the model, if it is known."""
        return self.model_names[0] if self.model_names else self.name

    @property
    def key(self) -> str:
        """A name that is unique in the run also for parts: ``NAME``, or ``NAME@OFFSET,OFFSET`` for a part."""
        return f"{self.name}@{','.join(map(str, self.offsets))}" if self.is_part else self.name

    @property
    def reshaped(self) -> Parameter:
        """The same buffer with names that say that it took its shape in the first step."""
        return replace(self, name=self.name + RESHAPED, aliases=tuple(each + RESHAPED for each in self.aliases))

    @property
    def is_reshaped(self) -> bool:
        """True for a result of ``reshaped``."""
        return self.name.endswith(RESHAPED)

    @property
    def plain(self) -> Parameter:
        """The same buffer with its names in the run, without the ending ``RESHAPED``."""
        if not self.is_reshaped:
            return self
        aliases = tuple(each.removesuffix(RESHAPED) for each in self.aliases)
        return replace(self, name=self.name.removesuffix(RESHAPED), aliases=aliases)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def item_size(self) -> int:
        """Bytes per element."""
        return ITEM_SIZES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item_size


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one parameter that is inside a byte range of the flat vector."""

    parameter_index: int
    start_bytes: int
    """Half-open, in the unit's flat vector."""
    stop_bytes: int
    start_element: int
    """Half-open, in the flattened parameter."""
    stop_element: int

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes


@dataclass(frozen=True)
class UnitLayout:
    """The positions of all parameters in a unit's flat vector.

    Raises:
        InvalidRequestError: A name is repeated or empty, a dtype or a number of dims is not supported, a part is not
            inside its parameter, the placement or the kind is unknown, or the unit is too large.
    """

    unit: str
    parameters: tuple[Parameter, ...]
    placement: str = "flat"
    """``flat``: cut at any block. ``tensor``: cut between parameters only."""
    kind: str = "parameters"
    """``parameters`` or ``buffers``."""
    tp_rank: int = 0
    """Tensor-parallel rank that pushes the unit. Units without parts are held by all tensor-parallel ranks, and pushed
    by rank 0."""
    pp_ranks: tuple[int, ...] = (0,)
    """Pipeline ranks of the trainers that hold the unit, rising. Several for a parameter that stages share."""
    cp: int = 1
    """Number of context-parallel ranks. All of them hold the unit, and each pushes a gradient. 1 for buffers."""
    starts: tuple[int, ...] = field(init=False)
    """First byte of each parameter."""
    size_bytes: int = field(init=False)
    """Size of the flat vector, a multiple of the alignment of its parameters."""

    def __post_init__(self) -> None:
        self._validate()
        starts, position = [], 0
        alignment = BLOCK_BYTES if self.placement == "tensor" else ALIGNMENT_BYTES
        for parameter in self.parameters:
            starts.append(position)
            position = align(position + parameter.size_bytes, alignment)
        if position > MAX_UNIT_BYTES:
            raise self._invalid(f"has {position} bytes, more than the limit of {MAX_UNIT_BYTES}: wrap smaller modules")
        object.__setattr__(self, "starts", tuple(starts))
        object.__setattr__(self, "size_bytes", position)

    def _validate(self) -> None:
        if not self.unit:
            raise InvalidRequestError("the unit has no name: set UnitSpec.name")
        if self.placement not in PLACEMENT_NUMBERS:
            raise self._invalid(f"has placement {self.placement!r}: expected one of {', '.join(PLACEMENT_NUMBERS)}")
        if self.kind not in KIND_NUMBERS:
            raise self._invalid(f"has kind {self.kind!r}: expected one of {', '.join(KIND_NUMBERS)}")
        if len(self.parameters) > MAX_UNIT_PARAMETERS:
            raise self._invalid(f"has {len(self.parameters)} parameters, more than {MAX_UNIT_PARAMETERS}")
        if not self.pp_ranks or list(self.pp_ranks) != sorted(set(self.pp_ranks)):
            raise self._invalid(f"has pp_ranks {list(self.pp_ranks)}: expected strictly rising ranks")
        if self.holds_buffers and len(self.pp_ranks) > 1:
            raise self._invalid(f"of buffers has pp_ranks {list(self.pp_ranks)}: expected one")
        if self.cp < 1 or (self.holds_buffers and self.cp > 1):
            raise self._invalid(
                f"of {self.kind} has cp {self.cp}: expected {'1' if self.holds_buffers else '1 or more'}"
            )
        names = [name for parameter in self.parameters for name in (parameter.name, *parameter.aliases)]
        if len(set(names)) != len(names) or not all(names):
            raise self._invalid("has two parameters with the same name, or a parameter without a name")
        for parameter in self.parameters:
            if parameter.dtype not in ITEM_SIZES:
                raise InvalidRequestError(
                    f"{'buffer' if self.holds_buffers else 'parameter'} {parameter.name!r} has dtype "
                    f"{parameter.dtype}; expected one of {', '.join(ITEM_SIZES)}",
                    parameter=parameter.name,
                )
            if len(parameter.shape) > MAX_DIMS:
                raise InvalidRequestError(
                    f"parameter {parameter.name!r} has {len(parameter.shape)} dimensions, more than {MAX_DIMS}",
                    parameter=parameter.name,
                )
            self._validate_part(parameter)

    def _invalid(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(f"unit {self.unit!r} {problem}", unit=self.unit)

    def _validate_part(self, parameter: Parameter) -> None:
        if not (parameter.offsets or parameter.whole_shape):
            return
        if self.holds_buffers:
            raise InvalidRequestError(
                f"buffer {parameter.name!r} is declared as a part, but buffers are stored whole",
                parameter=parameter.name,
            )
        if not parameter.shape or not Box(parameter.whole_shape, parameter.offsets, parameter.shape).is_inside:
            raise InvalidRequestError(
                f"parameter {parameter.name!r} is a part of shape {parameter.shape} at offsets {parameter.offsets} of "
                f"whole_shape {parameter.whole_shape}: expected equally many dimensions, at least one, and a part "
                "inside the whole",
                parameter=parameter.name,
            )

    @property
    def holds_parts(self) -> bool:
        """True if a parameter of the unit is a part, so that one tensor-parallel rank holds the unit."""
        return any(parameter.is_part for parameter in self.parameters)

    @property
    def holds_buffers(self) -> bool:
        """True for units of buffers, False for units of parameters."""
        return self.kind == "buffers"

    @property
    def pp_rank(self) -> int:
        """The first of ``pp_ranks``, whose trainers send the initial values."""
        return self.pp_ranks[0]

    def is_updated_by(self, tp_rank: int, pp_rank: int, cp_rank: int = 0) -> bool:
        """True if trainers of these ranks update the unit's optimizer partitions, if the optimizer runs on trainers.

        Of all the trainers of a replica that hold the unit, exactly one updates it.
        """
        return (tp_rank, pp_rank, cp_rank) == (self.tp_rank, self.pp_rank, 0)

    @property
    def contributors_per_item(self) -> int:
        """Number of trainers of a replica that push a gradient of the unit."""
        return self.cp * len(self.pp_ranks)

    def contributor(self, dp_rank: int, pp_rank: int, cp_rank: int = 0) -> int:
        """Returns the number of the contribution of a data rank, context-parallel rank and pipeline rank.

        Contributions are added in this order.

        Args:
            dp_rank: The data rank. It is the number, unless several trainers of a replica push the unit.
            pp_rank: The pipeline rank. Ignored if the unit has only one.

        Raises:
            InvalidRequestError: Trainers of the pipeline rank or of the context-parallel rank do not hold the unit.
        """
        if not 0 <= cp_rank < self.cp:
            raise InvalidRequestError(
                f"cp_rank is {cp_rank}, but unit {self.unit!r} has {self.cp} context-parallel ranks", unit=self.unit
            )
        sequence_part = dp_rank * self.cp + cp_rank
        if len(self.pp_ranks) == 1:
            return sequence_part
        if pp_rank not in self.pp_ranks:
            raise InvalidRequestError(
                f"pp_rank is {pp_rank}, but unit {self.unit!r} belongs to the pipeline ranks {list(self.pp_ranks)}",
                unit=self.unit,
            )
        return sequence_part * len(self.pp_ranks) + self.pp_ranks.index(pp_rank)

    @cached_property
    def index_by_name(self) -> dict[str, int]:
        """Layout index of each parameter by name and alias."""
        return {
            name: index
            for index, parameter in enumerate(self.parameters)
            for name in (parameter.name, *parameter.aliases)
        }

    @cached_property
    def _spans(self) -> list[tuple[int, int, int]]:
        """Start and end of each parameter in bytes, half-open, and the size of its elements."""
        return [
            (start, start + parameter.size_bytes, parameter.item_size)
            for start, parameter in zip(self.starts, self.parameters, strict=True)
        ]

    def named(self, names: Mapping[str, tuple[str, ...]]) -> UnitLayout:
        """Returns the layout with other ``model_names``, by the names in the run; itself if nothing changes."""
        if all(names.get(p.name, p.model_names) == p.model_names for p in self.parameters):
            return self
        parameters = tuple(replace(p, model_names=names.get(p.name, p.model_names)) for p in self.parameters)
        return replace(self, parameters=parameters)

    def segments(self, start_bytes: int, stop_bytes: int) -> list[Segment]:
        """Returns the parts of parameters inside ``[start_bytes, stop_bytes)``, in layout order.

        Parameters without elements have no segment.
        """
        found = []
        # The last parameter that starts at or before the range.
        first = max(0, bisect_right(self.starts, start_bytes) - 1)
        for index in range(first, len(self.parameters)):
            begin, end, size = self._spans[index]
            if begin >= stop_bytes:
                break
            low, high = max(begin, start_bytes), min(end, stop_bytes)
            if low < high:
                found.append(Segment(index, low, high, (low - begin) // size, (high - begin) // size))
        return found

    def parameters_cut_at(self, cuts: Iterable[int]) -> set[int]:
        """Returns the layout indices of the parameters that a cut would split.

        Args:
            cuts: Positions in the flat vector, in bytes.
        """
        found = set()
        for byte in cuts:
            # Several parameters may start at the same byte. All but the last of them have no elements.
            index = bisect_right(self.starts, byte) - 1
            if index >= 0 and self.starts[index] < byte < self.starts[index] + self.parameters[index].size_bytes:
                found.add(index)
        return found

    def packed_segments(self, parameter_indices: Iterable[int], start_bytes: int, stop_bytes: int) -> list[Segment]:
        """Returns the segments of the given parameters, which make up the stream of a contribution."""
        wanted = set(parameter_indices)
        return [segment for segment in self.segments(start_bytes, stop_bytes) if segment.parameter_index in wanted]

    def to_proto(self) -> common_pb2.UnitSpec:
        copied = common_pb2.UnitSpec()
        copied.CopyFrom(self._proto)
        return copied

    @cached_property
    def _proto(self) -> common_pb2.UnitSpec:
        return common_pb2.UnitSpec(
            name=self.unit,
            parameters=[
                common_pb2.ParameterSpec(
                    name=p.name,
                    shape=p.shape,
                    dtype=DTYPE_NUMBERS[p.dtype],
                    aliases=p.aliases,
                    whole_shape=p.whole_shape,
                    offsets=p.offsets,
                    model_names=p.model_names,
                    exact=p.exact,
                )
                for p in self.parameters
            ],
            placement=PLACEMENT_NUMBERS[self.placement],
            kind=KIND_NUMBERS[self.kind],
            tp_rank=self.tp_rank,
            pp_ranks=self.pp_ranks,
            cp=self.cp if self.cp > 1 else 0,
        )

    @classmethod
    def from_proto(cls, spec: common_pb2.UnitSpec) -> UnitLayout:
        """Decodes a unit. Raises InvalidRequestError if the unit is invalid."""
        parameters = (
            Parameter(
                p.name,
                tuple(p.shape),
                DTYPE_NAMES.get(p.dtype, "unspecified"),
                tuple(p.aliases),
                tuple(p.whole_shape),
                tuple(p.offsets),
                model_names=tuple(p.model_names),
                exact=p.exact,
            )
            for p in spec.parameters
        )
        placement = _PLACEMENT_NAMES.get(spec.placement, str(spec.placement))
        kind = _KIND_NAMES.get(spec.kind, str(spec.kind))
        return cls(
            spec.name, tuple(parameters), placement, kind, spec.tp_rank, tuple(spec.pp_ranks) or (0,), spec.cp or 1
        )


def shown_names(units: Iterable[UnitLayout]) -> dict[str, tuple[str, ...]]:
    """Returns the names that users see of a run's parameters and buffers, by their names in the run.

    The first one is the name, the others are those of a tied tensor. They are the names in the model as far as these
    are known. If that gives two tensors the same name, all have their names in the run. A buffer that took its shape in
    the first step has the names of the one that it replaces, which is left out.
    """
    in_run, shown, stored = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]](), dict[str, str]()
    for parameter in (parameter for unit in units for parameter in unit.parameters):
        plain = parameter.plain
        in_run[plain.name] = (plain.name, *plain.aliases)
        if plain.model_names or plain.name not in shown:
            shown[plain.name] = plain.model_names or in_run[plain.name]
        if parameter.is_reshaped:
            stored[plain.name] = parameter.name
    all_names = [name for names in shown.values() for name in names]
    found = shown if len(set(all_names)) == len(all_names) else in_run
    return {stored.get(name, name): names for name, names in found.items()}


def with_model_names(units: Sequence[UnitLayout]) -> tuple[UnitLayout, ...]:
    """Returns units in which the names in the model are aliases, unless another tensor has them in the run.

    Tensors of a checkpoint are then also found by a run that has these names, because it wraps the model with
    ``auto_wrap``.
    """
    shown = shown_names(units)
    in_run = {name for unit in units for each in unit.parameters for name in (each.name, *each.aliases)}

    def renamed(parameter: Parameter) -> Parameter:
        end = RESHAPED if parameter.is_reshaped else ""
        names = shown[parameter.name] if parameter.name in shown else shown[parameter.name + RESHAPED]
        more = (name + end for name in names if name + end not in in_run)
        return replace(parameter, aliases=(*parameter.aliases, *more))

    return tuple(replace(unit, parameters=tuple(map(renamed, unit.parameters))) for unit in units)


def by_any_name(names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Returns the name in the run by every name that a user may write, for the result of ``shown_names``."""
    return {
        **{name.removesuffix(RESHAPED): name for name in names},
        **{each: name for name, shown in names.items() for each in shown},
    }


def align(position: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Returns the next multiple of ``alignment`` at or after ``position``."""
    return -(-position // alignment) * alignment


def cut_between(layout: UnitLayout, weights: Sequence[float], min_shard_bytes: int) -> list[tuple[int, int]]:
    """Cuts a unit of placement ``tensor`` between parameters, into one range per weight, approximately in proportion.

    Args:
        weights: See ``cut``.
        min_shard_bytes: See ``cut``.

    Returns:
        See ``cut``. The first range is empty only if the unit is empty.
    """
    bounds, allowed = [0], [*layout.starts, layout.size_bytes]
    for _, wanted in cut(layout.size_bytes, weights, min_shard_bytes):
        # Each cut moves to the nearest start of a parameter. If two are equally near, it moves to the later one.
        rest = [byte for byte in allowed[bisect_right(allowed, 0) :] if byte >= bounds[-1]]
        bounds.append(min(rest, key=lambda byte: (abs(byte - wanted), -byte), default=layout.size_bytes))
    return list(pairwise(bounds))


def cut(size_bytes: int, weights: Sequence[float], min_shard_bytes: int) -> list[tuple[int, int]]:
    """Cuts a flat vector at block boundaries, into one range per weight, in proportion.

    Args:
        size_bytes: Size of the flat vector.
        weights: Relative sizes, such as the capacities of servers. At least one must be positive. A weight of 0 gets an
            empty range.
        min_shard_bytes: Lower bound of the mean size of a range. If the vector is too short for all weights, the last
            weights get empty ranges.

    Returns:
        Half-open ranges ``(start, stop)`` in order, which cover the vector.
    """
    able = [index for index, weight in enumerate(weights) if weight > 0]
    if not able:
        raise ValueError(f"expected at least one positive weight, got {list(weights)}")
    used = set(able[: max(1, size_bytes // max(min_shard_bytes, BLOCK_BYTES))])
    total = math.fsum(weights[index] for index in used)
    bounds, share = [0], 0.0
    for index, weight in enumerate(weights):
        share += weight if index in used else 0.0
        stop = round(size_bytes * share / total / BLOCK_BYTES) * BLOCK_BYTES
        # The last weight in use gets the rest of the vector, and all later weights get empty ranges.
        bounds.append(size_bytes if index >= max(used) else min(size_bytes, stop))
    return list(pairwise(bounds))
