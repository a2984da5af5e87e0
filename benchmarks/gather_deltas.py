"""Measures how many bytes gathers with deltas receive: ``python -m benchmarks.gather_deltas``.

Trains a small GPT on English text with AdamW, first at a learning rate that changes all weights, then at each measured
learning rate from these weights. Bytes are counted over the measured steps, in which the trainer has every base. The
CPU time of deltas is measured without training, on the weights of consecutive steps. After each measured step, a reader
without a cache reads what has changed since the former version (``PinnedVersion.changes``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

import shardwell
from benchmarks import report
from benchmarks.report import Report, to_table
from examples.corpus import Corpus, Windows
from examples.gpt import GPT, GPTConfig
from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.chunk_streams import memory_at

VOCAB_SIZE, CONTEXT, NUM_LAYERS, WIDTH, BATCH_SIZE = 2048, 32, 4, 256, 8
WARMUP_RATE = 1e-3
RATES = (1e-3, 1e-4, 1e-5, 1e-6)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class DeltaResult:
    """The measured steps at one learning rate in one dtype."""

    gather_dtype: str
    rate: float
    changed: float
    """Part of the 16-bit values that a step changes, mean over the steps."""
    ratio: float
    """Bytes that were received for the streams that were fetched, of their size."""
    received_bytes: float
    """Per step. A stream is fetched once: the backward reads the one of the forward."""
    received_bytes_without: float
    """Per step, without deltas."""
    encode_s_per_byte: float
    """CPU time of a server, per byte of a whole stream, once for all trainers."""
    apply_s_per_byte: float
    """CPU time of a trainer, per byte of a whole stream, with the checksum of the result."""
    changes_ratio: float
    """Bytes of a version's changes that a reader receives, of those of the whole version."""

    @property
    def break_even_bytes_per_s(self) -> float:
        """Bandwidth of a link at which a delta takes as long as the bytes that it saves, if nothing overlaps."""
        return (1 - self.ratio) / (self.encode_s_per_byte + self.apply_s_per_byte)


def to_markdown(results: Sequence[DeltaResult], parameters: int, steps: int) -> str:
    """Returns the table of the results."""
    header = [
        "gather dtype, learning rate",
        "values changed per step",
        "bytes with / without deltas",
        "received per step, MB: without / with",
        "CPU, ms per MB: server / trainer",
        "pays below, Gbit/s",
        "changes for a reader / whole version",
    ]
    rows = [
        [
            f"{each.gather_dtype}, {each.rate:.0e}",
            f"{each.changed:.1%}",
            f"{each.ratio:.3f}",
            f"{each.received_bytes_without / 1e6:.2f} / {each.received_bytes / 1e6:.2f}",
            f"{each.encode_s_per_byte * 1e9:.2f} / {each.apply_s_per_byte * 1e9:.2f}",
            f"{each.break_even_bytes_per_s * 8 / 1e9:.1f}",
            f"{each.changes_ratio:.4f}",
        ]
        for each in results
    ]
    heading = (
        f"A GPT with {parameters / 1e6:.1f} M parameters, AdamW, one trainer, {steps} measured steps at each rate. MB "
        "count 16-bit streams. Without deltas, a trainer that frees its units fetches each weight twice per step, for "
        "the forward and the backward; with deltas it keeps the stream, and fetches it once. The last column but one "
        "is the bandwidth of a link at which the CPU time of both sides is as long as the transfer of the saved bytes, "
        "if nothing overlaps. The last one is of a reader that keeps no stream, and reads the changes since the former "
        "version."
    )
    return f"{heading}\n\n{to_table(header, rows)}"


class Training:
    """A run of one trainer over sockets.

    Args:
        address: Address of the coordinator.
        run: Name of the run.
        transfers: Options of its transfers.
    """

    def __init__(self, address: str, run: str, **transfers: Any) -> None:
        options = shardwell.TransferOptions(transports="socket", **transfers)
        self.session = shardwell.join(address, run=run, transfers=options, keep_versions=1)
        corpus = Corpus.read(None, vocab_size=VOCAB_SIZE)
        self._windows = Windows(corpus.tokens, CONTEXT)
        torch.manual_seed(0)
        self.model = GPT(
            GPTConfig(vocab_size=len(corpus.vocabulary), context=CONTEXT, num_layers=NUM_LAYERS, width=WIDTH)
        )
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        for block in self.model.blocks:
            shardwell.fully_shard(block, self.session)
        shardwell.fully_shard(self.model, self.session)
        self._optimizer = shardwell.optim.AdamW(self.model.parameters(), lr=WARMUP_RATE, weight_decay=0.01)

    def train(self, until: int, rate: float, after_step: Callable[[], None] = lambda: None) -> None:
        """Trains up to step ``until``."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for step in self.session.steps(until):
            for batch in step.batches(self._windows, batch_size=BATCH_SIZE):
                loss = functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            after_step()

    def stats(self, names: Sequence[str]) -> list[float]:
        stats = self.session.stats()
        return [stats[name] for name in names]

    def versions(self, until: int, rate: float) -> list[Tensor]:
        """Trains up to step ``until``; returns the weights before the first step and after each step."""
        found = [self._weights()]
        self.train(until, rate, lambda: found.append(self._weights()))
        return found

    def _weights(self) -> Tensor:
        """Returns all weights in float32. [num_parameters]"""
        state = shardwell.full_state_dict(self.model)
        return torch.cat([value.flatten() for value in state.values() if value.dtype == torch.float32])


def measure(address: str, gather_dtype: str, rate: float, warmup: int, steps: int) -> tuple[DeltaResult, int]:
    """Trains with and without deltas; returns the result and the number of parameters."""
    counters = ("received_bytes", "delta_received_bytes", "delta_stream_bytes")
    moved = {}
    for budget in (0, 1 << 40):
        name = f"{gather_dtype}-{rate}-{budget}"
        training = Training(address, name, gather_dtype=gather_dtype, delta_cache_bytes=budget)
        with training.session:
            training.train(warmup, WARMUP_RATE)
            training.train(warmup + 1, rate)  # the deltas of the measured steps are those of this rate
            before = training.stats(counters)
            training.train(warmup + 1 + steps, rate)
            moved[budget] = [after - former for after, former in zip(training.stats(counters), before, strict=True)]
            if budget:
                versions = training.versions(warmup + 1 + 2 * steps, rate)
                parameters = training.parameters
            else:
                changes_ratio = measure_changes(address, training, warmup + 1 + 2 * steps, rate, gather_dtype)
    (without, _, _), (received, delta_bytes, stream_bytes) = moved[0], moved[1 << 40]
    streams = [version.to(_DTYPES[gather_dtype]).view(torch.int16) for version in versions]
    encode_s, apply_s = measure_cpu(streams)
    result = DeltaResult(
        gather_dtype=gather_dtype,
        rate=rate,
        changed=statistics.mean((after != before).float().mean().item() for before, after in pairwise(streams)),
        ratio=delta_bytes / stream_bytes,
        received_bytes=received / steps,
        received_bytes_without=without / steps,
        encode_s_per_byte=encode_s,
        apply_s_per_byte=apply_s,
        changes_ratio=changes_ratio,
    )
    return result, parameters


def measure_changes(address: str, training: Training, until: int, rate: float, gather_dtype: str) -> float:
    """Trains up to step ``until``; returns the bytes of changes that a reader receives, of those of whole versions."""
    moved = list[float]()
    with shardwell.attach(address, training.session.run, gather_dtype=gather_dtype) as reader:

        def read() -> None:
            before = reader.stats()["received_bytes"]
            with reader.pin() as pinned:
                assert list(pinned.changes(pinned.version - 1))
            moved.append(reader.stats()["received_bytes"] - before)

        training.train(until, rate, read)
    return statistics.mean(moved) / (training.parameters * value_deltas.ITEM_BYTES)


def measure_cpu(streams: Sequence[Tensor]) -> tuple[float, float]:
    """Returns the CPU time of encoding and of applying the deltas between streams, in seconds per byte of a stream."""
    encoding, applying = [], []
    for before, after in pairwise(streams):
        base, stream = (memory_at(each.data_ptr(), each.nbytes, each) for each in (before, after))
        for _ in range(_REPEATS):
            started = time.process_time()
            pieces = value_deltas.encode(base, stream, 2 * len(stream))
            encoding.append((time.process_time() - started) / len(stream))
            delta, kept = b"".join(pieces or []), memoryview(bytearray(base))
            started = time.process_time()
            value_deltas.apply(delta, kept, "the weights")
            xxhash.xxh3_64_intdigest(kept)
            applying.append((time.process_time() - started) / len(stream))
            assert kept == stream
    return statistics.median(encoding), statistics.median(applying)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the bytes of gathers with deltas.")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="learning rates")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=list(_DTYPES), help="gather dtypes")
    parser.add_argument("--warmup", type=int, default=60, help=f"steps at learning rate {WARMUP_RATE} before")
    parser.add_argument("--steps", type=int, default=10, help="measured steps at each learning rate")
    report.add_arguments(parser, name="gather_deltas")
    arguments = parser.parse_args()
    document = Report(arguments, title="Gathers with deltas")
    torch.set_num_threads(1)
    results, parameters = [], 0
    with shardwell.LocalCluster(num_shards=2) as cluster:
        for gather_dtype in arguments.dtypes:
            for rate in arguments.rates:
                result, parameters = measure(cluster.address, gather_dtype, rate, arguments.warmup, arguments.steps)
                results.append(result)
                print(result, file=sys.stderr, flush=True)
    section = to_markdown(results, parameters, arguments.steps)
    document.write(results={"results": [asdict(each) for each in results]}, sections=[section])


if __name__ == "__main__":
    main()
