"""The commits of an asynchronous run, and the same training with plain PyTorch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwell.seeds import derive_seed
from tests.support import transformer
from tests.support.reference import ADAMW, sha256


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


def read_commits(log_dir: Path, run: str) -> list[ItemCommit]:
    """Returns all commits of a run from the coordinator's log."""
    event = re.compile(
        rf"run '{run}': step_committed: step (\d+): item (\d+) of dp rank (\d+), which read version (\d+), gradient"
    )
    lines = (log_dir / "coordinator.log").read_text(encoding="utf-8").splitlines()
    numbers = [tuple(map(int, found.groups())) for line in lines if (found := event.search(line))]
    commits = [ItemCommit(step, dp_rank, item, base) for step, item, dp_rank, base in numbers]
    assert [commit.step for commit in commits] == list(range(len(commits))), commits
    return commits


def replay(commits: list[ItemCommit]) -> str:
    """Applies commits one after another with plain PyTorch; returns the hash of the weights.

    The gradient of each item is computed at the weights of the version that it read.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
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
    torch.set_num_threads(threads)
    return sha256(model.state_dict())


def _load(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
