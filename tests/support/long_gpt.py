"""A GPT that takes positions, its batches, and its training with context parallelism and in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwell
from examples.gpt import GPT, GPTConfig
from shardwell.parallel import ContextParallel, parallelize
from tests.support.split_gpt import loss_of, momentum_sgd

LENGTH, VOCABULARY, BATCH, STEPS, LR = 16, 32, 4, 4, 0.1


class LongGPT(GPT):
    """Gets positions, which a part of a sequence needs."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Expert(nn.Linear):
    """An expert of a ``Mixture``."""


class Mixture(nn.Module):
    """Sends each token to one of many experts."""

    def __init__(self, width: int, num_experts: int = 24) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(Expert(width, width) for _ in range(num_experts))
        self.used: set[int] = set()
        """The experts of the latest forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        self.used = set(chosen.unique().tolist())
        for number in sorted(self.used):
            at = torch.where(chosen == number)
            result = result.index_put(at, share[at][:, None] * torch.tanh(self.experts[number](x[at])))
        return result


def gpt(*, tied: bool = False, experts: bool = False) -> LongGPT:
    """Returns the model, with the same values each time.

    Args:
        tied: Whether the head shares the embedding's weight.
        experts: Whether the blocks have mixtures of experts.
    """
    torch.manual_seed(0)
    sizes = GPTConfig(vocab_size=VOCABULARY, context=LENGTH, num_layers=2, num_heads=2, width=12, tied=tied)
    model = LongGPT(sizes)
    for block in model.blocks if experts else ():
        block.mlp = Mixture(sizes.width)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)  # so that attention matters
    return model


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and targets of a work item. Each [BATCH, LENGTH]"""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def reference(dp: int = 1, *, momentum: float = 0.0, **options: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Trains in this process. ``options`` as in ``gpt``. Returns the parameters, and the mean loss of each step."""
    model, losses = gpt(**options), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for step in range(STEPS):
        found = []
        for dp_rank in range(dp):
            tokens, targets = batch(step, dp_rank)
            loss = loss_of(model(tokens, torch.arange(LENGTH)[None]), targets)
            (loss / dp).backward()
            found.append(float(loss.detach()))
        losses.append(sum(found) / dp)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), losses


def train(
    session: shardwell.Session,
    *,
    load_balance: bool = True,
    on_trainers: bool = False,
    checkpointed: bool = False,
    momentum: float = 0.0,
    steps: int = STEPS,
    experts: bool = False,
    note_experts: Callable[[list[set[int]]], None] = lambda _: None,
) -> list[float]:
    """Trains with context parallelism. Returns the mean losses of the steps that it takes.

    ``note_experts`` gets the experts of each block that this trainer's tokens were sent to in a work item.
    """
    context, model = ContextParallel(session, load_balance=load_balance), gpt(experts=experts)
    for block in model.blocks if checkpointed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    shardwell.auto_wrap(model, session, experts={Expert} if experts else ())
    optimizer = momentum_sgd(model, lr=LR, momentum=momentum, on_trainers=on_trainers)
    losses = []
    for step in session.steps(steps):
        for whole_tokens, whole_targets in step.batches(batch):
            tokens, targets = context.split(whole_tokens, whole_targets)
            with context:
                loss = loss_of(model(tokens, context.positions(tokens)), targets)
                loss.backward()
            step.log(loss=loss)
            note_experts([block.mlp.used for block in model.blocks if experts])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step.means["loss"])
    return losses


def train_divided(session: shardwell.Session, *, tied: bool = False, **tp: Any) -> None:
    """Trains with context parallelism, tensor parallelism and pipeline stages. ``tp`` as in ``parallelize``."""
    context = ContextParallel(session)
    example = torch.empty(BATCH, LENGTH // context.cp, dtype=torch.int64, device="meta")
    parallel = parallelize(
        gpt(tied=tied), session, loss=loss_of, example=(example, example), micro_batches=2, schedule="1F1B", tp=tp
    )
    optimizer = shardwell.optim.SGD(parallel.parameters(), lr=LR)
    for step in session.steps(STEPS):
        for whole_tokens, whole_targets in step.batches(batch):
            tokens, targets = context.split(whole_tokens, whole_targets)
            with context:
                parallel.schedule.step(tokens, context.positions(tokens).expand(tokens.shape), target=targets)
        optimizer.step()
        optimizer.zero_grad()
