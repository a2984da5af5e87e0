"""Compares starts of the iterations that find low-rank factors: ``python -m benchmarks.low_rank_starts``.

Trains the GPT of ``benchmarks.wire_loss`` in plain PyTorch, on the same text. Every logical rank replaces its gradients
by products of factors, with error feedback, before they are added. The iterations that find factors start at random
numbers, or at the right factor of the step before, as in PowerSGD (a warm start).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks import report
from benchmarks.report import Report, to_table
from benchmarks.wire_loss import (
    BATCH_SIZE,
    CONTEXT,
    LEARNING_RATE,
    NUM_RANKS,
    VOCAB_SIZE,
    evaluate,
    loss_of,
    model_and_text,
)
from examples.corpus import Corpus, Windows
from examples.gpt import GPT, GPTConfig
from shardwell_wire.encoding import low_rank_factors
from shardwell_wire.encoding.wire_dtypes import AS_STORED, LOW_RANK, applied
from shardwell_wire.model.layout import Parameter

KINDS = {rank: kind for kind, rank in LOW_RANK.items()}


@dataclass(frozen=True)
class Start:
    """How the factors of a matrix are found."""

    rank: int
    iterations: int
    at: str
    """One of ``POINTS``."""


SAME, NEW, WARM = "the same random numbers", "new random numbers", "the factor of the step before"
POINTS = (SAME, NEW, WARM)
STARTS = [Start(rank, iterations, at) for rank in (1, 4) for iterations in (1, 2) for at in POINTS]


@dataclass
class StartResult:
    """Results of one start."""

    losses: list[float] = field(default_factory=list)
    """Loss on held-out text after training, by seed."""
    errors: list[float] = field(default_factory=list)
    """Mean relative error of a push, by seed: the norm of what it left out, divided by the norm of all."""


class Compressor:
    """Replaces the gradients of one rank by what would be pushed.

    Args:
        start: How factors are found.
        model: Has the parameters.
    """

    def __init__(self, start: Start, model: GPT) -> None:
        self._start = start
        parameters = list(model.parameters())
        self._residuals = [torch.zeros_like(parameter) for parameter in parameters]
        self._right: list[Tensor | None] = [None] * len(parameters)
        described = [Parameter("p", tuple(parameter.shape), "float32") for parameter in parameters]
        self._encoded = [applied(KINDS[start.rank], each) != AS_STORED for each in described]

    def pushed(self, index: int, gradient: Tensor, step: int) -> tuple[Tensor, float, float]:
        """Returns what arrives, the squared norm of what is left out, and the squared norm of all."""
        if not self._encoded[index]:
            return gradient, 0.0, 0.0
        matrix = (gradient + self._residuals[index]).flatten(1)
        at = self._right[index] if self._start.at == WARM else None
        if at is None:
            seed = step if self._start.at == NEW else 0
            at = low_rank_factors.random_start(matrix.size(1), self._start.rank, seed)
        left, right = low_rank_factors.factors_of(matrix, at, self._start.iterations)
        self._right[index] = right.float().t()
        arrived = left.float() @ right.float()
        self._residuals[index] = (matrix - arrived).view_as(gradient)
        return (
            arrived.view_as(gradient),
            self._residuals[index].square().sum().item(),
            matrix.square().sum().item(),
        )


def train(start: Start, config: GPTConfig, tokens: Tensor, steps: int, seed: int) -> tuple[GPT, float]:
    """Trains one model. Returns it, and the mean relative error of a push."""
    torch.manual_seed(seed)
    model, windows = GPT(config), Windows(tokens, CONTEXT)
    ranks = [Compressor(start, model) for _ in range(NUM_RANKS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.2, cycle_momentum=False)
    generator, errors = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        left_out = norm = 0.0
        for rank in ranks:
            chosen = torch.randint(len(windows), (BATCH_SIZE,), generator=generator).tolist()
            model.zero_grad()
            loss_of(model, torch.stack([windows[index] for index in chosen])).backward()
            for index, parameter in enumerate(model.parameters()):
                assert parameter.grad is not None
                arrived, lost, total = rank.pushed(index, parameter.grad, step)
                sums[index] += arrived
                left_out, norm = left_out + lost, norm + total
        errors.append((left_out / norm) ** 0.5)
        for parameter, total_gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = total_gradient / NUM_RANKS
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return model, statistics.mean(errors)


def measure(seeds: Sequence[int], steps: int) -> list[StartResult]:
    """Trains with all starts and seeds. Returns the results in the order of ``STARTS``."""
    torch.set_num_threads(1)
    config, training, held_out = model_and_text(Corpus.read(None, vocab_size=VOCAB_SIZE))
    results = [StartResult() for _ in STARTS]
    for seed in seeds:
        for start, result in zip(STARTS, results, strict=True):
            model, error = train(start, config, training, steps, seed)
            result.losses.append(evaluate(model, held_out))
            result.errors.append(error)
            print(
                f"seed {seed}, rank {start.rank}, {start.at}, {start.iterations}: {result.losses[-1]:.4f}",
                file=sys.stderr,
            )
    return results


def to_markdown(results: Sequence[StartResult]) -> str:
    rows = [
        [
            str(start.rank),
            str(start.iterations),
            start.at,
            f"{statistics.mean(result.errors):.1%}",
            f"{statistics.mean(result.losses):.4f}",
            f"{min(result.losses):.4f} to {max(result.losses):.4f}",
        ]
        for start, result in zip(STARTS, results, strict=True)
    ]
    return to_table(["rank", "iterations", "start at", "mean error of a push", "mean loss", "least to most"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares starts of the iterations that find low-rank factors.")
    parser.add_argument("--seeds", type=int, default=3, help="number of trainings with each start")
    parser.add_argument("--steps", type=int, default=200, help="steps of each training")
    report.add_arguments(parser, name="low_rank_starts")
    arguments = parser.parse_args()
    document = Report(arguments, title="Starts of low-rank factors")
    results = measure(range(arguments.seeds), arguments.steps)
    rows = [{**asdict(start), **asdict(result)} for start, result in zip(STARTS, results, strict=True)]
    document.write(results={"steps": arguments.steps, "starts": rows}, sections=[to_markdown(results)])


if __name__ == "__main__":
    main()
