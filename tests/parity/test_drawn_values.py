"""Initial values drawn on the servers follow torch's distributions for any units and any number of servers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwell import NoWrapPolicy, SizePolicy, auto_wrap, init
from shardwell.module.fully_shard import fully_shard
from shardwell.module.new_units import GridPlace
from shardwell.module.units import Units
from shardwell.weights.state_dict import full_state_dict
from shardwell_wire.errors import UsageError
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Gpt, gpt, gpt_loss


def drawn_gpt(policy: Any, num_shards: int = 1, **options: Any) -> Gpt:
    with torch.device("meta"):
        model = Gpt()
    session = SimpleNamespace(units=Units(InMemoryStore(num_shards), init_seed=3, **options))
    return auto_wrap(model, session, policy, source=init.drawn())  # type: ignore[no-any-return]


def test_drawn_values_depend_on_seed_and_name_only() -> None:
    expected = full_state_dict(drawn_gpt(NoWrapPolicy()))
    for policy, num_shards, stage in ((SizePolicy(1000), 3, 0), (SizePolicy(20), 7, 1)):
        got = full_state_dict(drawn_gpt(policy, num_shards, place=GridPlace(pp=2, pp_rank=stage)))
        assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_distributions_match_torch() -> None:
    model = drawn_gpt(SizePolicy(1000))
    got, torchs = full_state_dict(model), gpt().state_dict()
    assert model.head.weight is model.tokens.weight
    for name, values in got.items():
        if torchs[name].unique().numel() == 1:
            assert torch.equal(values, torchs[name]), name
        else:
            assert values.unique().numel() > 1
            spread = torchs[name].std().item()
            assert abs(values.std().item() - spread) < 5 * spread / math.sqrt(values.numel()), name
    assert got["blocks.0.up.weight"].abs().max() <= 1 / math.sqrt(20)
    gpt_loss(model, 0).backward()


def bounds_of(module: nn.Module, name: str) -> tuple[float, float]:
    distribution = init.default_rule(module, name, module.get_parameter(name)).distribution
    if distribution.WhichOneof("kind") == "constant":
        return distribution.constant, distribution.constant
    return distribution.uniform.low, distribution.uniform.high


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(30, 50),
        nn.Conv2d(6, 40, 3, groups=2),
        nn.ConvTranspose1d(40, 6, 5),
        nn.Bilinear(20, 5, 60),
        nn.LSTM(3, 50, 2),
        nn.GRUCell(3, 50),
        nn.MultiheadAttention(20, 4, kdim=12, vdim=8),
        nn.BatchNorm2d(9),
        nn.GroupNorm(2, 8),
        nn.RMSNorm(7),
        nn.PReLU(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_default_rule_has_the_bounds_of_torch(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        holder, own_name = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        low, high = bounds_of(holder, own_name)
        assert low <= parameter.min() and parameter.max() <= high, name
        if parameter.numel() > 500:
            assert parameter.max() > 0.95 * high and parameter.min() < 0.95 * low, name


def test_custom_rule_falls_back_to_the_default_rule() -> None:
    def rule(module: nn.Module, name: str, parameter: nn.Parameter) -> init.Draw | None:
        return init.constant(0.25) if name == "Sequential-0.1.weight" else None

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    fully_shard(model, SimpleNamespace(units=Units(InMemoryStore())), source=init.drawn(rule))
    state = full_state_dict(model)
    assert state["1.weight"].tolist() == [[0.25] * 3] * 3 and state["0.weight"].unique().numel() > 1
    assert state["2.running_var"].tolist() == [1, 1, 1]


def test_module_without_a_rule_is_rejected_by_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(3))

        def forward(self) -> None:
            pass

    session: Any = SimpleNamespace(units=Units(InMemoryStore()))
    with pytest.raises(UsageError, match=r"no distribution for 'Own-0.w' of Own.*drawn\(lambda"):
        fully_shard(Own(), session, source=init.drawn())


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_row_is_zero_and_other_rows_are_unchanged(kind: Any, num_shards: int) -> None:
    def drawn(padding_idx: int | None, source: Any = None) -> torch.Tensor:
        with torch.device("meta"):
            module = kind(1000, 7, padding_idx=padding_idx)
        fully_shard(
            module, SimpleNamespace(units=Units(InMemoryStore(num_shards))), source=source or init.drawn(), name="e"
        )
        return full_state_dict(module)["weight"]

    expected = drawn(None)
    for row in (0, 613, -1):
        got = drawn(row)
        assert not got[row].any() and expected[row].all()
        assert torch.equal(torch.cat([got[:row], got[row:][1:]]), torch.cat([expected[:row], expected[row:][1:]]))
    ruled = drawn(None, init.drawn(lambda *_: init.normal(std=0.02).with_zero_row(3)))
    assert not ruled[3].any() and 0.015 < ruled.std() < 0.025
    with pytest.raises(UsageError, match=r"zero row 1000 of 'e.weight' is out of range: its shape is \(1000, 7\)"):
        drawn(None, init.drawn(lambda *_: init.ones().with_zero_row(1000)))
