"""Renews deploy/locks: the packages of the images, each with its version and its hashes. Run by `make lock`.

uv resolves the dependencies in pyproject.toml under constraints.txt for Linux. The packages are divided over five
files, because a coordinator needs no torch, and a build of torch for CPUs needs no CUDA libraries. A package index of
such builds has other hashes than the public one: `--wheel FILE` adds the hash of a file to those of its package.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_LOCKS = _ROOT / "deploy" / "locks"
_PYTHON = "3.11"
_HEADER = "# Made by `make lock`. pip installs these packages with --require-hashes --no-deps.\n"
_CUDA = re.compile(r"nvidia-|cuda-|triton$")
"""Names of the packages that only CUDA builds of torch need."""

Locks = dict[str, str]
"""The lines of each package, by its name."""


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", action="append", default=[], type=Path, metavar="FILE")
    arguments = parser.parse_args()
    extras = ("dashboard", "train", "demo")  # every server's image has the page of the coordinator
    server, train, demo = (_resolve("--extra", extra) for extra in extras)
    for wheel in arguments.wheel:
        name = wheel.name.partition("-")[0]
        train[name] += f" \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    torch = {name: lines for name, lines in train.items() if name not in server}
    cuda = {name: torch.pop(name) for name in list(torch) if _CUDA.match(name)}
    trainer = {name: lines for name, lines in demo.items() if name not in train}
    grpcurl = {name: lines for name, lines in _resolve("--extra", "grpcurl").items() if name not in server}
    _LOCKS.mkdir(exist_ok=True)
    files = {"torch": torch, "cuda": cuda, "server": server, "trainer": trainer, "grpcurl": grpcurl}
    for file, locks in files.items():
        (_LOCKS / f"{file}.txt").write_text(_HEADER + "".join(f"{lines}\n" for _, lines in sorted(locks.items())))


def _resolve(*options: str) -> Locks:
    """Returns the dependencies of the project and of its build."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "-", "--constraint", "constraints.txt"]
    command += ["--universal", "--python-version", _PYTHON, "--generate-hashes", "--no-annotate", "--no-header"]
    done = subprocess.run(
        [*command, *options], cwd=_ROOT, input="setuptools>=77\n", capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    locks = Locks()
    for lines in re.split(r"\n(?=\S)", done.stdout.strip()):
        name = lines.partition("==")[0]
        # Versions for different Pythons are separate entries.
        locks[name] = f"{locks[name]}\n{lines}" if name in locks else lines
    return locks


if __name__ == "__main__":
    main()
