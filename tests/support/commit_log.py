"""The commits of an asynchronous run, and the same training with plain PyTorch."""

from __future__ import annotations

import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwell.seeds import derive_seed
from shardwell_server.coordinator.storage.database import FILE_NAME
from tests.support import transformer
from tests.support.reference import ADAMW, one_thread, sha256


@dataclass(frozen=True)
class ItemCommit:
    """One commit of an asynchronous run."""

    step: int
    """Number of the commit."""
    dp_rank: int
    item: int
    """Number of the work item in its data rank."""
    base_version: int
    """The version that the item read."""


def read_commits(log_dir: Path, run: str, stored: Iterable[ItemCommit] = ()) -> list[ItemCommit]:
    """Returns all commits of a run, without those that a rollback has undone.

    Args:
        log_dir: Folder with the coordinator's log, which has one line per commit.
        run: Name of the run.
        stored: Commits that may be missing in the log, because the coordinator was killed before it wrote the line.
    """
    event = re.compile(
        rf"run '{run}': step_committed: step (\d+): item (\d+) of dp rank (\d+), which read version (\d+), gradient"
    )
    rollback = re.compile(rf"run '{run}': rolled_back: rolled back to step (\d+)")
    found = set(stored)
    for line in (log_dir / "coordinator.log").read_text(encoding="utf-8").splitlines():
        if match := event.search(line):
            step, item, dp_rank, base = map(int, match.groups())
            found.add(ItemCommit(step, dp_rank, item, base))
        elif match := rollback.search(line):
            found = {commit for commit in found if commit.step < int(match[1])}
    commits = sorted(found, key=lambda commit: commit.step)
    assert [commit.step for commit in commits] == list(range(len(commits))), commits
    return commits


def stored_commits(state_dir: Path, run: str) -> list[ItemCommit]:
    """Returns the newest commits of a run, at most ``KEPT_COMMITS``, from the coordinator's database.

    Reads a copy, because the coordinator locks its database. The run must not commit meanwhile.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in state_dir.glob(f"{FILE_NAME}*"):
            shutil.copy(file, folder)
        with closing(sqlite3.connect(Path(folder) / FILE_NAME)) as database:
            rows = database.execute("SELECT step, dp_rank, item, base_version FROM commits WHERE run = ?", (run,))
            return [ItemCommit(*row) for row in rows]


@one_thread()
def replay(commits: list[ItemCommit]) -> str:
    """Applies commits one after another with plain PyTorch; returns the hash of the weights.

    The gradient of each item is computed at the weights of the version that it read.
    """
    model = transformer.build()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)
    versions = [[parameter.detach().clone() for parameter in parameters]]
    for commit in commits:
        _load(parameters, versions[commit.base_version])
        torch.manual_seed(derive_seed(0, commit.item, commit.dp_rank))
        model(transformer.batch(commit.item, commit.dp_rank)).backward()
        _load(parameters, versions[-1])
        optimizer.step()
        optimizer.zero_grad()
        versions.append([parameter.detach().clone() for parameter in parameters])
    return sha256(model.state_dict())


def _load(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
