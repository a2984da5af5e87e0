"""Training loops that skip, repeat or abandon steps, and the errors they get."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.step.step_commit import StepCommitter


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the backward ends here")


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number)).square().mean()
    return loss


def shard(session: shardwell.Session) -> tuple[Any, shardwell.optim.SGD]:
    model = net()
    for layer in (model[0], model[2], model[4]):
        shardwell.fully_shard(layer, session)
    model = shardwell.fully_shard(model, session)
    return model, shardwell.optim.SGD(model.parameters(), lr=0.5)


def after(*numbers: int) -> dict[str, torch.Tensor]:
    """Returns the weights of plain PyTorch after a step on each of these batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    for number in numbers:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


def assert_weights(model: Any, expected: dict[str, torch.Tensor]) -> None:
    found = shardwell.full_state_dict(model)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture
def session(cluster: shardwell.LocalCluster, run_name: str) -> Iterator[shardwell.Session]:
    with shardwell.join(cluster.address, run=run_name, waits=shardwell.WaitOptions(wait_limit_s=60)) as joined:
        yield joined


def test_restarted_trainer_in_a_plain_loop_does_not_mix_two_batches(
    cluster: shardwell.LocalCluster, run_name: str
) -> None:
    with shardwell.join(
        cluster.address, run=run_name, trainer="t", waits=shardwell.WaitOptions(wait_limit_s=60)
    ) as first:
        model, _ = shard(first)
        hidden = Raise.apply(model[1](model[0](batch(1))))
        with pytest.raises(RuntimeError, match="the backward ends here"):
            model[4](model[3](model[2](hidden))).square().mean().backward()
        assert first.stats()["push_count"] == 1, "the last layer's gradient is on the servers"
        first.store.gradients.drain()
    with shardwell.join(
        cluster.address, run=run_name, trainer="t", waits=shardwell.WaitOptions(wait_limit_s=60)
    ) as second:
        model, optimizer = shard(second)
        loss_of(model, 2).backward()
        optimizer.step()
        assert_weights(model, after(2))


def test_step_without_a_forward_is_rejected(session: shardwell.Session) -> None:
    model, optimizer = shard(session)
    with pytest.raises(shardwell.UsageError, match=r"in step 0, but no forward has run on this trainer since the sess"):
        optimizer.step()
    for step in session.steps(2):
        if step.number == 1:
            with pytest.raises(shardwell.UsageError, match=r"no forward has run .* since step 0 was committed"):
                optimizer.step()
        loss_of(model, step.number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_weights(model, after(0, 1))


def test_zero_grad_allows_a_step_without_gradients(session: shardwell.Session) -> None:
    model, optimizer = shard(session)
    optimizer.zero_grad()
    optimizer.step()
    for step in session.steps(3):
        if step.number == 1:
            optimizer.zero_grad()
        else:
            assert list(step.batches(lambda step, rank: step)) == [2], "the loop ignores this batch"
        optimizer.step()
    assert session.step == 3
    assert_weights(model, after())


def test_loop_body_declares_the_number_of_optimizer_steps(session: shardwell.Session) -> None:
    model, optimizer = shard(session)
    for _ in session.steps(1):
        loss_of(model, 0).backward()
        optimizer.step()
        loss_of(model, 1).backward()
        with pytest.raises(shardwell.UsageError, match=r"called 2 times in the loop body of step 0.*optimizer_steps=2"):
            optimizer.step()
        optimizer.zero_grad()
    seen: list[tuple[int, int]] = []
    for step in session.steps(3, optimizer_steps=2):
        # The loop starts with the iteration whose first step is committed and whose second is not.
        for _ in range(2):
            for number in step.batches(lambda step, rank: step):
                seen.append((session.step, number))
                loss_of(model, session.step).backward()
            optimizer.step()
    assert seen == [(1, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert_weights(model, after(0, 1, 2, 3, 4, 5))
    with pytest.raises(shardwell.UsageError, match=r"ended without optimizer.step\(\): 1 of 2 calls"):
        for _ in session.steps(4, optimizer_steps=2):
            loss_of(model, 0).backward()
            optimizer.step()


def test_plain_loop_continues_after_an_abandoned_loop(session: shardwell.Session) -> None:
    model, optimizer = shard(session)
    for _ in session.steps(10):
        loss_of(model, 0).backward()
        optimizer.step()
        break
    for number in (1, 2):
        loss_of(model, number).backward()
        optimizer.step()
    assert session.step == 3
    assert_weights(model, after(0, 1, 2))


def test_backward_before_the_batches_is_rejected(session: shardwell.Session) -> None:
    model, optimizer = shard(session)
    for step in session.steps(1):
        loss_of(model, 1).backward()
        with pytest.raises(shardwell.UsageError, match=r"a backward ran in step 0 before `for batch in step.batches"):
            next(step.batches(lambda step, rank: step))
        optimizer.zero_grad()
        for number in step.batches(lambda step, rank: step):
            loss_of(model, number).backward()
        optimizer.step()
    assert_weights(model, after(0))


def test_batch_can_be_skipped_after_its_norm_was_read(session: shardwell.Session) -> None:
    model, optimizer = shard(session)
    for number in range(4):
        loss_of(model, number).backward()
        optimizer.clip_grad_norm_(1e6)
        if number == 1:
            with pytest.raises(shardwell.UsageError, match=r"clip_grad_value_.. or an optimizer.step.. that raised"):
                loss_of(model, number).backward()
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert session.step == 3
    assert_weights(model, after(0, 2, 3))


def test_batch_with_a_non_finite_gradient_can_be_skipped(session: shardwell.Session) -> None:
    model, optimizer = shard(session)
    for number in range(3):
        (loss_of(model, number) * (float("nan") if number == 1 else 1.0)).backward()
        try:
            optimizer.step()
        except shardwell.NonFiniteError:
            assert number == 1
        optimizer.zero_grad()
    assert_weights(model, after(0, 2))


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("then", ["step", "forward", "zero_grad", "fully_shard", "read"])
def test_next_call_completes_an_interrupted_optimizer_step(
    session: shardwell.Session, monkeypatch: pytest.MonkeyPatch, committed: bool, then: str
) -> None:
    model, optimizer = shard(session)
    loss_of(model, 0).backward()
    commit: Callable[..., Any] = StepCommitter.commit

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if committed:
            commit(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepCommitter, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert session.step == 0
    if then == "step":
        optimizer.step()
    elif then == "zero_grad":
        optimizer.zero_grad()
    elif then == "fully_shard":
        with pytest.raises(shardwell.StepStateError, match=r"is new, but run '.*' has committed 1 steps"):
            shardwell.fully_shard(nn.Linear(2, 2), session)
    elif then == "read":
        assert_weights(model, after(0))
        assert {part.version for part in shardwell.sharded_state_dict(model).values()} == {1}
    dropped = then == "zero_grad" and not committed
    loss_of(model, 1).backward()
    optimizer.step()
    assert_weights(model, after(1) if dropped else after(0, 1))
    assert session.step == (1 if dropped else 2)


def test_optimizer_state_of_another_run_is_rejected_and_its_hyperparameters_are_loaded(
    cluster: shardwell.LocalCluster, run_name: str
) -> None:
    with shardwell.join(cluster.address, run=f"{run_name}-1", waits=shardwell.WaitOptions(wait_limit_s=60)) as session:
        model, optimizer = shard(session)
        untrained = optimizer.state_dict()
        loss_of(model, 0).backward()
        optimizer.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
    with shardwell.join(cluster.address, run=f"{run_name}-2", waits=shardwell.WaitOptions(wait_limit_s=60)) as session:
        model, optimizer = shard(session)
        with pytest.raises(
            shardwell.UsageError, match=r"belongs to run '.*-1' after 1 steps, and the optimizer's state"
        ):
            optimizer.load_state_dict(saved)
        optimizer.load_state_dict(untrained)
        optimizer.load_state_dict({"param_groups": saved["param_groups"]})


def test_unsupported_optimizers_are_rejected_with_the_reason(session: shardwell.Session) -> None:
    model, _ = shard(session)
    with pytest.raises(shardwell.UsageError, match="SparseAdam takes sparse gradients only, but the mean gradient"):
        shardwell.ClientSide(model.parameters(), torch.optim.SparseAdam)
    with pytest.raises(shardwell.UsageError, match="none of them evaluates the model several times in a step"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)


def test_second_session_of_a_process_names_the_first(
    cluster: shardwell.LocalCluster, session: shardwell.Session, run_name: str
) -> None:
    shard(session)
    with shardwell.join(cluster.address, run=run_name, waits=shardwell.WaitOptions(wait_limit_s=60)) as second:
        model, _ = shard(second)
        with pytest.raises(shardwell.UsageError, match=r"spare .* this process has joined run '.*' before, as trainer"):
            loss_of(model, 0).backward()
