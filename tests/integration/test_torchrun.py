"""A training script under the real ``torchrun``: its ranks share a cluster and train one model."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import shardwell

# The ranks share one pipe. One `os.write` per line keeps lines whole; `print` may write a line in pieces.
TRAIN = """
    import hashlib, os, torch, shardwell
    session = shardwell.join()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for step in session.steps(3):
        for x in step.batches(lambda step, dp_rank: torch.full((2, 3), float(dp_rank))):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = shardwell.full_state_dict(model)
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest()
    place = f"rank {session.global_rank} {session.trainer} {session.world}"
    os.write(1, f"{place} step {session.step} {digest}\\n".encode())
"""
RANK_0_IS_FIRST = """
    import threading
    if session.global_rank == 1:
        threading.Event().wait(1.0)
        elements = sum(value.numel() for value in shardwell.full_state_dict(model).values())
        os.write(1, f"late rank still reads {elements}\\n".encode())
"""
RANK_0_FAILS = """
    import os, threading, time, shardwell
    session = shardwell.join()
    if session.global_rank == 0:
        os.write(1, f"fails at {time.monotonic()}\\n".encode())
        raise RuntimeError("boom")
    os.write(1, b"rank 1 joined\\n")
    threading.Event().wait(60)
"""


JOINS_TWICE = """
    import os, torch, shardwell
    for lr in (0.1, 0.2):
        session = shardwell.join()
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=lr)
        for step in session.steps(1):
            for x in step.batches(lambda step, dp_rank: torch.ones(1, 1)):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = shardwell.full_state_dict(model)["weight"].item()
        os.write(1, f"join of rank {session.global_rank}: {weight:.1f} {session.run_id}\\n".encode())
        if CLOSES:
            session.close()
"""


def torchrun(script: Path, *sources: str) -> subprocess.CompletedProcess[str]:
    script.write_text("".join(textwrap.dedent(source) for source in sources))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def rank_lines(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert done.returncode == 0 and len(lines) == 2, done.stdout + done.stderr
    return sorted(line.split(maxsplit=3) for line in lines)


def test_ranks_train_one_model_on_the_cluster_of_rank_0(tmp_path: Path) -> None:
    done = torchrun(tmp_path / "train.py", TRAIN, RANK_0_IS_FIRST)
    (rank_0, rank_1) = rank_lines(done)
    assert [rank_0[:3], rank_1[:3]] == [["rank", "0", "rank-0"], ["rank", "1", "rank-1"]]
    assert rank_0[3] == rank_1[3], "both ranks read the same weights"
    assert rank_0[3].startswith("World(dp=2, tp=1, pp=1) step 3 ")
    assert "late rank still reads 4" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("closes", [False, True])
def test_second_join_trains_another_model_on_another_cluster(tmp_path: Path, closes: bool) -> None:
    done = torchrun(tmp_path / "train.py", f"CLOSES = {closes}\n", JOINS_TWICE)
    joins = re.findall(r"^join of rank (\d): (\S+) (\S+)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted((rank, weight) for rank, weight, _ in joins) == [
        ("0", "0.8"),
        ("0", "0.9"),
        ("1", "0.8"),
        ("1", "0.9"),
    ]
    assert len({(weight, run_id) for _, weight, run_id in joins}) == 2, "both ranks join the same run"


def test_failure_of_rank_0_ends_the_other_ranks_at_once(tmp_path: Path) -> None:
    done = torchrun(tmp_path / "train.py", RANK_0_FAILS)
    ended = time.monotonic()
    assert done.returncode == 1
    assert "RuntimeError: boom" in done.stderr
    (failed,) = re.findall(r"fails at ([\d.]+)", done.stdout)
    assert ended - float(failed) < 40, "rank 0 does not wait for ranks that wait for it"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "1"}, r"started 2 ranks, 1 of them on this host.*SHARDWELL_ADDRESS"),
        ({"MASTER_ADDR": ""}, r"MASTER_ADDR not.*torchrun.*unset RANK"),
    ],
)
def test_ranks_that_cannot_share_a_cluster_get_advice(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**place, **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(shardwell.UsageError, match=message):
        shardwell.join()
