"""Trainers of one host that add their gradients, as threads of one process. Restarted work changes no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell import testing
from shardwell_wire.errors import UsageError
from tests.support.reference import sha256

STEPS = 3


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

    def run(self) -> str:
        """Trains with one trainer per rank; returns a hash of the weights."""
        with testing.in_process_cluster(num_shards=2) as address, ThreadPoolExecutor(self.dp) as threads:
            done = [threads.submit(self.train, address, rank) for rank in range(self.dp)]
            results = [each.result(120) for each in done]
        self.stats = [stats for _, stats in results]
        (found,) = {weights for weights, _ in results}
        return found

    def train(self, address: str, rank: int) -> tuple[str, dict[str, float]]:
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
            return sha256(shardwell.full_state_dict(model)), session.stats()


def summed_bytes(training: Training) -> Sequence[float]:
    return [stats["node_summed_bytes"] for stats in training.stats]


def test_sums_change_no_bit_and_halve_the_bytes() -> None:
    alone, together = Training(reduction="direct"), Training()
    assert alone.run() == together.run()
    gradients = sum(parameter.nbytes for parameter in build().parameters())
    sent = [sum(stats["sent_bytes"] for stats in training.stats) for training in (alone, together)]
    assert sent[0] - sent[1] == STEPS * gradients
    assert summed_bytes(alone) == [0, 0]
    assert min(summed_bytes(together)) > 0


def test_groups_are_added_in_their_order() -> None:
    weights = {
        (groups, reduction): Training(4, groups, reduction).run()
        for groups in ((), (2, 2))
        for reduction in ("direct", "hierarchical")
    }
    assert weights[(), "direct"] == weights[(), "hierarchical"]
    assert weights[(2, 2), "direct"] == weights[(2, 2), "hierarchical"] != weights[(), "direct"]


@pytest.mark.parametrize("rank", [0, 1])
def test_withdrawn_gradients_void_the_sums(rank: int) -> None:
    """One rank drops its first gradient of step 1 and computes it again."""

    def withdraw(own: int, step: int, number: int, optimizer: Any) -> None:
        if (own, step, number) == (rank, 1, 0):
            optimizer.zero_grad()

    assert Training(interfere=withdraw).run() == Training(reduction="direct", interfere=withdraw).run()


def test_several_backwards_are_added_per_rank_first() -> None:
    assert Training(backwards=2).run() == Training(reduction="direct", backwards=2).run()


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
