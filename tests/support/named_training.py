"""Training of the small transformer in this process, with the model's own names, and its plain counterpart."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

import shardwell
from tests.support import transformer
from tests.support.reference import ADAMW, train_plain

DP = 2


def join(address: str, run: str, folder: Path | str, **options: Any) -> shardwell.Session:
    """Joins as the only trainer of a run of two ranks."""
    return shardwell.join(
        address, run=run, world=shardwell.World(dp=DP), min_trainers=1, checkpoint_dir=str(folder), **options
    )


def train(session: shardwell.Session, *, steps: int) -> dict[str, torch.Tensor]:
    """Trains to a number of steps. Returns the final state."""
    model = transformer.build()
    shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({transformer.Block}))
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    for step in session.steps(steps):
        for tokens in step.batches(transformer.batch):
            model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return shardwell.full_state_dict(model)


@cache
def plain(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Returns the weights and the optimizer state of plain training, by name."""
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    train_plain(model, optimizer, transformer.batch, dp=DP, steps=steps)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return dict(model.state_dict()), {names[at]: dict(state) for at, state in optimizer.state.items()}
