"""Training over the whole grid: weights, norms and buffers are those of one process, for every grid."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
import torch

import shardwell
from shardwell.command.inspect_commands import peek
from shardwell.find_credentials import find_credentials
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import shard_pb2
from tests.support.grid_runs import read, train
from tests.support.grid_trainer import MAX_NORM, OPTIMIZER, build, compute

STEPS = 3


def reference(dp: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Trains in this process. Returns the state and the gradient norms."""
    model, norms = build("cpu"), []
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    for step in range(STEPS):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after_rank_0 = {}
        for dp_rank in range(dp):
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            compute(model, step, dp_rank, (None, None))
            if dp_rank == 0:
                after_rank_0 = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(after_rank_0[name])
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= dp
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


@pytest.mark.parametrize(
    ("world", "trainers", "on_trainers"),
    [
        ((1, 2, 1), 2, False),
        ((1, 1, 2), 2, False),
        ((2, 2, 1), 4, False),
        ((2, 1, 2), 4, False),
        ((1, 2, 2), 4, False),
        ((4, 1, 2), 2, False),
        ((2, 2, 1), 4, True),
        ((4, 1, 2), 2, True),
    ],
    ids=str,
)
def test_a_grid_trains_as_one_process(
    cluster: shardwell.LocalCluster, tmp_path: Path, world: tuple[int, int, int], trainers: int, on_trainers: bool
) -> None:
    run, outputs = train(cluster, tmp_path, world, steps=STEPS, trainers=trainers, on_trainers=on_trainers)
    expected, norms = reference(world[0])
    got = read(cluster, run)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(got[name], value, atol=1e-5), name
    for output in outputs:
        assert output["norms"] == pytest.approx(norms, rel=1e-5), "each value is counted once"
    parameter_bytes = sum(value.nbytes for name, value in expected.items() if not name.endswith("mean"))
    buffer_bytes = sum(value.nbytes for name, value in expected.items() if name.endswith("mean"))
    pushed = sum(output["pushed_bytes"] for output in outputs)
    assert pushed == STEPS * (world[0] * parameter_bytes + buffer_bytes), "each value is pushed once per dp rank"
    check_checkpoint(tmp_path, run, got, on_trainers=on_trainers)
    check_peek(cluster, run, got)


def check_checkpoint(folder: Path, run: str, expected: dict[str, torch.Tensor], *, on_trainers: bool) -> None:
    """A checkpoint has whole tensors, also of the optimizer's state."""
    checkpoint = shardwell.open_checkpoint(folder / "checkpoints", run=run)
    state = checkpoint.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    for name, shape in checkpoint.parameters.items():
        average = checkpoint.read(name, "trainer.exp_avg" if on_trainers else "exp_avg")
        assert expected[name].shape == shape == average.shape


def check_peek(cluster: shardwell.LocalCluster, run: str, expected: dict[str, torch.Tensor]) -> None:
    """``shardwell peek`` shows all parts of a parameter."""
    name = "blocks.0.down.weight"
    request = shard_pb2.PeekRequest(run=run, parameter=name, count=1)
    with closing(CoordinatorClient(cluster.address, find_credentials(cluster.address, None))) as coordinator:
        pieces = [piece.response for piece in peek(coordinator, request, timeout_s=60.0)]
    assert sum(piece.stop_element - piece.start_element for piece in pieces) == expected[name].numel()
    assert math.hypot(*(piece.norm for piece in pieces)) == pytest.approx(expected[name].norm().item(), rel=1e-5)
    for piece in pieces:
        if piece.start_element == 0:
            assert piece.values[0] == expected[name][tuple(piece.offsets) or (0, 0)]


def test_initial_values_are_the_same_in_every_grid(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    found = []
    for world in ((1, 1, 1), (1, 2, 2)):
        folder = tmp_path / str(world)
        folder.mkdir()
        found.append(read(cluster, train(cluster, folder, world, steps=0, device="meta")[0]))
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def test_a_grid_goes_on_from_its_checkpoint(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    world = (1, 2, 2)
    run, _ = train(cluster, first, world, steps=STEPS - 1)
    url = shardwell.open_checkpoint(first / "checkpoints", run=run).url
    resumed, _ = train(cluster, second, world, steps=STEPS, resume=url)
    got, (expected, _) = read(cluster, resumed), reference(world[0])
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(got[name], value, atol=1e-5), name
