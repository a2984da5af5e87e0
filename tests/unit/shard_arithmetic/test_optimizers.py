"""Every optimizer of the shard server: cuts, settings that change, and invalid settings."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from shardwell_server import optimizer_checks
from shardwell_server.shard.arithmetic.shard_optimizer import ShardOptimizer
from shardwell_server.shard.arithmetic.update_pieces import Piece, Progress
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.optimizers import OPTIMIZERS
from shardwell_wire.v1 import common_pb2

ADAM = {"lr": 0.01, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
CHANGES: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": 1.0},
    "adam": {**ADAM, "amsgrad": 1.0},
    "adamw": ADAM,
    "nadam": ADAM,
    "radam": {**ADAM, "beta2": 0.8, "decoupled_weight_decay": 1.0},
    "adamax": ADAM,
    "rmsprop": {"alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.9, "centered": 1.0, "maximize": 1.0},
    "adagrad": {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-6, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
    "adadelta": {"eps": 1e-4, "weight_decay": 0.1},
    "lion": {"lr": 0.01, "weight_decay": 0.1},
    "lamb": ADAM,
    "adafactor": {"eps1": 1e-7, "weight_decay": 0.1},
    "muon": {"lr": 0.01},
}
"""Settings that differ from the defaults of the table, by algorithm."""
SETTINGS: dict[str, dict[str, float]] = {
    name: {each.name: float(each.default or 0.0) for each in spec.hyperparameters} | CHANGES.get(name, {})
    for name, spec in OPTIMIZERS.items()
}
BY_RANGE = [name for name, known in OPTIMIZERS.items() if not known.needs_whole_tensors]


def step_of(algorithm: str, **changes: float) -> common_pb2.OptimizerStep:
    group = common_pb2.ParameterGroup(hyperparameters=SETTINGS[algorithm] | changes)
    return common_pb2.OptimizerStep(algorithm=algorithm, groups=[group])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_algorithm_is_covered() -> None:
    assert CHANGES.keys() <= OPTIMIZERS.keys()
    for algorithm in OPTIMIZERS:
        optimizer_checks.validate(step_of(algorithm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", BY_RANGE)
def test_cuts_on_blocks_change_no_bit(algorithm: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(9_001, generator=generator).to(dtype) for _ in range(6))
    # A parameter can start at any multiple of 64 bytes, so the first shard can have a part of that size.
    aligned, block = 64 // dtype.itemsize, 4096 // dtype.itemsize
    results = []
    for cuts in ([], [aligned], [3 * aligned, 3 * aligned + block], [block - 5 * aligned]):
        sizes = [stop - first for first, stop in zip([0, *cuts], [*cuts, 9_001], strict=True)]
        values = [piece.clone() for piece in start.split(sizes)]
        optimizer = ShardOptimizer(values)
        for gradient in gradients:
            pieces = [piece.clone() for piece in gradient.split(sizes)]
            optimizer.step(pieces, step_of(algorithm), [0] * len(sizes), 0.5)
        results.append(bits(torch.cat(values)))
    assert bits(start) not in results
    assert bool(torch.isfinite(torch.cat(values)).all())
    assert results[1:] == results[:1] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_parts_that_one_piece_updates_together_get_the_same_bits(algorithm: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(48, 64), (7, 3), (5, 1), (400, 900), (3, 2), *[(2, 2)] * 70]
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    steps = [[torch.randn(shape, generator=generator).to(dtype).view(-1) for shape in shapes] for _ in range(3)]
    settings = step_of(algorithm)
    settings.clip_value = 0.5
    together, apart = [value.clone() for value in start], [value.clone() for value in start]
    optimizer, single = ShardOptimizer(together), [ShardOptimizer([value]) for value in apart]
    for number, gradients in enumerate(steps):
        # Some parts have their first update in the second step.
        present = [gradient if number or part % 3 else None for part, gradient in enumerate(gradients)]
        optimizer.step(present, settings, [0] * len(shapes), 0.5)
        for each, gradient in zip(single, present, strict=True):
            each.step([gradient], settings, [0], 0.5)
    assert list(map(bits, together)) == list(map(bits, apart))
    for part, each in enumerate(single):
        assert {name: bits(tensor) for name, tensor in optimizer.state(part).items()} == {
            name: bits(tensor) for name, tensor in each.state(0).items()
        }


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_parameter_without_elements_changes_nothing(algorithm: str, shape: tuple[int, int]) -> None:
    shapes, results = [(3, 2), shape, (2, 4)], []
    for left in (shapes, [shapes[0], shapes[2]]):
        values = [torch.full(each, 0.5) for each in left]
        optimizer = ShardOptimizer(values)
        for _ in range(2):
            optimizer.step([torch.ones(each.numel()) for each in values], step_of(algorithm), [0] * len(left), 0.5)
        results.append([bits(each) for each in values if each.numel()])
    assert results[0] == results[1]
    assert results[0][0] != bits(torch.full((3, 2), 0.5))


@pytest.mark.parametrize("algorithm", ["sgd", "adam", "adamw"])
def test_small_parts_are_updated_by_one_call(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    run = Progress.run

    def count(self: Progress, piece: Piece) -> None:
        assert piece.changed is not None
        pieces.append(sum(size_bytes for _, size_bytes in piece.changed.ranges))
        run(self, piece)

    monkeypatch.setattr(Progress, "run", count)
    optimizer = ShardOptimizer([torch.ones(4, 3) for _ in range(10)])
    optimizer.step([torch.ones(12)] * 10, step_of(algorithm), [0] * 10, 1.0)
    changed = {"sgd": [960], "adam": [1920, 40], "adamw": [1440, 40]}  # bytes of values and state, then step counts
    assert pieces == changed[algorithm]


def test_no_algorithm_imports_torchs_compiler() -> None:
    steps = [step_of(algorithm).SerializeToString() for algorithm in OPTIMIZERS]
    program = f"""if True:
        import sys, torch
        from shardwell_server.shard.arithmetic.shard_optimizer import ShardOptimizer
        from shardwell_wire.v1 import common_pb2
        for step in {steps}:
            optimizer = common_pb2.OptimizerStep.FromString(step)
            ShardOptimizer([torch.ones(2, 2)]).step([torch.ones(4)], optimizer, [0], 0.5)
        print("torch._dynamo" in sys.modules)
    """
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


@pytest.mark.parametrize(
    ("algorithm", "late", "state"),
    [
        ("adam", {"amsgrad": 1.0}, "max_exp_avg_sq"),
        ("rmsprop", {"centered": 1.0}, "grad_avg"),
        ("rmsprop", {"momentum": 0.9}, "momentum_buffer"),
    ],
)
def test_settings_that_need_more_state_can_be_enabled_later(algorithm: str, late: dict[str, float], state: str) -> None:
    optimizer, without = ShardOptimizer([torch.ones(4)]), dict.fromkeys(("amsgrad", "centered", "momentum"), 0.0)
    early = {name: value for name, value in without.items() if name in SETTINGS[algorithm]}
    optimizer.step([torch.ones(4)], step_of(algorithm, **early), [0], 1.0)
    assert state not in optimizer.state_names
    before = optimizer.size_bytes
    optimizer.step([torch.ones(4)], step_of(algorithm, **{**early, **late}), [0], 1.0)
    assert state in optimizer.state_names
    assert optimizer.size_bytes == before + 16


def test_groups_can_use_different_algorithms() -> None:
    values = [torch.ones(3, 2), torch.ones(5)]
    groups = [common_pb2.ParameterGroup(algorithm=name, hyperparameters=SETTINGS[name]) for name in ("muon", "rmsprop")]
    both = common_pb2.OptimizerStep(groups=groups)
    optimizer_checks.validate(both)
    optimizer = ShardOptimizer(values)
    optimizer.step([torch.ones(6), torch.ones(5)], both, [0, 1], 1.0)
    assert optimizer.state_names == ["grad_avg", "momentum_buffer", "square_avg"]
    assert sorted(optimizer.state(0)) == ["momentum_buffer"] and optimizer.state(0)["momentum_buffer"].shape == (3, 2)
    assert not any(bool((value == 1.0).any()) for value in values)


@pytest.mark.parametrize("clip_value", [1e300, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clip_value_beyond_the_dtypes_range_clips_nothing(dtype: torch.dtype, clip_value: float) -> None:
    outcomes = []
    for clip in (clip_value, None):
        values, step = torch.ones(4, dtype=dtype), step_of("sgd")
        if clip is not None:
            step.clip_value = clip
        optimizer_checks.validate(step)
        ShardOptimizer([values]).step([torch.full((4,), 3.0, dtype=dtype)], step, [0], 1.0)
        outcomes.append(bits(values))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("adadelta", {"rho": 1.5}, "0 <= rho <= 1"),
        ("nadam", {"decoupled_weight_decay": 2.0}, "expected 0 or 1"),
        ("adagrad", {"lr_decay": -0.1}, "at least 0"),
        ("adafactor", {"d": 0.5}, "at least 1"),
        ("adafactor", {"beta2_decay": 0.5}, "at most 0"),
        ("muon", {"ns_steps": 2.5}, "whole number"),
        ("muon", {"ns_steps": 100.0}, "at most 99"),
        ("lion", {"eps": 1e-8}, "eps is missing or unknown"),
        ("lamb", {"eps": math.inf}, "not finite"),
        ("adamw", {"eps": math.nan}, "not finite"),
        ("lion", {"lr": 1e39}, "not finite in fp32"),
    ],
)
def test_error_names_an_invalid_setting(algorithm: str, changes: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        optimizer_checks.validate(step_of(algorithm, **changes))


@pytest.mark.parametrize(
    ("algorithm", "groups", "cuts", "message"),
    [
        ("adamw", [0, 0, 0], [0, 4096], None),
        ("lamb", [0, 0, 0], [0, 12_288], None),
        ("lamb", [-1, 0, 0], [0, 4096], None),
        ("lamb", [0, 0, 0], [0, 4096], r"'big' of unit 'u' is cut over several servers.*placement=\"tensor\""),
        ("muon", [0, 0, -1], [0], None),
        ("muon", [0, -1, 0], [0], r"muon takes parameters of 2 dimensions; parameter 'flat'.*\(7,\).*Combined"),
    ],
)
def test_whole_tensor_algorithms_reject_cut_parameters(
    algorithm: str, groups: list[int], cuts: list[int], message: Any
) -> None:
    shapes = {"big": (32, 64), "after": (16, 64), "flat": (7,)}
    layout = UnitLayout("u", tuple(Parameter(name, shape, "float32") for name, shape in shapes.items()))
    if message is None:
        optimizer_checks.check_fit(step_of(algorithm), groups, layout, cuts)
    else:
        with pytest.raises(InvalidRequestError, match=message):
            optimizer_checks.check_fit(step_of(algorithm), groups, layout, cuts)
