"""Measures the effect of the consistency modes on the loss: ``python -m benchmarks.staleness``.

Trains the same small GPT on English text with the same work items in each mode, with SGD and Adam. All ranks are
sessions of one process. A simulated clock decides in which order they start and commit their items, so that the results
do not depend on the machine's speed. An asynchronous run takes one step of the optimizer for each item, where a
synchronous run takes one for the items of all ranks: it trains with the learning rate of the synchronous run, and with
that divided by the number of ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

import shardwell
from benchmarks import report
from benchmarks.report import Report, to_table
from benchmarks.wire_loss import (
    BATCH_SIZE,
    CONTEXT,
    HELD_OUT,
    NUM_LAYERS,
    VOCAB_SIZE,
    WIDTH,
    evaluate,
    loss_of,
)
from examples.corpus import Corpus, Windows
from examples.gpt import GPT, GPTConfig

NUM_RANKS, UNIT = 4, "gpt"
RATES = {"SGD": 0.5, "Adam": 4e-3}
ALIKE = (1.0, 1.01, 1.02, 1.03)
"""Simulated seconds that an item of each rank takes."""
ONE_SLOW = (1.0, 1.01, 1.02, 4.0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training."""

    optimizer: str
    rate: float
    mode: shardwell.Consistency
    item_s: tuple[float, ...]
    """Simulated seconds that an item of each rank takes."""


@dataclass
class Result:
    """Results of one setting."""

    losses: list[float] = field(default_factory=list)
    """Loss on held-out text after training, by seed."""
    duration_s: float = 0.0
    """Simulated seconds until the last commit."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Number of commits by staleness, in one training. Empty for SYNCHRONOUS."""


def settings() -> list[Setting]:
    """Returns all settings. The synchronous one comes first for each optimizer."""
    found = []
    for optimizer, rate in RATES.items():
        found.append(Setting(optimizer=optimizer, rate=rate, mode=shardwell.SYNCHRONOUS, item_s=ALIKE))
        for item_s, mode in (
            (ALIKE, shardwell.BOUNDED_STALENESS(0)),
            (ALIKE, shardwell.ASYNCHRONOUS),
            (ONE_SLOW, shardwell.BOUNDED_STALENESS(4)),
            (ONE_SLOW, shardwell.ASYNCHRONOUS),
        ):
            rates = (rate, rate / NUM_RANKS)
            found += [Setting(optimizer=optimizer, rate=each, mode=mode, item_s=item_s) for each in rates]
    return found


@dataclass(frozen=True)
class Data:
    """The text and the shape of the model."""

    config: GPTConfig
    training: torch.Tensor
    held_out: torch.Tensor


class Rank:
    """The trainer of one data rank, driven by the simulated clock.

    Args:
        session: Its session.
        setting: The setting.
        data: The text.
        num_items: Number of its work items.
    """

    def __init__(self, session: shardwell.Session, setting: Setting, data: Data, num_items: int) -> None:
        self.session, self.number = session, 0
        self._phases = self._train(setting, data, num_items)

    def _train(self, setting: Setting, data: Data, num_items: int) -> Iterator[None]:
        """Yields when an item is computed, and when it is committed."""
        model, optimizer = shard(self.session, setting, data)
        windows = Windows(data.training, CONTEXT)
        for step in self.session.steps(num_items):
            for batch in step.batches(windows, batch_size=BATCH_SIZE):
                loss_of(model, batch).backward()
            yield
            update(optimizer)
            yield

    def compute(self) -> None:
        """Reads the newest version and computes an item."""
        next(self._phases)

    def commit(self) -> None:
        """Commits the item."""
        next(self._phases)
        self.number += 1


def shard(session: shardwell.Session, setting: Setting, data: Data) -> tuple[GPT, shardwell.optim.ShardedOptimizer]:
    """Returns a sharded model and its optimizer. The initial weights depend on the run's seed only."""
    torch.manual_seed(session.seed)
    model = GPT(data.config)
    shardwell.fully_shard(model, session, name=UNIT)
    make: Any = getattr(shardwell.optim, setting.optimizer)
    return model, make(model.parameters(), lr=setting.rate)


def update(optimizer: shardwell.optim.ShardedOptimizer) -> None:
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(address: str, run: str, setting: Setting, data: Data, seed: int, num_items: int, result: Result) -> None:
    """Trains once and adds the results."""
    join = partial(shardwell.join, address, run=run, world=shardwell.World(dp=NUM_RANKS), seed=seed)
    if setting.mode.asynchronous:
        with ExitStack() as stack, ThreadPoolExecutor(NUM_RANKS) as pool:
            together = partial(join, min_trainers=NUM_RANKS, consistency=setting.mode)
            joins = [pool.submit(together, global_rank=rank) for rank in range(NUM_RANKS)]
            sessions = [stack.enter_context(each.result()) for each in joins]
            ranks = [Rank(session, setting, data, num_items) for session in sessions]
            result.duration_s = simulate(ranks, setting, num_items)
            staleness = Counter[int]()
            for session in sessions:
                staleness.update(session.report(last=num_items).staleness)
            result.staleness = dict(sorted(staleness.items()))
    else:
        with join(min_trainers=1) as session:
            train_synchronously(session, setting, data, num_items)
        result.duration_s = num_items * max(setting.item_s)
    reader, model = shardwell.attach(address, run=run), GPT(data.config)
    with reader:
        reader.follow(model)
    result.losses.append(evaluate(model, data.held_out))


def simulate(ranks: list[Rank], setting: Setting, num_items: int) -> float:
    """Lets the ranks compute and commit their items in the order of the simulated clock; returns its end."""
    limit, now = setting.mode.max_staleness, 0.0
    ends: dict[int, float] = {}
    """End of each item that is being computed, by rank."""
    while True:
        slowest = min(rank.number for rank in ranks)
        for index, rank in enumerate(ranks):
            may_start = limit is None or rank.number - slowest <= limit
            if index not in ends and rank.number < num_items and may_start:
                rank.compute()
                ends[index] = now + setting.item_s[index]
        if not ends:
            return now
        index = min(ends, key=lambda each: ends[each])
        now = ends.pop(index)
        ranks[index].commit()


def train_synchronously(session: shardwell.Session, setting: Setting, data: Data, num_steps: int) -> None:
    """Trains all ranks in one session. Contributions and their order are the same as with one process per rank."""
    model, optimizer = shard(session, setting, data)
    windows = Windows(data.training, CONTEXT)
    for step in session.steps(num_steps):
        for batch in step.batches(windows, batch_size=BATCH_SIZE):
            loss_of(model, batch).backward()
        update(optimizer)


def measure(num_items: int, seeds: int) -> tuple[str, list[tuple[Setting, Result]]]:
    """Runs all trainings; returns a heading and the results."""
    torch.set_num_threads(1)
    corpus = Corpus.read(None, vocab_size=VOCAB_SIZE)
    split = round(len(corpus.tokens) * (1 - HELD_OUT))
    config = GPTConfig(vocab_size=len(corpus.vocabulary), context=CONTEXT, num_layers=NUM_LAYERS, width=WIDTH)
    data = Data(config, corpus.tokens[:split], corpus.tokens[split:])
    found = [(setting, Result()) for setting in settings()]
    with shardwell.testing.in_process_cluster(num_shards=2) as address:  # times are not measured
        for seed in range(seeds):
            for number, (setting, result) in enumerate(found):
                train(address, f"{number}-{seed}", setting, data, seed, num_items, result)
                print(f"seed {seed}, {' '.join(to_row(setting, result))}", file=sys.stderr)
    heading = (
        f"Loss on held-out English text after {num_items} work items of each of {NUM_RANKS} ranks, with {BATCH_SIZE} x "
        f"{CONTEXT} tokens each, {seeds} seeds. Token frequencies alone give {corpus.unigram_entropy:.2f}. An item "
        "takes about 1 s of simulated time; with one slow rank, an item of that rank takes 4 s, and so does each step "
        "of a synchronous run."
    )
    return heading, found


def to_row(setting: Setting, result: Result) -> list[str]:
    """Returns a row of the table."""
    commits = sum(result.staleness.values())
    mean = sum(staleness * count for staleness, count in result.staleness.items()) / max(1, commits)
    return [
        setting.optimizer,
        str(setting.mode),
        "alike" if setting.item_s == ALIKE else "one slow",
        f"{setting.rate:g}",
        f"{mean:.1f}" if commits else report.ABSENT,
        str(max(result.staleness)) if commits else report.ABSENT,
        f"{result.duration_s:.0f} s",
        f"{statistics.mean(result.losses):.3f}",
        f"{min(result.losses):.3f} - {max(result.losses):.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the effect of the consistency modes on the loss.")
    parser.add_argument("--items", type=int, default=60, help="work items of each rank")
    parser.add_argument("--seeds", type=int, default=2)
    report.add_arguments(parser, name="staleness")
    arguments = parser.parse_args()
    document = Report(arguments, title="Loss in asynchronous runs")
    heading, found = measure(arguments.items, arguments.seeds)
    header = ["optimizer", "mode", "ranks", "lr", "mean staleness", "largest", "time", "mean loss", "lowest - highest"]
    table = to_table(header, [to_row(setting, result) for setting, result in found])
    results = [{**asdict(setting), "mode": str(setting.mode), **asdict(result)} for setting, result in found]
    document.write(results={"trainings": results}, sections=[f"{heading}\n\n{table}"])


if __name__ == "__main__":
    main()
