"""``shardwell plan``: arithmetic, models, options and output."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell import BackwardPrefetch, ShardingStrategy
from shardwell.command.cli import build_parser, main
from shardwell.module.unit import Unit
from shardwell.planning.dry_run import wire_bytes
from shardwell.planning.plan import Plan, TrainerPlan, assumptions, plan_run
from shardwell.planning.plan_command import options_of, parse_bandwidth
from shardwell.planning.plan_model import OPTIMIZER_CHOICES, PlanOptions
from shardwell.wrapping.policies import BlockPolicy, ModuleTypePolicy, NoWrapPolicy, SizePolicy
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.topology import World
from tests.support.module_parity import Block, Sharded, gpt, gpt_loss
from tests.support.real_models import VOCABULARY, llama

HERE = "tests.unit.parallel.test_plan"


def make_gpt() -> nn.Module:
    return gpt()


def planned(options: PlanOptions, make: Any = make_gpt) -> Plan:
    """Returns the plan of a model that is not divided."""
    return plan_run(make, options)


def units_of(make: Any = make_gpt, policy: Any = None, **options: Any) -> list[Unit]:
    """Returns the units of a plan."""
    return list(plan_run(make, PlanOptions(), policy=policy, **options).division.stages[0].units)


class Parameters(nn.Module):
    """A module with the given parameters, and without an example call."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self) -> None:
        pass


def make_nothing(size: int) -> None:
    pass


def make_number() -> int:
    return 3


@pytest.mark.parametrize("policy", [None, SizePolicy(100), ModuleTypePolicy({Block, nn.LayerNorm}), NoWrapPolicy()])
def test_plan_has_the_units_of_auto_wrap(policy: object) -> None:
    from shardwell.wrapping.auto_wrap import auto_wrap

    sharded = Sharded(gpt(), lambda model, session: auto_wrap(model, session, policy))
    assert [unit.layout for unit in units_of(policy=policy)] == [unit.layout for unit in sharded.units]


def test_model_in_use_stays_as_it_is() -> None:
    model, before = gpt(), gpt().state_dict()
    parameters, kind = list(model.parameters()), type(model)
    assert planned(PlanOptions(), lambda: model).model_bytes == planned(PlanOptions()).model_bytes
    assert type(model) is kind and all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    gpt_loss(model, 0).backward()
    assert all(type(parameter.grad) is torch.Tensor for parameter in parameters)


def test_server_memory_by_dp_and_number_of_servers() -> None:
    units = units_of()
    whole = sum(unit.layout.size_bytes for unit in units)
    one = planned(PlanOptions(world=World(dp=3)))
    server = one.server
    assert (server.weights_bytes, server.optimizer_bytes) == (whole, 2 * whole)
    assert (server.contributions_bytes, server.mean_bytes) == (3 * whole, whole)
    assert server.reserved_bytes == 7 * whole + max(unit.layout.size_bytes for unit in units)
    assert server.sent_bytes == 3 * one.trainer.received_bytes
    assert planned(PlanOptions()).server.mean_bytes == 0
    two = planned(PlanOptions(num_servers=2, min_shard_bytes=4096, optimizer="sgd")).server
    assert whole / 2 <= two.weights_bytes < 0.7 * whole and two.optimizer_bytes == 0
    uncut = planned(PlanOptions(num_servers=2, min_shard_bytes=whole)).server
    assert whole / 2 <= uncut.weights_bytes < 0.7 * whole, "small units spread over the servers"


def test_every_optimizer_can_be_planned() -> None:
    names = {name.lower() for name in shardwell.optim.__all__} - {"combined", "shardedoptimizer"}
    assert names <= set(OPTIMIZER_CHOICES)
    assert [planned(PlanOptions(optimizer=name)).options.optimizer for name in OPTIMIZER_CHOICES] == list(
        OPTIMIZER_CHOICES
    )


def test_state_that_a_hyperparameter_enables_is_planned() -> None:
    units = units_of()
    whole = sum(unit.size_bytes for unit in units)
    states = {"sgd": 0, "sgd-momentum": 1, "rmsprop": 1, "rmsprop-centered": 2, "adam": 2, "adam-amsgrad": 3}
    for name, count in states.items():
        assert planned(PlanOptions(optimizer=name)).server.optimizer_bytes == count * whole


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix() -> None:
    layout = UnitLayout("unit", (Parameter("matrix", (30, 20), "float32"), Parameter("vector", (20,), "float32")))
    plan = planned(PlanOptions(optimizer="adafactor"), lambda: Parameters(matrix=(30, 20), vector=(20,)))
    assert plan.server.optimizer_bytes == 4 * (30 + 20 + 20)
    assert plan.replica_bytes == 2 * layout.size_bytes + 4 * (30 + 20 + 20)


def test_busiest_link_determines_the_transfer_time() -> None:
    units = units_of()
    plan = planned(PlanOptions(world=World(dp=4), bandwidth=1e6))
    assert plan.transfer_seconds == plan.link_seconds["server out"] == plan.server.sent_bytes / 1e6
    half = planned(PlanOptions(gather_dtype="bfloat16", push_dtype="int8")).trainer
    assert 0.48 < half.received_bytes / plan.trainer.received_bytes < 0.51
    assert 0.25 < half.sent_bytes / plan.trainer.sent_bytes < 0.30
    low_rank = planned(PlanOptions(push_dtype="lowrank-1")).trainer
    assert low_rank.sent_bytes == sum(
        2 * (shape[0] + shape[1]) if len(shape) == 2 else 4 * shape[0]
        for unit in units
        for shape in (parameter.shape for parameter in unit.layout.parameters)
    )
    shared = planned(PlanOptions(same_host=True)).trainer
    assert shared.weights_bytes == shared.received_bytes == shared.push_bytes == 0 < shared.sent_bytes


def test_more_memory_for_weights_reduces_received_bytes() -> None:
    units = units_of()
    whole = sum(unit.size_bytes for unit in units)
    root = units[-1].size_bytes

    def trainer(**options: Any) -> TrainerPlan:
        return planned(PlanOptions(**{"keep_bytes": 0} | options)).trainer

    assert planned(PlanOptions()).trainer.received_bytes == whole, "the default keeps a small model"
    assert trainer().received_bytes == 2 * whole - root
    assert trainer(keep_bytes=whole).received_bytes == trainer(keep_bytes=whole).weights_bytes == whole
    block = units[0].size_bytes
    assert trainer(keep_bytes=block).received_bytes == 2 * whole - root - block
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        assert trainer(strategy=strategy).weights_bytes == trainer(strategy=strategy).received_bytes == whole
    assert trainer(reshard_after_forward=True).received_bytes == 2 * whole
    rounded = planned(PlanOptions(gather_dtype="bfloat16")).server
    assert 0.48 * whole < rounded.encoded_bytes < 0.51 * whole
    assert planned(PlanOptions()).server.encoded_bytes == 0


def test_bases_of_deltas_take_memory_and_are_received_once() -> None:
    units = units_of()
    sizes = [wire_bytes(unit.layout, "bfloat16") for unit in units]

    def planned_with(budget: int, **options: Any) -> TrainerPlan:
        options = {"gather_dtype": "bfloat16", "keep_bytes": 0, **options}
        return planned(PlanOptions(delta_cache_bytes=budget, **options)).trainer

    none, whole = planned_with(0), planned_with(sum(sizes))
    assert (none.bases_bytes, whole.bases_bytes) == (0, sum(sizes))
    assert (none.received_bytes, whole.received_bytes) == (2 * sum(sizes) - sizes[-1], sum(sizes))
    assert whole.total_bytes == none.total_bytes + sum(sizes)
    one = planned_with(sizes[0])
    assert (one.bases_bytes, one.received_bytes) == (sizes[0], none.received_bytes - sizes[0])
    for options in ({"gather_dtype": "int8"}, {"same_host": True}, {"host_cache_bytes": 1 << 40}):
        assert planned_with(sum(sizes), **options).bases_bytes == 0
    plan = planned(PlanOptions(delta_cache_bytes=sizes[0], gather_dtype="bfloat16"))
    assert any(each.startswith("deltas: ") for each in assumptions(plan))


def test_replicas_hold_gradients_of_one_bucket() -> None:
    layout = UnitLayout("m", tuple(Parameter(name, (5 << 20,), "float32") for name in "abcd"))
    make = partial(Parameters, **dict.fromkeys("abcd", (5 << 20,)))
    assert planned(PlanOptions(), make).trainer.gradients_bytes == layout.size_bytes == 80 << 20
    replica = PlanOptions(strategy=ShardingStrategy.NO_SHARD)
    assert planned(replica, make).trainer.gradients_bytes == 45 << 20


def test_host_cache_receives_weights_once_per_host() -> None:
    """Each host receives cached units once per step. Each trainer receives all other units twice per step."""
    units = units_of()
    whole, block = sum(unit.size_bytes for unit in units), units[0].size_bytes
    world = World(dp=6)
    three: dict[str, Any] = {"world": world, "ranks_per_host": 3, "keep_bytes": 0}
    cached = planned(PlanOptions(**three, host_cache_bytes=whole))
    assert cached.trainer.weights_bytes == cached.trainer.idle_bytes == 0
    assert cached.trainer.received_bytes == whole // 3
    assert cached.host_cache_bytes == whole + 4096 * len(units)
    assert cached.server.sent_bytes == 2 * whole
    assert cached.link_seconds["trainer in"] == pytest.approx(whole / cached.options.bandwidth, rel=1e-4)
    part = planned(PlanOptions(**three, host_cache_bytes=2 * block + 1))
    assert part.host_cache_bytes == 2 * (block + 4096)
    assert part.trainer.received_bytes == 2 * block // 3 + 2 * whole - units[-1].size_bytes - 4 * block
    hybrid = PlanOptions(**three, strategy=ShardingStrategy.HYBRID_SHARD)
    assert planned(hybrid).trainer == cached.trainer
    on_servers = planned(PlanOptions(same_host=True, host_cache_bytes=whole))
    assert on_servers.host_cache_bytes == 0 == on_servers.transfer_seconds
    rounded = planned(PlanOptions(same_host=True, gather_dtype="bfloat16")).trainer
    assert rounded.weights_bytes > 0, "rounded weights cannot be read in the servers' memory"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = llama()
    model.config.save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_hugging_face_config_is_planned(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = sum(parameter.numel() for parameter in llama().parameters())
    assert main(["plan", str(config), "--dp", "2", "--servers", "2", "--batch", "3", "--length", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_parameters"], found["num_units"], found["num_servers"]) == (expected, 4, 2)
    assert found["trainers"][0]["activation_bytes"] > 3 * 9 * VOCABULARY * 4
    assert found["transfer_seconds"] == max(found["link_seconds"].values())
    assert main(["plan", str(config), "--dtype", "bfloat16", "--length", "9"]) == 0
    assert "unknown" not in (text := capsys.readouterr().out) and f"{expected:,} parameters" in text
    halves = units_of(str(config), length=9, dtype=torch.float16)
    assert {parameter.dtype for unit in halves for parameter in unit.layout.parameters} == {"float16"}


def test_tables_show_unknown_activations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:make_gpt", "--bandwidth", "100mbit"]) == 0
    text = capsys.readouterr().out
    assert "unknown: pass --activations" in text and "0.1 Gbit/s" in text and "busiest" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--memory", "basic"], {"strategy": ShardingStrategy.SHARD_GRAD_OP}),
        (["--memory", "standard"], {"strategy": ShardingStrategy.FULL_SHARD, "checkpoint_activations": True}),
        (
            ["--memory", "extreme", "--gather-dtype", "float32", "--prefetch-bytes", "7"],
            {
                "strategy": ShardingStrategy.FULL_SHARD,
                "reshard_after_forward": True,
                "checkpoint_activations": True,
                "offload_to": "disk",
                "push_dtype": "bfloat16",
                "prefetch_bytes": 7,
                "keep_bytes": 0,
                "backward_prefetch": BackwardPrefetch.NONE,
            },
        ),
        (
            ["--memory", "aggressive", "--strategy", "no-shard", "--no-checkpoint-activations"],
            {
                "strategy": ShardingStrategy.NO_SHARD,
                "offload_to": "cpu",
                "keep_bytes": 0,
                "gather_dtype": "bfloat16",
                "push_dtype": "bfloat16",
            },
        ),
    ],
)
def test_arguments_override_the_memory_preset(arguments: list[str], expected: dict[str, Any]) -> None:
    assert options_of(build_parser().parse_args(["plan", "m", *arguments])) == PlanOptions(**expected)


def test_assumptions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{HERE}:make_gpt"
    assert main(["plan", target, "--dp", "4", "--checkpoint-activations"]) == 0
    assert "checkpoints: around the outermost units" in capsys.readouterr().out
    cache = ["--dp", "4", "--ranks-per-host", "2", "--host-cache-bytes", "1000000"]
    assert main(["plan", target, "--bandwidth", "1gbit", *cache]) == 0
    text = capsys.readouterr().out
    assert "2 data-parallel ranks share a host" in text and "the 2 trainers of a host receive weights" in text
    assert "tp:" not in text


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("no_such_module:make", "No module named"),
        (f"{HERE}:absent", "has no function 'absent' that makes a model"),
        (f"{HERE}:HERE", "has no function 'HERE' that makes a model"),
        ("models/mine.py:make", "expected the module's name, models.mine:make"),
        (f"{HERE}:make_nothing", "missing a required argument: 'size'"),
        (f"{HERE}:make_number", "returned int, expected a module"),
        ("no/such/config.json", "no such file"),
    ],
)
def test_invalid_model_target_is_refused(target: str, match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target]) == 1
    assert match in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            "import nowhere",
            "cannot import broken_model: ModuleNotFoundError: No module named 'nowhere' ({path}, line 1)",
        ),
        ("\nmake = ", "cannot import broken_model: SyntaxError: invalid syntax"),
        ("def make():\n    raise RuntimeError('no')", "make failed: RuntimeError: no ({path}, line 2)"),
        ("import torch\ndef make():\n    return torch.nn.Linear(-1, 2)", "({path}, line 3)"),
    ],
)
def test_error_in_user_code_names_its_line(
    source: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken_model.py"
    path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_model", raising=False)
    assert main(["plan", "broken_model:make"]) == 1
    assert match.format(path=path) in capsys.readouterr().err


def test_invalid_options_are_refused() -> None:
    for options in ({"optimizer": "magic"}, {"num_servers": 0}, {"gather_dtype": "float4"}, {"ranks_per_host": 2}):
        with pytest.raises(UsageError, match="expected"):
            PlanOptions(**options)
    with pytest.raises(UsageError, match=r"contradicts ShardingStrategy.NO_SHARD"):
        PlanOptions(strategy=ShardingStrategy.NO_SHARD, reshard_after_forward=True)
    with pytest.raises(UsageError, match="no parameters"):
        planned(PlanOptions(), nn.Identity)
    assert main(["plan", f"{HERE}:make_gpt", "--batch", "0"]) == 1


def test_bandwidth_is_parsed() -> None:
    assert (parse_bandwidth("1gbit"), parse_bandwidth("300MB"), parse_bandwidth("2.5 Gbit/s")) == (125e6, 3e8, 312.5e6)
    for text in ("fast", "0gbit", "1gbyte", ""):
        with pytest.raises(ArgumentTypeError, match="expected a rate"):
            parse_bandwidth(text)


def test_block_policy_finds_the_blocks() -> None:
    model = gpt()
    assert BlockPolicy(model).blocks() == list(model.blocks)
