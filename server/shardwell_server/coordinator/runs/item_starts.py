"""Which work item a trainer of an asynchronous run starts next. Pure functions.

Note: [Asynchronous runs]
    A run whose items are committed one by one has one ``Step`` per data rank, with one item each. A step's number is
    the version that its item reads. An item that no trainer computes reads the newest version: with every commit, its
    number becomes that version.

    A trainer computes one item at a time. When it asks for work, it gets the item with the lowest number among the
    items of its own ranks and of ranks whose owners are gone. If numbers are equal, the latter come first, because the
    trainer's loop ends with the last item of its own ranks. With bounded staleness, an item starts only if it is at
    most ``max_staleness`` items ahead of the item of the slowest data rank.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from shardwell_server.coordinator.runs.work_items import WorkItem, WorkState
from shardwell_wire.consistency import Consistency


def choose_item(
    name: str,
    items: Sequence[WorkItem],
    owners: Mapping[int, str],
    live: Container[str],
    consistency: Consistency,
    limit: int | None,
) -> WorkItem | None:
    """Returns the item that a trainer starts next. None: there is none for it now.

    Args:
        name: The trainer.
        items: The items of all data ranks.
        owners: Owner of each data rank, live or gone.
        live: Names of the live trainers.
        consistency: The run's mode.
        limit: Number of items of each data rank after which the trainer computes no more. None: unlimited.
    """
    slowest = min(item.number for item in items)
    free = [
        item
        for item in items
        if item.state is WorkState.VACANT
        and item.fenced
        and (owners[item.dp_rank] == name or owners[item.dp_rank] not in live)
        and (consistency.max_staleness is None or item.number - slowest <= consistency.max_staleness)
        and (limit is None or item.number < limit)
    ]
    return min(free, key=lambda item: (item.number, owners[item.dp_rank] == name, item.dp_rank), default=None)


def position(name: str, items: Sequence[WorkItem], owners: Mapping[int, str]) -> int:
    """Returns the number of committed items of a trainer's data ranks: the lowest; for a spare, that of all ranks."""
    own = [item.number for item in items if owners[item.dp_rank] == name]
    return min(own or [item.number for item in items])
