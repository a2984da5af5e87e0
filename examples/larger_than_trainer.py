"""Trains a model whose state is more than eight times what a trainer may use; then FSDP2 tries under the same limit.

    python examples/larger_than_trainer.py

Every trainer is a process under RLIMIT_DATA, which the kernel enforces and which needs no rights: all memory that
the process may write and does not share counts, that of the interpreter, of torch and of thread stacks too. The last
layer alone is larger than the limit; it is a ``shardwell.TiledLinear``. Two shard servers on this machine hold the
state; they are reached over sockets, as on other hosts: in memory that they share, weights would count twice. FSDP2
gets the same model, with the same tiles as units, built without values and cut in two before a tensor has memory.

A run took 50 s of processor time, all processes together; the servers need about 5 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shardwell import Session

NUM_TRAINERS = 2
STATE_BYTES_PER_PARAMETER = 16
"""Weight, gradient and Adam's two moments in float32."""
IN_FLIGHT_BYTES = 9 << 20
"""Weights fetched ahead, and gradients on their way: one tile or two layers each."""
CHILD_LIMIT_S = 240.0


def main() -> None:
    arguments = parse_arguments()
    if arguments.role:
        run_role(arguments)
        return
    import shardwell

    print(describe(arguments), flush=True)
    with shardwell.LocalCluster(num_shards=2) as cluster:
        ours = run_trainers("shardwell", arguments, cluster.address)
    with tempfile.TemporaryDirectory() as folder:
        fsdp2 = run_trainers("fsdp2", arguments, f"{folder}/limited")
        control = run_trainers("fsdp2", arguments, f"{folder}/free", limited=False) if arguments.control else None
    print_table(arguments, ours, fsdp2, control)
    if not all(trainer.finished for trainer in ours):
        sys.exit("a trainer of Shardwell did not finish")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a model whose state is 8 times what a trainer may use.")
    parser.add_argument("--limit-mib", type=int, default=384, help="RLIMIT_DATA of each trainer (default: 384)")
    parser.add_argument("--num-layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--num-classes", type=int, default=102400, help="output features of the last layer")
    parser.add_argument("--num-tiles", type=int, default=50, help="of the last layer")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=2)
    parser.add_argument("--control", action="store_true", help="let FSDP2 train without a limit, too")
    parser.add_argument("--role", choices=["shardwell", "fsdp2"], help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def count_parameters(arguments: argparse.Namespace) -> int:
    layer = arguments.width * (arguments.width + 1)
    return int(arguments.num_layers * layer + arguments.num_classes * (arguments.width + 1))


def describe(arguments: argparse.Namespace) -> str:
    parameters, limit = count_parameters(arguments), arguments.limit_mib << 20
    state, largest = parameters * STATE_BYTES_PER_PARAMETER, arguments.num_classes * (arguments.width + 1) * 4
    return (
        f"{parameters / 1e6:.0f} M parameters; with gradients and AdamW's moments {state / 1e9:.2f} GB, "
        f"{state / limit:.1f} times the limit of {limit / 1e6:.0f} MB per trainer. "
        f"The last layer's weight alone has {largest / 1e6:.0f} MB."
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


def run_trainers(role: str, arguments: argparse.Namespace, place: str, *, limited: bool = True) -> list[Trainer]:
    """Starts all trainers of one kind and waits for them; one that dies ends the others."""
    options = ["--role", role, "--place", place, "--limit-mib", str(arguments.limit_mib if limited else 0)]
    for name in ("num_layers", "width", "num_classes", "num_tiles", "batch_size", "num_steps"):
        options += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    # Freed gradients go back to the system at once: docs/memory.md, "The C library".
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "2", **os.environ}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, *options, "--rank", str(rank)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(NUM_TRAINERS)
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
    try:
        losses = (train_sharded if arguments.role == "shardwell" else train_fsdp2)(arguments)
    except (MemoryError, RuntimeError, OSError) as error:
        # torch's own reason is behind the name of the check that failed.
        reason = str(error).partition("DefaultCPUAllocator: ")[2] or str(error)
        say(died=f"{type(error).__name__}: {reason[:90]}", **memory())
        sys.stdout.flush()
        os._exit(1)  # threads of a process without memory do not end by themselves
    say(losses=losses, **memory())
    sys.stdout.flush()
    os._exit(0)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def memory() -> dict[str, int]:
    """Most resident, and limited memory now. Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM", "VmData"))}
    return {"peak_resident": int(kilobytes["VmHWM"]) << 10, "data": int(kilobytes["VmData"]) << 10}


def batch(arguments: argparse.Namespace, step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    inputs = torch.randn(arguments.batch_size, arguments.width, generator=generator)
    return inputs, torch.randint(arguments.num_classes, (arguments.batch_size,), generator=generator)


def train_sharded(arguments: argparse.Namespace) -> list[float]:
    """Shardwell: a layer leaves this process as soon as it is made."""
    import torch

    import shardwell

    say(stage="joining")
    losses = []
    with shardwell.join(
        arguments.place,
        run="larger than a trainer",
        world=shardwell.World(dp=NUM_TRAINERS),
        global_rank=arguments.rank,
        lanes="socket",
        prefetch_bytes=IN_FLIGHT_BYTES,
        push_bytes=IN_FLIGHT_BYTES,
    ) as session:
        say(stage="building", **memory())
        model = make_model(arguments, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-3)
        for step in session.steps(arguments.num_steps):
            say(stage=f"training step {step.number}", **memory())
            for inputs, labels in step.batches(lambda number, dp_rank: batch(arguments, number, dp_rank)):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        report = session.memory()
        say(weights=report.peak_bytes, model=report.model_bytes)
    return losses


def make_model(arguments: argparse.Namespace, session: Session | None) -> torch.nn.Sequential:
    """Layers, and a last one in tiles; with a session each is sharded before the next is made."""
    import torch

    import shardwell

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for number in range(arguments.num_layers):
        layer = torch.nn.Sequential(torch.nn.Linear(arguments.width, arguments.width), torch.nn.Tanh())
        layers.append(layer if session is None else shardwell.fully_shard(layer, session, name=f"layer-{number}"))
    head = shardwell.TiledLinear(
        arguments.width, arguments.num_classes, num_tiles=arguments.num_tiles, session=session, name="head"
    )
    return torch.nn.Sequential(*layers, head)


def train_fsdp2(arguments: argparse.Namespace) -> list[float]:
    """FSDP2: the model is made without memory, cut in two, and given values then."""
    import torch
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    say(stage="making the process group")
    distributed.init_process_group(
        "gloo", init_method=f"file://{arguments.place}", rank=arguments.rank, world_size=NUM_TRAINERS
    )
    mesh = distributed.init_device_mesh("cpu", (NUM_TRAINERS,))
    with torch.device("meta"):
        model = make_model(arguments, None)
    units = [*model[:-1], *model[-1].tiles]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for number, unit in enumerate(units):
        say(stage=f"giving memory to its half of layer {number + 1} of {len(units)}", **memory())
        unit.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in unit.parameters():
                parameter.to_local().uniform_(-(arguments.width**-0.5), arguments.width**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(arguments.num_steps):
        say(stage=f"training step {step}", **memory())
        inputs, labels = batch(arguments, step, arguments.rank)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- the result ----


def print_table(
    arguments: argparse.Namespace, ours: Sequence[Trainer], fsdp2: Sequence[Trainer], control: Sequence[Trainer] | None
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "LIMIT", "TRAINERS", "MOST RESIDENT", "WEIGHTS AT MOST", "LOSS", "ENDED")
    limit = f"{(arguments.limit_mib << 20) / 1e6:.0f} MB"
    table.add_row("Shardwell", limit, *cells(ours))
    table.add_row("FSDP2, gloo", limit, *cells(fsdp2))
    if control:
        table.add_row("FSDP2, gloo", "none", *cells(control))
    console = Console()
    Console(width=max(console.width, 160)).print(table)


def cells(trainers: Sequence[Trainer]) -> Iterator[str]:
    resident = max(trainer.last("peak_resident", 0) for trainer in trainers)
    weights = max(trainer.last("weights", 0) for trainer in trainers)
    losses = trainers[0].last("losses", [])
    yield str(len(trainers))
    yield f"{resident / 1e6:.0f} MB"
    yield f"{weights / 1e6:.0f} MB" if weights else ""
    yield f"{losses[0]:.2f} to {losses[-1]:.2f}" if losses else ""
    first = next((trainer for trainer in trainers if "died" in str(trainer.lines)), trainers[0])
    yield first.ending()


if __name__ == "__main__":
    main()
