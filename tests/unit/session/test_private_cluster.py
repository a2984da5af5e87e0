"""The private clusters of one launcher's ranks: each join has its own, and all ranks agree which."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from shardwell.options import LauncherPlace, WaitOptions
from shardwell.session import private_cluster
from shardwell.session.private_cluster import _JoinedCluster, _Launch, _SharedCluster
from shardwell_wire.errors import DeadlineError, UnavailableError, UsageError
from shardwell_wire.security.credentials import NO_CREDENTIALS

WAITS = WaitOptions(wait_limit_s=0.2, warn_after_s=0.1)


class Ranks:
    """Two ranks in this process. Rank 0 has clusters with the addresses ``cluster:0``, ``cluster:1`` and so on."""

    def __init__(self) -> None:
        store = HashStore()
        self._launches = _Launch(store), _Launch(store)

    def rank_0(self) -> _SharedCluster:
        return _SharedCluster(self._launches[0], WAITS)

    def rank_1(self) -> _JoinedCluster:
        return _JoinedCluster(self._launches[1], WAITS, LauncherPlace(1, 2, 2))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    numbers = itertools.count()

    class FakeCluster:
        def __init__(self, num_shards: int) -> None:
            self.address, self.credentials = f"cluster:{next(numbers)}", NO_CREDENTIALS

        def start(self) -> None: ...

        def stop(self) -> None: ...

    monkeypatch.setattr(private_cluster, "LocalCluster", FakeCluster)
    monkeypatch.setattr(private_cluster, "find_credentials", lambda address: NO_CREDENTIALS)
    monkeypatch.setattr(_SharedCluster, "_wait_for_others", lambda self: None)
    return Ranks()


@pytest.mark.parametrize("rank_1_is_first", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_each_join_has_its_own_cluster(ranks: Ranks, closes: bool, rank_1_is_first: bool) -> None:
    for number in range(3):
        shared = ranks.rank_0()
        joined = ranks.rank_1()
        for cluster in (joined, shared):
            cluster.note_joined()
        assert joined.address == shared.address == f"cluster:{number}"
        if closes:
            for cluster in (joined, shared) if rank_1_is_first else (shared, joined):
                cluster.close()


def test_rank_1_that_waits_too_long_tries_the_same_join_again(ranks: Ranks) -> None:
    with pytest.raises(DeadlineError, match="rank 0 has not called"):
        ranks.rank_1()
    ranks.rank_0()
    assert ranks.rank_1().address == "cluster:0"


def test_rank_1_whose_join_failed_tries_the_same_join_again(ranks: Ranks) -> None:
    """For example with another world than rank 0, which still waits for it."""
    ranks.rank_0()
    ranks.rank_1().close()
    joined = ranks.rank_1()
    assert joined.address == "cluster:0"
    joined.note_joined()
    ranks.rank_0()
    assert ranks.rank_1().address == "cluster:1"


def test_join_of_rank_0_that_failed_is_over_for_rank_1_too(ranks: Ranks) -> None:
    """Rank 0 waited for rank 1 for too long, stopped the cluster, and joins again."""
    ranks.rank_0().close()
    with pytest.raises(UnavailableError, match="rank 0 has finished and stopped the private cluster"):
        ranks.rank_1()
    assert ranks.rank_0().address == ranks.rank_1().address == "cluster:1"


@pytest.mark.parametrize("error", [UnavailableError("no port is free"), KeyboardInterrupt()])
def test_cluster_that_does_not_start_is_over_for_rank_1_too(
    ranks: Ranks, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise error

    start: Callable[..., None] = private_cluster.LocalCluster.start
    monkeypatch.setattr(private_cluster.LocalCluster, "start", fail)
    with pytest.raises(type(error)):
        ranks.rank_0()
    with pytest.raises(UnavailableError, match="rank 0 could not start the private cluster"):
        ranks.rank_1()
    monkeypatch.setattr(private_cluster.LocalCluster, "start", start)
    assert ranks.rank_0().address == ranks.rank_1().address


def test_ranks_that_cannot_find_each_other_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    place = LauncherPlace(0, 2, 2, variables=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    with pytest.raises(UsageError, match=r"SLURM_PROCID and SLURM_STEP_NUM_TASKS are set, but.*SHARDWELL_ADDRESS"):
        private_cluster._open_store(place, 1.0)
