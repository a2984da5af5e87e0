"""Training over a slow network: four hosts whose links have 1 Gbit/s or 200 Mbit/s, Shardwell against FSDP2 and DDP.

The hosts are network namespaces of this machine (``network.py``; needs root) and share its CPUs: what is compared is
the network's part. Groups take turns of a few steps, round after round; all stay alive meanwhile if memory has room.

    sudo python benchmarks/slow_network.py [--rates 1gbit 200mbit] [--rounds 3] [--steps 3]
    sudo python benchmarks/slow_network.py --loss-seeds 3 --loss-steps 300    # and what 16 and 8 bits cost in loss
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from gpt import GPT, GPTConfig  # noqa: E402 (neither the examples nor the benchmarks are installed)

from benchmarks.line_process import HostProcess, PeakMemory  # noqa: E402
from benchmarks.network import LinkCounters, Network, NetworkError, Rate  # noqa: E402
from benchmarks.network_trainer import KINDS, PEERS  # noqa: E402
from benchmarks.wire_loss import LossCheck, measure_losses  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TRAINER = ROOT / "benchmarks" / "network_trainer.py"
NUM_HOSTS = 4
WARMUP_STEPS = 2
_HOST_BASE_BYTES, _COPIES_PER_HOST = 500 << 20, 6
"""Memory of one host's processes of a group, roughly: the interpreters, and copies of the model."""
MODEL = GPTConfig(vocab_size=8192, context=128, num_layers=8, num_heads=8, width=512)
TINY_MODEL = GPTConfig(vocab_size=256, context=32, num_layers=2, num_heads=2, width=64)
NAMES = {
    "ddp": "DDP (gloo)",
    "fsdp2": "FSDP2 (gloo)",
    "fsdp2-prefetch": "FSDP2 (gloo), explicit prefetch",
    "fsdp2-keep": "FSDP2 (gloo), explicit prefetch, kept after the forward",
    "shardwell-fp32": "Shardwell, fp32",
    "shardwell-bf16": "Shardwell, bf16 both ways",
    "shardwell-int8": "Shardwell, int8 both ways",
}


@dataclass
class Turns:
    """What the turns of one group at one rate gave."""

    step_s: list[float] = field(default_factory=list)
    """The slowest trainer of each step counts."""
    received_bytes: list[float] = field(default_factory=list)
    """Per step, the busiest host; one number per turn."""
    loss: float = float("nan")
    """Of rank 0 in the last step."""


class Group:
    """The trainers of one kind, one per host, and for Shardwell their servers.

    Args:
        kind: One of ``KINDS``.
        network: Where they run.
        model: What they train.
        log_directory: Receives their standard error.
    """

    def __init__(self, kind: str, network: Network, model: GPTConfig, log_directory: Path) -> None:
        self.kind = kind
        self._network, self._model, self._log_directory = network, model, log_directory
        self._servers: list[HostProcess] = []
        self._trainers: list[HostProcess] = []

    def start(self) -> None:
        """Starts the processes; the first turn waits until they are ready."""
        hosts = self._network.hosts
        address = f"{hosts[0].address}:{hosts[0].free_port()}" if self.kind in PEERS else self._start_servers()
        for rank in range(len(hosts)):
            arguments = ["--kind", self.kind, "--address", address, "--rank", str(rank)]
            arguments += ["--num-trainers", str(len(hosts)), "--model", json.dumps(asdict(self._model))]
            self._trainers.append(self._start(rank, "trainer", str(TRAINER), *arguments))

    def close(self) -> None:
        for process in (*self._trainers, *self._servers):
            process.close()

    def take_steps(self, number: int) -> tuple[list[float], float]:
        """Every trainer takes so many steps; returns the time of each and rank 0's last loss."""
        for trainer in self._trainers:
            trainer.send(str(number))
        answers = [trainer.receive() for trainer in self._trainers]
        slowest = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
        return slowest, answers[0]["loss"]

    def take_turn(self, number: int, turns: Turns) -> None:
        """Takes steps and notes their times and what the busiest host received."""
        before = self._counters()
        seconds, turns.loss = self.take_steps(number)
        received = [now.received - then.received for now, then in zip(self._counters(), before, strict=True)]
        turns.step_s += seconds
        turns.received_bytes.append(max(received) / number)

    def peak_bytes_per_host(self, number: int) -> int:
        """Unshared memory of the group's processes on the fullest host while it takes steps."""
        by_host = [
            [process.pid for process in (*self._trainers, *self._servers) if process.host is host]
            for host in self._network.hosts
        ]
        with PeakMemory(by_host) as memory:
            self.take_steps(number)
        return max(memory.peak_bytes)

    def _counters(self) -> list[LinkCounters]:
        return [host.counters() for host in self._network.hosts]

    def _start_servers(self) -> str:
        hosts = self._network.hosts
        common = ["--listen", f"{hosts[0].address}:0", "--exit-with-parent"]
        coordinator = self._start(
            0, "coordinator", "-m", "shardwell_server", "coordinator", *common, "--min-servers", str(len(hosts))
        )
        self._servers.append(coordinator)
        address: str = coordinator.receive()["address"]
        shards = []
        for index, host in enumerate(hosts):
            where = ["--listen", f"{host.address}:0", "--id", f"shard-{index}", "--coordinator", address]
            shards.append(self._start(index, "shard", "-m", "shardwell_server", "shard", *where, "--exit-with-parent"))
        self._servers += shards
        for shard in shards:
            shard.receive()
        return address

    def _start(self, host_index: int, role: str, *arguments: str) -> HostProcess:
        host = self._network.hosts[host_index]
        log = self._log_directory / f"{self.kind}-{role}-{host_index}.log"
        return HostProcess(host, [sys.executable, *arguments], log)


class Stage:
    """The groups that are alive: all of them if memory has room, else as many as fit; a context manager.

    Args:
        network: Where they run.
        model: What they train.
    """

    def __init__(self, network: Network, model: GPTConfig) -> None:
        self._network, self._model = network, model
        self._group_bytes = NUM_HOSTS * (_HOST_BASE_BYTES + _COPIES_PER_HOST * 4 * count_parameters(model))
        self._alive: dict[str, Group] = {}

    def group(self, kind: str) -> Group:
        """A group that has taken its first steps."""
        if kind not in self._alive:
            # Turns go round: the group that had the last one is the one whose next is furthest away.
            while self._alive and psutil.virtual_memory().available < self._group_bytes:
                self._alive.popitem()[1].close()
            group = Group(kind, self._network, self._model, self._log_directory)
            self._alive[kind] = group
            group.start()
            group.take_steps(WARMUP_STEPS)
            say(f"{NAMES[kind]}: warmed up")
        return self._alive[kind]

    def __enter__(self) -> Self:
        self._logs = tempfile.TemporaryDirectory(prefix="slow-network-")
        self._log_directory = Path(self._logs.name)
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._alive.values():
            group.close()
        self._logs.cleanup()


def measure(options: argparse.Namespace, model: GPTConfig) -> dict[str, Any]:
    """Step times, bytes and memory of every group at every rate."""
    with Network(NUM_HOSTS) as network, Stage(network, model) as stage:
        rates = {}
        for rate in options.rates:
            network.limit(rate)
            rates[rate.text] = measure_rate(stage, options.groups, rate, rounds=options.rounds, steps=options.steps)
        memory = {kind: stage.group(kind).peak_bytes_per_host(options.steps) for kind in reversed(options.groups)}
    return {"rates": rates, "peak_bytes_per_host": {kind: memory[kind] for kind in options.groups}}


def measure_rate(
    stage: Stage, kinds: Sequence[str], rate: Rate, *, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Interleaved turns of all groups at one rate."""
    turns = {kind: Turns() for kind in kinds}
    for number in range(1, rounds + 1):
        for kind in kinds:
            stage.group(kind).take_turn(steps, turns[kind])
        say(f"{rate.text}: round {number} of {rounds}")
    return with_ratios({kind: summarize(found, rate) for kind, found in turns.items()})


def summarize(turns: Turns, rate: Rate) -> dict[str, Any]:
    received = statistics.median(turns.received_bytes)
    return {
        "step_s": statistics.median(turns.step_s),
        "step_s_range": [min(turns.step_s), max(turns.step_s)],
        "steps": len(turns.step_s),
        "received_bytes_per_host_and_step": received,
        "link_s": rate.seconds(received),
        "loss": turns.loss,
    }


def with_ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds step times relative to DDP's and to the best FSDP2's, where these were measured."""
    fsdp2 = [result["step_s"] for kind, result in results.items() if kind.startswith("fsdp2")]
    ddp = [result["step_s"] for kind, result in results.items() if kind == "ddp"]
    for result in results.values():
        result["step_vs_fsdp2"] = result["step_s"] / min(fsdp2) if fsdp2 else None
        result["step_vs_ddp"] = result["step_s"] / ddp[0] if ddp else None
    return results


def to_markdown(report: dict[str, Any]) -> str:
    model = report["model"]
    lines = [
        f"{NUM_HOSTS} hosts (network namespaces on one machine with {report['cpus']} CPUs, which all share), one "
        f"trainer and one shard server each; a GPT with {report['parameters'] / 1e6:.1f} M parameters in "
        f"{model['num_layers'] + 1} units, 1 x {model['context']} tokens per trainer, AdamW, one thread per process. "
        f"Load average before {report['load_average_before']:.1f}. Ratios below 1 are faster.",
    ]
    for rate, results in report["rates"].items():
        lines += [
            "",
            f"### {rate} each way",
            "",
            "| | step, median (range) | against FSDP2, its best mode | against DDP | received per host and step "
            "| of which the link needs |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(kind, result) for kind, result in results.items()]
    lines += ["", "| | peak memory of a host (unshared, all its processes) |", "|---|---|"]
    lines += [f"| {NAMES[kind]} | {size / 1e6:.0f} MB |" for kind, size in report["peak_bytes_per_host"].items()]
    if report["losses"] is not None:
        lines += ["", LossCheck(**report["losses"]).to_markdown()]
    return "\n".join(lines) + "\n"


def _row(kind: str, result: dict[str, Any]) -> str:
    low, high = result["step_s_range"]
    ratios = ("-" if ratio is None else f"{ratio:.2f}" for ratio in (result["step_vs_fsdp2"], result["step_vs_ddp"]))
    return (
        f"| {NAMES[kind]} | {result['step_s']:.2f} s ({low:.2f} - {high:.2f}) | {' | '.join(ratios)} "
        f"| {result['received_bytes_per_host_and_step'] / 1e6:.1f} MB | {result['link_s']:.2f} s |"
    )


def count_parameters(model: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(model).parameters())


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def rate(text: str) -> Rate:
    try:
        return Rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time over slow links against FSDP2 and DDP; needs root.")
    parser.add_argument("--rates", type=rate, nargs="+", default=[Rate("1gbit"), Rate("200mbit")], metavar="RATE")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=3, help="steps of each group per round")
    parser.add_argument("--groups", choices=KINDS, nargs="+", default=list(KINDS), help="default: all")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see whether everything works")
    parser.add_argument("--loss-seeds", type=int, default=0, help="seeds of the loss check; 0: none")
    parser.add_argument("--loss-steps", type=positive, default=300, help="steps of each training of the loss check")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where the results go")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_arguments()
    model = TINY_MODEL if options.tiny else MODEL
    os.environ["OMP_NUM_THREADS"] = "1"
    load_average = os.getloadavg()[0]
    try:
        measured = measure(options, model)
    except NetworkError as error:
        raise SystemExit(f"slow_network.py: {error}") from None
    losses = measure_losses(range(options.loss_seeds), options.loss_steps, say) if options.loss_seeds else None
    report = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average_before": load_average,
        "parameters": count_parameters(model),
        "model": asdict(model),
        **measured,
        "losses": None if losses is None else asdict(losses),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "slow_network.json").write_text(json.dumps(report, indent=2) + "\n")
    (options.output / "slow_network.md").write_text(to_markdown(report))
    print(to_markdown(report), end="")


if __name__ == "__main__":
    main()
