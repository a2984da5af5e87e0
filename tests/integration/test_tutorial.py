"""Follows docs/tutorial.md: its files, and its commands in one shell, in the order of the page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ports import reserved_ports
from tests.support.processes import ROOT

PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCK = re.compile(r'^```(?:python title="(?P<file>[\w.]+)")?\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)
HASH = re.compile(r"SHA-256 of the weights: (\w{64})")
SHORTER = {"10000": "1500", "12000": "2000", "20000": "4000"}
"""Numbers of steps on the page, and those of the test."""


class Shell:
    """A shell that runs blocks of commands one after another, and what they print."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output.txt"
        bin_folder = Path(sys.executable).parent
        environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(folder)}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                ["bash"],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def run(self, commands: str) -> str:
        """Runs commands, and returns what is printed until the last one has ended."""
        start, end = len(self.output.read_text()), f"end-{uuid.uuid4().hex}"
        assert self.process.stdin is not None
        self.process.stdin.write(f"{commands}\necho {end}\n")
        self.process.stdin.flush()
        self.wait_for(lambda: end in self.output.read_text()[start:], what=commands)
        return self.output.read_text()[start:]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until a condition holds."""
        deadline = time.monotonic() + 150
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.output.read_text()}"
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.02)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    try:
        yield shell
    finally:
        os.killpg(shell.process.pid, signal.SIGKILL)
        shell.process.communicate()


@pytest.mark.long
@pytest.mark.timeout(500)
def test_tutorial_can_be_followed(shell: Shell, tmp_path: Path) -> None:
    with reserved_ports() as port:
        follow(shell, tmp_path, re.sub(r"\b50051\b", str(port), PAGE))


def follow(shell: Shell, tmp_path: Path, page: str) -> None:
    for number, shorter in SHORTER.items():
        page = re.sub(rf"\b{number}\b", shorter, page)
    files = {found["file"]: found["text"] for found in BLOCK.finditer(page) if found["file"]}
    assert sorted(files) == ["model.py", "serve.py", "train.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    servers, train, again, kill_trainer, kill_shards, events, lose, new, serve, stop = (
        found["text"] for found in BLOCK.finditer(page) if not found["file"]
    )
    shell.run(servers)
    undisturbed = shell.run(train)
    assert "step 1400: loss" in undisturbed
    start = len(shell.output.read_text())
    shell.run(again)
    shell.wait_for(lambda: "step 200: loss" in shell.output.read_text()[start:], what=again)
    shell.run(kill_trainer)
    shell.run(kill_shards)
    disturbed = shell.output.read_text()[start:]
    assert "step 1400: loss" in disturbed
    assert len(HASH.findall(undisturbed)) == 2 and {*HASH.findall(undisturbed)} == {*HASH.findall(disturbed)}
    assert "trainer_ended" in shell.run(events)
    assert "step-000001500" in shell.run(lose)
    resumed = shell.run(new)
    assert "step 1900: loss" in resumed and "step 1400: loss" not in resumed
    versions = [int(version) for version in re.findall(r"version (\d+): the sum", shell.run(serve))]
    assert len(versions) == 3 and versions[0] >= 2000 and versions[2] >= versions[0] + 200
    assert shell.run(stop).count("deleted /dev/shm/") == 3
    assert "Traceback" not in shell.output.read_text()
