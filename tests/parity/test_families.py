"""Four Hugging Face families under planned tensor parallelism, against one process.

``make check-families`` checks all of them.
"""

from __future__ import annotations

import uuid

import pytest

import shardwell
from benchmarks.families import Case, Verdict, check, table
from tests.support import gloo
from tests.support.processes import run_ranks

RESULTS = {
    Case("llama"): "right",
    Case("qwen3"): "right",
    Case("qwen3", sequence_parallel=True): "right",
    Case("gemma3", sequence_parallel=True): "right",
    Case("bert"): "right",
    Case("bert", sequence_parallel=True): "refused",
}


def worker(rank: int, address: str, run: str) -> None:
    for number, (case, result) in enumerate(RESULTS.items()):
        verdict = check(case, rank, address, f"{run}-{number}")
        assert verdict.result == result, verdict
    gloo.leave()


@pytest.mark.long
def test_families_are_right_or_refused(cluster: shardwell.LocalCluster) -> None:
    run_ranks(worker, cluster.address, uuid.uuid4().hex)


def test_the_table_has_a_row_per_family() -> None:
    reason = "tp=2 for Model: a layer does not fit. Otherwise write a plan"
    verdicts = [
        Verdict(Case("one"), "right", "1.0e-08"),
        Verdict(Case("one", sequence_parallel=True), "refused", reason),
        Verdict(Case("two"), "wrong", "weight is 1.0e-01 from one process"),
    ]
    assert table(verdicts).splitlines()[2:] == [
        "| one | 1.0e-08 | refused | tp=2 for Model: a layer does not fit |",
        "| two | wrong | - | weight is 1.0e-01 from one process |",
    ]
