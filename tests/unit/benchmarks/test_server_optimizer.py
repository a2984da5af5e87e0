"""Tests for the benchmark of the servers' optimizer, on tiny shards."""

from __future__ import annotations

import pytest

from benchmarks.server_optimizer import OTHERS, measure, parse_arguments, to_elements, to_sections, to_step
from shardwell_server import optimizer_checks


def test_every_kind_of_update_has_a_rate_and_a_cell() -> None:
    adamw, others = measure([0.1], 0.05, 1)
    assert list(others) == OTHERS
    assert all(rate.median > 0 for rate in (*adamw[0.1].values(), *others.values()))
    assert adamw[0.1]["update"].count == adamw[0.1]["kernel"].count == 1
    table = to_sections(adamw, 0.05, others)[1].splitlines()
    assert table[-1].startswith("| 0.1 | ") and table[-1].count("(") == 4


@pytest.mark.parametrize("algorithm", [*OTHERS, "adamw"])
def test_optimizer_steps_are_valid(algorithm: str) -> None:
    optimizer_checks.validate(to_step(algorithm))


def test_shard_sizes_are_whole_rows() -> None:
    assert to_elements(1.0) == 244 * 1024
    assert to_elements(0.0001) == 1024


def test_size_zero_is_rejected() -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--megabytes", "0"])
