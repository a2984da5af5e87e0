"""``unwrap`` makes a sharded model an ordinary one with the same bits."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwell.testing
from shardwell import MemoryOptions, MixedPrecisionPolicy, ShardingStrategy, auto_wrap, fully_shard, unwrap
from shardwell.module.fully_shard import ShardedModule, sharding_of
from shardwell.module.parameters import FreedParameter, is_sharded
from shardwell.weights.state_dict import full_state_dict
from shardwell_wire.errors import UsageError
from tests.parity.test_module_tensor_parallel import make_optimizer, parallel_model
from tests.parity.test_module_tensor_parallel import wrap as wrap_parallel
from tests.support import gloo
from tests.support.in_memory_store import InMemoryStore, fused_adamw
from tests.support.module_parity import Pair, Sharded, gpt, gpt_loss, inputs, wrap_blocks
from tests.support.processes import run_ranks

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


def check_plain(model: nn.Module, expected: nn.Module) -> None:
    """Checks that classes, hooks, attributes and bits are those of a model that was never sharded."""
    assert [type(part) for part in model.modules()] == [type(part) for part in expected.modules()]
    for part, other in zip(model.modules(), expected.modules(), strict=True):
        assert vars(part).keys() == vars(other).keys()
        assert all(len(vars(part)[name]) == len(vars(other)[name]) for name in _HOOKS)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    others = dict(expected.named_parameters(remove_duplicate=False))
    assert list(parameters) == list(others)
    for name, parameter in parameters.items():
        assert type(parameter) is nn.Parameter and not is_sharded(parameter) and parameter.grad is None
        assert parameter.requires_grad == others[name].requires_grad and torch.equal(parameter, others[name])
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, "memory of its own"
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), expected.buffers(), strict=True))


def test_session_does_not_hold_an_unwrapped_model() -> None:
    sharded = Sharded(gpt(), wrap_blocks, keep_bytes=None)
    gpt_loss(sharded.model, 0).backward()
    sharded.step()
    with torch.no_grad():
        gpt_loss(sharded.model, 1)  # keeps the units
    weight = weakref.ref(unwrap(sharded.model).head.weight)
    del sharded.model
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.SHARD_GRAD_OP])
def test_unwrapped_model_is_the_plain_model(strategy: ShardingStrategy | None) -> None:
    def wrap(model: nn.Module, session: Any) -> None:
        auto_wrap(model, session, strategy=strategy)

    pair = Pair(gpt(), wrap).train(gpt_loss, steps=2)
    model = pair.sharded.model
    tied = model.head.weight
    assert unwrap(model) is model
    check_plain(model, pair.plain)
    assert model.head.weight is tied and model.tokens.weight is tied
    assert len(pair.sharded.units) == 0 and pair.sharded.units.live_bytes == 0

    # The model trains, copies, pickles and loads like any other.
    optimizer = fused_adamw(model.parameters())
    for trained, step in ((pair.plain, None), (model, optimizer)):
        torch.manual_seed(0)
        gpt_loss(trained, 7).backward()
        gradients = [parameter.grad.clone() for parameter in trained.parameters()]
        if step is None:
            expected = gradients
        else:
            assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
            step.step()
    duplicate = copy.deepcopy(model)
    assert duplicate.head.weight is duplicate.tokens.weight
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert str(pair.plain.load_state_dict(torch.load(file))) == "<All keys matched successfully>"


def test_replica_that_was_used_becomes_plain() -> None:
    sharded = Sharded(gpt(), lambda model, session: auto_wrap(model, session, strategy=ShardingStrategy.NO_SHARD))
    gpt_loss(sharded.model, 0).backward()
    sharded.units.zero_grad()
    assert sharded.units.live_bytes > 0, "weights of replicas stay"
    unwrap(sharded.model)
    check_plain(sharded.model, gpt())
    assert sharded.units.live_bytes == 0
    hooks = [parameter._post_accumulate_grad_hooks for parameter in sharded.model.parameters()]
    assert not any(hooks), "no gradient is pushed any more"


def test_units_are_gathered_one_after_another() -> None:
    freed: list[int] = []
    store = InMemoryStore(before_gather=lambda _: freed.append(sum(isinstance(p, FreedParameter) for p in parameters)))
    sharded = Sharded(gpt(), wrap_blocks, store=store)
    parameters = list(sharded.model.parameters())
    parts = [part for part in sharded.model.modules() if isinstance(part, ShardedModule)]
    sizes = [len(unit.parameters) for part in parts for unit in sharding_of(part).own_units]
    store.gathers.clear()
    unwrap(sharded.model)
    assert sum(store.gathers.values()) == len(sizes)
    assert freed == [len(parameters) - sum(sizes[:number]) for number in range(len(sizes))]


def test_wrapped_forwards_methods_and_casts_are_removed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layers(x))

        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).sum()

    torch.manual_seed(0)
    plain = Model()

    def wrap(model: Any, session: Any) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        memory = MemoryOptions(checkpoint_activations=True, offload_to="disk")
        auto_wrap(model, session, shardwell.ModuleTypePolicy({nn.Linear}), memory=memory, mp_policy=policy)
        shardwell.register_forward_method(model, "score")

    sharded = Sharded(copy.deepcopy(plain), wrap)
    assert isinstance(sharded.model.layers[0], ShardedModule) and "forward" in vars(sharded.model.layers[0])
    unwrap(sharded.model)
    check_plain(sharded.model, plain)
    assert torch.equal(sharded.model.score(inputs(0, 3, 4)), plain.score(inputs(0, 3, 4)))


def test_part_of_a_model_is_unwrapped() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    block = unwrap(sharded.model.blocks[0])
    assert not any(isinstance(part, ShardedModule) for part in block.modules())
    assert isinstance(sharded.model, ShardedModule)
    assert len(sharded.units) == len(sharded.model.blocks)  # the other blocks and the root
    plain = gpt().train(False)
    with torch.no_grad():
        assert torch.equal(gpt_loss(sharded.model.train(False), 0), gpt_loss(plain, 0))
    with pytest.raises(UsageError, match="1 units of this trainer's model were unwrapped"):
        sharded.units.require_all()


def test_unwrap_is_refused() -> None:
    with pytest.raises(UsageError, match="Sequential has no sharded module"):
        unwrap(nn.Sequential(nn.Linear(2, 2)))
    sharded = Sharded(gpt(), wrap_blocks)
    gpt_loss(sharded.model, 0).backward()
    with pytest.raises(UsageError, match=r"is in the middle of a step: call unwrap after optimizer.step"):
        unwrap(sharded.model)
    sharded.units.zero_grad()
    unwrap(sharded.model)

    def wrap(model: Any, session: Any) -> None:
        fully_shard([model[0], model[1]], session)

    pair = Sharded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), wrap)
    with pytest.raises(UsageError, match="also has the modules Linear, which are outside"):
        unwrap(pair.model[0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def train(*, unwraps: bool) -> dict[str, torch.Tensor]:
    """Trains for 4 steps; with ``unwraps``, evaluates and damages an ordinary model after the second one."""
    with shardwell.testing.in_process_cluster(num_shards=2), shardwell.join() as session:
        model = Net()

        def wrap() -> None:
            auto_wrap(model, session, shardwell.ModuleTypePolicy({nn.Linear}))

        wrap()
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)

        def steps(stop: int) -> None:
            for step in session.steps(stop):
                for x in step.batches(lambda step, _: inputs(step, 4, 8)):
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        steps(2)
        if unwraps:
            committed = full_state_dict(model)
            unwrap(model)
            state = model.state_dict()
            assert all(torch.equal(state[name], value) for name, value in committed.items())
            with pytest.raises(UsageError, match="3 units of this trainer's model were unwrapped"):
                steps(4)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            wrap()
            assert all(torch.equal(value, committed[name]) for name, value in full_state_dict(model).items())
        steps(4)
        assert session.step == 4
        state = full_state_dict(model)
        unwrap(model)
    model.eval()
    assert torch.isfinite(model(inputs(9, 4, 8))).all(), "the model outlives its session"
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    return state


def test_training_goes_on_after_the_model_is_wrapped_again() -> None:
    expected, got = train(unwraps=False), train(unwraps=True)
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def tensor_parallel_worker(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = parallel_model(mesh, sequence_parallel=True)
    store = InMemoryStore(make_optimizer=make_optimizer)
    model = unwrap(Sharded(parallel_model(mesh, sequence_parallel=True), wrap_parallel, store=store).model)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert type(parameter.data) is type(other.data), name
        if isinstance(other, DTensor):
            assert isinstance(parameter, DTensor) and parameter.placements == other.placements
            assert torch.equal(parameter.to_local(), other.to_local())
    x = inputs(0, 2, 4, 8)
    losses = [each(x).square().mean() for each in (plain, model)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        got, expected = (
            each.grad.full_tensor() if isinstance(each, DTensor) else each.grad for each in (parameter, other)
        )
        assert torch.equal(got, expected)
    gloo.leave()


def test_tensor_parallel_model_stays_split(tmp_path: Any) -> None:
    run_ranks(tensor_parallel_worker, str(tmp_path / "store"))
