"""Training loops on a session with real servers, compared with plain PyTorch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwell
from shardwell.membership import membership
from shardwell.module import torch_patches
from tests.support import transformer
from tests.support.cluster import join_options
from tests.support.reference import ADAMW, sha256, train_plain

STEPS = 4


@pytest.fixture
def join(cluster: shardwell.LocalCluster) -> Iterator[Callable[..., shardwell.Session]]:
    sessions: list[shardwell.Session] = []

    def open_session(run: str | None = None, **options: Any) -> shardwell.Session:
        options = {"wait_limit_s": 60, **options}
        session = shardwell.join(cluster.address, run=run or uuid.uuid4().hex, **join_options(**options))
        sessions.append(session)
        return session

    yield open_session
    for session in sessions:
        session.close()


def test_wait_for_other_trainers_is_logged(
    join: Callable[..., shardwell.Session], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "_POLL_S", 0.1)
    with pytest.raises(shardwell.DeadlineError, match="1 of 2 trainers"):
        join(run="half", world=shardwell.World(dp=2), wait_limit_s=0.5)
    warnings = [record for record in caplog.records if "waiting for run 'half' to start" in record.message]
    assert warnings and warnings[0].levelname == "WARNING"


def test_unreachable_coordinator_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(shardwell.UnavailableError, match=r"127\.0\.0\.1:1"):
        shardwell.join("127.0.0.1:1", run="r", waits=shardwell.WaitOptions(wait_limit_s=0.3, warn_after_s=0.1))
    assert "Connection refused; retrying for 0 s" in caplog.text


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(7, 15), nn.ReLU(), nn.Linear(15, 13), nn.ReLU(), nn.Linear(13, 1))


def inputs(step: int, dp_rank: int) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + dp_rank))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def shard(model: nn.Module, session: shardwell.Session) -> Any:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            shardwell.fully_shard(layer, session)
    return shardwell.fully_shard(model, session)


def reference(change: Callable[[nn.Module, torch.optim.Optimizer, int], None], steps: int = STEPS) -> str:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    for step in range(steps):
        change(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return sha256(model.state_dict())


def plain_step(model: nn.Module, _: torch.optim.Optimizer, step: int) -> None:
    loss_of(model, inputs(step, 0)).backward()


def test_plain_loop_has_the_bits_of_plain_pytorch(join: Callable[..., shardwell.Session]) -> None:
    session = join()
    model = shard(net(), session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(STEPS):
        assert session.step == step
        loss_of(model, inputs(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sha256(shardwell.full_state_dict(model)) == reference(plain_step)


@pytest.mark.parametrize("sync", [True, False], ids=["push each", "push last"])
def test_accumulated_gradients_have_the_bits_of_plain_pytorch(
    join: Callable[..., shardwell.Session], sync: bool
) -> None:
    def accumulate(model: nn.Module, _: torch.optim.Optimizer, step: int) -> None:
        for micro in range(3):
            (loss_of(model, inputs(step, micro)) / 3).backward()

    session = join()
    model = shard(net(), session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(STEPS):
        for micro in range(3):
            model.set_requires_gradient_sync(sync or micro == 2)
            (loss_of(model, inputs(step, micro)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sha256(shardwell.full_state_dict(model)) == reference(accumulate)
    assert session.stats()["push_count"] == STEPS * 3 * (3 if sync else 1)


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")


def exploding_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    hidden = model[1](model[0](batch))
    return model[4](model[3](model[2](Explodes.apply(hidden)))).square().mean()  # type: ignore[no-any-return]


def test_failed_backward_contributes_nothing_to_the_step(join: Callable[..., shardwell.Session]) -> None:
    session = join()
    model = shard(net(), session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(STEPS):
        if step == 2:
            with pytest.raises(RuntimeError, match="boom"):
                (exploding_loss(model, inputs(9, 9)) * 100).backward()
            assert session.stats()["push_count"] > 3 * step, "the last layers were pushed before the failure"
            optimizer.zero_grad()
        loss_of(model, inputs(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sha256(shardwell.full_state_dict(model)) == reference(plain_step)


def test_batches_restart_a_failed_item(join: Callable[..., shardwell.Session]) -> None:
    session = join(world=shardwell.World(dp=2), min_trainers=1)
    model = shard(net(), session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    for step in session.steps(STEPS):
        if step.number == 1:
            with pytest.raises(RuntimeError, match="boom"):
                for number, batch in enumerate(step.batches(inputs)):
                    (exploding_loss if number else loss_of)(model, batch).backward()
        for batch in step.batches(inputs):
            loss_of(model, batch).backward()
        optimizer.step()
    plain = net()
    train_plain(
        nn.Sequential(plain, Loss()),
        torch.optim.AdamW(plain.parameters(), fused=True, **ADAMW),
        inputs,
        dp=2,
        steps=STEPS,
    )
    assert sha256(shardwell.full_state_dict(model)) == sha256(plain.state_dict())


class Loss(nn.Module):
    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()


def test_non_finite_gradient_is_named_and_the_step_can_be_skipped(join: Callable[..., shardwell.Session]) -> None:
    session = join()
    model = shard(net(), session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    before = sha256(shardwell.full_state_dict(model))
    (loss_of(model, inputs(0, 0)) * float("nan")).backward()
    with pytest.raises(shardwell.NonFiniteError, match=r"gradient of parameter '.*' .* of logical dp rank 0"):
        optimizer.step()
    with pytest.raises(shardwell.NonFiniteError):
        optimizer.clip_grad_norm_(1.0)
    assert sha256(shardwell.full_state_dict(model)) == before
    optimizer.zero_grad()
    optimizer.step()
    assert session.step == 1
    assert sha256(shardwell.full_state_dict(model)) == before
    loss_of(model, inputs(0, 0)).backward()
    optimizer.step()
    assert sha256(shardwell.full_state_dict(model)) != before


def test_parameter_groups_with_frozen_and_unused_parameters(join: Callable[..., shardwell.Session]) -> None:
    def build() -> tuple[nn.Sequential, list[dict[str, Any]]]:
        model = net()
        model[2].weight.requires_grad_(False)
        decay = [p for p in model.parameters() if p.dim() > 1]
        return model, [
            {"params": decay, "weight_decay": 0.3},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.01},
        ]

    plain, plain_groups = build()
    plain_optimizer = torch.optim.AdamW(plain_groups, lr=0.1, fused=True)
    local, groups = build()
    model = shard(local, join())
    optimizer = shardwell.optim.AdamW(groups, lr=0.1)
    for step in range(STEPS):
        for net_, optimizer_ in ((plain, plain_optimizer), (model, optimizer)):
            first = net_[1](net_[0](inputs(step, 0)))
            # Every other step uses the first layers only. The other layers have no gradient and are not updated.
            loss = first.square().mean() if step % 2 else net_[4](net_[3](net_[2](first))).square().mean()
            loss.backward()
            optimizer_.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer_.step()
            optimizer_.zero_grad()
    assert sha256(shardwell.full_state_dict(model)) == sha256(plain.state_dict())


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clipping_equals_torch(join: Callable[..., shardwell.Session], max_norm: float) -> None:
    session = join()
    model, plain = shard(net(), session), net()
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    for step in range(3):
        loss_of(plain, inputs(step, 0)).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        loss_of(model, inputs(step, 0)).backward()
        norm = optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, value in shardwell.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_infinity_norm_equals_torch(join: Callable[..., shardwell.Session]) -> None:
    model, plain = shard(net(), join()), net()
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    loss_of(plain, inputs(0, 0)).backward()
    loss_of(model, inputs(0, 0)).backward()
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    assert optimizer.clip_grad_norm_(1.0, norm_type=float("inf")).item() == largest


def test_batch_norm_statistics_come_from_rank_0(join: Callable[..., shardwell.Session]) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    plain, session = build(), join(world=shardwell.World(dp=2), min_trainers=1)
    model = shardwell.fully_shard(build(), session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.05)
    for step in session.steps(STEPS):
        for batch in step.batches(inputs):
            loss_of(model, batch).backward()
        optimizer.step()
    for step in range(STEPS):
        loss_of(plain, inputs(step, 0))
        # Rank 1 starts with the committed statistics, and its changes are undone.
        kept = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        sums: dict[str, torch.Tensor] = {}
        for dp_rank in range(2):
            copy = build()
            copy.load_state_dict(plain.state_dict())
            loss_of(copy, inputs(step, dp_rank)).backward()
            for name, parameter in copy.named_parameters():
                assert parameter.grad is not None
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.grad = sums[name] / 2
        torch.optim.SGD(plain.parameters(), lr=0.05, fused=True).step()
        plain.load_state_dict({**plain.state_dict(), **kept})
    state = shardwell.full_state_dict(model)
    assert torch.equal(state["1.running_mean"], plain[1].running_mean)
    assert torch.equal(state["1.running_var"], plain[1].running_var)
    assert state["1.num_batches_tracked"] == STEPS


class Interrupted(Exception):
    """Raised between ``optimizer.step()`` and ``scheduler.step()``."""


def train_tracked(
    session: shardwell.Session, until: int, interrupted: int | None = None
) -> tuple[Any, Any, dict[int, float]]:
    norms = {}
    model = shard(net(), session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    session.track(scheduler=scheduler)
    for step in session.steps(until):
        for batch in step.batches(inputs):
            loss_of(model, batch).backward()
        norms[step.number] = optimizer.clip_grad_norm_(0.5).item()
        optimizer.step()
        if step.number == interrupted:
            raise Interrupted
        scheduler.step()
    return model, scheduler, norms


@pytest.mark.parametrize("interrupted", [None, 1])
def test_run_resumes_with_the_state_of_its_scheduler(
    join: Callable[..., shardwell.Session], interrupted: int | None
) -> None:
    whole, _, expected_norms = train_tracked(join(), 5)
    expected = sha256(shardwell.full_state_dict(whole))
    run = uuid.uuid4().hex
    first = join(run)
    with nullcontext() if interrupted is None else pytest.raises(Interrupted):
        train_tracked(first, 2, interrupted)
    first.close()
    again = join(run)
    assert again.step == 2
    model, scheduler, norms = train_tracked(again, 5)
    first_step = 2 if interrupted is None else interrupted  # the end of the interrupted iteration is repeated
    assert norms == {step: expected_norms[step] for step in range(first_step, 5)}
    assert scheduler.last_epoch == 5
    assert sha256(shardwell.full_state_dict(model)) == expected


def test_dataset_samples_are_drawn_without_repetition(join: Callable[..., shardwell.Session]) -> None:
    session = join(world=shardwell.World(dp=2), min_trainers=1, seed=5)
    model = shard(net(), session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    dataset = [(torch.full((7,), float(index)), index) for index in range(16)]
    seen: list[int] = []
    for step in session.steps(2):
        for features, labels in step.batches(dataset, batch_size=4):
            seen += labels.tolist()
            model(features).sum().backward()
        optimizer.step()
    assert sorted(seen) == list(range(16))


def test_reading_state_during_training_does_not_change_the_result(join: Callable[..., shardwell.Session]) -> None:
    session = join()
    model = shard(net(), session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(STEPS):
        loss_of(model, inputs(step, 0)).backward()
        shardwell.full_state_dict(model)
        with torch.no_grad():
            model(inputs(step, 1))
        optimizer.step()
        with torch.inference_mode():
            model(inputs(step, 2))
    assert sha256(shardwell.full_state_dict(model)) == reference(plain_step)


def test_mistakes_in_the_training_loop_are_named(join: Callable[..., shardwell.Session]) -> None:
    session = join(world=shardwell.World(dp=2), min_trainers=1)
    model = shard(net(), session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(shardwell.UsageError, match="plays the logical ranks 0, 1"):
        loss_of(model, inputs(0, 0)).backward()
    optimizer.zero_grad()
    for step in session.steps(1):
        for batch in step.batches(inputs):
            loss_of(model, batch).backward()
            break
        with pytest.raises(shardwell.UsageError, match="rank 1 was not computed"):
            optimizer.step()
        for batch in step.batches(inputs):
            loss_of(model, batch).backward()
        with pytest.raises(shardwell.UsageError, match="after the work of step 0 was finished"):
            loss_of(model, inputs(0, 0)).backward()
        optimizer.step()
    with pytest.raises(shardwell.UsageError, match=r"ended without optimizer.step\(\)"):
        for step in session.steps(3):
            for batch in step.batches(inputs):
                loss_of(model, batch).backward()


def test_optimizers_reject_invalid_parameters(join: Callable[..., shardwell.Session]) -> None:
    with pytest.raises(shardwell.UsageError, match="got no sharded parameter"):
        shardwell.optim.AdamW(net().parameters())
    session = join()
    model = shard(net(), session)
    with pytest.raises(shardwell.UsageError, match="is not sharded"):
        shardwell.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(2))])
    for arguments in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": float("nan")}):
        with pytest.raises(shardwell.UsageError):
            shardwell.optim.Adam(model.parameters(), **arguments)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(shardwell.UsageError, match="norm_type"):
        optimizer.clip_grad_norm_(1.0, norm_type=0.0)
    optimizer.param_groups[0]["lr"] = float("inf")
    loss_of(model, inputs(0, 0)).backward()
    with pytest.raises(shardwell.InvalidRequestError, match="lr=inf is not finite"):
        optimizer.step()
    assert session.step == 0


def test_joining_with_another_world_is_rejected(join: Callable[..., shardwell.Session]) -> None:
    session = join()
    with pytest.raises(shardwell.RunMismatchError, match=r"dp=1.*dp=2"):
        join(session.run, world=shardwell.World(dp=2))
    with pytest.raises(shardwell.RunMismatchError, match="seed"):
        join(session.run, seed=3)


def test_units_with_another_layout_are_rejected(join: Callable[..., shardwell.Session]) -> None:
    session = join("two-models")
    shard(net(), session)
    session.close()
    other = join("two-models")
    with pytest.raises(shardwell.UnitMismatchError, match="Linear-0"):
        shardwell.fully_shard(nn.Linear(7, 16), other)


def test_run_keeps_the_first_initial_values(join: Callable[..., shardwell.Session]) -> None:
    first = join("kept-values")
    expected = shardwell.full_state_dict(shard(net(), first))
    first.close()
    torch.manual_seed(99)
    other = nn.Sequential(nn.Linear(7, 15), nn.ReLU(), nn.Linear(15, 13), nn.ReLU(), nn.Linear(13, 1))
    state = shardwell.full_state_dict(shard(other, join("kept-values")))
    assert sha256(state) == sha256(expected)


def test_join_without_an_address_starts_a_private_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWELL_ADDRESS", raising=False)
    with shardwell.join() as session:
        model = shard(net(), session)
        optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
        for step in session.steps(STEPS):
            for batch in step.batches(inputs):
                loss_of(model, batch).backward()
            optimizer.step()
        assert sha256(shardwell.full_state_dict(model)) == reference(plain_step)


def test_trainers_of_a_larger_world_get_their_ranks(join: Callable[..., shardwell.Session]) -> None:
    with pytest.raises(shardwell.WorldError, match="min_trainers"):
        join(world=shardwell.World(tp=2), min_trainers=1)
    with pytest.raises(shardwell.WorldError, match="layers cannot be split evenly"):
        join(world=shardwell.World(pp=2), num_layers=7)


def test_auto_wrapped_model_computes_like_the_plain_model(join: Callable[..., shardwell.Session]) -> None:
    session = join()
    model = transformer.build()
    shardwell.auto_wrap(model, session, policy=shardwell.ModuleTypePolicy({transformer.Block}))
    plain = transformer.build()
    tokens = transformer.batch(0, 0)
    torch.manual_seed(0)
    expected = F.relu(plain(tokens))
    torch.manual_seed(0)
    assert torch.equal(F.relu(model(tokens)), expected)
    assert list(shardwell.full_state_dict(model)) == list(plain.state_dict())


def test_gradients_of_a_closed_session_are_no_longer_guarded(
    join: Callable[..., shardwell.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_patches, "_watched", WeakSet())
    session = join()
    model = shardwell.fully_shard(nn.Linear(3, 3), session, name="left")
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(shardwell.UsageError, match="'left'"):
        nn.utils.get_total_norm([])
    session.close()
    assert nn.utils.get_total_norm([]) == 0.0
