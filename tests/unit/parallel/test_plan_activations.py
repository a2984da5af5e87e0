"""Activations in a plan, compared with known graphs and with recorded ones."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardwell.command.cli import main
from shardwell.planning.plan import plan_run
from shardwell.planning.plan_model import PlanOptions, load, record_activations
from tests.support.module_parity import gpt

HERE = "tests.unit.parallel.test_plan_activations"
ROWS, WIDTH = 16, 8


class Block(nn.Module):
    """Saves its input and the result of the ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x).relu())
        return result


class Normed(Block):
    """A block that cannot be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


INPUT, INSIDE = ROWS * WIDTH * 4, ROWS * 4 * WIDTH * 4


def make(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 3)), torch.zeros(batch, WIDTH)


def make_normed(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(Normed(), Normed()), torch.zeros(batch, WIDTH)


def make_with_values(batch: int) -> tuple[nn.Module, torch.Tensor]:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())

    return Model(8, 8), torch.zeros(batch, 8)


def make_without_a_call() -> nn.Module:
    return gpt()


def planned(name: str = "make", **options: object) -> int | None:
    plan = plan_run(f"{HERE}:{name}", PlanOptions(**options), batch=ROWS, length=1)
    return plan.trainer.activation_bytes


def test_every_saved_tensor_counts_once() -> None:
    """Each linear layer saves its input. ReLU saves its result, which is the input of the next layer."""
    assert planned() == 4 * (INPUT + INSIDE) + INPUT
    assert planned(activation_bytes=17) == 17


def test_checkpoints_save_inputs_and_one_unit_inside() -> None:
    """The head's input is the result of the last block, and is released when that block is recomputed."""
    assert planned(checkpoint_activations=True) == 4 * INPUT + INSIDE
    assert planned("make_normed", checkpoint_activations=True) == planned("make_normed") == 2 * (INPUT + INSIDE)


def test_offloaded_activations_return_one_unit_at_a_time() -> None:
    """Each block's input is the result of the block before, and no other graph saves it."""
    everything = planned(checkpoint_activations=True, offload_to="disk", offload_min_bytes=1)
    assert everything == INPUT + INSIDE
    assert planned(offload_to="disk", offload_min_bytes=INSIDE) == 4 * INPUT + INSIDE
    assert planned(offload_to="disk") == planned(offload_to="cpu") == planned()


def make_with_arguments(batch: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    model, x = make(batch)
    return model, (x,)


def make_with_keywords(batch: int) -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
    model, x = make(batch)
    return model, (), {"input": x}


@pytest.mark.parametrize("name", ["make_with_arguments", "make_with_keywords"])
def test_example_call_takes_a_tuple_and_a_dict(name: str) -> None:
    assert planned(name) == planned()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("make_with_values", "the example call on shapes raised"), ("make_without_a_call", "there is no example call")],
)
def test_unknown_activations_have_a_reason(name: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    saved, found = record_activations(load(f"{HERE}:{name}", batch=2, length=1))
    assert saved is None and found.startswith(reason)
    assert main(["plan", f"{HERE}:{name}", "--batch", "2"]) == 0
    assert f"shardwell plan: the activations are unknown: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("recompute", [False, True])
def test_real_graphs_save_the_planned_bytes(recompute: bool) -> None:
    """Measured at the end of the forward, before any recomputation."""
    model, x = make(ROWS)
    if recompute:
        for block in model[:-1]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            held[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        model(x)
    found = sum(storage.nbytes() for storage in held.values())
    assert found == (5 * INPUT if recompute else planned())
