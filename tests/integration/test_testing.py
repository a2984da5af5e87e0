"""``shardwell.testing``: training scripts run unchanged on a cluster inside the process."""

from __future__ import annotations

import os
import runpy
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import shardwell
import shardwell.testing
from shardwell.session.session import sessions_at

SCRIPT = """
    import sys
    import torch
    import shardwell

    session = shardwell.join()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    shardwell.fully_shard(model[0], session)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
    for step in session.steps(5):
        for x in step.batches(lambda step, dp_rank: torch.full((4, 8), float(step + dp_rank))):
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = shardwell.full_state_dict(model)
    world = session.world
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_unchanged_script_trains_to_the_same_bits_as_on_a_cluster(
    script: str, cluster: shardwell.LocalCluster, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shardwell.testing.in_process_cluster(num_shards=2, dp=2):
        tested = runpy.run_path(script)
    assert tested["world"] == shardwell.World(dp=2)
    for name, value in {"ADDRESS": cluster.address, "RUN": run_name, "DP": "2", "MIN_TRAINERS": "1"}.items():
        monkeypatch.setenv(f"SHARDWELL_{name}", value)
    trained = runpy.run_path(script)
    trained["session"].close()
    assert same(tested["weights"], trained["weights"])


def test_each_cluster_starts_empty_and_cleans_up(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_RUN", "mine")
    monkeypatch.setenv("RANK", "1")
    before, threads = dict(os.environ), set(threading.enumerate())
    results = []
    for _ in range(2):
        with shardwell.testing.in_process_cluster() as address:
            results.append(runpy.run_path(script))
            assert results[-1]["session"].run == "default"
            assert sessions_at(address) == [results[-1]["session"]]
        assert sessions_at(address) == []
    assert same(results[0]["weights"], results[1]["weights"])
    assert results[1]["session"].step == 5
    assert dict(os.environ) == before
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    assert [name for name in left if name.startswith("shardwell")] in ([], ["shardwell-servers"])


def test_invalid_cluster_size_is_rejected() -> None:
    with pytest.raises(shardwell.UsageError, match="num_shards=0"), shardwell.testing.in_process_cluster(0):
        pass


def test_variables_of_another_cluster_do_not_reach_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN_FILE", "AUDIT_LOG", "SHM_DIR", "ENCRYPT", "DRAIN_S"):
        monkeypatch.setenv(f"SHARDWELL_{name}", "/none")
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        assert session.world == shardwell.World()
    assert os.environ["SHARDWELL_TLS_CA"] == "/none"
