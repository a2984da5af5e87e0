"""Fault points: every name in the table is reached somewhere, and armed points act exactly once."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwell_wire import fault_points
from shardwell_wire.errors import CapacityError
from shardwell_wire.fault_points import Fault

ROOT = Path(__file__).parents[3]
FOLDERS = (ROOT / "client/shardwell", ROOT / "server/shardwell_server", ROOT / "protos/shardwell_wire")


def reached_names() -> set[str]:
    """Returns the literal first arguments of all calls of ``fault_points.reach``."""
    found = set()
    for path in (path for folder in FOLDERS for path in folder.rglob("*.py") if "_pb2" not in path.name):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "fault_points.reach":
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: expected a literal name"
                found.add(node.args[0].value)
    return found


def test_the_table_names_exactly_the_points_in_the_code() -> None:
    assert reached_names() == set(fault_points.POINTS)


def test_a_point_that_is_not_armed_does_nothing() -> None:
    fault_points.reach("server.update.middle")
    assert not fault_points.are_armed()


def test_only_the_nth_occurrence_with_the_details_acts() -> None:
    with fault_points.armed("client.push.before", "raise", nth=2, error="CapacityError", unit="b") as point:
        for unit in ("b", "a", "a"):
            fault_points.reach("client.push.before", unit=unit)
        assert not point.has_happened
        with pytest.raises(CapacityError, match=r"client\.push\.before"):
            fault_points.reach("client.push.before", unit="b")
        fault_points.reach("client.push.before", unit="b")
        assert point.count == 3 and point.has_happened
    fault_points.reach("client.push.before", unit="b")
    assert point.count == 3


def test_handlers_get_the_details() -> None:
    seen = []
    with (
        fault_points.armed("server.update.before", seen.append),
        fault_points.armed("server.update.before", seen.append),
    ):
        fault_points.reach("server.update.before", step=3)
    assert [details["step"] for details in seen] == [3, 3]
    assert not fault_points.are_armed()


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="does not exist"):
        Fault(point="server.update.midle", action="kill")
    with pytest.raises(ValueError, match="action"):
        Fault(point="server.update.middle", action="explode")
    with pytest.raises(ValueError, match="error"):
        Fault(point="server.update.middle", action="raise", error="ValueError")
    with pytest.raises(ValueError, match="nth"):
        Fault(point="server.update.middle", action="kill", nth=0)


def test_a_child_process_dies_once_at_its_occurrence(tmp_path: Path) -> None:
    once = tmp_path / "happened"
    fault = Fault(point="server.update.middle", action="kill", nth=3, where={"server": "shard-0"}, once=str(once))
    code = """
from shardwell_wire import fault_points
fault_points.describe_process(server="shard-0")
for number in range(4):
    print(number, flush=True)
    fault_points.reach("server.update.middle")
"""
    environment = {**os.environ, **fault_points.environment(fault), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    first = run()
    assert (first.returncode, first.stdout.split()) == (-signal.SIGKILL, ["0", "1", "2"]), first.stderr
    assert once.exists()
    second = run()
    assert (second.returncode, second.stdout.split()) == (0, ["0", "1", "2", "3"]), second.stderr
