"""Offloaded activations give the same bits, need less memory and leave no files."""

from __future__ import annotations

import copy
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwell import UsageError, offload_activations
from shardwell.errors import CapacityError
from shardwell.module.fully_shard import fully_shard
from shardwell.module.residency import UnitState
from shardwell.wrapping import ActivationOffload
from tests.support.module_parity import LAYERS, Pair, Sharded, gpt, gpt_loss, inputs, wrap_blocks


def offload_blocks(model: Any, to: Path | str, min_bytes: int = 1) -> list[ActivationOffload]:
    return [offload_activations(block, to=to, min_bytes=min_bytes) for block in model.blocks]


def wrap_and_offload(to: Path, *, before: bool = False, min_bytes: int = 1) -> Callable[[nn.Module, Any], None]:
    def wrap(model: nn.Module, session: Any) -> None:
        if before:
            offload_blocks(model, to, min_bytes)
        wrap_blocks(model, session)
        if not before:
            offload_blocks(model, to, min_bytes)

    return wrap


# Parity.


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("before", [False, True])
def test_offloading_gives_the_same_bits(tmp_path: Path, recompute: bool | None, before: bool) -> None:
    Pair(gpt(recompute), wrap_and_offload(tmp_path, before=before)).train(gpt_loss)


@pytest.mark.parametrize("min_bytes", [1, 1500, 1 << 30])
def test_any_min_bytes_gives_the_same_bits(tmp_path: Path, min_bytes: int) -> None:
    Pair(gpt(), wrap_and_offload(tmp_path, min_bytes=min_bytes)).train(gpt_loss)


def test_inputs_of_checkpoints_are_moved_and_nothing_inside(tmp_path: Path) -> None:
    """Inside a checkpoint nothing is saved."""
    inside, around = gpt(recompute=False), gpt(recompute=False)
    offloads = offload_blocks(inside, tmp_path)
    outer = offload_activations(around, to=tmp_path, min_bytes=1)
    torch.manual_seed(0)
    gpt_loss(inside, 0).backward()
    torch.manual_seed(0)
    gpt_loss(around, 0).backward()
    assert [offload.moved_bytes for offload in offloads] == [0] * LAYERS
    assert outer.moved_bytes > 0
    for ours, theirs in zip(inside.parameters(), around.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_restored_views_keep_strides_and_alignment(tmp_path: Path) -> None:
    saved: list[torch.Tensor] = []

    class Slices(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = x.exp()
            return (whole[1:, ::2] * whole.t()[:3, :4].t() * whole[0].expand(4, -1)[:, :3]).sum()

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            saved.extend(ctx.saved_tensors)
            return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)

    class Saves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = x * 2
            return Watched.apply(whole[1:, ::2], whole.t(), whole[2].expand(3, -1), whole[:0])  # type: ignore[no-any-return]

    x = inputs(0, 5, 6, requires_grad=True)
    plain, moved = Slices()(x), Slices()
    offload = offload_activations(moved, to=tmp_path, min_bytes=1)
    expected = torch.autograd.grad(plain, x)[0]
    assert torch.equal(torch.autograd.grad(moved(x), x)[0], expected)
    view_bytes, row_bytes = 4 * 3 * x.itemsize, 3 * x.itemsize
    product_bytes = view_bytes
    assert offload.moved_bytes == x.nbytes + 2 * view_bytes + row_bytes + product_bytes, (
        "each saved tensor has different elements"
    )

    module = Saves()
    offload_activations(module, to=tmp_path, min_bytes=1)
    module(x).backward()
    whole = x.detach() * 2
    for got, want in zip(saved, [whole[1:, ::2], whole.t(), whole[2].expand(3, -1), whole[:0]], strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
        assert got.numel() == 0 or got.data_ptr() % 64 == want.data_ptr() % 64


def test_storage_that_is_saved_more_than_once_is_moved_once(tmp_path: Path) -> None:
    class Saves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x * 2
            return sum(view.square().sum() for view in (wide, wide.t(), wide.view(-1), wide.unfold(0, 2, 1)))  # type: ignore[return-value]

    results, module = [], Saves()
    x = inputs(0, 5, 6, requires_grad=True)
    results.append(torch.autograd.grad(module(x), x)[0])
    offload = offload_activations(module, to=tmp_path, min_bytes=1)
    results.append(torch.autograd.grad(module(x), x)[0])
    assert torch.equal(*results)
    assert offload.moved_bytes == x.nbytes


@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_with_separate_version_counters_are_moved_separately(tmp_path: Path, dim: int) -> None:
    """Chunks of ``unsafe_chunk`` share one storage, but a write to one does not change the others' counters."""

    class Gates(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second, third = torch.unsafe_chunk(x * 2, 3, dim)
            return (first.sigmoid_() * second.tanh_() + third.sigmoid_()).sum()

    x = inputs(0, 60, 60, requires_grad=True)
    expected = torch.autograd.grad(Gates()(x), x)[0]
    module = Gates()
    offload = offload_activations(module, to=tmp_path, min_bytes=1)
    assert torch.equal(torch.autograd.grad(module(x), x)[0], expected)
    assert x.nbytes <= offload.moved_bytes < 1.02 * x.nbytes


def test_reused_memory_is_moved_again(tmp_path: Path) -> None:
    class Loop(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x.sum()
            for power in range(20):  # every square is freed, and its memory is reused for the next one
                total = total + (x + power).square().sigmoid().sum()
            return total

    x = inputs(0, 64, 64, requires_grad=True)
    expected = torch.autograd.grad(Loop()(x), x)[0]
    module = Loop()
    offload_activations(module, to=tmp_path, min_bytes=1)
    assert torch.equal(torch.autograd.grad(module(x), x)[0], expected)


def test_second_backward_and_second_derivatives_give_the_same_bits(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    moved = copy.deepcopy(plain)
    offload_activations(moved, to=tmp_path, min_bytes=1)
    results = []
    for model in (plain, moved):
        x = inputs(0, 3, 5, requires_grad=True)
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        results.append([first, second, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_write_after_saving_raises_or_has_no_effect(tmp_path: Path) -> None:
    """Tensors that are not moved are checked as in torch. Moved copies keep the old bytes, which the backward needs."""

    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            result = doubled.square().sum()
            doubled.add_(1)
            return result

    x = inputs(0, 4, 4, requires_grad=True)
    stays, moves = Square(), Square()
    offload_activations(stays, to=tmp_path, min_bytes=1 << 30)
    offload_activations(moves, to=tmp_path, min_bytes=1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        stays(x).backward()
    moves(x).backward()
    assert torch.equal(x.grad, 8 * x.detach())  # type: ignore[arg-type]


# Selection of tensors.


def test_weights_of_units_are_not_moved(tmp_path: Path) -> None:
    sharded = Sharded(gpt(), wrap_and_offload(tmp_path), prefetch_bytes=0)
    loss = gpt_loss(sharded.model, 0)
    blocks = [unit for unit in sharded.units if unit.name.startswith("Block")]
    assert all(unit.state is UnitState.FREED for unit in blocks)
    moved = sum(block.forward._wrapper.__self__.moved_bytes for block in sharded.model.blocks)
    sizes = {unit.layout.size_bytes for unit in blocks}
    assert moved > 0
    loss.backward()
    assert sharded.units.live_bytes == 0
    assert len(sizes) == 1


def test_parameters_and_buffers_are_not_moved(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(40, 40, bias=False), nn.BatchNorm1d(40))
    offload = offload_activations(module, to=tmp_path, min_bytes=40 * 40 * 4)
    module(inputs(0, 2, 40)).sum().backward()
    assert offload.moved_bytes == 0, "only the weight is large enough to move"


def test_moved_activation_is_freed_and_its_file_is_unlinked(tmp_path: Path) -> None:
    import weakref

    class Wide(nn.Module):
        alive: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.repeat(8) * 3
            self.alive = weakref.ref(wide)
            return wide.square().sum()

    module = Wide()
    offload = offload_activations(module, to=tmp_path, min_bytes=1)
    loss = module(inputs(0, 1000, requires_grad=True))
    assert module.alive() is None and offload.moved_bytes == 8 * 4000
    assert list(tmp_path.iterdir()) == [], "files are unlinked"
    loss.backward()


def test_nothing_is_moved_when_disabled_or_without_gradients(tmp_path: Path) -> None:
    module = nn.Linear(8, 8)
    offload = offload_activations(module, to=tmp_path, min_bytes=1)
    with torch.no_grad():
        module(inputs(0, 2, 8))
    offload.enabled = False
    module(inputs(0, 2, 8)).sum().backward()
    assert offload.moved_bytes == 0
    offload.enabled = True
    module(inputs(0, 2, 8)).sum().backward()
    assert offload.moved_bytes > 0


def test_offloading_to_cpu_moves_nothing_on_the_cpu() -> None:
    def wrap(model: nn.Module, session: Any) -> None:
        wrap_blocks(model, session)
        offload_blocks(model, "cpu")

    pair = Pair(gpt(), wrap).train(gpt_loss, steps=2)
    assert all(block.forward._wrapper.__self__.moved_bytes == 0 for block in pair.sharded.model.blocks)


def test_copy_of_a_module_has_its_own_offload(tmp_path: Path) -> None:
    module = nn.Linear(8, 8)
    offload = offload_activations(module, to=tmp_path, min_bytes=1)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(twin(inputs(0, 2, 8)), twin.bias.expand(2, 8))
    assert offload.moved_bytes == 0


def test_compiled_forward_can_be_offloaded(tmp_path: Path) -> None:
    pair_inputs = inputs(0, 3, 8)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    moved = copy.deepcopy(plain)
    moved.forward = torch.compile(moved.forward, backend="eager")  # type: ignore[method-assign]
    offload = offload_activations(moved, to=tmp_path, min_bytes=1)
    for model in (plain, moved):
        model(pair_inputs).sum().backward()
    assert offload.moved_bytes > 0
    assert all(
        torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
        for ours, theirs in zip(plain.parameters(), moved.parameters(), strict=True)
    )


# Failures and targets.


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """Limits the size of files, so that writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_raises_and_the_step_can_be_repeated(tmp_path: Path) -> None:
    pair = Pair(gpt(), wrap_and_offload(tmp_path))
    pair.train(gpt_loss, steps=1)
    torch.manual_seed(5)
    with (
        small_files(100),
        pytest.raises(CapacityError, match=r"activation of \d+ bytes could not be .*raise min_bytes"),
    ):
        gpt_loss(pair.sharded.model, 5)
    assert list(tmp_path.iterdir()) == []
    pair.sharded.units.zero_grad()
    pair.train(gpt_loss, steps=3)


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"to='.*missing'\): expected 'cpu', 'disk' or a writable directory"):
        offload_activations(module, to=tmp_path / "missing")
    with pytest.raises(UsageError, match="min_bytes=0"):
        offload_activations(module, to=tmp_path, min_bytes=0)
    assert "forward" not in vars(module)


def test_offloading_to_disk_uses_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o700)
    module = nn.Linear(8, 8)
    offload = offload_activations(module, to="disk", min_bytes=1)
    module(inputs(0, 2, 8)).sum().backward()
    assert offload.moved_bytes > 0
    assert os.listdir(tmp_path) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_offloading_from_a_gpu_gives_the_same_bits(to: str) -> None:
    results = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).cuda()
        offloads = [offload_activations(part, to=to, min_bytes=1) for part in model] if moves else []
        for number in range(3):
            model(inputs(number, 32, 64).cuda()).square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
        assert all(offload.moved_bytes > 0 for offload in offloads)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_nested_checkpoint_and_fully_shard_give_the_same_bits(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(9, 30), nn.Tanh(), nn.Dropout(0.2), nn.Linear(30, 9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.inner, x * 2, use_reentrant=False)
            return result

    def wrap(model: Any, session: Any) -> None:
        for part in model:
            fully_shard(part.inner[0], session)
            fully_shard(part, session)
            offload_activations(part, to=tmp_path, min_bytes=1)
        fully_shard(model, session)

    torch.manual_seed(0)
    model = nn.Sequential(Checkpointed(), Checkpointed())
    Pair(model, wrap).train(lambda model, number: model(inputs(number, 4, 9)).square().sum())
