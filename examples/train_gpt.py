"""Trains a small GPT on English text, with its parameters on shard servers.

Two trainers on a private cluster:   shardwell launch examples/train_gpt.py
One trainer, one shard server:       python examples/train_gpt.py
On an existing cluster:              SHARDWELL_ADDRESS=host:50051 SHARDWELL_DP=2 python examples/train_gpt.py
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from corpus import Corpus
from gpt import GPT, GPTConfig, generate
from report import History, Progress, describe_costs, draw_curve, save_curve
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR

import shardwell


def main() -> None:
    arguments = parse_arguments()
    corpus = Corpus.read(arguments.text, vocab_size=arguments.vocab_size)
    # A small prefetch limit shows that a trainer needs memory for the layers in use only.
    with shardwell.join(seed=arguments.seed, transfers=shardwell.TransferOptions(prefetch_bytes=1 << 20)) as session:
        model = make_model(session, len(corpus.vocabulary), arguments)
        if session.global_rank == 0:
            print_introduction(session, model, corpus)
        started, first_step = time.perf_counter(), session.step
        history, is_printing = train(session, model, corpus, arguments)
        seconds = time.perf_counter() - started
        if arguments.hash_file:
            Path(arguments.hash_file).write_text(hash_of(shardwell.full_state_dict(model)))
        elif is_printing:
            print_summary(model, corpus, history, Path(arguments.output))
            print(describe_costs(session, model, seconds=seconds, num_steps=session.step - first_step))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small GPT with its parameters on shard servers.")
    parser.add_argument("--text", metavar="FILE", help="English text (default: Python's language reference)")
    parser.add_argument("--num-steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per logical rank and step")
    parser.add_argument("--context", type=int, default=64, help="tokens per window")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", metavar="DIR", default="demo-output", help="folder for the image of the loss curve")
    parser.add_argument("--hash-file", metavar="FILE", help="write the hash of the weights there, instead of a summary")
    arguments = parser.parse_args()
    if arguments.num_steps < 6:  # OneCycleLR would divide by zero
        parser.error(f"--num-steps {arguments.num_steps}: expected at least 6, because the learning rate first rises")
    return arguments


def make_model(session: shardwell.Session, vocab_size: int, arguments: argparse.Namespace) -> GPT:
    """Returns a GPT with its parameters on the shard servers: one unit per block, one for the rest."""
    torch.manual_seed(arguments.seed)
    model = GPT(GPTConfig(vocab_size=vocab_size, context=arguments.context))
    for index, block in enumerate(model.blocks):
        shardwell.fully_shard(block, session, name=f"blocks.{index}")
    shardwell.fully_shard(model, session)
    return model


def train(
    session: shardwell.Session, model: GPT, corpus: Corpus, arguments: argparse.Namespace
) -> tuple[History, bool]:
    """Runs the training loop. If a trainer dies at any line of the loop, the run continues.

    Returns:
        The losses, and True if this trainer prints, because it did the work of rank 0 in the last step.
    """
    optimizer = shardwell.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, arguments.lr, arguments.num_steps, pct_start=0.2, cycle_momentum=False)
    history = History()
    session.track(scheduler=scheduler, history=history)
    windows = corpus.windows(arguments.context)
    step_tokens = session.world.dp * arguments.batch_size * arguments.context
    progress = Progress(session, num_steps=arguments.num_steps, step_tokens=step_tokens)
    is_printing = session.global_rank == 0

    for step in session.steps(arguments.num_steps):
        for batch in step.batches(windows, batch_size=arguments.batch_size):  # [batch_size, context + 1]
            logits = model(batch[:, :-1])  # [batch_size, context, vocab_size]
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            history.add(step.number, loss.item())
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        is_printing = 0 in step.global_ranks  # if the trainer of rank 0 is lost, another one acts for the rank
        if is_printing:
            progress.show(step.number, history.recent_loss())
    return history, is_printing


def hash_of(state: Mapping[str, torch.Tensor]) -> str:
    """Returns the SHA-256 of all bits of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def print_introduction(session: shardwell.Session, model: GPT, corpus: Corpus) -> None:
    """Prints the sizes of the model and the text."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"A GPT with {num_parameters / 1e6:.2f} M parameters in {len(model.blocks) + 1} units, {session.world}.\n"
        f"{len(corpus.text):,} characters of text are {len(corpus.tokens):,} tokens of a vocabulary of "
        f"{len(corpus.vocabulary):,}; token frequencies alone give a loss of {corpus.unigram_entropy:.2f}.",
        flush=True,
    )


def print_summary(model: GPT, corpus: Corpus, history: History, output: Path) -> None:
    """Prints the loss curve and a text sample of the trained model."""
    picture = output / "loss.png"
    save_curve(history, corpus.unigram_entropy, picture)
    print(f"\n{draw_curve(history, corpus.unigram_entropy)}\n")
    print(
        f"The loss fell from {history.losses[0]:.2f} to {history.recent_loss():.2f}, "
        f"against {corpus.unigram_entropy:.2f} for token frequencies alone. Image: {picture}"
    )
    plain = GPT(model.config)
    plain.load_state_dict(shardwell.full_state_dict(model))
    sample = generate(plain, corpus.tokens[:16], 200)
    print(f"\nThe trained model writes:\n\n{corpus.vocabulary.decode(sample)}\n")


if __name__ == "__main__":
    # With `docker stop`, as with Ctrl-C, the trainer leaves the run, and other trainers take over at once.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
