"""Tests for the growth benchmark: points, arithmetic and table."""

from typing import Any

import pytest

from benchmarks.growth import SWEEPS, Point, parse_arguments, skip_reason, summarize_point, to_section


def step(step_s: float, commit_s: float = 0.0) -> dict[str, float]:
    waits = {"finish_wait_s": 0.001, "commit_wait_s": commit_s}
    return {"step_s": step_s, **waits, "gathered_bytes": 4e6, "pushed_bytes": 2e6}


def test_points_of_a_sweep_differ_only_in_the_varied_number() -> None:
    for name, sweep in SWEEPS.items():
        points = (*sweep.points, *sweep.full_points)
        varied = [getattr(point, sweep.varied) for point in points]
        assert varied == sorted(set(varied)), name
        if name != "parameters":
            others = {tuple(getattr(point, field) for field in _fields() - {sweep.varied}) for point in points}
            assert len(others) == 1, name


def _fields() -> set[str]:
    return {"trainers", "servers", "units", "width"}


def test_the_largest_point_has_a_billion_parameters() -> None:
    (largest,) = SWEEPS["parameters"].full_points
    assert largest.parameters == pytest.approx(1e9, rel=0.01)
    assert SWEEPS["parameters"].points[0].parameters == pytest.approx(30e6, rel=0.05)


def test_overhead_is_step_time_minus_compute_time() -> None:
    point = Point(trainers=2, units=10)
    plain = [[step(0.010), step(0.012), step(0.011)]] * 2
    sharded = [[step(0.031, 0.004), step(0.029, 0.002)], [step(0.033, 0.006), step(0.031, 0.004)]]
    result = summarize_point(point, plain, sharded, cpu_s=0.062)
    assert result["step_ms"] == pytest.approx(31)
    assert result["commit_ms"] == pytest.approx(4)
    assert result["overhead_ms_per_unit"] == pytest.approx((31 - 11) / 10)
    assert result["unit_ms"] == pytest.approx((31 - 11 - 1 - 4) / 10)
    assert result["cpu_ms_per_unit_and_trainer"] == pytest.approx((62 - 2 * 11) / 10 / 2)
    assert result["moved_mb_per_s"] == pytest.approx(6 / 0.031)


def test_the_table_shows_ratios_to_the_first_row() -> None:
    rows: list[dict[str, Any]] = [
        summarize_point(Point(units=10), [[step(0.01)]], [[step(0.03, 0.002)]], cpu_s=0.03),
        summarize_point(Point(units=100), [[step(0.1)]], [[step(0.3, 0.005)]], cpu_s=0.3),
    ]
    text = to_section("units", rows)
    assert "| 10 | 30.00 | 10.00 | 1.00 | 2.00 (1.0) | 2.00 (1.0) | 1.70 (1.0) | 2.00 (1.0) | 200 |" in text
    assert "| 100 | 300.00 | 100.00 | 1.00 | 5.00 (2.5) | 2.00 (1.0) | 1.94 (1.1) | 2.00 (1.0) | 20 |" in text


def test_skip_reason_names_required_memory_of_too_large_point() -> None:
    point = Point(units=12, width=9130)
    assert skip_reason(point, 64 << 30) is None
    assert skip_reason(point, 8 << 30) == (
        "1,000,392,360 parameters need about 12.0 GB in the servers, of which 8.6 GB are free"
    )


def test_zero_steps_are_rejected() -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--steps", "0"])
