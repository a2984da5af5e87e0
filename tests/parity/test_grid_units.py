"""Units of tensor-parallel ranks: names, who pushes, and initial values that do not depend on the grid."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwell import SizePolicy, auto_wrap, init
from shardwell.module.fully_shard import fully_shard
from shardwell.module.new_units import GridPlace
from shardwell.module.units import Units
from shardwell.weights.state_dict import full_state_dict
from shardwell_wire.errors import UsageError
from tests.support import gloo
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import inputs
from tests.support.processes import run_ranks

UNEVEN = 13


class Feed(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": Feed(hidden), "1": Feed(hidden)})
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = x + block(x)
        return self.out(x)


def built(device: str, mesh: Any = None, hidden: int = 12) -> Model:
    """Returns the model on a device, split over a mesh of tensor-parallel ranks if there is one."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(hidden)
    for block in model.blocks.values() if mesh is not None else ():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def session(rank: int = 0, tp: int = 1) -> Any:
    units = Units(InMemoryStore(), place=GridPlace(tp=tp, tp_rank=rank), init_seed=3)
    return SimpleNamespace(units=units)


def wrapped(model: Model, held: Any, **options: Any) -> Model:
    for name, block in model.blocks.named_children():
        fully_shard(block, held, name=f"blocks.{name}", **options)
    fully_shard(model, held, name="model", **options)
    return model


def join(rank: int, path: str) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def split_units(rank: int, path: str) -> None:
    """Both ranks declare the whole parameters under one name, and push them once."""
    mesh, held = join(rank, path), session(rank, tp=2)
    model = wrapped(built("cpu", mesh), held)
    store: InMemoryStore = held.units._store
    names = {unit.name: [(at.name, at.shape, at.offsets) for at in unit.layout.parameters] for unit in held.units}
    start, size = 6 * rank, 6
    blocks = [f"blocks.{number}" for number in range(2)]
    assert list(names) == [*(name for block in blocks for name in (block, f"{block}@tp{rank}")), "model"]
    assert names["blocks.0"] == [
        ("blocks.0.norm.weight", (8,), ()),
        ("blocks.0.norm.bias", (8,), ()),
        ("blocks.0.down.bias", (8,), ()),
    ]
    assert names[f"blocks.0@tp{rank}"] == [
        ("blocks.0.up.weight", (size, 8), (start, 0)),
        ("blocks.0.up.bias", (size,), (start,)),
        ("blocks.0.down.weight", (8, size), (0, start)),
    ]
    plain = built("cpu")
    loss, expected = (each(inputs(0, 2, 4, 8)).square().mean() for each in (model, plain))
    assert torch.allclose(loss, expected)
    loss.backward()
    expected.backward()
    held.units.finish_item()
    own = {"blocks.0", "blocks.1", "model"} if rank == 0 else set()
    assert set(store.pushes) == {*own, *(f"{block}@tp{rank}" for block in blocks)}
    assert held.units.live_bytes == 0
    found = {
        unit.layout.parameters[index].name: gradient
        for unit in store.units
        for part in unit.parts
        for index, gradient in part
    }
    for name, gradient in found.items():
        whole = plain.get_parameter(name.removeprefix("model.")).grad
        box = next(at.box for unit in held.units for at in unit.layout.parameters if at.name == name)
        assert torch.allclose(gradient, whole[box.slices], atol=1e-6), name
    gloo.leave()


def test_whole_parameters_are_pushed_once_and_parts_by_their_ranks(tmp_path: Path) -> None:
    run_ranks(split_units, str(tmp_path / "store"))


def function(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.1)


SOURCES: dict[str, Any] = {"reset_parameters": None, "function": function, "drawn": init.drawn()}


def initial_values(rank: int, path: str, kind: str, expected_path: str) -> None:
    mesh = join(rank, path)
    expected = torch.load(expected_path)
    model = wrapped(built("meta", mesh, UNEVEN), session(rank, tp=2), source=SOURCES[kind])
    got = full_state_dict(model)
    assert list(got) == list(expected)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert all(type(each).__name__.endswith("DTensor") for each in model.blocks["0"].up.parameters())
    gloo.leave()


@pytest.mark.parametrize("kind", SOURCES)
def test_initial_values_do_not_depend_on_the_grid(tmp_path: Path, kind: str) -> None:
    expected = full_state_dict(wrapped(built("meta", hidden=UNEVEN), session(), source=SOURCES[kind]))
    assert expected["blocks.0.up.weight"].unique().numel() == UNEVEN * 8
    torch.save(expected, tmp_path / "expected")
    run_ranks(initial_values, str(tmp_path / "store"), kind, str(tmp_path / "expected"))


def staged(stage: int) -> Any:
    return SimpleNamespace(units=Units(InMemoryStore(), place=GridPlace(pp=2, pp_rank=stage), init_seed=3))


def test_default_names_are_refused_with_several_stages() -> None:
    with pytest.raises(UsageError, match=r"the unit of Linear has no name, but this run has 2 pipeline stages"):
        fully_shard(nn.Linear(3, 3), staged(0))


def test_units_of_stages_have_the_names_of_the_model() -> None:
    names = {}
    for stage in range(2):
        model, held = built("meta"), staged(stage)
        del model.blocks[str(1 - stage)]  # torch's habit: what a stage lacks is removed
        auto_wrap(model, held, SizePolicy(100))
        names[stage] = {unit.name: unit.layout for unit in held.units}
    assert [layout.pp_rank for layout in names[1].values()] == [1] * len(names[1])
    assert not names[0].keys() & names[1].keys()


def unshard_both(rank: int, path: str) -> None:
    mesh, held = join(rank, path), session(rank, tp=2)
    model: Any = wrapped(built("cpu", mesh), held)
    model.blocks["0"].unshard()
    assert held.units.live_bytes == sum(unit.size_bytes for unit in held.units if unit.name.startswith("blocks.0"))
    model.blocks["0"].reshard()
    assert held.units.live_bytes == 0
    gloo.leave()


def test_unshard_and_reshard_apply_to_both_units(tmp_path: Path) -> None:
    run_ranks(unshard_both, str(tmp_path / "store"))
