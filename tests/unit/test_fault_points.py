"""Fault points are armed by tests only."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shardwell_wire import fault_points
from shardwell_wire.fault_points import Fault


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fault_points.environment(Fault(point="server.update.before", action="kill")).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("given")
def test_environment_arms_faults_in_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_points, "armed_points", {})
    fault_points.arm_from_environment()
    assert list(fault_points.armed_points) == ["server.update.before"]


@pytest.mark.usefixtures("given")
def test_environment_arms_nothing_in_an_installed_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fault_points, "armed_points", {})
    monkeypatch.setattr(fault_points, "_TESTS", tmp_path / "tests" / "faults")
    with caplog.at_level(logging.WARNING):
        fault_points.arm_from_environment()
    assert fault_points.armed_points == {}
    assert "SHARDWELL_TEST_FAULTS is ignored: only a source tree with the tests arms fault points" in caplog.text
