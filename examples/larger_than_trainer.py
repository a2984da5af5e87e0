"""Trains a model whose state is more than eight times what a trainer may use; then others try under the same limit.

    python examples/larger_than_trainer.py

What is limited: RLIMIT_DATA of every trainer, a process of its own. The kernel enforces it, it needs no rights, and
it counts all memory that a process may write and does not share, used or not: the interpreter, torch and thread stacks
too. It does not count shared memory, so trainers reach the shard servers over sockets, as on other hosts, and the table
shows that they map none. Two shard servers on this machine, about 5 GB, hold the state and are not limited.

The last layer alone is larger than the limit; it is a ``shardwell.TiledLinear``. FSDP2 gets the same model with the
same tiles as units, built without values and cut in two before a tensor has memory; plain PyTorch gets it as it is. At
the end plain PyTorch without a limit plays both ranks: its weights have the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NUM_TRAINERS = 2
STATE_BYTES_PER_PARAMETER = 16
"""Weight, gradient and Adam's two moments in float32."""
IN_FLIGHT_BYTES = 9 << 20
"""Weights fetched ahead, and gradients on their way: one tile or two layers each."""
LEARNING_RATE = 1e-3
CHILD_LIMIT_S = 600.0
SIZES = {"num_layers": 100, "width": 1024, "num_classes": 107520, "num_tiles": 50, "batch_size": 4, "num_steps": 2}


def main() -> None:
    arguments = parse_arguments()
    if arguments.role:
        run_role(arguments)
        return
    print(describe(arguments), flush=True)
    results = dict(run_all(arguments))
    print_table(arguments, results)
    print("WEIGHTS is the beginning of a hash of all of them after the last step.")
    if not all(trainer.finished for trainer in results["Shardwell"]):
        sys.exit("a trainer of Shardwell did not finish")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a model whose state is 8 times what a trainer may use.")
    parser.add_argument("--limit-mib", type=int, default=400, help="RLIMIT_DATA of each trainer (default: 400)")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, help=f"(default: {size})")
    parser.add_argument("--control", action="store_true", help="let FSDP2 train without a limit, too")
    parser.add_argument("--role", choices=["shardwell", "fsdp2", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def count_parameters(arguments: argparse.Namespace) -> int:
    layer = arguments.width * (arguments.width + 1)
    return int(arguments.num_layers * layer + arguments.num_classes * (arguments.width + 1))


def state_bytes(arguments: argparse.Namespace) -> int:
    """Of weights, gradients and optimizer."""
    return count_parameters(arguments) * STATE_BYTES_PER_PARAMETER


def describe(arguments: argparse.Namespace) -> str:
    limit, largest = arguments.limit_mib << 20, arguments.num_classes * (arguments.width + 1) * 4
    return (
        f"{count_parameters(arguments) / 1e6:.0f} M parameters; with gradients and AdamW's moments "
        f"{state_bytes(arguments) / 1e9:.2f} GB, {state_bytes(arguments) / limit:.1f} times the limit of "
        f"{limit / 1e6:.0f} MB per trainer. The last layer's weight alone has {largest / 1e6:.0f} MB."
    )


# ---- the trainers, each a process of its own ----


@dataclass
class Trainer:
    """What a trainer said of itself, and how it ended."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int = 0

    @property
    def finished(self) -> bool:
        return self.exit_code == 0 and any("losses" in line for line in self.lines)

    def last(self, key: str, default: Any = None) -> Any:
        return next((line[key] for line in reversed(self.lines) if key in line), default)

    def ending(self) -> str:
        if self.finished:
            return f"trained {len(self.last('losses'))} steps"
        if self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name} while {self.last('stage', 'starting')}"
        return f"died while {self.last('stage', 'starting')}: {self.last('died', f'exit code {self.exit_code}')}"


def run_all(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Trainer]]]:
    """All that is compared, one after another."""
    import shardwell

    with shardwell.LocalCluster(num_shards=2) as cluster:
        yield "Shardwell", run_trainers("shardwell", arguments, cluster.address)
    with tempfile.TemporaryDirectory() as folder:
        yield "FSDP2, gloo", run_trainers("fsdp2", arguments, f"{folder}/limited")
        if arguments.control:
            yield "FSDP2, gloo, no limit", run_trainers("fsdp2", arguments, f"{folder}/free", limit_mib=0)
    yield "plain PyTorch", run_trainers("plain", arguments, "", count=1)
    yield "plain PyTorch, no limit", run_trainers("plain", arguments, "", count=1, limit_mib=0)


def run_trainers(
    role: str, arguments: argparse.Namespace, place: str, *, count: int = NUM_TRAINERS, limit_mib: int | None = None
) -> list[Trainer]:
    """Starts all trainers of one kind and waits for them; one that dies ends the others."""
    options = ["--role", role, "--place", place]
    for name in SIZES:
        options += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    options += ["--limit-mib", str(arguments.limit_mib if limit_mib is None else limit_mib)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as `shardwell launch` does
    children = [
        subprocess.Popen(
            [sys.executable, __file__, *options, "--rank", str(rank)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        wait_for(children)
        outputs = [child.communicate()[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [
        Trainer([json.loads(line) for line in output.splitlines() if line.startswith("{")], child.returncode)
        for child, output in zip(children, outputs, strict=True)
    ]


def wait_for(children: Sequence[subprocess.Popen[str]]) -> None:
    """Returns when all have ended; those that wait for one that died are ended."""
    give_up = time.monotonic() + CHILD_LIMIT_S
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children) or time.monotonic() > give_up:
            time.sleep(3.0)  # another one that is dying too says why
            for child in children:
                child.kill()
        time.sleep(0.1)


def run_role(arguments: argparse.Namespace) -> None:
    """A trainer: limits itself, then does everything else, imports too."""
    threading.stack_size(512 << 10)
    if arguments.limit_mib:
        limit = arguments.limit_mib << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    say(stage="importing torch")
    exit_code = 0
    try:
        import torch

        torch.set_num_threads(1)
        say(**ROLES[arguments.role](arguments), **memory())
    except (MemoryError, RuntimeError, OSError) as error:
        # torch's own reason is behind the name of the check that failed.
        reason = str(error).partition("DefaultCPUAllocator: ")[2] or str(error)
        say(died=f"{type(error).__name__}: {reason[:90]}", **memory())
        exit_code = 1
    sys.stdout.flush()
    os._exit(exit_code)  # threads of a process without memory do not end by themselves


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def memory() -> dict[str, int]:
    """Most resident; limited memory and resident shared memory now. Bytes."""
    names = {"VmHWM": "peak_resident", "VmData": "limited", "RssShmem": "shared"}
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {names[words[0][:-1]]: int(words[1]) << 10 for words in lines if words and words[0][:-1] in names}


def make_model(arguments: argparse.Namespace) -> torch.nn.Sequential:
    """Layers, and a last one in tiles; without memory."""
    import torch

    import shardwell

    with torch.device("meta"):
        linears = [torch.nn.Linear(arguments.width, arguments.width) for _ in range(arguments.num_layers)]
        head = shardwell.TiledLinear(arguments.width, arguments.num_classes, num_tiles=arguments.num_tiles)
        layers = [layer for linear in linears for layer in (linear, torch.nn.Tanh())]
        return torch.nn.Sequential(*layers, head)


def linears_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The layers and tiles with their names in the model."""
    import torch

    return ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))


def initialiser(model: torch.nn.Module) -> Any:
    """Gives each layer values that depend on its name only."""
    import torch

    seeds = {module: number for number, (_, module) in enumerate(linears_of(model))}

    def initialise(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            generator, bound = torch.Generator().manual_seed(seeds[module]), module.in_features**-0.5
            for parameter in module.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                torch.nn.init.uniform_(local, -bound, bound, generator=generator)

    return initialise


def digest(model: torch.nn.Module) -> str:
    """Hash of all weights, one layer at a time."""
    import shardwell

    found = hashlib.sha256()
    for name, module in linears_of(model):
        is_sharded = isinstance(module, shardwell.ShardedModule)
        if is_sharded:
            module.unshard()
        for parameter in module.parameters():
            found.update(f"{name} {tuple(parameter.shape)}".encode())
            found.update(parameter.detach().clone().numpy().data)
        if is_sharded:
            module.reshard()
    return found.hexdigest()


def batch(arguments: argparse.Namespace, step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    inputs = torch.randn(arguments.batch_size, arguments.width, generator=generator)
    return inputs, torch.randint(arguments.num_classes, (arguments.batch_size,), generator=generator)


def train_sharded(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Shardwell: as any model that is built without memory, but that freed memory goes back to the system."""
    import torch

    import shardwell

    say(stage="joining")
    losses = []
    with shardwell.join(
        arguments.place,
        run="larger than a trainer",
        world=shardwell.World(dp=NUM_TRAINERS),
        global_rank=arguments.rank,
        transfers=shardwell.TransferOptions(
            transports="socket", prefetch_bytes=IN_FLIGHT_BYTES, push_bytes=IN_FLIGHT_BYTES
        ),
    ) as session:
        say(stage="sharding", **memory())
        model = make_model(arguments)
        shardwell.auto_wrap(
            model,
            session,
            shardwell.ModuleTypePolicy({torch.nn.Linear}),
            source=initialiser(model),
            memory=shardwell.MemoryOptions(keep_freed_memory=False),
        )
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        for step in session.steps(arguments.num_steps):
            say(stage=f"training step {step.number}", **memory())
            for inputs, labels in step.batches(lambda number, dp_rank: batch(arguments, number, dp_rank)):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        report = session.memory()
        say(stage="reading the weights", weights=report.peak_bytes, **memory())
        return {"losses": losses} | ({"digest": digest(model)} if arguments.rank == 0 else {})


def train_fsdp2(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """FSDP2: the model is made without memory, cut in two, and given values then."""
    import torch
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    say(stage="making the process group")
    distributed.init_process_group(
        "gloo", init_method=f"file://{arguments.place}", rank=arguments.rank, world_size=NUM_TRAINERS
    )
    mesh = distributed.init_device_mesh("cpu", (NUM_TRAINERS,))
    model = make_model(arguments)
    initialise = initialiser(model)
    units = [module for _, module in linears_of(model)]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for number, unit in enumerate(units):
        say(stage=f"giving memory to its half of layer {number + 1} of {len(units)}", **memory())
        unit.to_empty(device="cpu")
        with torch.no_grad():
            initialise(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(arguments.num_steps):
        say(stage=f"training step {step}", **memory())
        inputs, labels = batch(arguments, step, arguments.rank)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


def train_plain(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """One process plays all ranks, one after another; their gradients are added in the order of ranks."""
    import torch

    model = make_model(arguments)
    initialise = initialiser(model)
    for name, module in linears_of(model):
        say(stage=f"giving memory to {name}", **memory())
        module.to_empty(device="cpu")
        with torch.no_grad():
            initialise(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    losses = []
    for step in range(arguments.num_steps):
        for dp_rank in range(NUM_TRAINERS):
            say(stage=f"training step {step}", **memory())
            inputs, labels = batch(arguments, step, dp_rank)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad.div_(NUM_TRAINERS)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses[::NUM_TRAINERS], "digest": digest(model)}


ROLES = {"shardwell": train_sharded, "fsdp2": train_fsdp2, "plain": train_plain}


# ---- the result ----


def print_table(arguments: argparse.Namespace, results: Mapping[str, Sequence[Trainer]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "LIMIT", "TRAINERS", "MOST RESIDENT", "SHARED", "WEIGHTS AT MOST", "LOSS", "WEIGHTS", "ENDED")
    for name, trainers in results.items():
        limit = "none" if "no limit" in name else f"{(arguments.limit_mib << 20) / 1e6:.0f} MB"
        table.add_row(name.removesuffix(", no limit"), limit, *cells(trainers))
    console = Console()
    Console(width=max(console.width, 180)).print(table)


def cells(trainers: Sequence[Trainer]) -> Iterator[str]:
    weights = max(trainer.last("weights", 0) for trainer in trainers)
    losses = trainers[0].last("losses", [])
    yield str(len(trainers))
    yield f"{max(trainer.last('peak_resident', 0) for trainer in trainers) / 1e6:.0f} MB"
    yield f"{max(trainer.last('shared', 0) for trainer in trainers) / 1e6:.0f} MB"
    yield f"{weights / 1e6:.0f} MB" if weights else ""
    yield f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
    yield trainers[0].last("digest", "")[:8]
    first = next((trainer for trainer in trainers if "died" in str(trainer.lines)), trainers[0])
    yield first.ending()


if __name__ == "__main__":
    main()
