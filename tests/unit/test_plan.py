"""``shardwell plan``: its arithmetic, the models it takes, and what it prints."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwell.command.cli import main
from shardwell.planning.plan import PlanOptions, make_plan
from shardwell.planning.plan_command import parse_bandwidth
from shardwell.planning.plan_model import count_saved_bytes, load, plan_units
from shardwell.wrapping.default_policy import BlockPolicy
from shardwell.wrapping.wrap import ModuleTypePolicy, NoWrapPolicy, SizePolicy
from shardwell_wire.errors import UsageError, WorldError
from shardwell_wire.topology import World
from tests.support.module_parity import Block, Pair, Sharded, gpt, gpt_loss
from tests.support.real_models import VOCABULARY, llama

HERE = "tests.unit.test_plan"


def make_gpt() -> nn.Module:
    return gpt()


def make_mlp(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), torch.zeros(batch, 8)


def make_with_values(batch: int) -> tuple[nn.Module, torch.Tensor]:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())

    return Model(8, 8), torch.zeros(batch, 8)


def make_nothing(size: int) -> None:
    pass


def make_number() -> int:
    return 3


@pytest.mark.parametrize("policy", [None, SizePolicy(100), ModuleTypePolicy({Block, nn.LayerNorm}), NoWrapPolicy()])
def test_units_are_those_of_auto_wrap(policy: object) -> None:
    from shardwell.wrapping.wrap import auto_wrap

    sharded = Sharded(gpt(), lambda model, session: auto_wrap(model, session, policy))
    assert [unit.layout for unit in plan_units(gpt(), policy)] == [unit.layout for unit in sharded.units]


@pytest.mark.parametrize("prefetch_bytes", [0, 20000])
@pytest.mark.parametrize("policy", [None, ModuleTypePolicy({Block, nn.LayerNorm})])
def test_weights_and_bytes_are_those_of_a_step(policy: object, prefetch_bytes: int) -> None:
    """What is fetched ahead is bounded by the plan, all else is exact."""
    from shardwell.wrapping.wrap import auto_wrap

    pair = Pair(gpt(), lambda model, session: auto_wrap(model, session, policy), prefetch_bytes=prefetch_bytes)
    for number in range(3):
        pair.backward(gpt_loss, number)
        pair.step()
    trainer = make_plan(plan_units(gpt(), policy), PlanOptions(prefetch_bytes=prefetch_bytes)).trainer
    sizes, store = pair.sharded.unit_bytes(), pair.sharded.store
    gathered = sum(sizes[name] * count for name, count in store.gathers.items())
    pushed = sum(sizes[name] * count for name, count in store.pushes.items())
    assert (3 * trainer.received_bytes, 3 * trainer.sent_bytes) == (gathered, pushed)
    most = trainer.weights_bytes + trainer.prefetch_bytes
    assert trainer.weights_bytes <= pair.sharded.units.peak_bytes <= most
    assert bool(trainer.prefetch_bytes) == bool(prefetch_bytes)


def test_a_server() -> None:
    units = plan_units(gpt())
    whole = sum(unit.layout.size_bytes for unit in units)
    one = make_plan(units, PlanOptions(world=World(dp=3)))
    server = one.server
    assert (server.weights_bytes, server.optimizer_bytes) == (whole, 2 * whole)
    assert (server.contributions_bytes, server.mean_bytes) == (3 * whole, whole)
    assert server.reserved_bytes == 7 * whole + max(unit.layout.size_bytes for unit in units)
    assert server.sent_bytes == 3 * one.trainer.received_bytes
    assert make_plan(units, PlanOptions()).server.mean_bytes == 0
    two = make_plan(units, PlanOptions(num_servers=2, min_shard_bytes=4096, optimizer="sgd")).server
    assert whole / 2 <= two.weights_bytes < 0.7 * whole and two.optimizer_bytes == 0


def test_time_is_the_busiest_links() -> None:
    units = plan_units(gpt())
    plan = make_plan(units, PlanOptions(world=World(dp=4), bandwidth=1e6))
    assert plan.transfer_seconds == plan.link_seconds["server out"] == plan.server.sent_bytes / 1e6
    half = make_plan(units, PlanOptions(gather_dtype="bfloat16", push_dtype="int8")).trainer
    assert 0.48 < half.received_bytes / plan.trainer.received_bytes < 0.51
    assert 0.25 < half.sent_bytes / plan.trainer.sent_bytes < 0.30
    shared = make_plan(units, PlanOptions(same_host=True)).trainer
    assert shared.weights_bytes == shared.received_bytes == shared.push_bytes == 0 < shared.sent_bytes


def test_tensor_and_pipeline_parallelism() -> None:
    units = plan_units(gpt())
    whole = make_plan(units, PlanOptions())
    cut = make_plan(units, PlanOptions(world=World(tp=2)))
    assert 0.5 < cut.trainer.weights_bytes / whole.trainer.weights_bytes < 0.6
    assert whole.server.weights_bytes < cut.server.weights_bytes < 1.15 * whole.server.weights_bytes
    staged = make_plan(units, PlanOptions(world=World(pp=3)))
    blocks = [unit.layout.size_bytes for unit in units if unit.block is not None]
    assert staged.trainer.sent_bytes == whole.trainer.sent_bytes - sum(blocks[1:])
    assert staged.server.weights_bytes == whole.server.weights_bytes
    with pytest.raises(WorldError, match="3 layers cannot be split evenly over pp=2"):
        make_plan(units, PlanOptions(world=World(pp=2)))


def test_saved_bytes_of_a_known_graph() -> None:
    """The two inputs of the linear layers: ReLU keeps its result, which is the second."""
    shapes = load(f"{HERE}:make_mlp", batch=16, length=1)
    assert count_saved_bytes(shapes) == 16 * (8 + 32) * 4
    assert count_saved_bytes(load(f"{HERE}:make_with_values", batch=2, length=1)) is None
    assert count_saved_bytes(load(f"{HERE}:make_gpt", batch=1, length=1)) is None


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = llama()
    model.config.save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_hugging_face_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = sum(parameter.numel() for parameter in llama().parameters())
    assert main(["plan", str(config), "--dp", "2", "--servers", "2", "--batch", "3", "--length", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_parameters"], found["num_units"], found["num_servers"]) == (expected, 4, 2)
    assert found["trainer"]["activation_bytes"] > 3 * 9 * VOCABULARY * 4
    assert found["transfer_seconds"] == max(found["link_seconds"].values())
    assert main(["plan", str(config), "--dtype", "bfloat16", "--length", "9"]) == 0
    assert "not known" not in (text := capsys.readouterr().out) and f"{expected:,} parameters" in text
    halves = plan_units(load(str(config), batch=1, length=9, dtype=torch.float16).module)
    assert {parameter.dtype for unit in halves for parameter in unit.layout.parameters} == {"float16"}


def test_tables_name_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:make_gpt", "--bandwidth", "100mbit"]) == 0
    text = capsys.readouterr().out
    assert "not known: give --activations" in text and "0.1 Gbit/s" in text and "busiest" in text


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("no_such_module:make", "No module named"),
        (f"{HERE}:absent", "has no attribute"),
        (f"{HERE}:make_nothing", "missing a required argument: 'size'"),
        (f"{HERE}:make_number", "returned int, expected a module"),
        ("no/such/config.json", "no such file"),
    ],
)
def test_what_is_no_model(target: str, match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target]) == 1
    assert match in capsys.readouterr().err


def test_impossible_options() -> None:
    for options in ({"optimizer": "magic"}, {"num_servers": 0}, {"gather_dtype": "float8"}):
        with pytest.raises(UsageError, match="expected"):
            PlanOptions(**options)
    with pytest.raises(UsageError, match="no parameters"):
        make_plan([], PlanOptions())
    assert main(["plan", f"{HERE}:make_gpt", "--batch", "0"]) == 1


def test_rates() -> None:
    assert (parse_bandwidth("1gbit"), parse_bandwidth("300MB"), parse_bandwidth("2.5 Gbit/s")) == (125e6, 3e8, 312.5e6)
    for text in ("fast", "0gbit", "1gbyte", ""):
        with pytest.raises(ArgumentTypeError, match="expected a rate"):
            parse_bandwidth(text)


def test_blocks_of_a_model() -> None:
    model = gpt()
    assert BlockPolicy(model).blocks() == list(model.blocks)
