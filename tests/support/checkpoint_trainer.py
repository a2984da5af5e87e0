"""A trainer process for tests of checkpoints. Prints one JSON line per step and a hash at the end.

``python -m tests.support.checkpoint_trainer --address A --run R --kind KIND --steps N [--checkpoint-dir D ...]``

Every kind has another optimizer and therefore another state: see ``KINDS``. The model has BatchNorm buffers, and a
learning rate scheduler is tracked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwell
from tests.support.cluster import join_options, wait_until
from tests.support.reference import sha256

WIDTH, BATCH = 24, 6
ADAM = {"lr": 2e-3, "betas": (0.5, 0.99)}


class Net(nn.Module):
    """Two units with matrices, vectors, odd sizes and BatchNorm."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(17, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 67))
        self.second = nn.Sequential(nn.Linear(67, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


def batch(step: int, dp_rank: int) -> torch.Tensor:
    """Returns a batch that depends on step and rank."""
    return torch.randn(BATCH, 17, generator=torch.Generator().manual_seed(1000 * step + dp_rank))


def shard(model: Net, session: shardwell.Session, name: str, placement: Any = "flat") -> Any:
    shardwell.fully_shard(model.first, session, name=f"{name}-first", placement=placement)
    shardwell.fully_shard(model.second, session, name=f"{name}-second", placement=placement)
    return shardwell.fully_shard(model, session, name=name, placement=placement)


def build(outputs: int = 1) -> Net:
    torch.manual_seed(7)
    return Net(outputs)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.ndim == 2]


def _others(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.ndim != 2]


def _make_optimizer(kind: str, model: nn.Module) -> Any:
    match kind:
        case "sgd" | "error-feedback":
            return shardwell.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        case "adamw" | "deltas":
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=2e-3)
            optimizer.ema_decay = 0.8
            return optimizer
        case "client-side":
            return shardwell.ClientSide(model.parameters(), torch.optim.AdamW, lr=2e-3)
        case "adafactor":
            return shardwell.optim.Adafactor(model.parameters(), lr=1e-2)
        case "muon":
            return shardwell.optim.Combined(
                [shardwell.optim.Muon(_matrices(model), lr=1e-2), shardwell.optim.AdamW(_others(model), lr=2e-3)]
            )
    raise ValueError(kind)


KINDS = ("sgd", "adamw", "client-side", "adafactor", "muon", "gan", "error-feedback")

WIRE_KINDS: dict[str, dict[str, Any]] = {
    "error-feedback": {"push_dtype": "int8", "push_error_feedback": True},
    "deltas": {"transports": "socket", "gather_dtype": "bfloat16", "delta_cache_bytes": 1 << 30},
}
"""Options of kinds whose values travel in another way."""


def transfers(kind: str) -> dict[str, Any]:
    """Returns the options of ``join_options`` for a kind."""
    return WIRE_KINDS.get(kind, {})


class Pause:
    """Waits in the first batch of one step until a file exists.

    Args:
        step: The step. None: never.
        path: The file.
    """

    def __init__(self, step: int | None, path: str) -> None:
        self._step, self._path = step, Path(path)

    def __call__(self, step: int) -> None:
        if step == self._step:
            print(json.dumps({"step": step, "paused": True}), flush=True)
            wait_until(self._path.exists, f"{self._path} exists", timeout_s=60)


def train(session: shardwell.Session, kind: str, steps: int, pause: Pause) -> dict[str, Any]:
    """Trains to a number of loop steps. Returns the final state."""
    if kind == "gan":
        return _train_gan(session, steps, pause)
    whole = kind in ("adafactor", "muon")
    model = shard(build(), session, "net", "tensor" if whole else "flat")
    optimizer = _make_optimizer(kind, model)
    scheduled = optimizer if hasattr(optimizer, "param_groups") else None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.9) if scheduled is not None else None
    if scheduler is not None:
        session.track(scheduler=scheduler)
    for step in session.steps(steps):
        for x in step.batches(batch):
            pause(step.number)
            loss = F.smooth_l1_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            _report(step.number, loss)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return shardwell.full_state_dict(model)


def _train_gan(session: shardwell.Session, steps: int, pause: Pause) -> dict[str, Any]:
    """Two optimizers in turn: two commits per step. Every second step keeps gradients for the other optimizer."""
    net_d, net_g = shard(build(), session, "d"), shard(build(17), session, "g")
    optimizer_d = shardwell.optim.Adam(net_d.parameters(), **ADAM)
    optimizer_g = shardwell.optim.SGD(net_g.parameters(), lr=0.05, momentum=0.9)
    for step in session.steps(steps, optimizer_steps=2):
        for x in step.batches(batch):
            pause(step.number)
            loss = F.softplus(net_d(net_g(x).detach())).mean() + F.softplus(-net_d(x)).mean()
            loss.backward()
            _report(step.number, loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        for x in step.batches(batch):
            F.softplus(-net_d(net_g(x))).mean().backward()
        if step.number % 2:
            optimizer_d.zero_grad()
        optimizer_g.step()
        optimizer_g.zero_grad()
    return {
        **{f"d.{name}": value for name, value in shardwell.full_state_dict(net_d).items()},
        **{f"g.{name}": value for name, value in shardwell.full_state_dict(net_g).items()},
    }


def _report(step: int, loss: torch.Tensor) -> None:
    print(json.dumps({"step": step, "loss": loss.item()}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--kind", choices=(*KINDS, "deltas"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--trainer", default="")
    parser.add_argument("--min-trainers", type=int)
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--keep", type=int)
    parser.add_argument("--resume")
    parser.add_argument("--pause-at-step", type=int)
    parser.add_argument("--pause-until", default="")
    parser.add_argument("--transports")
    parser.add_argument("--chunk-bytes", type=int)
    options = parser.parse_args()
    session = shardwell.join(
        options.address,
        run=options.run,
        world=shardwell.World(dp=options.dp),
        min_trainers=options.min_trainers,
        trainer=options.trainer,
        **join_options(
            checkpoint_dir=options.checkpoint_dir,
            checkpoint_every=options.checkpoint_every,
            keep=options.keep,
            resume=options.resume,
            chunk_bytes=options.chunk_bytes,
            wait_limit_s=90,
            **{"transports": options.transports, **transfers(options.kind)},
        ),
    )
    state = train(session, options.kind, options.steps, Pause(options.pause_at_step, options.pause_until))
    print(json.dumps({"sha256": sha256(state)}), flush=True)
    session.close()


if __name__ == "__main__":
    main()
