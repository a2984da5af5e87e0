"""The report of ``session.memory()``."""

from __future__ import annotations

from torch import nn

from shardwell.module.residency import UnitState
from shardwell.session.memory_report import MemoryReport, local_ratio, measure, num_parameters
from tests.support.module_parity import Sharded, gpt, gpt_loss, wrap_blocks, wrap_whole


def report(sharded: Sharded) -> MemoryReport:
    counts = {"gather_count": sharded.store.gathers.total(), "push_count": sharded.store.pushes.total()}
    return measure(sharded.units, {**counts, "delta_cache_bytes": 0})


def test_report_follows_a_step() -> None:
    sharded = Sharded(gpt(), wrap_blocks, prefetch_bytes=0)
    before = report(sharded)
    assert {unit.state for unit in before.units} == {UnitState.FREED}
    assert before.current_bytes == before.gather_count == before.reduce_scatter_count == 0
    assert before.saved_bytes == before.model_bytes == sum(sharded.unit_bytes().values())
    assert before.local_ratio == local_ratio(sharded.model) == 0.0
    loss = gpt_loss(sharded.model, 0)
    root = next(unit for unit in report(sharded).units if unit.name == "Gpt-0")
    assert root.state is UnitState.UNSHARDED
    assert report(sharded).current_bytes == root.held_bytes == root.size_bytes
    assert report(sharded).local_ratio == local_ratio(sharded.model) == root.num_parameters / before.num_parameters
    sharded.model.set_requires_gradient_sync(False)
    loss.backward()
    trainable = [parameter for parameter in gpt().parameters() if parameter.requires_grad]
    assert report(sharded).gradient_bytes == sum(parameter.nbytes for parameter in trainable)
    sharded.step()
    after = report(sharded)
    # Three blocks are gathered for forward and backward, the root once.
    assert (after.gather_count, after.reduce_scatter_count) == (7, 4)
    assert after.current_bytes == after.gradient_bytes == 0
    assert after.peak_bytes == root.size_bytes + max(unit.size_bytes for unit in after.units if unit is not root)
    assert after.saved_at_peak_bytes == after.model_bytes - after.peak_bytes


def test_report_counts_kept_and_fetching_units() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    unit = next(iter(sharded.units))
    sharded.model.blocks[0].unshard(async_op=True)
    assert (report(sharded).fetching_bytes, report(sharded).units[0].state) == (unit.own_bytes, UnitState.FETCHING)
    unit.unshard()
    unit.keep()
    assert (report(sharded).kept_bytes, report(sharded).fetching_bytes) == (unit.own_bytes, 0)
    unit.free()
    assert report(sharded).idle_bytes == unit.own_bytes


def test_pool_keeps_one_unit_larger_than_its_limit_unless_the_limit_is_zero() -> None:
    sharded = Sharded(gpt(), wrap_blocks, prefetch_bytes=1)
    unit = next(iter(sharded.units))
    for prefetch_bytes, kept_bytes in ((1, unit.own_bytes), (0, 0)):
        sharded.units.set_limits(prefetch_bytes=prefetch_bytes)
        for _ in range(2):
            sharded.model.blocks[0].unshard()
            assert report(sharded).idle_bytes == 0
            unit.free()
            assert report(sharded).idle_bytes == kept_bytes


def test_report_prints_as_a_table() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    sharded.model.blocks[1].unshard()
    text = str(report(sharded))
    assert "saved by sharding" in text and "reduce-scatters" in text
    line = next(line for line in text.splitlines() if line.startswith("Block-1 "))
    assert "UNSHARDED" in line and f"{sum(p.numel() for p in gpt().blocks[1].parameters()):,}" in line
    assert max(map(len, text.splitlines())) <= 120


def test_num_parameters_counts_tied_parameters_once() -> None:
    plain = gpt()
    expected = num_parameters(plain)
    assert expected == sum(parameter.numel() for parameter in plain.parameters())
    assert expected < sum(parameter.numel() for _, parameter in plain.named_parameters(remove_duplicate=False))
    assert num_parameters(Sharded(plain, wrap_blocks).model) == expected


def test_local_ratio_is_the_unsharded_share_of_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    assert local_ratio(model) == 1.0
    Sharded(model[0], wrap_whole)
    assert local_ratio(model) == num_parameters(model[1]) / num_parameters(model)
    assert local_ratio(nn.ReLU()) == 0.0
