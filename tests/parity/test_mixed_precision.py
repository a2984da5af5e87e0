"""Mixed precision matches a manual loop with fp32 master weights and a low-precision copy."""

from __future__ import annotations

import copy
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwell
from shardwell.module import mixed_precision
from shardwell.module.mixed_precision import MixedPrecisionPolicy
from shardwell.module.units import Units
from shardwell.seeds import derive_seed
from tests.support import transformer
from tests.support.cluster import join_options
from tests.support.in_memory_store import InMemoryStore, fused_adamw
from tests.support.reference import ADAMW, sha256

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STEPS = 3


class Reference:
    """Manual mixed precision as in FSDP2's tests: an optimizer updates masters, and a copy computes.

    Args:
        model: Model in the dtype of the masters.
        computes: Copy of the model whose parameters have the compute dtypes.
    """

    def __init__(self, model: nn.Module, computes: nn.Module, *, reduce_dtype: torch.dtype | None = None) -> None:
        self.model, self.computes, self.reduce_dtype = model, computes, reduce_dtype
        self.pairs = list(zip(model.parameters(), computes.parameters(), strict=True))
        self.sums: dict[nn.Parameter, torch.Tensor] = {}

    def load(self) -> None:
        """Copies the masters into the computing model."""
        with torch.no_grad():
            for master, low in self.pairs:
                low.copy_(master)

    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        """Returns the gradients as they are pushed, and clears them."""
        taken = {}
        for master, low in self.pairs:
            if low.grad is not None:
                taken[master] = low.grad.to(self.reduce_dtype or master.dtype).to(master.dtype)
                low.grad = None
        return taken

    def add(self, gradients: dict[nn.Parameter, torch.Tensor]) -> None:
        for master, gradient in gradients.items():
            self.sums[master] = self.sums[master] + gradient if master in self.sums else gradient

    def step(self, optimizer: torch.optim.Optimizer, dp: int = 1) -> None:
        for master, total in self.sums.items():
            master.grad = total / dp
        self.sums.clear()
        optimizer.step()
        optimizer.zero_grad()


# On servers, over every transport, with one and two ranks.


@cache
def reference_hash(dp: int, reduce_dtype: torch.dtype | None = None) -> str:
    model = transformer.build()
    reference = Reference(model, copy.deepcopy(model).to(BF16), reduce_dtype=reduce_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    for step in range(STEPS):
        for dp_rank in range(dp):
            reference.load()
            torch.manual_seed(derive_seed(0, step, dp_rank))
            reference.computes(transformer.batch(step, dp_rank)).backward()
            reference.add(reference.take())
        reference.step(optimizer, dp)
    return sha256(model.state_dict())


def trained_hash(address: str, policy: MixedPrecisionPolicy, *, dp: int, **options: Any) -> str:
    world = shardwell.World(dp=dp)
    with shardwell.join(
        address, run=uuid.uuid4().hex, world=world, min_trainers=1, **join_options(**options)
    ) as session:
        model = transformer.build()
        shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({transformer.Block}), mp_policy=policy)
        optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
        for step in session.steps(STEPS):
            for tokens in step.batches(transformer.batch):
                model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = shardwell.full_state_dict(model)
    assert {value.dtype for value in state.values()} == {FP32}
    return sha256(state)


@pytest.mark.parametrize(
    ("transports", "gather_dtype", "dp"),
    [
        ("shm,grpc", "float32", 1),
        ("shm,grpc", "bfloat16", 2),
        ("socket,grpc", "float32", 2),
        ("socket,grpc", "bfloat16", 1),
        ("grpc", "float32", 2),
        ("grpc", "bfloat16", 1),
    ],
)
def test_bf16_over_fp32_masters_matches_the_manual_loop(
    cluster_of_three: shardwell.LocalCluster, transports: str, gather_dtype: str, dp: int
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    assert trained_hash(
        cluster_of_three.address, policy, dp=dp, transports=transports, gather_dtype=gather_dtype
    ) == reference_hash(dp)


def test_host_cache_changes_no_bit(cluster_of_three: shardwell.LocalCluster) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    assert trained_hash(
        cluster_of_three.address, policy, dp=2, transports="grpc", host_cache_bytes=1 << 26
    ) == reference_hash(2)


def test_wire_dtype_unlike_the_compute_dtype_gives_the_same_bits_on_every_transport(
    cluster_of_three: shardwell.LocalCluster,
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    hashes = {
        trained_hash(cluster_of_three.address, policy, dp=1, transports=transports, gather_dtype="float16")
        for transports in ("shm,grpc", "grpc")
    }
    assert len(hashes) == 1
    assert hashes != {reference_hash(1)}


def test_gradients_are_rounded_to_the_reduce_dtype(cluster_of_three: shardwell.LocalCluster) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP16)
    expected = reference_hash(2, FP16)
    assert expected != reference_hash(2)
    assert trained_hash(cluster_of_three.address, policy, dp=2, transports="shm,grpc") == expected


def test_gathered_unit_occupies_the_bytes_of_the_compute_dtype(cluster_of_three: shardwell.LocalCluster) -> None:
    peaks = {}
    for dtype in (None, BF16):
        with shardwell.join(
            cluster_of_three.address,
            run=uuid.uuid4().hex,
            transfers=shardwell.TransferOptions(transports="grpc", gather_dtype="bfloat16"),
        ) as session:
            model = transformer.build()
            shardwell.fully_shard(model, session, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            model(transformer.batch(0, 0))
            peaks[dtype] = session.units.live_bytes
    size = sum(parameter.numel() for parameter in transformer.build().parameters())
    assert 4 * size <= peaks[None] < 4 * size + 64 * 100
    assert 2 * size <= peaks[BF16] < 2 * size + 64 * 100


# In one process. Most of these tests mirror FSDP2's.


class Sharded:
    """Holds units in an in-process store."""

    def __init__(self) -> None:
        self.store = InMemoryStore()
        self.units = Units(self.store, prefetch_bytes=1 << 30)
        self.session: Any = SimpleNamespace(units=self.units)

    def step(self) -> None:
        self.units.finish_item()
        self.store.step()
        self.units.invalidate()
        self.units.zero_grad()


@pytest.fixture
def sharded() -> Iterator[Sharded]:
    made = Sharded()
    yield made
    made.store.close()


def mlp(widths: Sequence[int] = (7, 13, 5)) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(left, right) for left, right in pairwise(widths)]
    return nn.Sequential(*layers)


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(number))


def shard_all(sharded: Sharded, model: nn.Module, policy: MixedPrecisionPolicy) -> nn.Module:
    for child in model.children():
        shardwell.fully_shard(child, sharded.session, mp_policy=policy)
    return shardwell.fully_shard(model, sharded.session, mp_policy=policy)


@pytest.mark.parametrize("low", [BF16, FP16, FP64])
@pytest.mark.parametrize("reduce_dtype", [None, BF16, FP32])
@pytest.mark.parametrize("keeps_low", [False, True])
def test_accumulation_without_sync_sums_in_the_reduce_dtype(
    sharded: Sharded, low: torch.dtype, reduce_dtype: torch.dtype | None, keeps_low: bool
) -> None:
    plain = mlp()
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype, keep_low_precision_grads=keeps_low)
    model = shard_all(sharded, copy.deepcopy(plain), policy)
    reference, optimizer = Reference(plain, copy.deepcopy(plain).to(low)), fused_adamw(list(plain.parameters()))
    sum_dtype = low if keeps_low else reduce_dtype or FP32
    for step in range(2):
        reference.load()
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for micro in range(3):
            reference.computes(batch(10 * step + micro).to(low)).float().square().sum().backward()
            for master, computing in reference.pairs:
                assert computing.grad is not None
                before = sums.get(master)
                if before is None:
                    sums[master] = computing.grad.to(sum_dtype)
                else:
                    before += computing.grad
                computing.grad = None
            model.set_requires_gradient_sync(micro == 2)
            model(batch(10 * step + micro)).float().square().sum().backward()
        reference.add({master: total.to(reduce_dtype or FP32).to(FP32) for master, total in sums.items()})
        reference.step(optimizer)
        sharded.step()
    assert sharded.store.pushes == {"Linear-0": 2, "Linear-1": 2}
    state = shardwell.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name


class Recomputed(nn.Module):
    """Blocks with a checkpoint between an embedding and a head. The last block and the embedding are in the root unit.

    Args:
        use_reentrant: Kind of the checkpoints.
        twice: Whether the forward uses every block twice.
    """

    def __init__(self, use_reentrant: bool, *, twice: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self._use_reentrant, self._repeats = use_reentrant, 2 if twice else 1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for block in [*self.blocks] * self._repeats:
            x = x + checkpoint(block, x, use_reentrant=self._use_reentrant)
        return self.head(x)


def gradients_of_two_backwards(use_reentrant: bool, policy: MixedPrecisionPolicy, *, twice: bool) -> list[Any]:
    """Returns the parts of each unit's gradient that two backwards push, the first without sync."""
    model: Any = Recomputed(use_reentrant, twice=twice)
    store = InMemoryStore()
    session: Any = SimpleNamespace(units=Units(store))
    for block in model.blocks[:2]:
        shardwell.fully_shard(block, session, mp_policy=policy)
    shardwell.fully_shard(model, session, mp_policy=policy)
    for number in range(2):
        tokens = torch.randint(0, 31, (8, 5), generator=torch.Generator().manual_seed(number))
        model.set_requires_gradient_sync(number == 1)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten()).backward()
    session.units.finish_item()
    return [unit.parts for unit in store.units]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(reduce_dtype=BF16),
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
        MixedPrecisionPolicy(param_dtype=BF16, keep_low_precision_grads=True),
    ],
)
def test_reentrant_checkpoints_push_accumulated_gradients_once(policy: MixedPrecisionPolicy, twice: bool) -> None:
    """The backward of a reentrant checkpoint ends inside another one that still uses the root unit.

    A part of a gradient that is pushed apart is added in the dtype of the servers, and not in that of the policy.
    """
    *_, root = gradients_of_two_backwards(True, policy, twice=twice)
    assert len(root) == 1
    if not twice:  # torch sums the gradients of two nested backwards in another order than those of one backward
        pushed = [gradients_of_two_backwards(kind, policy, twice=False) for kind in (False, True)]
        for one, other in zip(*pushed, strict=True):
            for (_, expected), (_, got) in zip(one[0], other[0], strict=True):
                assert torch.equal(expected, got)


def test_unsynced_gradients_are_in_grad_only_with_keep_low_precision_grads(sharded: Sharded) -> None:
    kept, summed = mlp((7, 5)), mlp((7, 5))
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    shardwell.fully_shard(summed, sharded.session, mp_policy=policy)
    shardwell.fully_shard(
        kept, sharded.session, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, keep_low_precision_grads=True)
    )
    for model in (kept, summed):
        model.set_requires_gradient_sync(False)
        model(batch(0)).sum().backward()
    assert kept[0].weight.grad is not None
    assert kept[0].weight.grad.dtype == BF16
    with pytest.warns(UserWarning, match=r"is None because its gradient is summed.*keep_low_precision_grads=True"):
        assert summed[0].weight.grad is None
    summed.zero_grad()
    kept.zero_grad()
    sharded.units.finish_item()
    assert not sharded.store.pushes, "zero_grad left gradients behind"


@dataclass
class Batch:
    values: torch.Tensor
    indices: torch.Tensor


class DtypeRecorder(nn.Module):
    """Records the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.seen: list[torch.dtype] = []

    def forward(self, nested: dict[str, list[Batch]], *, scale: torch.Tensor) -> dict[str, Any]:
        entry = nested["batch"][0]
        self.seen = [entry.values.dtype, entry.indices.dtype, scale.dtype]
        result = self.linear(entry.values.to(self.linear.weight.dtype)) * scale
        return {"nested": (result, entry.indices), "number": 3}

    def twice(self, values: torch.Tensor) -> torch.Tensor:
        self.seen = [values.dtype]
        return self.linear(values)


def call(model: nn.Module) -> Any:
    entry = Batch(batch(0), torch.arange(6))
    return model({"batch": [entry]}, scale=torch.ones((), dtype=FP32))


def test_nested_inputs_and_outputs_are_cast(sharded: Sharded) -> None:
    model = DtypeRecorder()
    shardwell.fully_shard(model, sharded.session, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP32))
    output = call(model)
    assert model.seen == [BF16, torch.int64, BF16]
    assert [value.dtype for value in output["nested"]] == [FP32, torch.int64]
    assert output["nested"][0].grad_fn is not None
    output["nested"][0].sum().backward()
    assert sharded.store.pushes == {"DtypeRecorder-0": 1}


def test_inputs_are_not_cast_without_cast_forward_inputs(sharded: Sharded) -> None:
    model = DtypeRecorder()
    shardwell.fully_shard(model, sharded.session, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=False))
    output = call(model)
    assert model.seen == [FP32, torch.int64, FP32]
    assert output["nested"][0].dtype == BF16


def test_registered_forward_method_casts(sharded: Sharded) -> None:
    model = DtypeRecorder()
    shardwell.fully_shard(model, sharded.session, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP64))
    shardwell.register_forward_method(model, "twice")
    assert model.twice(batch(0)).dtype == FP64
    assert model.seen == [BF16]


def test_input_gradient_has_the_dtype_of_the_input(sharded: Sharded) -> None:
    plain = mlp()
    model = shard_all(sharded, copy.deepcopy(plain), MixedPrecisionPolicy(param_dtype=BF16))
    values, expected = batch(0).requires_grad_(), batch(0).requires_grad_()
    model(values).sum().backward()
    copy.deepcopy(plain).to(BF16)(expected.to(BF16)).sum().backward()
    assert values.grad is not None and expected.grad is not None
    assert values.grad.dtype == FP32
    assert torch.equal(values.grad, expected.grad)
    assert sharded.units.live_bytes == 0


class Mixed(nn.Module):
    """Has a norm in fp32 between layers in bf16, as in FSDP2's tests."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(values)))


@pytest.mark.parametrize("recompute", [None, False, True])
def test_nested_units_may_have_different_policies(sharded: Sharded, recompute: bool | None) -> None:
    torch.manual_seed(4)
    plain = Mixed()
    model = copy.deepcopy(plain)
    inner = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)
    shardwell.fully_shard(model.norm, sharded.session, mp_policy=inner)
    shardwell.fully_shard(model, sharded.session, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    computes = copy.deepcopy(plain).to(BF16)
    computes.norm.to(FP32)
    computes.norm.register_forward_pre_hook(lambda _, args: args[0].float())
    computes.norm.register_forward_hook(lambda _, args, output: output.to(BF16))
    reference, optimizer = Reference(plain, computes), fused_adamw(list(plain.parameters()))

    def run(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        return module(values) if recompute is None else checkpoint(module, values, use_reentrant=recompute)

    for step in range(STEPS):
        reference.load()
        # A reentrant checkpoint needs an input that requires a gradient.
        computes(batch(step).to(BF16)).float().square().sum().backward()
        run(model, batch(step).requires_grad_()).float().square().sum().backward()
        reference.add(reference.take())
        reference.step(optimizer)
        sharded.step()
    state = shardwell.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name


def test_root_without_own_parameters_casts_its_inputs(sharded: Sharded) -> None:
    model = mlp((7, 5))
    seen = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    keep = MixedPrecisionPolicy(BF16, cast_forward_inputs=False)
    shardwell.fully_shard(model[0], sharded.session, mp_policy=keep)
    shardwell.fully_shard(model, sharded.session, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP32))
    assert len(sharded.units) == 1
    assert model(batch(0)).dtype == FP32
    assert seen == [BF16]


def test_buffers_are_cast_except_in_nested_units(sharded: Sharded) -> None:
    inner, outer = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    model = nn.Sequential(inner, outer)
    shardwell.fully_shard(inner, sharded.session)
    shardwell.fully_shard(model, sharded.session, mp_policy=MixedPrecisionPolicy(BF16, buffer_dtype=BF16))
    assert outer.running_mean.dtype == outer.running_var.dtype == BF16
    assert outer.num_batches_tracked.dtype == torch.int64
    assert inner.running_mean.dtype == FP32
    before = outer.running_mean.clone()
    assert model(torch.randn(4, 5)).dtype == BF16
    assert outer.running_mean.dtype == BF16
    assert not torch.equal(outer.running_mean, before)


def test_freed_parameter_has_the_stored_dtype_and_unsharded_the_compute_dtype(sharded: Sharded) -> None:
    model = mlp((7, 5))
    expected = model[0].weight.detach().clone()
    shardwell.fully_shard(model, sharded.session, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    weight = model[0].weight
    assert (weight.dtype, weight.element_size(), weight.nbytes) == (FP32, 4, 4 * 35)
    assert torch.zeros_like(weight).dtype == weight.new_zeros(2).dtype == FP32
    assert torch.zeros_like(weight).shape == torch.zeros_like(weight).contiguous().shape == weight.shape
    assert "dtype=torch.float32" in repr(weight)
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}
    model.unshard()
    assert weight.dtype == BF16
    assert torch.equal(weight.detach(), expected.to(BF16))
    assert weight.data_ptr() % 64 == model[0].bias.data_ptr() % 64 == 0
    model.reshard()
    assert weight.dtype == FP32
    state = shardwell.full_state_dict(model)
    assert torch.equal(state["0.weight"], expected)
    model.float()  # the dtype on the servers
    with pytest.raises(shardwell.UsageError, match=r"is torch.float32 on cpu and cannot become torch.bfloat16"):
        model.bfloat16()


def test_parameters_of_several_dtypes_compute_in_one_dtype(sharded: Sharded) -> None:
    plain = mlp((7, 13, 5, 3))
    plain[1].to(BF16)
    plain[2].to(FP64)
    model = copy.deepcopy(plain)
    shardwell.fully_shard(model, sharded.session, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model(batch(0)).sum().backward()
    sharded.units.finish_item()
    state = shardwell.full_state_dict(model)
    assert {name: value.dtype for name, value in state.items()} == {
        name: value.dtype for name, value in plain.state_dict().items()
    }
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def test_policy_with_the_stored_dtype_casts_nothing(sharded: Sharded) -> None:
    model = mlp((7, 5))
    shardwell.fully_shard(model, sharded.session, mp_policy=MixedPrecisionPolicy(param_dtype=FP32))
    (unit,) = sharded.units
    assert not unit.precision.casts
    assert unit.precision.layout == unit.layout


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"])
def test_unsupported_dtype_is_rejected(name: str) -> None:
    message = rf"MixedPrecisionPolicy\({name}=torch.int8\): expected one of torch.float32, .*torch.float16, or None"
    with pytest.raises(shardwell.UsageError, match=message):
        MixedPrecisionPolicy(**{name: torch.int8})


# Autocast.


@pytest.fixture
def _fresh_warning() -> Iterator[None]:
    mixed_precision._warn_of_autocast_once.cache_clear()
    yield
    mixed_precision._warn_of_autocast_once.cache_clear()


@pytest.mark.usefixtures("_fresh_warning")
def test_autocast_warns_once_and_names_the_alternative(sharded: Sharded) -> None:
    model = shard_all(sharded, mlp(), MixedPrecisionPolicy())
    with warnings.catch_warnings(record=True) as caught, torch.autocast("cpu", BF16):
        warnings.simplefilter("always")
        for _ in range(2):
            model(batch(0)).sum().backward()
    messages = [str(entry.message) for entry in caught]
    assert len(messages) == 1
    assert "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in messages[0]


@pytest.mark.usefixtures("_fresh_warning")
def test_autocast_does_not_warn_if_it_copies_no_weight(sharded: Sharded) -> None:
    model = shard_all(sharded, mlp(), MixedPrecisionPolicy(param_dtype=BF16))
    with torch.autocast("cpu", BF16):
        model(batch(0))
    plain = shard_all(sharded, mlp(), MixedPrecisionPolicy())
    with torch.autocast("cpu", BF16), torch.no_grad():
        plain(batch(0))
