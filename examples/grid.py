"""Trains the small GPT in a grid: data x tensor x pipeline, with one small process per logical rank.

Eight trainers on a private cluster: shardwell launch --num-trainers 8 --dp 2 --tp 2 --pp 2 --restart 1 examples/grid.py

If a trainer is killed, launch starts it again. The others of its replica go on in their processes, and the hash of the
weights stays the same.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Mapping

import torch
from corpus import Corpus
from gpt import GPT, GPTConfig
from torch.nn import functional

import shardwell
from shardwell.parallel import SCHEDULES, parallelize


def main() -> None:
    arguments = parse_arguments()
    corpus = Corpus.read(arguments.text, vocab_size=arguments.vocab_size)
    with shardwell.join(seed=arguments.seed) as session:
        session.run_replica(lambda session: train(session, corpus, arguments))
        if session.global_rank == 0:
            print(f"SHA-256 of the weights: {hash_of(read_weights(session, len(corpus.vocabulary), arguments))}")


def train(session: shardwell.Session, corpus: Corpus, arguments: argparse.Namespace) -> None:
    """Trains from the run's step to the last one. Called again with new stages if this replica loses a trainer."""
    parallel = parallelize(
        make_model(len(corpus.vocabulary), arguments),
        session,
        loss=next_token_loss,
        example=torch.zeros(arguments.batch_size, arguments.context, dtype=torch.int64),
        micro_batches=arguments.micro_batches,
        schedule=arguments.schedule,
        tp={"fused_by_head": True},
    )
    if session.global_rank == 0:
        print(f"{session.world}\n{parallel.describe()}", flush=True)
    optimizer = shardwell.optim.AdamW(parallel.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    windows, started, idle_shares = corpus.windows(arguments.context), time.perf_counter(), list[float]()
    for step in session.steps(arguments.num_steps):
        for batch in step.batches(windows, batch_size=arguments.batch_size):  # [batch_size, context + 1]
            loss = parallel.schedule.step(batch[:, :-1], target=batch[:, 1:])
            idle_shares.append(parallel.schedule.idle_share)
            step.log(loss=loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if session.global_rank == 0 and step.number % 5 == 0:
            print(f"step {step.number:3d}  loss {step.means['loss']:.3f}", flush=True)
    print_summary(session, idle_shares, seconds=time.perf_counter() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small GPT in a grid of trainers.")
    parser.add_argument("--text", metavar="FILE", help="English text (default: Python's language reference)")
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per work item")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--context", type=int, default=32, help="tokens per window")
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(vocab_size: int, arguments: argparse.Namespace) -> GPT:
    """Returns the whole model in this process. Its vocabulary is padded to a multiple of 8."""
    torch.manual_seed(arguments.seed)
    padded = -(-vocab_size // 8) * 8
    return GPT(GPTConfig(vocab_size=padded, context=arguments.context, tied=False))


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def print_summary(session: shardwell.Session, idle_shares: list[float], *, seconds: float) -> None:
    """Prints one line per trainer."""
    idle = sum(idle_shares) / max(1, len(idle_shares))
    place = f"dp {session.dp_rank} tp {session.tp_rank} pp {session.pp_rank}"
    print(f"rank {session.global_rank} ({place}): {seconds:.1f} s, bubble measured {idle:.0%}", flush=True)


def read_weights(
    session: shardwell.Session, vocab_size: int, arguments: argparse.Namespace
) -> Mapping[str, torch.Tensor]:
    """Returns the whole weights as a reader of the run sees them."""
    plain = make_model(vocab_size, arguments)
    with shardwell.attach(session.config.address, run=session.run) as reader:
        reader.follow(plain)
    return plain.state_dict()


def hash_of(state: Mapping[str, torch.Tensor]) -> str:
    """Returns the SHA-256 of all bits of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
