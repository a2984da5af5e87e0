"""docs/experiment-trackers.md with the real packages: what the trackers have is what the run has logged."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwell
from tests.integration import test_docs as docs

PAGE = docs._ROOT / "docs/experiment-trackers.md"

pytestmark = pytest.mark.trackers


def scalars(folder: Path) -> dict[str, list[int]]:
    """Returns the steps of each name that TensorBoard finds in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {name: [at.step for at in accumulator.Scalars(name)] for name in accumulator.Tags()["scalars"]}


def test_code_of_the_page_reaches_the_trackers(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWELL_ADDRESS", cluster.address)
    blocks = [compile(found["code"], str(PAGE), "exec") for found in docs._BLOCK.finditer(PAGE.read_text())]
    in_script, from_coordinator, to_tensorboard, to_wandb = blocks
    for number, followers in enumerate(([in_script], [from_coordinator, to_tensorboard, to_wandb])):
        monkeypatch.setenv("SHARDWELL_RUN", f"{run_name}-{number}")
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        with docs._names(blocks[0], docs._SHARDED, cluster) as names:
            for code in followers:
                exec(code, names)
    assert scalars(tmp_path / "0/tensorboard/gpt") == {"loss": [0, 1, 2]}
    assert scalars(tmp_path / f"1/tensorboard/{run_name}-1") == {"loss": [0, 1]}
    [written] = (tmp_path / "1/wandb").glob(f"offline-run-*/run-{run_name}-1.wandb")
    assert written.stat().st_size > 100
