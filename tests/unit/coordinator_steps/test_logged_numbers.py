"""Means over the data ranks of the numbers that training scripts log."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from shardwell_server.coordinator.steps.reports import mean_scalars
from shardwell_server.coordinator.steps.step import ItemReport
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.names import check_scalars
from shardwell_wire.model.topology import World


def items(*logged: Mapping[int, Mapping[str, float]]) -> Any:
    """Returns finished items: for each data rank, what its ranks have logged."""
    return {
        dp_rank: SimpleNamespace(
            members={
                rank: SimpleNamespace(report=ItemReport(scalars=dict(scalars))) for rank, scalars in of_item.items()
            }
        )
        for dp_rank, of_item in enumerate(logged)
    }


def test_values_are_added_in_rank_order() -> None:
    values = [1e16, 1.0, -1e16]
    logged = items(*({rank: {"loss": value}} for rank, value in enumerate(values)))
    found = mean_scalars(dict(reversed(logged.items())), World(dp=3))
    assert found == {"loss": (1e16 + 1.0 + -1e16) / 3} and found["loss"] != ((-1e16 + 1e16) + 1.0) / 3


def test_lowest_rank_of_a_replica_that_logged_a_name_counts() -> None:
    replica = {3: {"loss": 5.0, "late": 1.0}, 2: {"loss": 4.0}, 1: {}}
    assert mean_scalars(items({0: {"loss": 2.0}}, replica), World(dp=2, pp=2)) == {"late": 1.0, "loss": 3.0}
    assert mean_scalars(items({0: {}}, {1: {}}), World(dp=2)) == {}


def test_every_context_parallel_rank_counts() -> None:
    logged = items(
        {0: {"loss": 1.0}, 1: {"loss": 9.0}, 2: {}, 3: {"loss": 2.0}}, {4: {"loss": 3.0}, 5: {}, 6: {"loss": 4.0}}
    )
    assert mean_scalars(logged, World(dp=2, cp=2, pp=2)) == {"loss": (1.0 + 2.0 + 3.0 + 4.0) / 4}


def test_names_and_numbers_of_names_are_limited() -> None:
    check_scalars([f"loss/{index}" for index in range(64)])
    for names in (["x"] * 65, [""], [" x"], ["x" * 101], ["a\nb"]):
        with pytest.raises(InvalidRequestError):
            check_scalars(names)
