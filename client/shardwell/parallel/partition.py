"""Divides a sequence of layers into consecutive pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence


def even_starts(num_layers: int, num_stages: int) -> list[int]:
    """Returns the first layer of each stage, for stages with equal numbers of layers.

    If the number of stages does not divide the number of layers, some stages get one layer more: inner stages first,
    because the first and the last stage also have the embedding and the head.
    """
    base, extra = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1]
    larger = set(order[:extra])
    starts, next_start = [], 0
    for stage in range(num_stages):
        starts.append(next_start)
        next_start += base + (stage in larger)
    return starts


def balanced_starts(costs: Sequence[float], num_stages: int) -> list[int]:
    """Returns the first layer of each stage, so that the most expensive stage is as cheap as possible.

    Among equally good divisions, earlier stages get fewer layers. Every stage has at least one layer.
    """
    num_layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[s][n]: the lowest maximum for the first n layers in s stages, and where the last of these stages starts
    best = [[(float("inf"), 0)] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_layers + 1):
            best[stage][stop] = min(
                (max(best[stage - 1][start][0], sums[stop] - sums[start]), start) for start in range(stage - 1, stop)
            )
    starts, stop = [], num_layers
    for stage in range(num_stages, 0, -1):
        stop = best[stage][stop][1]
        starts.append(stop)
    return starts[::-1]
