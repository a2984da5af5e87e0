"""Tests for the benchmark of low-rank starts: what is left out is added to the next gradient, and the table."""

from __future__ import annotations

import pytest
import torch

from benchmarks.low_rank_starts import NEW, POINTS, STARTS, WARM, Compressor, Start, StartResult, to_markdown
from examples.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=40, context=4, num_layers=1, width=24)


@pytest.mark.parametrize("at", POINTS)
def test_what_is_left_out_of_a_push_is_added_to_the_next(at: str) -> None:
    model = GPT(CONFIG)
    compressor, shapes = Compressor(Start(1, 1, at), model), [parameter.shape for parameter in model.parameters()]
    index = next(number for number, shape in enumerate(shapes) if len(shape) == 2)
    gradient = torch.randn(shapes[index], generator=torch.Generator().manual_seed(0))
    arrived, left_out, total = compressor.pushed(index, gradient, 0)
    assert total == pytest.approx(gradient.square().sum().item())
    assert 0 < left_out == pytest.approx((gradient - arrived).square().sum().item())
    _, _, total = compressor.pushed(index, gradient, 1)
    assert total == pytest.approx((gradient + gradient - arrived).square().sum().item())


def test_vectors_are_pushed_as_stored() -> None:
    model = GPT(CONFIG)
    vector = next(number for number, parameter in enumerate(model.parameters()) if parameter.dim() == 1)
    gradient = torch.ones_like(list(model.parameters())[vector])
    arrived, left_out, _ = Compressor(Start(4, 2, WARM), model).pushed(vector, gradient, 0)
    assert arrived is gradient and left_out == 0


def test_table_has_a_row_for_each_start() -> None:
    text = to_markdown([StartResult([4.0, 4.5], [0.9, 0.8]) for _ in STARTS])
    assert text.count("| 85.0% | 4.2500 | 4.0000 to 4.5000 |") == len(STARTS)
    assert f"| 4 | 2 | {NEW} |" in text
