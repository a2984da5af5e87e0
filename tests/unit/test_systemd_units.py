"""The units of deploy/systemd: systemd accepts them, and the servers accept their variables."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import which

import pytest

from shardwell_server.cli import build_parser

FOLDER = Path(__file__).resolve().parents[2] / "deploy/systemd"
UNITS = sorted(FOLDER.glob("*.service"))
PAGE = (FOLDER.parents[1] / "docs/by-hand.md").read_text().partition("## Hosts with systemd")[2].partition("\n## ")[0]


def value_of(unit: Path, name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
    return str(value)


def test_both_servers_have_a_unit() -> None:
    assert [unit.name for unit in UNITS] == ["shardwell-coordinator.service", "shardwell-shard@.service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_server_accepts_the_options_of_its_unit(unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_unit = dict(re.findall(r"(SHARDWELL_\w+)=(\S+)", unit.read_text()))
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    of_page = tomllib.loads(text)
    assert of_unit["SHARDWELL_CONFIG"] in PAGE and of_page["coordinator"]
    (tmp_path / "config.toml").write_text(text)
    for name, value in (of_unit | {"SHARDWELL_CONFIG": str(tmp_path / "config.toml")}).items():
        monkeypatch.setenv(name, value)
    program, *arguments = value_of(unit, "ExecStart").split()
    assert program.endswith("/bin/shardwell-server")
    parsed = build_parser(arguments[0]).parse_args(arguments)
    assert parsed.state_dir.removeprefix("/var/lib/") == value_of(unit, "StateDirectory")
    assert parsed.token_file == of_page["token_file"] and parsed.listen == of_unit["SHARDWELL_LISTEN"]
    assert float(value_of(unit, "TimeoutStopSec")) > 2 * float(getattr(parsed, "drain_s", 0))


@pytest.mark.skipif(which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        text = unit.read_text().replace("/opt/shardwell/bin/shardwell-server", sys.executable)
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / unit.name) for unit in UNITS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
