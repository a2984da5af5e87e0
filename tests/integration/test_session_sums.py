"""Trainers that add their gradients, as threads of one process. Restarted work changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell import testing
from shardwell.store import sums
from shardwell.store.host_relay import HostRelay
from shardwell_server.shard.requests import relayed_shards
from shardwell_wire.errors import UsageError
from tests.support.reference import sha256

STEPS = 3
SUMMING = pytest.mark.parametrize("reduction", ["hierarchical", "allreduce"])


def build() -> nn.Sequential:
    """Returns a model with fixed values, in any thread."""
    model = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


def batch(step: int, dp_rank: int) -> torch.Tensor:  # [5, 17]
    return torch.randn(5, 17, generator=torch.Generator().manual_seed(100 * step + dp_rank))


@dataclass
class Training:
    """What the trainers of a run do."""

    dp: int = 2
    groups: tuple[int, ...] = ()
    reduction: str = "hierarchical"
    backwards: int = 1
    interfere: Callable[[int, int, int, Any], None] = lambda rank, step, attempt, optimizer: None
    """Called after each backward, with the rank, the step, the number of this batch and the optimizer."""
    stats: list[dict[str, float]] = field(default_factory=list)
    reports: list[shardwell.PerformanceReport] = field(default_factory=list)

    def run(self) -> str:
        """Trains with one trainer per rank; returns a hash of the weights."""
        with testing.in_process_cluster(num_shards=2) as address, ThreadPoolExecutor(self.dp) as threads:
            done = [threads.submit(self.train, address, rank) for rank in range(self.dp)]
            results = [each.result(120) for each in done]
        self.stats = [stats for _, stats, _ in results]
        self.reports = [report for _, _, report in results]
        (found,) = {weights for weights, _, _ in results}
        return found

    def train(self, address: str, rank: int) -> tuple[str, dict[str, float], shardwell.PerformanceReport]:
        transfers = shardwell.TransferOptions(transports="socket,grpc", gradient_reduction=self.reduction)
        with shardwell.join(
            address,
            world=shardwell.World(dp=self.dp),
            min_trainers=self.dp,
            global_rank=rank,
            reduction_groups=self.groups,
            transfers=transfers,
        ) as session:
            model = build()
            shardwell.fully_shard(model[0], session)
            shardwell.fully_shard(model, session)
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
            for step in session.steps(STEPS):
                for number, values in enumerate(step.batches(batch)):
                    for _ in range(self.backwards):
                        model(values).square().mean().backward()
                    self.interfere(rank, step.number, number, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            return sha256(shardwell.full_state_dict(model)), session.stats(), session.report()


def total(training: Training, name: str) -> float:
    """Returns the sum of a statistic over all trainers."""
    return sum(stats[name] for stats in training.stats)


def gradient_bytes() -> int:
    """Returns the bytes of one rank's gradients in one step."""
    return sum(parameter.nbytes for parameter in build().parameters())


@SUMMING
@pytest.mark.parametrize("dp", [2, 3])
def test_sums_change_no_bit_and_the_servers_get_one_gradient(dp: int, reduction: str) -> None:
    alone, together = Training(dp, reduction="direct"), Training(dp, reduction=reduction)
    assert alone.run() == together.run()
    one = STEPS * gradient_bytes()
    assert total(alone, "sent_bytes") - total(together, "sent_bytes") == (dp - 1) * one
    assert (total(alone, "direct_pushed_bytes"), total(alone, "direct_count")) == (dp * one, dp * 2 * STEPS)
    assert total(together, "direct_pushed_bytes") == 0
    assert (total(together, f"{reduction}_pushed_bytes"), total(together, f"{reduction}_count")) == (
        one,
        dp * 2 * STEPS,
    )
    assert total(together, f"{reduction}_peer_bytes") == (dp - 1) * one, "each gradient, except what its trainer adds"
    assert total(together, f"{reduction}_seconds") > 0


@pytest.mark.parametrize("groups", [(), (2, 2)])
def test_groups_are_added_in_their_order(groups: tuple[int, ...]) -> None:
    direct, *others = (Training(4, groups, name).run() for name in ("direct", "hierarchical", "allreduce"))
    assert others == [direct, direct]
    other_order = Training(4, () if groups else (2, 2), "direct").run()
    assert other_order != direct


@SUMMING
@pytest.mark.parametrize("rank", [0, 1])
def test_withdrawn_gradients_void_the_sums(rank: int, reduction: str) -> None:
    """One rank drops its first gradient of step 1 and computes it again."""

    def withdraw(own: int, step: int, number: int, optimizer: Any) -> None:
        if (own, step, number) == (rank, 1, 0):
            optimizer.zero_grad()

    together = Training(reduction=reduction, interfere=withdraw)
    assert together.run() == Training(reduction="direct", interfere=withdraw).run()
    assert total(together, f"{reduction}_count") >= 2 * 2 * (STEPS - 1), "they add again in the next step"


@SUMMING
def test_several_backwards_are_added_per_rank_first(reduction: str) -> None:
    together = Training(reduction=reduction, backwards=2)
    assert together.run() == Training(reduction="direct", backwards=2).run()


def test_report_names_the_route_of_each_unit() -> None:
    together = Training(reduction="allreduce")
    together.run()
    for report in together.reports:
        assert {at["route"] for at in report.unit_routes.values()} == {"allreduce"}
        assert list(report.routes) == ["allreduce"]
        assert report.routes["allreduce"]["count"] == 2
    assert sum(at.routes["allreduce"]["pushed_bytes"] for at in together.reports) == gradient_bytes()
    assert "2 units allreduce: gradient_reduction='allreduce'" in str(together.reports[0])


def test_adaptive_pushes_small_units_directly() -> None:
    together = Training(reduction="adaptive")
    assert together.run() == Training(reduction="direct").run()
    (choice,) = {tuple(at.values()) for at in together.reports[0].unit_routes.values()}
    assert choice == ("direct", "smaller than 256 KiB")


@pytest.mark.parametrize("without", [(0, 1), (1,), ()])
def test_adaptive_adds_among_trainers_where_a_relay_is_missing(
    without: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All trainers choose alike, also if only one of them has no relay."""
    connect = HostRelay._connect

    def connect_some(relay: HostRelay, *present: Any) -> Any:
        return None if relay._dp_rank in without else connect(relay, *present)

    monkeypatch.setattr(sums, "SMALL_UNIT_BYTES", 0)
    monkeypatch.setattr(HostRelay, "_connect", connect_some)
    together = Training(reduction="adaptive")
    assert together.run() == Training(reduction="direct").run()
    routes = {choice["route"] for report in together.reports for choice in report.unit_routes.values()}
    assert routes == {"allreduce" if without else "hierarchical"}
    assert total(together, "direct_count") == 0


def test_trainers_with_different_relays_get_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay keeps what it has of a run apart by rollbacks, as two relays would."""
    open_relay = HostRelay._open

    def open_own(relay: HostRelay, found: Any) -> Any:
        relay._rollback_count = 1 + relay._dp_rank
        return open_relay(relay, found)

    monkeypatch.setattr(relayed_shards, "PATIENCE_S", 0.1)
    monkeypatch.setattr(HostRelay, "_open", open_own)
    apart = Training(reduction="hierarchical")
    assert apart.run() == Training(reduction="direct").run()
    assert total(apart, "node_summed_bytes") == total(apart, "hierarchical_count") == 0
    assert total(apart, "direct_pushed_bytes") == 2 * STEPS * gradient_bytes()


def test_several_optimizers_are_refused() -> None:
    transfers = shardwell.TransferOptions(transports="socket,grpc", gradient_reduction="hierarchical")
    with testing.in_process_cluster() as address, shardwell.join(address, transfers=transfers) as session:
        model = build()
        shardwell.fully_shard(model[0], session)
        shardwell.fully_shard(model, session)
        first = shardwell.optim.SGD(model[0].parameters(), lr=0.1)
        second = shardwell.optim.SGD(model[2].parameters(), lr=0.1)
        with pytest.raises(UsageError, match="several optimizers in one session need gradient_reduction='direct'"):
            for _ in session.steps(1):
                model(batch(0, 0)).sum().backward()
                first.step()
                second.step()
