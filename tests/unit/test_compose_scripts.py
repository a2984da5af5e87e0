"""The scripts of docker compose that make secrets: containers that run one at the same time agree on the files."""

from __future__ import annotations

import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
PROGRAMS = {
    "shardwell": 'echo "token of $5"',
    "shardwell-server": 'mkdir -p "$2"; for name in server-key server ca; do echo $name > "$2/$name.pem"; done',
}


def run_together(script: str, tmp_path: Path, count: int = 8) -> None:
    """Runs a script several times at once, with its folders in ``tmp_path`` and without the package's programs."""
    for name, text in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    for name in ("servers", "trainers"):
        (tmp_path / name).mkdir(exist_ok=True)
    text = (FOLDER / script).read_text().replace("/etc/shardwell", str(tmp_path))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SHARDWELL_RUN": "gpt", "SHARDWELL_TLS_SERVER_NAME": "name"}
    commands = [subprocess.Popen(["sh", "-c", text], env=environment) for _ in range(count)]
    assert [command.wait(60) for command in commands] == [0] * count


def test_containers_that_start_together_make_one_set_of_secrets(tmp_path: Path) -> None:
    run_together("compose-certs.sh", tmp_path)
    made = {path.name for path in (tmp_path / "servers").iterdir()}
    assert made == {"key", "ca.pem", "server.pem", "server-key.pem"}
    key = (tmp_path / "servers/key").read_text()
    assert len(key) == 64 and (tmp_path / "servers/key").stat().st_mode & 0o777 == 0o600
    run_together("compose-certs.sh", tmp_path)
    assert (tmp_path / "servers/key").read_text() == key
    run_together("compose-token.sh", tmp_path)
    trainers = tmp_path / "trainers"
    assert {path.name: path.read_text() for path in trainers.iterdir()} == {"ca.pem": "ca\n", "token": "token of gpt\n"}
    assert (trainers / "token").stat().st_mode & 0o777 == 0o640
