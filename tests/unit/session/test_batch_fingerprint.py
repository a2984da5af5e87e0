"""Fingerprints of batches depend on every value, and not on memory or layout."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from shardwell.training.batch_fingerprint import fingerprint


def example() -> dict[str, Any]:
    tokens = torch.arange(24).view(4, 6)
    return {"tokens": tokens, "more": [numpy.arange(3), 2.5, 7, "text", None], "mask": (tokens > 3)[:, ::2]}


def test_equal_batches_have_equal_fingerprints() -> None:
    other = example()
    other["tokens"] = other["tokens"].t().contiguous().t()
    assert fingerprint(example()) == fingerprint(other)
    assert 0 <= fingerprint(example()) < 1 << 62


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": example()["tokens"].view(6, 4)},
        {"tokens": example()["tokens"].int()},
        {"tokens": example()["tokens"] + torch.eye(4, 6, dtype=torch.int64)},
        {"more": [numpy.arange(3) + 1, 2.5, 7, "text", None]},
        {"more": [numpy.arange(3), 2.25, 7, "text", None]},
        {"more": [numpy.arange(3), 2.5, 8, "text", None]},
        {"more": [numpy.arange(3), 2.5, 7, "texts", None]},
    ],
)
def test_other_values_shapes_or_dtypes_have_other_fingerprints(change: dict[str, Any]) -> None:
    assert fingerprint(example()) != fingerprint(example() | change)


def test_tensors_without_memory_count_by_their_shapes() -> None:
    meta = torch.empty(2, 3, device="meta")
    assert fingerprint(meta) == fingerprint(meta.clone()) != fingerprint(meta.view(6))
    assert fingerprint(torch.empty(0)) == fingerprint([torch.empty(0)])
    assert fingerprint(torch.ones((), dtype=torch.bfloat16)) != fingerprint(torch.zeros((), dtype=torch.bfloat16))


@dataclass
class Batch:
    tokens: torch.Tensor


@pytest.mark.parametrize("kind", [lambda tokens: UserDict(tokens=tokens), Batch, lambda tokens: (Batch(tokens),)])
def test_values_in_mappings_and_dataclasses_count(kind: Callable[[torch.Tensor], object]) -> None:
    """As in the batches of Hugging Face's tokenizers and collators."""
    assert fingerprint(kind(torch.ones(2))) == fingerprint(kind(torch.ones(2))) != fingerprint(kind(torch.zeros(2)))


def test_order_of_keys_and_addresses_do_not_count() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 2, "b": 1})
    texts = [numpy.array(["".join(["te", "xt"]), number], dtype=object) for number in (300.5, 300.5, 7)]
    assert fingerprint(texts[0]) == fingerprint(texts[1]) != fingerprint(texts[2])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_count_by_their_values(layout: torch.layout) -> None:
    made = [torch.nested.nested_tensor([torch.full((2,), x), torch.ones(3)], layout=layout) for x in (1.0, 1.0, 2.0)]
    assert fingerprint(made[0]) == fingerprint(made[1]) != fingerprint(made[2])
