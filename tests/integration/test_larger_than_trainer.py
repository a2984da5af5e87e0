"""The example of a model larger than a trainer, with one step: its claims hold."""

from __future__ import annotations

import psutil
import pytest

from examples import larger_than_trainer as example
from shardwell import LocalCluster

NEEDED_BYTES = 7 << 30
ARGUMENTS = example.parse_arguments(["--num-steps", "1"])
LIMIT_BYTES = ARGUMENTS.limit_mib << 20


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(psutil.virtual_memory().available < NEEDED_BYTES, reason="the servers need 5 GB")
def test_trainer_with_an_eighth_of_the_state_trains_to_the_bits_of_plain_pytorch() -> None:
    assert example.state_bytes(ARGUMENTS) >= 8 * LIMIT_BYTES
    with LocalCluster(num_shards=2) as cluster:
        ours = example.run_trainers("shardwell", ARGUMENTS, cluster.address)
    assert [trainer.ending() for trainer in ours] == ["trained 1 steps"] * 2
    for trainer in ours:
        assert max(line.get("limited", 0) for line in trainer.lines) <= LIMIT_BYTES
        assert max(line.get("shared", 0) for line in trainer.lines) == 0, "shared memory would not count"
        assert trainer.last("weights") <= 2 * example.IN_FLIGHT_BYTES
    (plain,) = example.run_trainers("plain", ARGUMENTS, "", count=1, limit_mib=0)
    assert plain.last("losses") == ours[0].last("losses")
    assert plain.last("digest") == ours[0].last("digest")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("role", "count"), [("fsdp2", 2), ("plain", 1)])
def test_peers_run_out_of_memory_under_the_same_limit(role: str, count: int, tmp_path: object) -> None:
    trainers = example.run_trainers(role, ARGUMENTS, f"{tmp_path}/rendezvous", count=count)
    assert not any(trainer.finished for trainer in trainers)
    died = [trainer for trainer in trainers if "llocate memory" in trainer.last("error", "")]
    assert died and all("giving memory to" in trainer.last("stage") for trainer in died)
