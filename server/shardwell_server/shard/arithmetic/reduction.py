"""Reduces gradients in the run's order of additions, and sums powers of their elements for norms.

Most of the time of a small shard is the fixed cost of each tensor operation. ``reduce_small`` therefore reduces shards
with the same order of additions together: rows of blocks of all shards are summed by one operation, each row by itself.
The results have the bits of ``reduce_shard``.

Note: [Norms]
    A term is the fp64 sum over the part of one parameter that is inside one fixed block of the flat vector. Shards are
    cut at blocks, so the terms are the same for any number of servers. Terms are added without rounding error, so
    their order and grouping do not matter either.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress, islice

import torch

from shardwell_server.shard.arithmetic.update_pieces import Clipping
from shardwell_wire.model.layout import BLOCK_BYTES
from shardwell_wire.model.sum_order import Scratch, SumOrder, Term


@dataclass(frozen=True)
class Reduced:
    """The mean gradient of one shard in one step."""

    gradients: Sequence[torch.Tensor | None]
    """By segment number. None: no rank has a gradient."""
    buffer: torch.Tensor | None
    """Memory that contains the gradients. None: they are in a contribution."""
    square_partials: list[float]
    non_finite: int | None = None
    """The first segment with NaN or infinity. Later segments were not reduced."""
    skipped: bool = False
    """True if there are no gradients because the step is skipped, not because no rank pushed one."""

    def max_abs(self) -> float:
        """Returns the largest absolute value; 0 if there is no gradient."""
        values = (torch.aminmax(gradient) for gradient in self.gradients if gradient is not None and gradient.numel())
        return max((abs(float(value)) for pair in values for value in pair), default=0.0)

    def power_partials(self, first_bytes: Sequence[int], norm_type: float, bound: float | None = None) -> list[float]:
        """Returns this shard's share of another norm, in the form of ``square_partials``.

        Args:
            first_bytes: First byte of each segment in the flat vector.
            norm_type: Type of the norm, positive and finite.
            bound: Elements are clamped to ``[-bound, bound]`` first. None: they are not.
        """
        clipping = Clipping(value=bound)
        powers: list[float] = []
        for gradient, first_byte in zip(self.gradients, first_bytes, strict=True):
            if gradient is not None:
                for here in _slices(gradient, first_byte):
                    start = first_byte + here.start * gradient.element_size()
                    powers += block_powers(clipping.apply(gradient[here]), start, norm_type)
        return exact_partials(powers)


def reduce_shard(
    terms: Sequence[Sequence[Term]],
    order: SumOrder,
    outs: Sequence[torch.Tensor] | None,
    first_bytes: Sequence[int],
    *,
    buffer: torch.Tensor | None,
) -> Reduced:
    """Returns the mean gradients of all segments of a shard, and their share of the norm.

    Args:
        terms: Gradients of each segment by ascending data rank. Empty: the segment has no gradient.
        outs: Receive the results. None if no segment has more than one gradient, and there is one data rank.
        first_bytes: First byte of each segment in the flat vector.
        buffer: Memory that contains ``outs``.
    """
    means = [None if not own else own[0][1] if outs is None else outs[number] for number, own in enumerate(terms)]
    gradients = [None if mean is None or mean.numel() else mean for mean in means]
    squares: list[float] = []
    scratch = Scratch()
    for numbers in _adjacent(terms, means, first_bytes, is_copied=outs is not None):
        first, own_means = numbers[0], [mean for number in numbers if (mean := means[number]) is not None]
        starts = [first_bytes[number] for number in numbers]
        plan = square_plan(tuple(starts), tuple(mean.numel() for mean in own_means), own_means[0].element_size())
        mean, own = _joined(own_means[0], plan), [(rank, _joined(term, plan)) for rank, term in terms[first]]
        norms = torch.empty(plan.row_count, dtype=torch.float64)
        for here, rows in plan.slices():
            part = mean[here]
            if outs is not None:
                compute_mean([(rank, term[here]) for rank, term in own], order, part, scratch)
            plan.compute_norms(mean, rows, norms)
        found = plan.squares(mean, norms)
        # A sum of squares may overflow even if all values are finite.
        if not all(map(math.isfinite, found)):
            for number, each in zip(numbers, own_means, strict=True):
                if not bool(torch.isfinite(each).all()):
                    return Reduced(gradients, buffer, [], non_finite=number)
                gradients[number] = each
        for number, each in zip(numbers, own_means, strict=True):
            gradients[number] = each
        squares += found
    return Reduced(gradients, buffer, exact_partials(squares))


def _adjacent(
    terms: Sequence[Sequence[Term]],
    means: Sequence[torch.Tensor | None],
    first_bytes: Sequence[int],
    *,
    is_copied: bool,
) -> Iterator[list[int]]:
    """Divides the segments that have a gradient into groups of which each can be reduced as one vector.

    Segments of one group have one dtype, gradients of the same ranks, and the same places in every tensor as in the
    flat vector. The bytes between them are reduced too, without a meaning.
    """
    group: list[int] = []
    former: object = None
    for number, own in enumerate(terms):
        if (mean := means[number]) is None or not mean.numel():
            continue
        tensors = [*(term for _, term in own), *([mean] if is_copied else [])]
        # Equal if a tensor continues, in the same memory, where the one of the segment before ended.
        places = [(each.untyped_storage().data_ptr(), each.data_ptr() - first_bytes[number]) for each in tensors]
        key = mean.dtype, [rank for rank, _ in own], places
        if group and key != former:
            yield group
            group = []
        group.append(number)
        former = key
    if group:
        yield group


def _joined(first: torch.Tensor, plan: SquarePlan) -> torch.Tensor:
    """Returns a group of adjacent segments as one vector, given the first one. [numel]"""
    return first if first.numel() == plan.numel else first.as_strided((plan.numel,), (1,))


def _slices(values: torch.Tensor, first_byte: int) -> Iterator[slice]:
    """Yields consecutive parts of a segment that end at a block of the flat vector."""
    size, stop = values.element_size(), 0
    while stop < values.numel():
        start = stop
        end_byte = (first_byte + start * size) // BLOCK_BYTES * BLOCK_BYTES + SLICE_BYTES
        stop = min(values.numel(), (end_byte - first_byte) // size)
        yield slice(start, stop)


def compute_mean(terms: Sequence[Term], order: SumOrder, out: torch.Tensor, scratch: Scratch) -> None:
    """Computes the mean gradient of consecutive elements of one parameter.

    The result depends only on the terms and their ranks. 16-bit terms are added in fp32 and rounded once.

    Args:
        terms: Gradients by ascending data rank, without ranks that have none, which count as 0.
        order: The run's order of additions. The sum is divided by its number of data ranks.
        out: Receives the result. [numel]
        scratch: Memory for the sums of inner groups.
    """
    if out.element_size() < 4:
        total = order.add(terms, torch.empty_like(out, dtype=torch.float32), scratch).float()
        out.copy_(_divide(total, order.divisor, out=total))
    else:
        _divide(order.add(terms, out, scratch), order.divisor, out=out)


def _divide(values: torch.Tensor, dp: int, *, out: torch.Tensor) -> torch.Tensor:
    """Divides by ``dp``. For a power of two, a multiplication gives the same bits in half the time."""
    if dp & (dp - 1):
        return torch.div(values, dp, out=out)
    return torch.mul(values, 1.0 / dp, out=out)


def block_powers(values: torch.Tensor, first_byte: int, norm_type: float) -> list[float]:
    """Sums absolute values to a power, per block of the flat vector. See Note: [Norms].

    Args:
        values: Consecutive elements of one parameter. [numel]
        first_byte: Position of the first element in the flat vector.
        norm_type: The power, positive and finite.

    Returns:
        One term per block. [num_blocks]
    """
    return list(chain.from_iterable(_row_powers(rows, norm_type) for rows in block_rows(values, first_byte)))


def block_rows(values: torch.Tensor, first_byte: int) -> list[torch.Tensor]:
    """Divides consecutive elements of one parameter at the blocks of the flat vector. Each [num_rows, row]"""
    row = BLOCK_BYTES // values.element_size()
    head = min(values.numel(), -first_byte % BLOCK_BYTES // values.element_size())
    body = (values.numel() - head) // row * row
    if not head and not body:
        return [values[None]] if values.numel() else []
    pieces = (values[:head][None], values[head : head + body].view(-1, row), values[head + body :][None])
    return [piece for piece in pieces if piece.numel()]


def _row_powers(rows: torch.Tensor, norm_type: float) -> list[float]:
    """[num_rows, row] -> [num_rows]"""
    norms = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=torch.float64)
    if norm_type == 2.0:
        return [norm * norm for norm in norms.tolist()]  # as ``pow``, without another operation
    powers: list[float] = norms.pow(norm_type).tolist()
    return powers


def exact_partials(terms: Sequence[float]) -> list[float]:
    """Returns a few doubles whose exact sum is the exact sum of ``terms`` (Shewchuk 1997, with ``math.fsum``).

    If the sum is not finite, returns one partial that is not finite.
    """
    if not all(map(math.isfinite, terms)):
        return [sum(terms)]
    partials: list[float] = []
    try:
        while rest := math.fsum(chain(terms, (-partial for partial in partials))):
            partials.append(rest)
    except OverflowError:
        return [math.inf]
    return partials


SLICE_BYTES = 256 << 10
"""Size of the slices that are summed, divided and squared together, while they are in the cache."""


class _Workspace(threading.local):
    """Memory of one thread for the values of one slice in fp64. A new allocation each time would cost page faults."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float64)

    def double(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values of at most one slice in fp64. The result is valid until the next call."""
        if values.dtype == torch.float64:
            return values
        if self._memory.numel() < values.numel():
            self._memory = torch.empty(values.numel(), dtype=torch.float64)
        return self._memory[: values.numel()].copy_(values)


_workspace = _Workspace()


@dataclass(frozen=True, slots=True)
class SquarePlan:
    """How the squares of adjacent segments are summed, by block of the flat vector.

    Blocks that lie within one segment are squared together, as rows. In the others, each segment's part has a sum of
    its own.
    """

    numel: int
    """Number of elements from the start of the first segment to the end of the last."""
    row: int
    """Number of elements of a block."""
    base: int
    """Number of elements of the flat vector before the first segment, in a vector of these elements only."""
    row_count: int
    """Number of whole blocks."""
    is_own: bytes
    """1 for each whole block that lies within one segment, 0 for the others."""
    parts: Sequence[tuple[int, Sequence[slice]]]
    """Parts of segments in other blocks, by length."""

    def slices(self) -> Iterator[tuple[slice, tuple[int, int, int]]]:
        """Yields the slices of the vector that are reduced together.

        Each comes with the first element and the end of its whole blocks, and the number of whole blocks before.
        """
        base, row, step, stop = self.base, self.row, SLICE_BYTES // BLOCK_BYTES * self.row, 0
        first_block = -(-base // row)
        while stop < self.numel:
            start, stop = stop, min(self.numel, (base + stop) // step * step + step - base)
            low, high = -(-(base + start) // row), (base + stop) // row
            yield slice(start, stop), (low * row - base, high * row - base, low - first_block)

    def compute_norms(self, values: torch.Tensor, rows: tuple[int, int, int], norms: torch.Tensor) -> None:
        """Computes the norms of the whole blocks of one slice.

        Args:
            values: The vector. [numel]
            rows: See ``slices``.
            norms: Receives the norms. fp64. [row_count]
        """
        start, stop, number = rows
        if start < stop:
            own = _workspace.double(values[start:stop]).view(-1, self.row)
            torch.linalg.vector_norm(own, 2.0, dim=1, out=norms[number : number + own.shape[0]])

    def squares(self, values: torch.Tensor, norms: torch.Tensor) -> list[float]:
        """Returns one sum of squares for each part of a segment in one block.

        Args:
            values: The vector. [numel]
            norms: The norms of all whole blocks. fp64. [row_count]
        """
        found: list[float] = list(compress(norms.tolist(), self.is_own))
        for length, places in self.parts:
            rows = torch.cat([values[here] for here in places]).view(-1, length)
            found += torch.linalg.vector_norm(rows, 2.0, dim=1, dtype=torch.float64).tolist()
        return [norm * norm for norm in found]


@lru_cache(1024)
def square_plan(first_bytes: tuple[int, ...], numels: tuple[int, ...], item_size: int) -> SquarePlan:
    """Returns the plan of adjacent segments.

    Args:
        first_bytes: First byte of each segment in the flat vector. The segments do not overlap and are not empty.
        numels: Number of elements of each segment.
        item_size: Size of an element.
    """
    row, base = BLOCK_BYTES // item_size, first_bytes[0] // item_size
    starts = [first // item_size - base for first in first_bytes]
    numel = starts[-1] + numels[-1]
    first_block, end_block = -(-base // row), (base + numel) // row
    is_own = bytearray(max(0, end_block - first_block))
    parts: dict[int, list[slice]] = {}
    for start, count in zip(starts, numels, strict=True):
        stop = start + count
        low, high = -(-(base + start) // row), (base + stop) // row
        if low < high:
            is_own[low - first_block : high - first_block] = b"\1" * (high - low)
        head_stop = min(stop, low * row - base)
        for begin, end in ((start, head_stop), (max(head_stop, high * row - base), stop)):
            if begin < end:
                parts.setdefault(end - begin, []).append(slice(begin, end))
    return SquarePlan(numel, row, base, len(is_own), bytes(is_own), list(parts.items()))


MAX_BYTES = 64 << 10
"""Size of the largest shard that is worth it."""
_TOGETHER_BYTES = 1 << 20
"""Size of the shards that are reduced together, so that their means stay in the cache."""


@dataclass(frozen=True, slots=True)
class SmallMean:
    """Where the mean gradient of a small shard is written: all segments, and the bytes between them, as one vector."""

    vector: torch.Tensor
    """The whole shard. [numel]"""
    gradients: Sequence[torch.Tensor]
    """The segments, by number. Each [numel]"""
    rows: Sequence[torch.Tensor]
    """The segments, divided at the blocks of the flat vector. Each [num_rows, row]"""
    buffer: torch.Tensor | None
    """Memory of the server that contains the vector. None: it is in a file."""


@dataclass(frozen=True, slots=True)
class SmallReduction:
    """One small shard to reduce. Every rank has a gradient of each segment, or none at all."""

    terms: Sequence[Term]
    """Gradients of the whole shard by ascending data rank. Bytes between the segments are undefined. Each [numel]"""
    mean: SmallMean


def reduce_small(shards: Sequence[SmallReduction], order: SumOrder) -> list[Reduced | None]:
    """Returns the mean gradient of each shard. None: it is not finite, and ``reduce_shard`` must find out where.

    Args:
        shards: Shards with gradients of one dtype of 32 or 64 bits.
    """
    found: list[Reduced | None] = []
    for some in _in_cache(shards):
        scratch = Scratch()
        for shard in some:
            _add(shard, order, scratch)
        _divide_small([shard.mean.vector for shard in some], order.divisor)
        for shard, squares in zip(some, _squares([shard.mean.rows for shard in some]), strict=True):
            is_finite = all(map(math.isfinite, squares))
            mean = shard.mean
            found.append(Reduced(mean.gradients, mean.buffer, exact_partials(squares)) if is_finite else None)
    return found


def _in_cache(shards: Sequence[SmallReduction]) -> list[Sequence[SmallReduction]]:
    """Divides shards into groups whose means are in the cache from the additions to the norm."""
    count = max(1, _TOGETHER_BYTES // max(shard.mean.vector.nbytes for shard in shards))
    return [shards[start : start + count] for start in range(0, len(shards), count)]


def _add(shard: SmallReduction, order: SumOrder, scratch: Scratch) -> None:
    total = order.add(shard.terms, shard.mean.vector, scratch)
    if total is not shard.mean.vector:  # one rank's gradient
        shard.mean.vector.copy_(total)


def _divide_small(means: list[torch.Tensor], dp: int) -> None:
    """As ``reduction.compute_mean`` divides."""
    if dp & (dp - 1):
        torch._foreach_div_(means, dp)
    elif dp > 1:
        torch._foreach_mul_(means, 1.0 / dp)


def _squares(shards: Sequence[Sequence[torch.Tensor]]) -> list[list[float]]:
    """Returns the sums of squares of the blocks of each shard: a list per shard, from its rows."""
    by_length: dict[int, list[torch.Tensor]] = {}
    for rows in shards:
        for piece in rows:
            by_length.setdefault(piece.shape[1], []).append(piece)
    norms = {
        length: iter(torch.linalg.vector_norm(torch.cat(pieces), 2.0, dim=1, dtype=torch.float64).tolist())
        for length, pieces in by_length.items()
    }
    return [
        [norm * norm for piece in rows for norm in islice(norms[piece.shape[1]], piece.shape[0])] for rows in shards
    ]
