"""Trains a model whose state is over eight times a trainer's memory limit, and tries FSDP2 and plain PyTorch too.

    python examples/larger_than_trainer.py

The limit is RLIMIT_DATA of every trainer process. The kernel enforces it, and setting it needs no privileges. It counts
all private writable memory, used or not, including the interpreter, torch and thread stacks. It does not count shared
memory. Trainers therefore use sockets, as with servers on other hosts. The table shows that they map no shared memory.
Two shard servers on this machine, about 5 GB, hold the state and have no limit.

The last layer alone is larger than the limit and is therefore a ``shardwell.wrapping.TiledLinear``. FSDP2 gets the same
model with the same tiles as units, built on the meta device and cut in two before a tensor has memory. Plain PyTorch
gets the model unchanged. Finally, plain PyTorch without a limit plays both ranks, and its weights have the same bits.
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
"""Bytes of the weight, the gradient and Adam's two moments in float32."""
IN_FLIGHT_BYTES = 9 << 20
"""Limit of prefetched weights and of gradients in flight: one tile or two layers each."""
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
    print("WEIGHTS is the start of a hash of all weights after the last step.")
    if not all(trainer.finished for trainer in results["Shardwell"]):
        sys.exit("a Shardwell trainer did not finish")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a model whose state is 8 times a trainer's memory limit.")
    parser.add_argument("--limit-mib", type=int, default=400, help="RLIMIT_DATA of each trainer (default: 400)")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, help=f"(default: {size})")
    parser.add_argument("--control", action="store_true", help="also train FSDP2 without a limit")
    parser.add_argument("--role", choices=["shardwell", "fsdp2", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def count_parameters(arguments: argparse.Namespace) -> int:
    layer = arguments.width * (arguments.width + 1)
    return int(arguments.num_layers * layer + arguments.num_classes * (arguments.width + 1))


def state_bytes(arguments: argparse.Namespace) -> int:
    """Returns the bytes of weights, gradients and optimizer state."""
    return count_parameters(arguments) * STATE_BYTES_PER_PARAMETER


def describe(arguments: argparse.Namespace) -> str:
    limit, largest = arguments.limit_mib << 20, arguments.num_classes * (arguments.width + 1) * 4
    return (
        f"{count_parameters(arguments) / 1e6:.0f} M parameters. With gradients and AdamW's moments, they take "
        f"{state_bytes(arguments) / 1e9:.2f} GB, {state_bytes(arguments) / limit:.1f} times the limit of "
        f"{limit / 1e6:.0f} MB per trainer. The last layer's weight alone has {largest / 1e6:.0f} MB."
    )


# ---- trainer processes ----


@dataclass
class Trainer:
    """Output and exit code of a trainer process."""

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
        return f"failed while {self.last('stage', 'starting')}: {self.last('died', f'exit code {self.exit_code}')}"


def run_all(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Trainer]]]:
    """Runs all variants, one after another."""
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
    role: str,
    arguments: argparse.Namespace,
    rendezvous: str,
    *,
    count: int = NUM_TRAINERS,
    limit_mib: int | None = None,
) -> list[Trainer]:
    """Starts all trainers of one kind and waits for them. If one dies, the others are killed."""
    options = ["--role", role, "--rendezvous", rendezvous]
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
    """Returns when all processes have ended. Kills processes that wait for a dead one."""
    deadline = time.monotonic() + CHILD_LIMIT_S
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children) or time.monotonic() > deadline:
            time.sleep(3.0)  # lets other failing processes report their reasons
            for child in children:
                child.kill()
        time.sleep(0.1)


def run_role(arguments: argparse.Namespace) -> None:
    """Runs a trainer. Sets the limit before any other work, including imports."""
    threading.stack_size(512 << 10)
    if arguments.limit_mib:
        limit = arguments.limit_mib << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    emit(stage="importing torch")
    exit_code = 0
    try:
        import torch

        torch.set_num_threads(1)
        emit(**ROLES[arguments.role](arguments), **memory())
    except (MemoryError, RuntimeError, OSError) as error:
        # The reason follows the name of the failed check in torch's message.
        reason = str(error).partition("DefaultCPUAllocator: ")[2] or str(error)
        emit(error=f"{type(error).__name__}: {reason[:90]}", **memory())
        exit_code = 1
    sys.stdout.flush()
    os._exit(exit_code)  # threads of a process without memory may not end


def emit(**values: Any) -> None:
    """Prints a line of JSON for the parent process."""
    print(json.dumps(values), flush=True)


def memory() -> dict[str, int]:
    """Returns peak resident memory, limited memory and resident shared memory in bytes."""
    names = {"VmHWM": "peak_resident", "VmData": "limited", "RssShmem": "shared"}
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {names[words[0][:-1]]: int(words[1]) << 10 for words in lines if words and words[0][:-1] in names}


def make_model(arguments: argparse.Namespace) -> torch.nn.Sequential:
    """Returns the model on the meta device. The last layer is tiled."""
    import torch

    import shardwell

    with torch.device("meta"):
        linears = [torch.nn.Linear(arguments.width, arguments.width) for _ in range(arguments.num_layers)]
        head = shardwell.wrapping.TiledLinear(arguments.width, arguments.num_classes, num_tiles=arguments.num_tiles)
        layers = [layer for linear in linears for layer in (linear, torch.nn.Tanh())]
        return torch.nn.Sequential(*layers, head)


def linears_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Returns the layers and tiles with their names in the model."""
    import torch

    return ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))


def initialiser(model: torch.nn.Module) -> Any:
    """Returns a function that initialises a layer with values that depend on its position only."""
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
    """Returns a hash of all weights. Gathers one layer at a time."""
    import shardwell

    hasher = hashlib.sha256()
    for name, module in linears_of(model):
        if isinstance(module, shardwell.ShardedModule):
            module.unshard()
        for parameter in module.parameters():
            hasher.update(f"{name} {tuple(parameter.shape)}".encode())
            hasher.update(parameter.detach().clone().numpy().data)
        if isinstance(module, shardwell.ShardedModule):
            module.reshard()
    return hasher.hexdigest()


def batch(arguments: argparse.Namespace, step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    inputs = torch.randn(arguments.batch_size, arguments.width, generator=generator)
    return inputs, torch.randint(arguments.num_classes, (arguments.batch_size,), generator=generator)


def train_sharded(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Trains with Shardwell. The only special option returns freed memory to the system."""
    import torch

    import shardwell

    emit(stage="joining")
    losses = []
    with shardwell.join(
        arguments.rendezvous,
        run="larger than a trainer",
        world=shardwell.World(dp=NUM_TRAINERS),
        global_rank=arguments.rank,
        transfers=shardwell.TransferOptions(
            transports="socket", prefetch_bytes=IN_FLIGHT_BYTES, push_bytes=IN_FLIGHT_BYTES
        ),
    ) as session:
        emit(stage="sharding", **memory())
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
            emit(stage=f"training step {step.number}", **memory())
            for inputs, labels in step.batches(lambda number, dp_rank: batch(arguments, number, dp_rank)):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        report = session.memory()
        emit(stage="reading the weights", weights=report.peak_bytes, **memory())
        return {"losses": losses} | ({"digest": digest(model)} if arguments.rank == 0 else {})


def train_fsdp2(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Trains with FSDP2. The model is built on the meta device, cut in two, and then initialised."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    emit(stage="creating the process group")
    distributed.init_process_group(
        "gloo", init_method=f"file://{arguments.rendezvous}", rank=arguments.rank, world_size=NUM_TRAINERS
    )
    mesh = init_device_mesh("cpu", (NUM_TRAINERS,))
    model = make_model(arguments)
    initialise = initialiser(model)
    units = [module for _, module in linears_of(model)]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for number, unit in enumerate(units):
        emit(stage=f"giving memory to its half of layer {number + 1} of {len(units)}", **memory())
        unit.to_empty(device="cpu")
        with torch.no_grad():
            initialise(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(arguments.num_steps):
        emit(stage=f"training step {step}", **memory())
        inputs, labels = batch(arguments, step, arguments.rank)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


def train_plain(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Trains with plain PyTorch. One process plays all ranks and adds their gradients in rank order."""
    import torch

    model = make_model(arguments)
    initialise = initialiser(model)
    for name, module in linears_of(model):
        emit(stage=f"giving memory to {name}", **memory())
        module.to_empty(device="cpu")
        with torch.no_grad():
            initialise(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    losses = []
    for step in range(arguments.num_steps):
        for dp_rank in range(NUM_TRAINERS):
            emit(stage=f"training step {step}", **memory())
            inputs, labels = batch(arguments, step, dp_rank)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
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
    first = next((trainer for trainer in trainers if "error" in str(trainer.lines)), trainers[0])
    yield first.ending()


if __name__ == "__main__":
    main()
