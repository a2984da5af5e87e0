"""Measures the effect of lossy wire dtypes on the loss, by the same trainings on English text with each dtype.

Runs over loopback without limits, because the network's speed does not affect the arithmetic.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR

import shardwell
from benchmarks.report import to_table
from benchmarks.wire_options import WIRE_OPTIONS
from examples.corpus import Corpus, Windows
from examples.gpt import GPT, GPTConfig

VOCAB_SIZE, CONTEXT, BATCH_SIZE, NUM_RANKS = 1024, 64, 16, 2
LEARNING_RATE = 8e-3
HELD_OUT = 0.1
"""Fraction at the end of the text that is not used for training."""


@dataclass(frozen=True, kw_only=True)
class LossCheck:
    """Losses on held-out text after training, by wire options and seed."""

    steps: int
    parameters: int
    unigram_entropy: float
    """Loss of a model that knows token frequencies only, in nats per token."""
    losses: dict[str, list[float]]

    def to_markdown(self) -> str:
        seeds = len(next(iter(self.losses.values())))
        reference = self.losses["fp32"]
        heading = (
            f"Loss on held-out English text after {self.steps} steps, {seeds} seeds, on loopback without limits (the "
            f"network's speed has no effect): a GPT with {self.parameters / 1e6:.2f} M parameters, "
            f"{NUM_RANKS} logical ranks of {BATCH_SIZE} x {CONTEXT} tokens; evaluated with the fp32 weights of the "
            f"servers. Token frequencies alone give {self.unigram_entropy:.2f}."
        )
        rows = []
        for name, losses in self.losses.items():
            differences = [loss - same for loss, same in zip(losses, reference, strict=True)]
            largest = max(differences, key=abs)
            difference = f"{statistics.mean(differences):+.4f} ({largest:+.4f})"
            rows.append([name, f"{statistics.mean(losses):.4f}", f"{max(losses) - min(losses):.4f}", difference])
        header = ["on the wire", "mean loss", "highest - lowest", "difference to fp32, same seed: mean (largest)"]
        return f"{heading}\n\n{to_table(header, rows)}"


def measure_losses(seeds: Sequence[int], steps: int) -> LossCheck:
    """Trains with all wire options and seeds."""
    torch.set_num_threads(1)
    corpus = Corpus.read(None, vocab_size=VOCAB_SIZE)
    config = GPTConfig(vocab_size=len(corpus.vocabulary), context=CONTEXT)
    trained = round(len(corpus.tokens) * (1 - HELD_OUT))
    losses: dict[str, list[float]] = {name: [] for name in WIRE_OPTIONS}
    with shardwell.LocalCluster(num_shards=2) as cluster:
        for seed in seeds:
            for name, transfer in WIRE_OPTIONS.items():
                transfers = shardwell.TransferOptions(**transfer.options())
                join = partial(shardwell.join, cluster.address, run=f"{name}-{seed}", seed=seed, transfers=transfers)
                model = train(join, config, corpus.tokens[:trained], steps, seed)
                losses[name].append(evaluate(model, corpus.tokens[trained:]))
                print(f"loss check, seed {seed}, {name}: {losses[name][-1]:.4f}", file=sys.stderr)
    return LossCheck(
        steps=steps,
        parameters=sum(parameter.numel() for parameter in GPT(config).parameters()),
        unigram_entropy=corpus.unigram_entropy,
        losses=losses,
    )


def train(join: Callable[..., shardwell.Session], config: GPTConfig, tokens: Tensor, steps: int, seed: int) -> GPT:
    """Trains one model and returns it as a plain module with the servers' weights."""
    torch.manual_seed(seed)
    windows = Windows(tokens, CONTEXT)
    # One process plays all ranks. Contributions and their order are the same as with one process per rank.
    with join(world=shardwell.World(dp=NUM_RANKS), min_trainers=1) as session:
        model = GPT(config)
        for block in model.blocks:
            shardwell.fully_shard(block, session)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.2, cycle_momentum=False)
        for step in session.steps(steps):
            for batch in step.batches(windows, batch_size=BATCH_SIZE):
                loss_of(model, batch).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        plain = GPT(config)
        plain.load_state_dict(shardwell.full_state_dict(model))
    return plain


@torch.no_grad()
def evaluate(model: GPT, tokens: Tensor) -> float:
    """Returns the mean loss over the text, cut into adjacent windows."""
    count = (len(tokens) - 1) // CONTEXT
    windows = tokens[: count * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)  # [count, CONTEXT + 1]
    return loss_of(model, windows).item()


def loss_of(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
