"""Idioms of scripts for DDP, FSDP1 and FSDP2 work, or raise an error that says what to do instead."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, TensorDataset

import shardwell
from shardwell import UsageError
from shardwell.module.fully_shard import fully_shard
from shardwell_wire.errors import FreedParameterError
from tests.support.module_parity import Pair, Sharded, gpt, gpt_loss, wrap_blocks, wrap_whole
from tests.support.strategies import BLOCKS


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sharded() -> Sharded:
    return Sharded(gpt(), wrap_blocks)


ignore_world_size = pytest.mark.filterwarnings("ignore:FSDP is switching to use")

WRAPPERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "DistributedDataParallel": (DistributedDataParallel, "NO_SHARD"),
    "FullyShardedDataParallel": (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "shardwell.fully_shard replaces it",
    ),
    "FSDPModule": (
        lambda model: torchs_fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
        "shardwell.fully_shard replaces it",
    ),
}


@ignore_world_size
@pytest.mark.parametrize("kind", WRAPPERS)
def test_torchs_sharding_around_a_sharded_model_is_refused(sharded: Sharded, kind: str) -> None:
    wrap, match = WRAPPERS[kind]
    with pytest.raises(FreedParameterError, match=match):
        wrap(sharded.model)


@ignore_world_size
@pytest.mark.parametrize("kind", WRAPPERS)
def test_sharding_a_model_with_torchs_sharding_is_refused(kind: str) -> None:
    wrap, _ = WRAPPERS[kind]
    with pytest.raises(UsageError, match=rf"torch's {kind}.*ignored_params"):
        Sharded(wrap(nn.Linear(3, 3)), wrap_whole)


def test_ignored_parts_may_be_wrapped_in_ddp() -> None:
    """Corresponds to FSDP2's ``test_ddp_A_fsdp_B_ddp_C``."""

    def wrap(model: Any, session: Any) -> None:
        fully_shard(model[1], session)
        model[0], model[2] = DistributedDataParallel(model[0]), DistributedDataParallel(model[2])
        fully_shard(model, session, ignored_params=[*model[0].parameters(), *model[2].parameters()])

    torch.manual_seed(0)
    pair = Pair(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 2)), wrap)
    local = torch.optim.AdamW(
        [*pair.sharded.model[0].parameters(), *pair.sharded.model[2].parameters()],  # type: ignore[index]
        lr=1e-2,
        weight_decay=0.1,
        fused=True,
    )
    for number in range(3):
        pair.backward(lambda model, seed: model(torch.ones(3, 4) * (seed + 1)).square().mean(), number)
        local.step()
        local.zero_grad()
        pair.step()
    for expected, got in zip(pair.plain.state_dict().values(), pair.sharded.state().values(), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda block: block.up.reset_parameters(), "source=function"),
        (lambda block: nn.init.zeros_(block.up.weight), "source=function"),
        (lambda block: prune.l1_unstructured(block.up, "weight", 0.5), "prune before"),
        (lambda block: parametrizations.weight_norm(block.up), "parametrise modules before"),
        (lambda block: block.up.weight.full_tensor(), "full_state_dict"),
        (lambda block: block.up.weight.data, "full_state_dict"),
    ],
)
def test_errors_of_freed_parameters_give_advice(sharded: Sharded, change: Callable[[Any], Any], match: str) -> None:
    with pytest.raises(FreedParameterError, match=match):
        change(sharded.model.blocks[0])  # type: ignore[index,union-attr]


def test_to_empty_after_fully_shard_is_refused(sharded: Sharded) -> None:
    with pytest.raises(UsageError, match=r"to_empty after fully_shard.*source="):
        sharded.model.to_empty(device="cpu")


def test_arguments_of_fsdp2_are_refused_with_advice() -> None:
    with pytest.raises(UsageError, match=r"expected the session that shardwell.join"):
        fully_shard(gpt(), "localhost:50051")  # type: ignore[type-var]
    with pytest.raises(UsageError, match=r"reshard_after_forward=2.*HYBRID_SHARD"):
        Sharded(gpt(), lambda model, session: fully_shard(model, session, reshard_after_forward=2))  # type: ignore[arg-type]


def test_no_sync_delays_pushes() -> None:
    pair = Pair(gpt(), wrap_blocks)
    model: Any = pair.sharded.model
    model.blocks[1].set_requires_gradient_sync(False)
    with model.no_sync():
        pair.backward(gpt_loss, 0)
    assert not pair.sharded.store.pushes
    pair.backward(gpt_loss, 1)
    assert BLOCKS[1] not in pair.sharded.store.pushes and len(pair.sharded.store.pushes) == 3
    pair.step()
    pair.compare()


def test_exception_in_no_sync_restores_the_settings(sharded: Sharded) -> None:
    with pytest.raises(ZeroDivisionError), sharded.model.no_sync():  # type: ignore[operator]
        raise ZeroDivisionError
    assert all(unit.settings.requires_gradient_sync for unit in sharded.units)


def test_reading_a_pushed_gradient_warns_once(sharded: Sharded) -> None:
    with pytest.warns(UserWarning, match=r"was pushed to the shard servers.*optimizer.clip_grad_norm_") as caught:
        for _ in range(2):
            gpt_loss(sharded.model, 0).backward()
            assert all(parameter.grad is None for parameter in sharded.model.parameters())
            sharded.units.invalidate()
    assert len(caught) == 1 and caught[0].filename == __file__


# With a session.


@pytest.fixture
def session(cluster_of_one: shardwell.LocalCluster) -> Iterator[shardwell.Session]:
    with shardwell.join(
        cluster_of_one.address, run=uuid.uuid4().hex, waits=shardwell.WaitOptions(wait_limit_s=30)
    ) as joined:
        yield joined


def shard(session: shardwell.Session) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for layer in model:
        fully_shard(layer, session)
    return fully_shard(model, session)


def scale_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5


def test_every_model_whose_gradients_are_scaled_too_late_is_named(session: shardwell.Session) -> None:
    """Also with Python's default filter, which shows a text once for each line of code."""
    models = [fully_shard(nn.Sequential(nn.Linear(3, 2)), session, name=name) for name in ("a", "b")]
    optimizers = [shardwell.optim.SGD(model.parameters(), lr=1.0) for model in models]
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(model)
                scale_gradients(model)
                optimizer.step()
    assert [str(each.message).split("'")[1] for each in caught] == ["a.0.weight", "b.0.weight"]
    assert {each.lineno for each in caught} == {scale_gradients.__code__.co_firstlineno + 2}


def scale_and_step(model: Any, optimizer: Any, *, unshards: bool = False) -> list[str]:
    """Scales the gradients before the step; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        backward(model)
        if unshards:
            model.unshard()
        scale_gradients(model)
        backward(model)  # without a warning for what Shardwell and torch do
        optimizer.step()
        optimizer.zero_grad()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("unshards", [False, True])
@pytest.mark.parametrize("strategy", shardwell.ShardingStrategy)
def test_scaling_gradients_of_gathered_parameters_warns_too(
    session: shardwell.Session, strategy: shardwell.ShardingStrategy, unshards: bool
) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 2)), session, strategy=strategy)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=1.0)
    (message,) = scale_and_step(model, optimizer, unshards=unshards)
    assert "0.weight' is None because its gradient was pushed to the shard servers, so code" in message
    assert scale_and_step(model, optimizer) == [], "one warning per model"
    backward(model)
    if unshards or strategy is shardwell.ShardingStrategy.NO_SHARD:
        model.unshard()
        assert isinstance(model[0].weight, nn.Parameter) and type(model[0].weight) is not nn.Parameter
        with pytest.raises(UsageError, match=r"setting \.grad would not change it"):
            model[0].weight.grad = torch.ones(2, 3)
    optimizer.zero_grad()


def test_gradients_summed_in_another_dtype_are_named(session: shardwell.Session) -> None:
    policy = shardwell.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = fully_shard(nn.Sequential(nn.Linear(3, 2)), session, mp_policy=policy)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=1.0)
    model.set_requires_gradient_sync(False)
    (message,) = scale_and_step(model, optimizer)
    assert "its gradient is summed in another dtype (mixed precision), so code" in message


def test_gradients_that_stay_in_the_process_can_be_scaled(session: shardwell.Session) -> None:
    plain = nn.Linear(3, 2)
    expected = {name: value - 0.5 * 2.0 for name, value in plain.state_dict().items()}  # ones of two samples
    model: Any = fully_shard(plain, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=1.0)
    model.set_requires_gradient_sync(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model)
        scale_gradients(model)
        optimizer.step()
    found = shardwell.full_state_dict(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def backward(model: Any) -> None:
    model(torch.ones(2, 3)).sum().backward()


def test_two_optimizers_step_one_after_the_other(session: shardwell.Session) -> None:
    model = shard(session)
    first, second = (shardwell.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    before = shardwell.full_state_dict(model)
    backward(model)
    first.step()
    between = shardwell.full_state_dict(model)
    second.step()
    after = shardwell.full_state_dict(model)
    assert [name for name in before if not torch.equal(before[name], between[name])] == ["0.weight", "0.bias"]
    assert [name for name in before if not torch.equal(between[name], after[name])] == ["1.weight", "1.bias"]
    with pytest.raises(UsageError, match=r"no forward has run .* since step 1 was committed.*zero_grad"):
        second.step()
    second.zero_grad()
    second.step()
    assert session.step == 3


def test_two_steps_in_one_loop_body_are_refused(session: shardwell.Session) -> None:
    model = shard(session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="called 2 times in the loop body of step 0"):
        for step in session.steps(2):
            for batch in step.batches(lambda *_: torch.ones(2, 3)):
                model(batch).sum().backward()
            optimizer.step()
            optimizer.step()


def test_steps_without_a_forward_update_the_weights(session: shardwell.Session) -> None:
    """Weights are gathered with ``unshard``, and gradients are set by hand."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    fully_shard(model, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        model.unshard()
        model.weight.sum().backward()
        optimizer.step()
    # These gradients must not reach the servers, or memory shared with them, before the last step is applied.
    for number in range(20):
        model.weight.grad = torch.full((2, 3), float(number))
        optimizer.step()
    assert session.step == 22
    assert torch.equal(shardwell.full_state_dict(model)["weight"], torch.full((2, 3), -2.0 - sum(range(20))))


def test_torchs_grad_scaler_is_refused(session: shardwell.Session) -> None:
    model = shard(session)
    optimizer, scaler = shardwell.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    for use in (scaler.unscale_, scaler.step):
        with pytest.raises(UsageError, match=r"use shardwell.amp.GradScaler"):
            use(optimizer)


def test_optimizer_loads_parameter_groups_and_refuses_state(session: shardwell.Session) -> None:
    model, plain = shard(session), nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1))
    optimizer, local = shardwell.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), lr=0.5)
    backward(plain)
    local.step()
    with pytest.raises(UsageError, match=r'state of 4 parameters.*"param_groups"'):
        optimizer.load_state_dict(local.state_dict())
    optimizer.load_state_dict({"param_groups": local.state_dict()["param_groups"]})
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(UsageError, match=r"torch.distributed.checkpoint would take a step"):
        get_optimizer_state_dict(model, optimizer)
    assert session.step == 0


def test_optimizer_refuses_parameters_of_another_or_a_closed_session(
    session: shardwell.Session, cluster_of_one: shardwell.LocalCluster
) -> None:
    model = shard(session)
    with shardwell.join(
        cluster_of_one.address, run=uuid.uuid4().hex, waits=shardwell.WaitOptions(wait_limit_s=30)
    ) as other:
        others = shard(other)
        with pytest.raises(UsageError, match=r"'Linear-0.weight' belongs to another session"):
            shardwell.optim.SGD([*model.parameters(), *others.parameters()], lr=0.1)
    with pytest.raises(UsageError, match="session of these parameters is closed"):
        shardwell.optim.SGD(others.parameters(), lr=0.1)


def test_data_loader_may_fork_workers(session: shardwell.Session) -> None:
    model = shard(session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for (batch,) in DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4, num_workers=2):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.step == 6


def test_forked_process_cannot_use_the_session(session: shardwell.Session) -> None:
    model = shard(session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            session.close()
            optimizer.step()
        except BaseException as error:
            os.write(writes, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        assert "UsageError: this process was forked from a trainer" in answer.read()
    os.waitpid(child, 0)
    backward(model)
    optimizer.step()
    assert session.step == 1
