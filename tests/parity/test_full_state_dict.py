"""``full_state_dict`` matches ``state_dict`` of the plain model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwell.module.fully_shard import fully_shard
from shardwell.module.residency import UnitState
from shardwell.weights.state_dict import full_state_dict, iter_full_state_dict
from tests.support.module_parity import Pair, Sharded, gpt, gpt_loss, inputs, wrap_blocks, wrap_children


def test_full_state_dict_loads_into_the_plain_model() -> None:
    pair = Pair(gpt(), wrap_blocks).train(gpt_loss)
    fresh = gpt()
    assert str(fresh.load_state_dict(pair.sharded.state(), strict=True)) == "<All keys matched successfully>"
    assert torch.equal(fresh.head.weight, pair.plain.tokens.weight)


def test_buffers_extra_state_hooks_and_tied_names_are_kept() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.arange(3))
            self.register_buffer("dropped", torch.arange(4), persistent=False)
            self.weight = nn.Parameter(torch.randn(3))
            self.same = self.weight
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x * self.weight + self.same)

        def get_extra_state(self) -> Any:
            return {"number": 7}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"number": 7}

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}renamed"] = state.pop(f"{prefix}kept")

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 3), Odd())
    pair = Pair(plain, wrap_children)
    for model in (pair.plain, pair.sharded.model):
        model[1].register_state_dict_post_hook(rename)
    pair.backward(lambda model, number: model(inputs(number, 4, 7)).square().mean(), 0)
    pair.step()
    expected, got = pair.plain.state_dict(), pair.sharded.state()
    assert list(got) == list(expected) and "1.renamed" in got and "1.dropped" not in got
    assert got["1._extra_state"] == expected["1._extra_state"]
    for name in ("1.same", "1.norm.running_mean", "1.norm.num_batches_tracked", "0.weight"):
        assert torch.equal(got[name], expected[name])


def test_units_are_gathered_one_at_a_time_and_values_are_copies() -> None:
    sharded = Sharded(gpt(), wrap_blocks, prefetch_bytes=0)
    peak, before = sharded.units.peak_bytes, sharded.store.gathers.total()
    seen: dict[str, int] = {}
    values = {}
    for name, value in iter_full_state_dict(sharded.model):
        seen[name] = sharded.store.gathers.total() - before
        values[name] = value
    assert seen["tokens.weight"] == 1 and seen["blocks.0.norm1.weight"] == 2 and seen["head.weight"] == 5
    assert sharded.units.live_bytes == 0 and sharded.units.peak_bytes == peak
    assert all(
        value.untyped_storage().nbytes() == value.nbytes and not value.requires_grad for value in values.values()
    )
    values["tokens.weight"].zero_()
    assert full_state_dict(sharded.model)["tokens.weight"].abs().sum() > 0


def test_full_state_dict_between_forward_and_backward_changes_no_unit() -> None:
    pair = Pair(gpt(), wrap_blocks)
    for number in range(3):
        for model in (pair.plain, pair.sharded.model):
            torch.manual_seed(number)
            loss = gpt_loss(model, number)
            if model is pair.sharded.model:
                states = [unit.state for unit in pair.sharded.units]
                with torch.no_grad():
                    pair.compare()
                assert [unit.state for unit in pair.sharded.units] == states and UnitState.UNSHARDED in states
            loss.backward()
        pair.step()
    pair.compare()


def test_submodules_and_partly_sharded_models_have_a_full_state_dict() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    assert list(full_state_dict(sharded.model.blocks[1])) == list(gpt().blocks[1].state_dict())

    def wrap(model: Any, session: Any) -> None:
        fully_shard(model[0], session)

    mixed = Sharded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), wrap)
    got = mixed.state()
    assert list(got) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(got["1.weight"], mixed.model[1].weight) and not got["1.weight"].requires_grad
