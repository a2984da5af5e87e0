"""Frozen parameters of any dtype are stored, gathered, saved and read as bytes."""

from __future__ import annotations

import copy
import math
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shardwell
from shardwell import FreedParameterError, UsageError
from shardwell.wrapping.auto_wrap import auto_wrap, unwrap
from shardwell_wire.errors import NonFiniteError
from shardwell_wire.model.layout import ITEM_SIZES
from tests.support.in_memory_store import fused_adamw
from tests.support.module_parity import Pair, Sharded, wrap_children, wrap_whole

DTYPES = [getattr(torch, name) for name in ITEM_SIZES if name != "complex128"]  # which safetensors files do not support


class Scaled(torch.Tensor):
    """A tensor of codes and a scale, as those of torchao."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        return func(*(each.codes * each.scale if isinstance(each, Scaled) else each for each in args), **(kwargs or {}))


class Nested(Scaled):
    """Codes that are a tensor subclass themselves, as in earlier versions of torchao."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.codes = codes if isinstance(codes, Scaled) else Scaled(codes, torch.ones(7, 1))


def _scaled(kind: type[Scaled] = Scaled) -> nn.Parameter:
    torch.manual_seed(1)
    return nn.Parameter(kind(torch.arange(49, dtype=torch.int8).view(7, 7), torch.rand(7, 1)), requires_grad=False)


def _flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a state dict, with the parts of a ``Scaled`` apart."""
    flat = {}
    for name, value in state.items():
        parts = {"codes": value.codes, "scale": value.scale} if isinstance(value, Scaled) else {}
        flat |= _flat({f"{name}.{part}": each for part, each in parts.items()}) if parts else {name: value}
    return flat


class Quantized(nn.Module):
    """A trained layer beside frozen codes of every dtype, a mask, and a tensor of codes and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.codes = nn.ParameterList()
        for dtype in DTYPES:
            values = torch.arange(35).view(5, 7) % (2 if dtype is torch.bool else 30)
            self.codes.append(nn.Parameter(values.to(dtype), requires_grad=False))
        self.mask = nn.Parameter(torch.full((7, 7), -math.inf).triu(1), requires_grad=False)
        self.scaled = _scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for code in self.codes:
            x = x + (code.real if code.is_complex() else code).float().mean(0)
        return x @ self.scaled.to(x.dtype) @ self.mask.softmax(-1)


def _model() -> Quantized:
    torch.manual_seed(0)
    return Quantized()


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.full((2, 7), number + 1.0)).square().mean()
    return loss


@pytest.mark.parametrize(
    ("transports", "gather_dtype"), [("shm,grpc", "float32"), ("socket,grpc", "bfloat16"), ("grpc", "float32")]
)
def test_frozen_values_keep_their_bytes(
    cluster: shardwell.LocalCluster, tmp_path: Path, transports: Any, gather_dtype: Any
) -> None:
    model, name = _model(), f"frozen-{uuid.uuid4().hex[:8]}"
    before = {key: value.clone() for key, value in _flat(model.state_dict()).items()}
    transfers = shardwell.TransferOptions(transports=transports, gather_dtype=gather_dtype)
    folder = str(tmp_path / "checkpoints")
    with shardwell.join(cluster.address, run=name, transfers=transfers, checkpoint_dir=folder) as session:
        auto_wrap(model, session)
        # The average of an infinite value is NaN, as in torch, unless the optimizer does not have the parameter.
        optimizer = shardwell.optim.AdamW([each for each in model.parameters() if each is not model.mask], lr=0.1)
        optimizer.ema_decay = 0.9
        for step in session.steps(2):
            for batch in step.batches(lambda item, rank: item):
                _loss(model, 0 if batch is None else 1).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        states = [shardwell.full_state_dict(model), shardwell.full_state_dict(model, ema=True)]
        shardwell.save_safetensors(model, tmp_path / "saved")
        saved = session.save_checkpoint(wait=True)
        reader = shardwell.attach(cluster.address, run=name)
        copy = _model()
        for tensor in _flat(copy.state_dict()).values():
            tensor.view(torch.uint8).zero_()
        reader.follow(copy)
        states += [_flat(copy.state_dict()), load_file(tmp_path / "saved" / "model.safetensors")]
        reader.close()
    other = _model()
    with shardwell.join(cluster.address, run=f"{name}-2", resume=saved) as session:
        auto_wrap(other, session)
        states.append(shardwell.full_state_dict(other))
    assert not torch.equal(states[0]["linear.weight"], before["linear.weight"])
    for state in states:
        for key, value in before.items():
            assert key.startswith("linear") or _same_bytes(value, state[key]), key


def test_mixed_precision_casts_only_what_is_trained() -> None:
    policy = shardwell.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded = Sharded(_model(), lambda model, session: shardwell.fully_shard(model, session, mp_policy=policy))
    module: Any = sharded.model
    module.unshard()
    assert module.linear.weight.dtype is module.mask.dtype is torch.bfloat16
    assert torch.equal(module.scaled.scale, _scaled().scale)
    assert [code.dtype for code in module.codes if code.dtype not in (torch.float32, torch.bfloat16)] == [
        dtype for dtype in DTYPES if str(dtype)[6:] not in ("float32", "float64", "float16", "bfloat16")
    ]
    module.reshard()


def test_training_with_frozen_codes_is_that_of_a_plain_model() -> None:
    def make_optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in parameters if each.dtype is torch.float32], lr=0.1, fused=True)

    pair = Pair(_model(), wrap_whole, make_optimizer=make_optimizer)
    for number in range(3):
        pair.backward(_loss, number)
        pair.step()
    got = pair.sharded.state()
    assert all(_same_bytes(value, got[key]) for key, value in _flat(pair.plain.state_dict()).items())


def test_trained_parameter_of_another_dtype_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(UsageError, match=r"float8_e4m3fn.*requires_grad_\(False\)"):
        Sharded(model, wrap_whole)
    model.weight.requires_grad_(False)
    Sharded(model, wrap_whole)


@pytest.mark.parametrize("gather_dtype", ["float32", "int8"])
def test_values_that_are_trained_or_gathered_in_8_bits_are_finite(
    cluster: shardwell.LocalCluster, gather_dtype: Any
) -> None:
    model = _model()
    model.mask.requires_grad_(gather_dtype == "float32")
    transfers = shardwell.TransferOptions(gather_dtype=gather_dtype)
    with (
        shardwell.join(cluster.address, run=f"mask-{uuid.uuid4().hex[:8]}", transfers=transfers) as session,
        pytest.raises(NonFiniteError, match=r"mask.*Only a parameter that is frozen"),
    ):
        shardwell.fully_shard(model, session)


class Coded(nn.Parameter):
    """Codes with the state that decodes them, as the parameters of bitsandbytes."""

    scale: torch.Tensor


class CodedLayer(nn.Module):
    def __init__(self, *, replaces: bool = False) -> None:
        super().__init__()
        self.weight, self.replaces = Coded(torch.arange(9, dtype=torch.uint8).view(3, 3), requires_grad=False), replaces
        self.weight.scale, self.bias = torch.tensor(0.5), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self.weight) is Coded
        if self.replaces:
            self.weight.data = self.weight.data.clone()
        return x @ (self.weight * self.weight.scale) + self.bias


def test_codes_keep_their_class_and_state() -> None:
    plain = CodedLayer()
    sharded = Sharded(CodedLayer(), wrap_whole)
    weight = sharded.model.weight
    assert isinstance(weight, Coded) and weight.scale == 0.5
    for _ in range(2):
        assert torch.equal(sharded.model(torch.eye(3)), plain(torch.eye(3)))
        sharded.model(torch.eye(3)).sum().backward()
        sharded.step()
        plain.load_state_dict(sharded.state())


def test_parameters_that_cannot_be_stored_may_be_ignored() -> None:
    model = CodedLayer(replaces=True)
    with torch.no_grad(), pytest.raises(UsageError, match=r"weight.*written in place.*ignored_params"):
        Sharded(CodedLayer(replaces=True), wrap_whole).model(torch.eye(3))
    expected = model(torch.eye(3))
    ignoring = Sharded(
        model, lambda model, session: shardwell.fully_shard(model, session, ignored_params=[model.weight])
    )
    assert torch.equal(ignoring.model(torch.eye(3)), expected)

    model = CodedLayer()
    model.weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)))
    model.weight.scale = torch.tensor(0.5)
    with pytest.raises(UsageError, match=r"'CodedLayer-0.weight' is a TwoTensor.*must be frozen.*ignored_params"):
        Sharded(model, wrap_whole)
    Sharded(model, lambda model, session: shardwell.fully_shard(model, session, ignored_params=[model.weight]))


def _scaled_layers(kind: type[Scaled] = Scaled) -> Any:
    """Returns a trained layer before two layers with the same frozen weight, whose values are in several tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.Sequential(*(nn.Linear(7, 7, bias=False) for _ in range(2))))
    model[1][0].weight = model[1][1].weight = _scaled(kind)
    return model


@pytest.mark.parametrize("kind", [Scaled, Nested])
def test_frozen_tensor_subclass_is_gathered_and_freed_with_its_inner_tensors(kind: type[Scaled]) -> None:
    plain, model = _scaled_layers(kind), _scaled_layers(kind)
    weight, names = model[1][0].weight, list(model.state_dict())
    sharded = Sharded(model, wrap_children)
    optimizer = fused_adamw(plain[0].parameters())
    for number in range(3):
        losses = [_loss(each, number) for each in (plain, model)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sharded.step()
    assert model[1][0].weight is model[1][1].weight is weight
    assert (weight.dtype, weight.shape) == (torch.float32, (7, 7))
    codes = "weight.codes_codes" if kind is Nested else "weight.codes"
    assert sharded.state()[f"1.1.{codes}"].dtype is torch.int8
    with pytest.raises(FreedParameterError, match="needs the values of parameter 'Sequential-0"):
        weight + 1
    with pytest.raises(FreedParameterError, match=codes):
        weight.codes + 1
    unwrap(model)
    assert list(model.state_dict()) == names and model.get_parameter("1.0.weight") is model[1][1].weight is weight
    assert type(weight) is kind and type(weight.scale) is torch.Tensor
    assert torch.equal(_loss(model, 0), _loss(plain, 0))


def test_frozen_tensor_subclass_that_is_replaced_is_refused() -> None:
    model = Sharded(_scaled_layers(), wrap_whole).model
    model[1][0].weight = nn.Parameter(torch.zeros(7, 7))
    with pytest.raises(UsageError, match=r"1.0.weight.scale' .* was replaced or removed after fully_shard"):
        _loss(model, 0)


def test_failed_call_leaves_frozen_tensor_subclasses_as_they_were() -> None:
    model = _scaled_layers()
    model[1].register_parameter("lazy", nn.UninitializedParameter())
    names, weight = [name for name, _ in model.named_parameters()], model[1][0].weight
    with pytest.raises(UsageError, match="lazy"):
        Sharded(model, wrap_whole)
    assert [name for name, _ in model.named_parameters()] == names
    assert model[1][0].weight is weight and type(weight.codes) is torch.Tensor


class HqqLike(nn.Module):
    """A layer as HQQ's: frozen codes, their scales in a dict, and a state dict of its own that looks for None."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(49, dtype=torch.uint8).view(7, 7), requires_grad=False)
        self.meta = {"scale": torch.rand(7, 1), "zero": torch.full((7, 1), 24.0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ ((self.codes - self.meta["zero"]) * self.meta["scale"])

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        assert None not in [self.codes, self.meta]
        destination = {} if destination is None else destination
        destination |= {prefix + key: value for key, value in {"codes": self.codes, **self.meta}.items()}
        return destination


class GptqLike(nn.Module):
    """A layer as those of GPTQ and AWQ: eight 4-bit codes in each int32, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.randint(-(2**31), 2**31, (7, 1), dtype=torch.int32))
        self.register_buffer("scales", torch.rand(7, 1, dtype=torch.float16))
        self.register_buffer("shifts", torch.arange(0, 28, 4, dtype=torch.int32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (((self.packed >> self.shifts) & 15) * self.scales).to(x.dtype)


class Adapted(nn.Module):
    """A frozen layer with a LoRA adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("kind", [HqqLike, GptqLike])
def test_adapters_on_layers_of_quantization_libraries_train_and_are_reloaded(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Adapted(kind()) for _ in range(2)))
    sharded = Sharded(copy.deepcopy(plain), wrap_children)
    optimizer = fused_adamw([each for each in plain.parameters() if each.requires_grad])
    for number in range(3):
        losses = [_loss(each, number) for each in (plain, sharded.model)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sharded.step()
    state = sharded.state()
    assert [*state] == [*plain.state_dict()]
    assert all(_same_bytes(value, state[name]) for name, value in plain.state_dict().items())
