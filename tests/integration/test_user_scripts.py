"""Scripts of users, moved to Shardwell as the pages say: the same numbers as before, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributions import Categorical

import shardwell
import shardwell.testing


@pytest.fixture(autouse=True)
def _cluster() -> Iterator[None]:
    with shardwell.testing.in_process_cluster():
        yield


class Generator(nn.Module):
    """As in the DCGAN tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(4, 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(True),
            nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise: torch.Tensor) -> Any:
        return self.main(noise)


class Discriminator(nn.Module):
    """As in the DCGAN tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(4, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, image: torch.Tensor) -> Any:
        return self.main(image)


def train_gan(generator: nn.Module, discriminator: nn.Module, optimizers: Any) -> list[float]:
    """The loop of the DCGAN tutorial, unchanged."""
    of_discriminator = optimizers.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999), fused=True)
    of_generator = optimizers.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999), fused=True)
    criterion, losses = nn.BCELoss(), []
    torch.manual_seed(1)
    for real in torch.randn(4, 8, 1, 8, 8):
        discriminator.zero_grad()
        label = torch.ones(8)
        real_error = criterion(discriminator(real).view(-1), label)
        real_error.backward()
        fake = generator(torch.randn(8, 4, 1, 1))
        label.fill_(0)
        fake_error = criterion(discriminator(fake.detach()).view(-1), label)
        fake_error.backward()
        of_discriminator.step()
        generator.zero_grad()
        label.fill_(1)
        error = criterion(discriminator(fake).view(-1), label)
        error.backward()
        of_generator.step()
        losses += [real_error.item(), fake_error.item(), error.item()]
    return losses


def make_gan() -> tuple[Generator, Discriminator]:
    torch.manual_seed(0)
    return Generator(), Discriminator()


def test_a_gan_of_two_models_with_equal_names(tmp_path: Path) -> None:
    plain = make_gan()
    save_file(plain[1].state_dict(), tmp_path / "discriminator.safetensors")
    expected = train_gan(*plain, torch.optim)
    with shardwell.join() as session:
        generator, discriminator = make_gan()
        discriminator.main[0].weight.data.zero_()
        shardwell.auto_wrap(generator, session)
        source = shardwell.from_safetensors(discriminator, tmp_path / "discriminator.safetensors")
        shardwell.auto_wrap(discriminator, session, source=source)
        assert train_gan(generator, discriminator, shardwell.optim) == expected
        for model, before in ((generator, plain[0]), (discriminator, plain[1])):
            values = shardwell.full_state_dict(model)
            assert values.keys() == before.state_dict().keys()
            assert all(torch.equal(value, values[name]) for name, value in before.state_dict().items())
        assert [name for name in session.units.by_name if name.startswith("Discriminator")]


class Agent(nn.Module):
    """An agent as in CleanRL: no forward, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.log_temperature = nn.Parameter(torch.zeros(1))

    def get_value(self, x: torch.Tensor) -> Any:
        return self.critic(x)

    def get_action_and_value(self, x: torch.Tensor, action: Any = None) -> tuple[Any, Any, Any]:
        policy = Categorical(logits=self.actor(x) / self.log_temperature.exp())
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), self.critic(x)


class TwoParts(Agent):
    """An agent whose parameters are all in modules."""

    def __init__(self) -> None:
        super().__init__()
        del self.log_temperature
        self.log_temperature: torch.Tensor = torch.zeros(1)


def train_agent(agent: Any, optimizers: Any) -> list[float]:
    """Several epochs for each rollout."""
    optimizer = optimizers.Adam(agent.parameters(), lr=0.01, fused=True)
    losses = []
    torch.manual_seed(1)
    for _ in range(2):
        with torch.no_grad():
            seen = torch.randn(8, 4)
            action, before, value = agent.get_action_and_value(seen)
            returns = seen.sum(1) + 0.9 * agent.get_value(seen + 1).view(-1)
            advantage = returns - value.view(-1)
        for _ in range(3):
            for chosen in torch.randperm(8).view(2, 4):
                _, after, value = agent.get_action_and_value(seen[chosen], action[chosen])
                ratio = (after - before[chosen]).exp()
                loss = (value.view(-1) - returns[chosen]).square().mean() - (advantage[chosen] * ratio).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses


def seeded(kind: type[Agent]) -> Agent:
    torch.manual_seed(0)
    return kind()


def test_an_agent_whose_parts_are_sharded_as_the_error_advises() -> None:
    expected = train_agent(seeded(TwoParts), torch.optim)
    with shardwell.join() as session:
        agent = seeded(TwoParts)
        with pytest.raises(
            shardwell.UsageError, match=r"for part in model\.children\(\): shardwell\.auto_wrap\(part, s"
        ):
            shardwell.auto_wrap(agent, session)
        for part in agent.children():
            shardwell.auto_wrap(part, session)
        assert train_agent(agent, shardwell.optim) == expected


def test_an_agent_that_gets_a_forward_as_the_error_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train_agent(seeded(Agent), torch.optim)
    monkeypatch.setattr(Agent, "forward", Agent.get_value)
    with shardwell.join() as session:
        agent = shardwell.auto_wrap(seeded(Agent), session)
        for name in ("get_value", "get_action_and_value"):
            shardwell.register_forward_method(agent, name)
        assert train_agent(agent, shardwell.optim) == expected
