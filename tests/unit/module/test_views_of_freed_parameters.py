"""Views that a user keeps after their unit is freed read as NaN, and never as another unit's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwell import fully_shard
from shardwell.memory.buffers import nan_storage
from shardwell.module.units import Units
from shardwell_wire.errors import ShardwellError
from tests.support.in_memory_store import InMemoryStore

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "transposed": lambda weight: weight.detach().t(),
    "row": lambda weight: weight.detach()[1],
}


@pytest.fixture
def layers() -> Iterator[tuple[Any, Any]]:
    with closing(InMemoryStore()) as store:
        session: Any = SimpleNamespace(units=Units(store))
        torch.manual_seed(0)
        yield fully_shard(nn.Linear(9, 9), session), fully_shard(nn.Linear(9, 9), session)


@pytest.mark.parametrize("view", VIEWS)
def test_view_reads_as_nan_while_its_unit_is_freed(layers: tuple[Any, Any], view: str) -> None:
    kept, other = layers
    kept.unshard()
    seen = VIEWS[view](kept.weight)
    before = seen.clone()
    kept.reshard()
    other.unshard()  # gets the memory that was just released to the pool
    assert seen.isnan().all()
    kept.unshard()
    assert torch.equal(seen, before)


def test_autograd_never_reads_another_units_bytes_through_saved_data(layers: tuple[Any, Any]) -> None:
    kept, other = layers
    kept.unshard()
    x = torch.rand(9, requires_grad=True)
    loss = (x * kept.weight.data).sum()
    kept.reshard()
    other.unshard()
    try:
        loss.backward()
    except ShardwellError:
        return
    assert x.grad is not None and x.grad.isnan().all()


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, (2 << 20) + 8, 9 << 20])
def test_nan_storage_has_its_size_and_reads_as_nan(size_bytes: int) -> None:
    storage = nan_storage(size_bytes)
    assert storage.nbytes() == size_bytes
    assert torch.empty(0, dtype=torch.uint8).set_(storage).eq(255).all()
