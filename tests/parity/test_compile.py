"""Compiled blocks of a sharded model: the same bits, and no graph breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.module_parity import Pair, Sharded, gpt, gpt_loss, wrap_blocks

ignore_compiler_warning = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compile_forwards(model: Any, backend: str) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)


@ignore_compiler_warning
@pytest.mark.parametrize("recompute", [None, False])
def test_compiled_inner_forward_has_no_graph_break(recompute: bool | None) -> None:
    """Gradients are pushed as often as without compilation."""
    pair, eager = Pair(gpt(recompute), wrap_blocks, prefetch_bytes=0), Sharded(gpt(recompute), wrap_blocks)
    compile_forwards(pair.sharded.model, "aot_eager")
    for number in range(3):
        torch.manual_seed(number)
        gpt_loss(eager.model, number).backward()
        eager.step()
    pair.train(gpt_loss, steps=3)
    assert graph_breaks() == 0
    assert pair.sharded.store.pushes == eager.store.pushes


@ignore_compiler_warning
def test_module_compiled_in_place_has_no_graph_break() -> None:
    """``module.compile()`` compiles the whole call, but the hooks stay outside the graph."""
    pair = Pair(gpt(), wrap_blocks)
    for block in pair.sharded.model.blocks:
        block.compile(backend="aot_eager")
    pair.train(gpt_loss, steps=3)
    assert graph_breaks() == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@ignore_compiler_warning
def test_module_compiled_before_sharding_has_no_graph_break() -> None:
    def wrap(model: Any, session: Any) -> None:
        compile_forwards(model, "aot_eager")
        wrap_blocks(model, session)

    Pair(gpt(), wrap).train(gpt_loss, steps=3)
    assert graph_breaks() == 0
