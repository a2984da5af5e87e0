"""Tests for the benchmark of gathers with deltas: the table, and the CPU time of deltas."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gather_deltas import DeltaResult, measure_cpu, to_markdown


def test_table_shows_bytes_and_when_deltas_pay() -> None:
    result = DeltaResult(
        gather_dtype="bfloat16",
        rate=1e-6,
        changed=0.01,
        ratio=0.02,
        received_bytes=1e5,
        received_bytes_without=2e7,
        encode_s_per_byte=5e-10,
        apply_s_per_byte=3e-10,
        changes_ratio=0.0123,
    )
    assert result.break_even_bytes_per_s == pytest.approx(0.98 / 8e-10)
    text = to_markdown([result], 3_300_000, 10)
    assert "| bfloat16, 1e-06 | 1.0% | 0.020 | 20.00 / 0.10 | 0.50 / 0.30 | 9.8 | 0.0123 |" in text


def test_cpu_time_is_measured_on_exact_deltas() -> None:
    streams = [torch.arange(100_000, dtype=torch.int16) + number for number in range(3)]
    assert all(seconds > 0 for seconds in measure_cpu(streams))
