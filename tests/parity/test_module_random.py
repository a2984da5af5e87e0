"""Random programs of nested, reused, checkpointed and in-place modules match plain PyTorch."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwell.module.fully_shard import ShardedModule, fully_shard
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Pair, inputs

WIDTH = 6


class Layer(nn.Module):
    """Applies one of several operations to its input."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.kind = rng.randrange(8)
        self.side_result: torch.Tensor | None = None
        if rng.random() < 0.2:
            (self if rng.random() < 0.3 else self.linear.weight).requires_grad_(False)

    def forward(self, x: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
        if self.kind == 1:
            return F.relu(self.linear(x), inplace=True)
        if self.kind == 2:
            return self.linear(x.mul_(1.1))
        if self.kind == 3:
            return self.linear(x).view(-1, WIDTH)[:]
        if self.kind == 4:
            return x + self.linear(x) * self.scale
        if self.kind == 5:
            self.side_result = self.router(x).square().mean()
        if self.kind == 6:
            return x if first is None else self.linear(x + first)
        return self.scale[None] + x if self.kind == 7 else self.linear(x)


class Group(nn.Module):
    """Calls its layers and groups in one of several ways, some of them twice."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            Group(rng, depth - 1) if depth and rng.random() < 0.6 else Layer(rng) for _ in range(rng.randint(1, 3))
        )
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.mode, self.packing, self.skips = rng.randrange(6), rng.randrange(4), rng.random() < 0.3
        # Reentrant checkpoints add the gradients of a repeated module piece by piece, in the order of the pushes.
        self.repeats = 1 if self.mode == 2 else rng.choice([1, 1, 1, 2])

    def forward(self, x: torch.Tensor, first: torch.Tensor | None = None) -> Any:
        before = x
        for part in [*self.parts] * self.repeats:
            if self.mode in (1, 2) and x.requires_grad:
                x = unpack(checkpoint(part, x, use_reentrant=self.mode == 2))
            elif self.mode == 3:
                x = unpack(part(x))
                x += 1
            else:
                x = unpack(part(x, before) if self.mode == 4 else part(x))
            x = x * 0.7
        x = (x + before.mean() if self.skips else x) * self.scale
        return {0: x, 1: [x, {"detached": x.detach()}], 2: (x, x * 2), 3: SimpleNamespace(x=x)}[self.packing]


class Program(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.groups = nn.ModuleList(Group(rng, 2) for _ in range(rng.randint(1, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for group in self.groups:
            x = unpack(group(x))
        return self.last(x)

    def side_results(self) -> torch.Tensor:
        found = torch.zeros(())
        for module in self.modules():
            if isinstance(module, Layer) and module.side_result is not None:
                found, module.side_result = found + module.side_result, None
        return found

    def recomputes(self) -> bool:
        return any(isinstance(module, Group) and module.mode in (1, 2) for module in self.modules())

    def recomputes_reentrantly(self) -> bool:
        return any(isinstance(module, Group) and module.mode == 2 for module in self.modules())


def unpack(result: Any) -> torch.Tensor:
    if isinstance(result, (list, tuple)):
        return result[0]
    return result.x if isinstance(result, SimpleNamespace) else result


def wrap_randomly(rng: random.Random) -> Any:
    def wrap(model: Any, session: Any) -> None:
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, (Group, Layer))]
        for _, module in sorted(named, key=lambda item: -item[0].count(".")):
            if rng.random() < 0.6:
                fully_shard(module, session, reshard_after_forward=rng.choice([None, None, True, False]))
        if rng.random() < 0.8:
            fully_shard(model, session)
        else:
            for module in (model.first, model.last, *model.groups):
                if not isinstance(module, ShardedModule):
                    fully_shard(module, session)

    return wrap


def compute(model: Program, number: int, choices: dict[str, bool]) -> torch.Tensor:
    """Runs one micro-batch. Raises RuntimeError if plain torch rejects the program."""
    x = inputs(number, 5, 4, requires_grad=choices["needs input gradient"])
    if choices["fails"]:
        handle = model.last.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
    if choices["evaluates"]:
        with torch.no_grad():
            model(x)
    model.side_results()
    loss = model(x).square().mean()
    side_results = model.side_results()
    if choices["uses side results"] and not model.recomputes():
        loss = loss + side_results
    if choices["twice"] and not model.recomputes_reentrantly():
        loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


class RejectedByTorch(Exception):
    """Plain torch cannot run the program, for example because of an in-place operation."""


def train(rng: random.Random) -> None:
    pair = Pair(
        Program(rng),
        wrap_randomly(rng),
        store=InMemoryStore(rng.randint(1, 3)),
        prefetch_bytes=rng.choice([0, 500, 1 << 20]),
    )
    sharded_modules: list[Any] = [part for part in pair.sharded.model.modules() if isinstance(part, ShardedModule)]
    names = ("needs input gradient", "fails", "evaluates", "uses side results", "twice")
    for step in range(3):
        for micro_batch in range(rng.randint(1, 3)):
            for module in sharded_modules:
                # After one push all later gradients are pushed, too: the order of summation must not change.
                if micro_batch == 0 or rng.random() < 0.3:
                    module.set_requires_gradient_sync(micro_batch > 0 or rng.random() < 0.7, recurse=False)
                if rng.random() < 0.1:
                    module.set_reshard_after_backward(rng.random() < 0.5, recurse=rng.random() < 0.5)
            choices = {name: rng.random() < 0.2 for name in names}
            try:
                expected = compute(pair.plain, 10 * step + micro_batch, choices)
            except RuntimeError as error:
                raise RejectedByTorch from error
            assert torch.equal(compute(pair.sharded.model, 10 * step + micro_batch, choices), expected)
        pair.step()
    pair.compare()


@pytest.mark.parametrize("seed", range(60))
def test_random_program_matches_torch(seed: int) -> None:
    for attempt in itertools.count():
        torch.manual_seed(seed)
        try:
            train(random.Random(f"{seed} {attempt}"))
        except RejectedByTorch:
            continue
        return
