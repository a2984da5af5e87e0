"""Data ranks that read the same data: the run warns once, and only then."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwell
import shardwell.testing
from shardwell.data_plane.gradient_parts import GradientSample
from shardwell_server.coordinator.steps.reports import EqualGradients
from tests.support.cluster import wait_until


def digest(*gradients: torch.Tensor) -> int:
    sample = GradientSample()
    for index, gradient in enumerate(gradients):
        sample.add([(index, gradient)])
    assert sample.digest() == sample.digest()
    return sample.digest()


def test_a_sample_tells_gradients_apart_that_are_finite_and_not_all_zero() -> None:
    one, zero = torch.arange(1, 1001, dtype=torch.float32), torch.zeros(1000)
    assert digest(one) == digest(one.clone()) != digest(one + 1)
    assert digest(zero, one) != digest(zero, one + 1), "an unused parameter hides nothing"
    assert digest(one.double().view(10, 100)) and digest(one.bfloat16())
    assert digest() == digest(zero) == digest(torch.empty(0)) == digest(one / 0) == digest(zero / 0) == 0
    assert digest(one.view(10, 100).t()) == digest(torch.ones(3, dtype=torch.int64)) == 0, "left out"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "same data" in record.getMessage()]


Batch = Callable[[int, int], torch.Tensor]
EVERY_RANK: Batch = lambda step, dp_rank: torch.full((4, 8), float(step + 1))  # noqa: E731
OWN: Batch = lambda step, dp_rank: torch.full((4, 8), float(step + dp_rank + 1))  # noqa: E731


class HalfUsed(nn.Module):
    """A model of which one layer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def train(batch: Batch, dp: int) -> None:
    with shardwell.testing.in_process_cluster(dp=dp), shardwell.join() as session:
        torch.manual_seed(0)
        model = HalfUsed()
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.01)
        for step in session.steps(6):
            for x in step.batches(batch):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_ranks_that_read_the_same_data_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(EVERY_RANK, dp=3)
        wait_until(lambda: bool(warnings_of(caplog)), "the warning")
    (warning,) = warnings_of(caplog)
    assert "the data ranks 0, 1, 2 have pushed equal gradients in the steps 0, 1, 2: do they read" in warning


@pytest.mark.parametrize(("batch", "dp"), [(OWN, 2), (EVERY_RANK, 1)], ids=["own data", "one rank"])
def test_other_runs_get_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, batch: Batch, dp: int
) -> None:
    compared = []
    note = EqualGradients.note
    monkeypatch.setattr(EqualGradients, "note", lambda self, step: compared.append(found := note(self, step)) or found)
    with caplog.at_level(logging.WARNING):
        train(batch, dp)
    assert not any(compared) and len(compared) == (6 if dp > 1 else 0)
    assert warnings_of(caplog) == []
