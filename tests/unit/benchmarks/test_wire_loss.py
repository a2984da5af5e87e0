"""Tests for the benchmark of lossy wire dtypes: the error of one transfer, and the table."""

from __future__ import annotations

import pytest
import torch

from benchmarks.wire_loss import LossCheck, WireResult, relative_error
from benchmarks.wire_options import LOSS_OPTIONS, REFERENCE
from shardwell.options import JoinConfig, TransferOptions
from shardwell_wire.encoding.wire_dtypes import GATHER_NAMES, PUSH_NAMES


def values(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


def test_float32_has_no_error() -> None:
    assert relative_error([values(1000).view(10, 100)], PUSH_NAMES["float32"]) == 0.0


def test_error_of_bfloat16_is_that_of_a_cast() -> None:
    x, y = values(1000), values(17)
    difference = torch.cat([x - x.bfloat16().float(), y - y.bfloat16().float()])
    expected = (difference.double().norm() / torch.cat([x, y]).double().norm()).item()
    assert relative_error([x, y], PUSH_NAMES["bfloat16"]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("dtype", "kept"), [("topk-10%", 103), ("topk-1%", 11)])
def test_error_of_top_k_is_the_norm_of_what_is_not_pushed(dtype: str, kept: int) -> None:
    x = torch.zeros(1024)
    x[::2] = 1.0
    assert relative_error([x], PUSH_NAMES[dtype]) ** 2 == pytest.approx((512 - kept) / 512, rel=1e-12)


def test_each_tensor_starts_a_block() -> None:
    """A large value, which int8 keeps exactly, does not share its scale with another tensor."""
    small, large = values(100), torch.tensor([127.0 * 2**20])
    alone = relative_error([small], GATHER_NAMES["int8"]) * small.norm().item()
    together = relative_error([small, large], GATHER_NAMES["int8"]) * torch.cat([small, large]).double().norm().item()
    assert alone > 0
    assert together == pytest.approx(alone, rel=1e-4)


def test_options_are_valid_and_the_first_is_lossless() -> None:
    assert next(iter(LOSS_OPTIONS)) == REFERENCE
    for name, wire in LOSS_OPTIONS.items():
        config = JoinConfig(transfers=TransferOptions(**wire.options()))
        assert config.transfers.push_error_feedback == name.endswith(", feedback")


def test_table_compares_equal_seeds_and_bytes() -> None:
    check = LossCheck(
        steps=10,
        parameters=1_000_000,
        unigram_entropy=5.5,
        results={
            REFERENCE: WireResult([3.0, 3.2], received_bytes=400.0, sent_bytes=200.0),
            "push int8": WireResult([3.01, 3.17], received_bytes=400.0, sent_bytes=52.0, push_error=0.01),
        },
    )
    text = check.to_markdown()
    assert f"| {REFERENCE} | 1.000 | 1.000 | 0.00% | 0.00% | 3.1000 | 0.2000 | +0.0000 (+0.0000 to +0.0000) |" in text
    assert "| push int8 | 0.260 | 1.000 | 1.00% | 0.00% | 3.0900 | 0.1600 | -0.0100 (-0.0300 to +0.0100) |" in text
