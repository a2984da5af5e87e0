"""Encodes a matrix as the product of two factors, and decodes it: the arithmetic of the low-rank wire dtypes.

The left factor is an orthonormal basis of the columns that the product can have. The right factor is the transposed
basis times the matrix. The product is then the projection of the matrix to that basis, which is never farther from the
matrix than zero is. The basis comes from subspace iterations (Halko et al. 2011, "Finding structure with randomness",
algorithm 4.4), of which PowerSGD (Vogels et al. 2019) makes one per step. docs/wire-format.md specifies the format.

Note: [Factors need no state]
    PowerSGD starts at the right factor of the step before, and makes one iteration. Here the iterations start at random
    numbers, whose seed is the step, and there are ``_ITERATIONS`` of them. An encoding is then a function of the matrix
    and the step: a work item that is repeated, by any trainer, needs no state but its residuals, which every lossy
    dtype has. ``benchmarks.low_rank_starts`` compares the losses.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwell_wire.encoding.quantization_blocks import scratch_values
from shardwell_wire.encoding.wire_dtypes import FACTOR_ITEM_BYTES

_ITERATIONS = 2
"""Multiplications by the matrix until the basis is final. ``benchmarks.low_rank_starts`` compares numbers."""

_TILE_NUMEL = 1 << 16
"""Elements of the product that are computed at once. With temporary memory a tile takes 0.75 MiB at most."""


def encode(matrix: torch.Tensor, rank: int, encoded: torch.Tensor, seed: int) -> None:
    """Encodes a whole matrix. The bytes depend on the arguments, the CPU and the number of threads only.

    Args:
        matrix: float32, contiguous, on the CPU. [rows, columns]
        rank: Less than rows and columns.
        encoded: Receives the factors as uint8: right, [rank, columns], then left, [rows, rank], as bfloat16.
        seed: Seed of the random numbers at which the iterations start.
    """
    left, right = factors_of(matrix, random_start(matrix.size(1), rank, seed))
    slots = encoded.split_with_sizes([factor.numel() * FACTOR_ITEM_BYTES for factor in (right, left)])
    for slot, factor in zip(slots, (right, left), strict=True):
        slot.copy_(factor.contiguous().view(-1).view(torch.uint8))


def factors_of(
    matrix: torch.Tensor, start: torch.Tensor, iterations: int = _ITERATIONS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the left and the right factor of a matrix. bfloat16. [rows, rank], [rank, columns]

    Args:
        matrix: See ``encode``.
        start: What the matrix is multiplied by first. float32. [columns, rank]
        iterations: Number of multiplications by the matrix until the basis is final, at least 1.
    """
    # Autocast would multiply in 16 bits.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        basis = _orthonormal(matrix @ start)
        for _ in range(iterations - 1):
            basis = _orthonormal(matrix @ _orthonormal(matrix.t() @ basis))
        left = basis.to(torch.bfloat16)
        # The right factor belongs to the rounded basis, which makes up for most of the rounding.
        return left, (left.to(torch.float32).t() @ matrix).to(torch.bfloat16)


def random_start(columns: int, rank: int, seed: int) -> torch.Tensor:
    """Returns random numbers at which iterations can start. They depend on the arguments only. [columns, rank]"""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(columns, rank, generator=generator, dtype=torch.float32, device="cpu")


def decode(encoded: torch.Tensor, rank: int, columns: int, first: int, values: torch.Tensor) -> None:
    """Decodes consecutive elements of a matrix.

    Every element is computed by itself, as a sum over the rank in rising order. Its bits therefore do not depend on the
    elements that are decoded with it.

    Args:
        encoded: The right factor, and the rows of the left factor that the elements meet.
        first: Index of the first element in the flattened matrix.
        values: Receives the elements. float32. [numel]
    """
    for left, right, out in _pieces(encoded, rank, columns, first, values):
        for rows, cols in _tiles(*out.shape):
            tile = out[rows, cols]
            _multiply(left[rows], right[:, cols], tile, scratch_values(tile.numel()).view(tile.shape))


def subtract(encoded: torch.Tensor, rank: int, columns: int, first: int, values: torch.Tensor) -> None:
    """Subtracts the decoded elements from ``values``, without memory for all of them; see ``decode``."""
    for left, right, out in _pieces(encoded, rank, columns, first, values):
        for rows, cols in _tiles(*out.shape):
            tile = out[rows, cols]
            product, term = scratch_values(2 * tile.numel()).view(2, *tile.shape)
            _multiply(left[rows], right[:, cols], product, term)
            tile.sub_(product)


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Returns an orthonormal basis that spans the columns, also if they are zero or dependent."""
    basis: torch.Tensor = torch.linalg.qr(columns).Q
    return basis


def _pieces(
    encoded: torch.Tensor, rank: int, columns: int, first: int, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields left rows, right columns and the elements of their product: a part of a row, or several whole rows."""
    # Copied, because a received payload may have any address.
    factors = torch.empty(encoded.numel(), dtype=torch.uint8, device="cpu").copy_(encoded)
    numbers = factors.view(torch.bfloat16).to(torch.float32)
    right, left = numbers[: rank * columns].view(rank, columns), numbers[rank * columns :].view(-1, rank)
    row = begin = 0
    while begin < values.numel():
        column = (first + begin) % columns
        whole_rows = 0 if column else (values.numel() - begin) // columns
        num_rows, width = (whole_rows, columns) if whole_rows else (1, min(columns - column, values.numel() - begin))
        own = values[begin : begin + num_rows * width].view(num_rows, width)
        yield left[row : row + num_rows], right[:, column : column + width], own
        row, begin = row + num_rows, begin + num_rows * width


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yields the tiles of a matrix, as slices of its rows and columns."""
    width = min(columns, _TILE_NUMEL)
    height = _TILE_NUMEL // width
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, min(row + height, rows)), slice(column, min(column + width, columns))


def _multiply(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, term: torch.Tensor) -> None:
    """Writes ``left @ right`` to ``product``, with a fixed order of operations. ``term`` is temporary memory."""
    # A matmul may sum in another order for another shape. addcmul may or may not round after the multiplication.
    torch.mul(left[:, :1], right[0], out=product)
    for index in range(1, left.size(1)):
        torch.mul(left[:, index : index + 1], right[index], out=term)
        product.add_(term)
