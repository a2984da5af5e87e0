"""Parts of a state join to the whole state; parts that do not fit are rejected."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell_wire.errors import UsageError
from tests.parity.test_saving import assert_same
from tests.support.module_parity import Pair, Sharded, gpt, gpt_loss, wrap_blocks, wrap_children


@pytest.fixture(scope="module")
def trained() -> Pair:
    """Returns a model after two steps."""
    return Pair(gpt(), wrap_blocks).train(gpt_loss, 2)


def test_joined_parts_equal_the_state(trained: Pair) -> None:
    model, expected = trained.sharded.model, trained.plain.state_dict()
    for num_parts in (1, 3, 50):
        parts = [shardwell.sharded_state_dict(model, part=part, num_parts=num_parts) for part in range(num_parts)]
        joined = shardwell.join_state_dicts(parts[::-1])
        assert list(joined) == list(expected)
        assert_same(expected, joined)


def test_every_kind_of_value_can_be_joined() -> None:
    """Covers a scalar, an empty tensor and extra state that is not a tensor."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar, self.empty = nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.empty(0, 4))
            self.register_buffer("mask", torch.tensor([True, False]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scalar

        def get_extra_state(self) -> Any:
            return {"number": 7}

    sharded = Sharded(nn.Sequential(Odd()), wrap_children)
    parts = [shardwell.sharded_state_dict(sharded.model, part=part, num_parts=2) for part in range(2)]
    joined = shardwell.join_state_dicts(parts)
    assert joined.pop("0._extra_state") == {"number": 7}
    expected = {name: value for name, value in sharded.state().items() if name != "0._extra_state"}
    assert_same(expected, joined)
    for name in ("0.scalar", "0._extra_state"):
        again = {name: parts[0][name]}
        with pytest.raises(UsageError, match=f"'{name}' is in 2 of the parts, expected one: a part was passed twice"):
            shardwell.join_state_dicts([again, again])


def test_parts_that_do_not_fit_are_rejected(trained: Pair) -> None:
    cut = functools.partial(shardwell.sharded_state_dict, trained.sharded.model)
    first, second, third = (cut(part=part, num_parts=3) for part in range(3))
    rows = second["tokens.weight"].offsets[0], third["tokens.weight"].offsets[0]
    with pytest.raises(
        UsageError, match=rf"rows \[{rows[0]}, {rows[1]}\) of 'tokens.weight' are in none of the 2 parts"
    ):
        shardwell.join_state_dicts([third, first])
    with pytest.raises(UsageError, match=r"rows \[88, 131\) of 'tokens.weight' are in none"):
        shardwell.join_state_dicts([first, second])
    with pytest.raises(UsageError, match=r"row 0 of 'tokens.weight' is in two of the 4 parts"):
        shardwell.join_state_dicts([first, first, second, third])
    with pytest.raises(UsageError, match=r"row 44 of 'tokens.weight' is in two of the 2 parts: .* different num_parts"):
        shardwell.join_state_dicts([cut(part=0, num_parts=2), second])
    with pytest.raises(UsageError, match="expected at least one part"):
        shardwell.join_state_dicts([])
    older = {name: dataclasses.replace(value, version=1) for name, value in first.items()}
    newer = {name: dataclasses.replace(value, version=2) for name, value in second.items()}
    with pytest.raises(UsageError, match="different steps: part 0 of step 1 and part 1 of step 2"):
        shardwell.join_state_dicts([older, newer, third])
    other = {"tokens.weight": dataclasses.replace(second["tokens.weight"], whole_shape=(131, 7))}
    with pytest.raises(UsageError, match=r"'tokens.weight' is \(131, 20\) of torch.float32, \(131, 7\) of"):
        shardwell.join_state_dicts([first, other])
