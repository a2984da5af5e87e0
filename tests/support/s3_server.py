"""A moto server: an S3-compatible server in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_S = 60.0
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Yields the endpoint of a running server.

    Args:
        folder: For the server's log.
    """
    log = folder / "moto.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=output, stderr=output
        )
    try:
        yield _endpoint(process, log)
    finally:
        process.kill()
        process.wait()


def make_bucket(endpoint: str, name: str) -> None:
    """Creates a bucket."""
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT"), timeout=10).close()


def _endpoint(process: subprocess.Popen[bytes], log: Path) -> str:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up:
        text = log.read_text(errors="replace")
        if (found := re.search(r"http://127\.0\.0\.1:(\d+)", text)) is not None:
            return found[0]
        if process.poll() is not None:
            raise RuntimeError(f"moto ended: {text}")
        time.sleep(0.05)
    raise RuntimeError(f"moto did not start: {log.read_text(errors='replace')}")
