"""Measures the effect of lossy wire dtypes: ``python -m benchmarks.wire_loss``.

Trains the same small GPT on English text with each dtype and seed. The table shows the bytes, the relative error of one
transfer, and the loss on text that was not trained on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR

import shardwell
from benchmarks import report
from benchmarks.report import Report, to_table
from benchmarks.wire_options import LOSS_OPTIONS, REFERENCE
from examples.corpus import Corpus, Windows
from examples.gpt import GPT, GPTConfig
from shardwell_wire.encoding.streams import InParameters, InVector, StreamPlan
from shardwell_wire.encoding.wire_dtypes import GATHER_NAMES, PUSH_NAMES, WireDtype
from shardwell_wire.model.layout import Parameter, UnitLayout

VOCAB_SIZE, CONTEXT, NUM_LAYERS, WIDTH = 512, 32, 2, 96
BATCH_SIZE, NUM_RANKS = 8, 2
LEARNING_RATE = 8e-3
HELD_OUT = 0.1
"""Fraction at the end of the text that is not used for training."""


@dataclass
class WireResult:
    """Results of one set of wire options."""

    losses: list[float] = field(default_factory=list)
    """Loss on held-out text after training, by seed."""
    received_bytes: float = 0.0
    """Bytes of weights that a training received."""
    sent_bytes: float = 0.0
    """Bytes of gradients that a training sent."""
    gather_error: float = 0.0
    """Relative error of one gather: the norm of the error divided by the norm of the weights."""
    push_error: float = 0.0
    """Relative error of one push, without error feedback."""


@dataclass(frozen=True, kw_only=True)
class LossCheck:
    """Results by the name of the wire options."""

    steps: int
    parameters: int
    unigram_entropy: float
    """Loss of a model that knows token frequencies only, in nats per token."""
    results: dict[str, WireResult]

    def to_markdown(self) -> str:
        reference = self.results[REFERENCE]
        heading = (
            f"A GPT with {self.parameters / 1e6:.2f} M parameters after {self.steps} steps of {NUM_RANKS} logical "
            f"ranks with {BATCH_SIZE} x {CONTEXT} tokens, {len(reference.losses)} seeds. The loss is that of English "
            "text that was not trained on, with the float32 weights of the servers. Token frequencies alone give "
            f"{self.unigram_entropy:.2f}. An error is the norm of the difference after one transfer, divided by the "
            "norm of the values, for the weights and a gradient at the end of a float32 training, without error "
            "feedback."
        )
        header = [
            "on the wire",
            "bytes pushed / float32",
            "bytes gathered / float32",
            "error of a push",
            "error of a gather",
            "mean loss",
            "highest - lowest",
            "loss - float32's, same seed: mean (least to most)",
        ]
        rows = []
        for name, result in self.results.items():
            differences = [loss - same for loss, same in zip(result.losses, reference.losses, strict=True)]
            spread = f"{statistics.mean(differences):+.4f} ({min(differences):+.4f} to {max(differences):+.4f})"
            rows.append(
                [
                    name,
                    f"{result.sent_bytes / reference.sent_bytes:.3f}",
                    f"{result.received_bytes / reference.received_bytes:.3f}",
                    f"{result.push_error:.2%}",
                    f"{result.gather_error:.2%}",
                    f"{statistics.mean(result.losses):.4f}",
                    f"{max(result.losses) - min(result.losses):.4f}",
                    spread,
                ]
            )
        return f"{heading}\n\n{to_table(header, rows)}"


@dataclass(frozen=True, slots=True)
class Trained:
    """A model after training."""

    model: GPT
    """A plain module with the servers' weights."""
    received_bytes: int
    sent_bytes: int


def measure_losses(seeds: Sequence[int], steps: int, only: Collection[str] = LOSS_OPTIONS) -> LossCheck:
    """Trains with the reference and with the wire options of the given names, with each seed."""
    torch.set_num_threads(1)
    corpus = Corpus.read(None, vocab_size=VOCAB_SIZE)
    config, training, held_out = model_and_text(corpus)
    options = {name: wire for name, wire in LOSS_OPTIONS.items() if name in only or name == REFERENCE}
    results = {name: WireResult() for name in options}
    with shardwell.testing.in_process_cluster(num_shards=2) as address:  # times are not measured
        for seed in seeds:
            for number, (name, wire) in enumerate(options.items()):
                # A stream transport counts the bytes in their wire dtype.
                transfers = shardwell.TransferOptions(transports="socket", **wire.options())
                run = f"{number}-{seed}"
                join = partial(shardwell.join, address, run=run, seed=seed, transfers=transfers)
                trained = train(join, config, training, steps, seed)
                result = results[name]
                result.losses.append(evaluate(trained.model, held_out))
                result.received_bytes, result.sent_bytes = trained.received_bytes, trained.sent_bytes
                if name == REFERENCE:
                    _set_errors(results, trained.model, training)
                print(f"seed {seed}, {name}: {result.losses[-1]:.4f}", file=sys.stderr)
    return LossCheck(
        steps=steps,
        parameters=sum(parameter.numel() for parameter in GPT(config).parameters()),
        unigram_entropy=corpus.unigram_entropy,
        results=results,
    )


def model_and_text(corpus: Corpus) -> tuple[GPTConfig, Tensor, Tensor]:
    """Returns the model that is trained, the tokens to train on, and the tokens to measure the loss on."""
    config = GPTConfig(vocab_size=len(corpus.vocabulary), context=CONTEXT, num_layers=NUM_LAYERS, width=WIDTH)
    split = round(len(corpus.tokens) * (1 - HELD_OUT))
    return config, corpus.tokens[:split], corpus.tokens[split:]


def train(join: Callable[..., shardwell.Session], config: GPTConfig, tokens: Tensor, steps: int, seed: int) -> Trained:
    """Trains one model."""
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
        transports = session.transports()
        received, sent = (sum(each[name] for each in transports) for name in ("received_bytes", "sent_bytes"))
        plain = GPT(config)
        plain.load_state_dict(shardwell.full_state_dict(model))
    return Trained(plain, received, sent)


@torch.no_grad()
def evaluate(model: GPT, tokens: Tensor) -> float:
    """Returns the mean loss over the text, cut into adjacent windows."""
    count = (len(tokens) - 1) // CONTEXT
    windows = tokens[: count * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)  # [count, CONTEXT + 1]
    return loss_of(model, windows).item()


def loss_of(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


# ---- the error of one transfer ----


def _set_errors(results: dict[str, WireResult], model: GPT, tokens: Tensor) -> None:
    """Sets the errors of all wire options, for the weights of a model and one of its gradients."""
    windows = Windows(tokens, CONTEXT)
    model.zero_grad()
    loss_of(model, torch.stack([windows[index * CONTEXT] for index in range(BATCH_SIZE)])).backward()
    weights = [parameter.detach() for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for name, result in results.items():
        result.gather_error = relative_error(weights, GATHER_NAMES[LOSS_OPTIONS[name].gather_dtype])
        result.push_error = relative_error(gradients, PUSH_NAMES[LOSS_OPTIONS[name].push_dtype])


def relative_error(tensors: Sequence[Tensor], wire_dtype: WireDtype) -> float:
    """Returns the norm of the error of one transfer, divided by the norm of the values.

    Args:
        tensors: Float32 tensors. Each starts a quantization block.
        wire_dtype: Encoding of the transfer.
    """
    error = norm = 0.0
    for tensor in tensors:
        layout = UnitLayout("unit", (Parameter("values", tuple(tensor.shape), "float32"),))
        plan = StreamPlan(layout, layout.segments(0, layout.size_bytes), wire_dtype)
        values, vector = tensor.flatten(), bytearray(layout.size_bytes)
        plan.round_trip(InParameters({0: values}), InVector(vector, 0))
        arrived = torch.frombuffer(vector, dtype=torch.float32)[: values.numel()]
        error += (arrived - values).double().square().sum().item()
        norm += values.double().square().sum().item()
    return (error / norm) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the effect of lossy wire dtypes on bytes and loss.")
    parser.add_argument("--seeds", type=int, default=3, help="number of trainings with each wire dtype")
    parser.add_argument("--steps", type=int, default=200, help="steps of each training")
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(LOSS_OPTIONS),
        choices=list(LOSS_OPTIONS),
        metavar="NAME",
        help=f"names of the rows beside {REFERENCE} (default: all)",
    )
    report.add_arguments(parser, name="wire_loss")
    arguments = parser.parse_args()
    document = Report(arguments, title="Loss with lossy wire dtypes")
    check = measure_losses(range(arguments.seeds), arguments.steps, arguments.only)
    document.write(results=asdict(check), sections=[check.to_markdown()])


if __name__ == "__main__":
    main()
