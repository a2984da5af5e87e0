"""Several optimizers with separate parameters in one session match plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwell
from tests.support.processes import run_ranks

ADAM = {"lr": 2e-3, "betas": (0.5, 0.999)}
STEPS = 4


def two_layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(4, 4), nn.Linear(4, 4)


def noise(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def discriminator() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)),
        nn.Sequential(nn.Conv2d(4, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2)),
        nn.Sequential(nn.Conv2d(8, 1, 2, 1, 0, bias=False), nn.Flatten()),
    )


def generator() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Sequential(nn.ConvTranspose2d(6, 8, 2, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False), nn.Tanh()),
    )


def shard(model: Any, session: shardwell.Session, name: str) -> Any:
    for number, part in enumerate(model):
        shardwell.fully_shard(part, session, name=f"{name}-{number}")
    return model


def real_loss(net_d: nn.Module, number: int) -> torch.Tensor:
    output = net_d(noise(number, 3, 1, 8, 8))
    return F.binary_cross_entropy_with_logits(output, torch.ones_like(output))


def fake_loss(net_d: nn.Module, fake: torch.Tensor, label: float) -> torch.Tensor:
    output = net_d(fake)
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, label))


def dcgan(net_d: Any, net_g: Any, optimizer_d: Any, optimizer_g: Any, clip: Callable[[Any, Any], Any]) -> list[float]:
    """The training loop of PyTorch's DCGAN tutorial."""
    norms = []
    for number in range(STEPS):
        net_d.zero_grad() if number % 2 else optimizer_d.zero_grad()
        real_loss(net_d, number).backward()
        fake = net_g(noise(100 + number, 3, 6, 1, 1))
        fake_loss(net_d, fake.detach(), 0.0).backward()
        norms.append(float(clip(optimizer_d, net_d)))
        optimizer_d.step()
        optimizer_g.zero_grad()
        fake_loss(net_d, fake, 1.0).backward()
        optimizer_g.step()
    return norms


def assert_equal(model: Any, reference: nn.Module) -> None:
    found = shardwell.full_state_dict(model)
    for name, value in reference.state_dict().items():
        assert torch.equal(found[name], value), name


@pytest.fixture(params=["shm,socket,grpc", "socket,grpc", "grpc"])
def session(
    cluster: shardwell.LocalCluster, run_name: str, request: pytest.FixtureRequest
) -> Iterator[shardwell.Session]:
    with shardwell.join(
        cluster.address,
        run=run_name,
        transfers=shardwell.TransferOptions(transports=request.param),
        waits=shardwell.WaitOptions(wait_limit_s=60),
    ) as joined:
        yield joined


def test_dcgan_with_two_optimizers_matches_pytorch(session: shardwell.Session) -> None:
    plain_d, plain_g = discriminator(), generator()
    expected = dcgan(
        plain_d,
        plain_g,
        torch.optim.Adam(plain_d.parameters(), fused=True, **ADAM),
        torch.optim.Adam(plain_g.parameters(), fused=True, **ADAM),
        lambda optimizer, model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    )
    net_d, net_g = shard(discriminator(), session, "d"), shard(generator(), session, "g")
    net_d, net_g = shardwell.fully_shard(net_d, session, name="d"), shardwell.fully_shard(net_g, session, name="g")
    norms = dcgan(
        net_d,
        net_g,
        shardwell.optim.Adam(net_d.parameters(), **ADAM),
        shardwell.optim.Adam(net_g.parameters(), **ADAM),
        lambda optimizer, model: optimizer.clip_grad_norm_(1e9),
    )
    assert session.step == 2 * STEPS
    assert norms == pytest.approx(expected, rel=1e-5), "the norm is over the discriminator's gradients only"
    assert_equal(net_d, plain_d)
    assert_equal(net_g, plain_g)


def test_zero_grad_of_one_optimizer_leaves_the_others_gradients(session: shardwell.Session) -> None:
    a, b = (shardwell.fully_shard(layer, session) for layer in two_layers())
    of_a = shardwell.optim.SGD(a.parameters(), lr=0.1)
    of_b = shardwell.optim.SGD(b.parameters(), lr=0.1)
    plain_a, plain_b = two_layers()
    a(torch.ones(1, 4)).sum().backward()
    of_b.zero_grad()
    of_a.step()
    plain_a(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(plain_a.parameters(), lr=0.1).step()
    assert_equal(a, plain_a)
    assert_equal(b, plain_b)


def accumulate(a: Any, b: Any, of_a: Any, of_b: Any, *, drops: bool) -> None:
    for number in range(6):
        for micro in range(2):
            x = noise(10 * number + micro, 2, 4)
            (a(x).square().sum() + b(x).square().sum()).backward()
        if drops and number == 2:
            of_b.zero_grad()
        x = noise(10 * number + 5, 2, 4)
        (a(x).square().sum() + b(x).square().sum()).backward()
        of_a.step()
        of_a.zero_grad()
        if number % 3 == 2:
            of_b.step()
            of_b.zero_grad()


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_accumulate_until_their_optimizer_steps(session: shardwell.Session, drops: bool) -> None:
    plain_a, plain_b = two_layers()
    accumulate(
        plain_a,
        plain_b,
        torch.optim.SGD(plain_a.parameters(), lr=0.01, fused=True),
        torch.optim.SGD(plain_b.parameters(), lr=0.01, momentum=0.9, fused=True),
        drops=drops,
    )
    a, b = (shardwell.fully_shard(layer, session) for layer in two_layers())
    of_a = shardwell.optim.SGD(a.parameters(), lr=0.01)
    of_b = shardwell.optim.SGD(b.parameters(), lr=0.01, momentum=0.9)
    accumulate(a, b, of_a, of_b, drops=drops)
    assert_equal(a, plain_a)
    assert_equal(b, plain_b)


def losses(a: Any, b: Any, number: int, rank: int) -> torch.Tensor:
    x = noise(100 * number + rank, 3, 4)
    loss: torch.Tensor = a(x).square().mean() + b(x).square().mean()
    return loss


def reference_of_two_ranks(steps: int) -> tuple[nn.Module, nn.Module]:
    """Each rank accumulates its own gradients, and an optimizer uses their mean. ``b`` steps every third time."""
    a, b = two_layers()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05, fused=True) for layer in (a, b)]
    sums: dict[nn.Parameter, list[torch.Tensor | None]] = {p: [None, None] for p in [*a.parameters(), *b.parameters()]}
    for number in range(steps):
        for rank in range(2):
            for parameter, gradient in zip(sums, torch.autograd.grad(losses(a, b, number, rank), [*sums]), strict=True):
                former = sums[parameter][rank]
                sums[parameter][rank] = gradient if former is None else former + gradient
        turn = 1 if number % 3 == 2 else 0
        for parameter in (a, b)[turn].parameters():
            parts = [part for part in sums[parameter] if part is not None]
            parameter.grad = (parts[0] + parts[1]) / 2
            sums[parameter] = [None, None]
        optimizers[turn].step()
    return a, b


def test_kept_gradients_survive_lost_trainers(cluster: shardwell.LocalCluster, run_name: str) -> None:
    steps = 7
    plain_a, plain_b = reference_of_two_ranks(steps)
    for lost_in in (1, 2, 4, 5, steps):
        with shardwell.join(
            cluster.address,
            run=run_name,
            trainer="t",
            world=shardwell.World(dp=2),
            min_trainers=1,
            waits=shardwell.WaitOptions(wait_limit_s=60),
        ) as session:
            a, b = (shardwell.fully_shard(layer, session) for layer in two_layers())
            optimizers = [shardwell.optim.SGD(layer.parameters(), lr=0.05) for layer in (a, b)]
            for step in session.steps(min(lost_in + 1, steps)):
                for number, rank in step.batches(lambda step, rank: (step, rank)):
                    losses(a, b, number, rank).backward()
                    if (number, rank) == (lost_in, 1):
                        break  # the gradients of rank 0 are on the servers, and some of rank 1
                if step.number == lost_in:
                    break
                optimizers[1 if step.number % 3 == 2 else 0].step()
            if session.step == steps:
                assert_equal(a, plain_a)
                assert_equal(b, plain_b)
    assert session.step == steps


def test_unsupported_use_of_two_optimizers_is_rejected(session: shardwell.Session) -> None:
    model = shardwell.fully_shard(two_layers()[0], session)
    of_weight = shardwell.optim.SGD([model.weight], lr=0.1)
    of_bias = shardwell.optim.SGD([model.bias], lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(shardwell.UsageError, match="has parameters of this optimizer and of another one"):
        of_weight.clip_grad_norm_(1.0)
    with pytest.raises(shardwell.UsageError, match=r"ClientSide.step\(\) would lose the gradients of another"):
        shardwell.ClientSide([model.weight], torch.optim.SGD, lr=0.1).step()
    before = shardwell.full_state_dict(model)
    of_weight.step()
    of_bias.step()
    after = shardwell.full_state_dict(model)
    assert torch.equal(after["weight"], before["weight"] - 0.1)
    assert torch.equal(after["bias"], before["bias"] - 0.1)


def layer(number: int) -> nn.Linear:
    torch.manual_seed(number)
    return nn.Linear(4, 4)


def loss_of(a: nn.Module, b: nn.Module, number: int) -> torch.Tensor:
    x = noise(number, 3, 4)
    return a(x).square().mean() + b(x).square().mean()  # type: ignore[no-any-return]


def reference_of_stages(stages: int) -> tuple[list[float], list[nn.Linear]]:
    """Trains the layers of all stages in one process. Returns the norms, and the layers of both optimizers in order."""
    layers = [[layer(10 * kind + stage) for stage in range(stages)] for kind in (1, 2)]
    optimizers = [torch.optim.SGD(nn.ModuleList(each).parameters(), lr=0.1, foreach=False) for each in layers]
    norms = []
    for number in range(STEPS):
        for a, b in zip(*layers, strict=True):
            loss_of(a, b, number).backward()
        kind = number % 2
        norms.append(nn.utils.clip_grad_norm_(nn.ModuleList(layers[kind]).parameters(), 0.1).item())
        optimizers[kind].step()
        optimizers[kind].zero_grad()
    return norms, [*layers[0], *layers[1]]


def grid_worker(rank: int, address: str, run: str, tp: int, pp: int) -> None:
    world, waits = shardwell.World(1, tp, pp), shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(address, run=run, world=world, global_rank=rank, waits=waits) as session:
        stage = session.pp_rank or 0
        a, b = (shardwell.fully_shard(layer(10 * kind + stage), session, name=f"{kind}-{stage}") for kind in (1, 2))
        optimizers, norms = [shardwell.optim.SGD(each.parameters(), lr=0.1) for each in (a, b)], []
        for step in session.steps(STEPS):
            for number in step.batches(lambda number, _: number):
                loss_of(a, b, number).backward()
            optimizer = optimizers[step.number % 2]
            norms.append(optimizer.clip_grad_norm_(0.1).item())
            optimizer.step()
            optimizer.zero_grad()
        expected, layers = reference_of_stages(pp)
        assert norms == pytest.approx(expected, rel=1e-6), "the norm is over the units of one optimizer in all stages"
        for found, plain in ((a, layers[stage]), (b, layers[pp + stage])):
            state = shardwell.full_state_dict(found)
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_alternating_optimizers_clip_over_all_trainers_of_a_replica(
    cluster: shardwell.LocalCluster, run_name: str, tp: int, pp: int
) -> None:
    run_ranks(grid_worker, cluster.address, run_name, tp, pp, count=tp * pp)
