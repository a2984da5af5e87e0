"""Trainer processes of the baselines and of Shardwell: ``python -m benchmarks.trainers SPEC`` runs one.

The command ``{"steps": n}`` runs n steps and returns their durations and losses. The model, its seeds, the data, the
number of threads (one per process) and the fused AdamW are the same for all.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwell
from benchmarks import workers
from benchmarks.models import compute, count_parameters, make_model, make_tokens
from benchmarks.workers import Group
from examples.gpt import GPT, GPTConfig
from shardwell_server.certificates import make_certificates

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
_WAITS = ("gather_wait_s", "push_wait_s", "finish_wait_s", "commit_wait_s")
_CARRIED = ("received_bytes", "sent_bytes")
_RUN = "benchmark"


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """The task of one trainer process."""

    mode: str
    """``plain``, ``ddp``, ``fsdp2``, ``fsdp2_prefetch`` or ``shardwell``."""
    model: GPTConfig
    batch_size: int
    length: int
    dp: int = 1
    dp_rank: int = 0
    address: str = ""
    """Address of the coordinator; for the baselines, the ``init_method`` of ``torch.distributed``."""
    transfers: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``shardwell.TransferOptions``."""
    join: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``shardwell.join``."""
    encrypt: str = ""
    """Which connections of the socket transport are encrypted. Empty: the cluster has no TLS."""
    security: dict[str, Any] = field(default_factory=dict)
    """Token file and TLS of the cluster."""

    def tokens(self, step: int, dp_rank: int) -> torch.Tensor:
        """Returns a rank's batch of a step. [batch_size, length + 1]"""
        return make_tokens(self.model, step=step, dp_rank=dp_rank, batch_size=self.batch_size, length=self.length)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainerSpec:
        values = json.loads(text)
        return cls(**{**values, "model": GPTConfig(**values["model"])})


@dataclass(frozen=True)
class StepResult:
    """Result of one step."""

    loss: float | None
    """Loss of the trainer's own work item. None: another trainer computed it."""
    totals: dict[str, float] = field(default_factory=dict)
    """Running totals of Shardwell: the wait times of ``session.stats()`` and the bytes of ``session.transports()``,
    under the same names."""


# ---- baselines ----


def baseline_steps(spec: TrainerSpec) -> Generator[StepResult, None, None]:
    """Trains without Shardwell, one step per item."""
    model = make_model(spec.model)
    trained: nn.Module = model
    if spec.mode != "plain":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group("gloo", init_method=spec.address, rank=spec.dp_rank, world_size=spec.dp)
    if spec.mode == "ddp":
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif spec.mode in ("fsdp2", "fsdp2_prefetch"):
        _shard_as_fsdp2(model, spec.dp)
    begin_step = gather_one_block_ahead(model, model.blocks) if spec.mode == "fsdp2_prefetch" else do_nothing
    optimizer = torch.optim.AdamW(trained.parameters(), fused=True, **ADAMW)
    for step in range(sys.maxsize):
        begin_step()
        loss = compute(trained, spec.tokens(step, spec.dp_rank))
        optimizer.step()
        optimizer.zero_grad()
        yield StepResult(loss)


def _shard_as_fsdp2(model: GPT, dp: int) -> None:
    mesh = init_device_mesh("cpu", (dp,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def do_nothing() -> None:
    """Stands for the start of a step that needs no preparation."""


def gather_one_block_ahead(model: nn.Module, blocks: Iterable[nn.Module]) -> Callable[[], None]:
    """Overlaps gathers by asynchronous collectives. FSDP2's prefetch does not overlap on CPU (streams are no-ops).

    Args:
        model: Root of the units.
        blocks: The blocks in the order of the forward, each a unit.

    Returns:
        A function to call at the start of each step. It begins the first gathers.
    """
    root, *units = (_as_fsdp2(module) for module in (model, *blocks))
    root._set_unshard_async_op(True)
    for earlier, later in itertools.pairwise(units):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])

    def begin_step() -> None:
        root.unshard(async_op=True)
        units[0].unshard(async_op=True)

    return begin_step


def _as_fsdp2(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


# ---- Shardwell ----


def shardwell_steps(spec: TrainerSpec) -> Generator[StepResult, None, None]:
    """Trains with Shardwell: one unit per block and one for the rest."""
    tls = shardwell.TlsOptions(**spec.security["tls"]) if spec.security else None
    with shardwell.join(
        spec.address,
        token_file=spec.security.get("token_file"),
        tls=tls,
        run=_RUN,
        world=shardwell.World(dp=spec.dp),
        global_rank=spec.dp_rank,
        transfers=shardwell.TransferOptions(**spec.transfers),
        **spec.join,
    ) as session:
        model = make_model(spec.model)
        for block in model.blocks:
            shardwell.fully_shard(block, session)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
        for step in session.steps(sys.maxsize):
            batches = step.batches(lambda number, rank: (rank, spec.tokens(number, rank)))
            losses = {rank: compute(model, tokens) for rank, tokens in batches}
            optimizer.step()
            optimizer.zero_grad()
            yield StepResult(losses.get(spec.dp_rank), totals_of(session))


def totals_of(session: shardwell.Session) -> dict[str, float]:
    """Returns the running totals of a session, for ``StepResult``."""
    stats, transports = session.stats(), session.transports()
    carried = {name: sum(transport[name] for transport in transports) for name in _CARRIED}
    return {name: stats[name] for name in _WAITS} | carried


# ---- groups ----


@contextmanager
def baseline_group(spec: TrainerSpec) -> Iterator[Group]:
    """Starts ``spec.dp`` trainers of a baseline. In the mode ``plain`` they do not communicate."""
    with tempfile.TemporaryDirectory() as directory:
        address = (Path(directory) / "rendezvous").as_uri()
        with _trainers(replace(spec, address=address)) as group:
            yield group


@contextmanager
def shardwell_group(spec: TrainerSpec, *, num_shards: int) -> Iterator[Group]:
    """Starts ``spec.dp`` trainers of Shardwell, and a cluster for them."""
    with tempfile.TemporaryDirectory() as folder, _cluster(spec, folder, num_shards) as cluster:
        security: dict[str, Any] = {}
        if spec.encrypt:
            trusted = shardwell.TlsOptions(ca=f"{folder}/ca.pem", encrypt=spec.encrypt)
            security = {"token_file": cluster.token_file, "tls": asdict(trusted)}
        join = spec.join | ({"checkpoint_dir": folder} if "checkpoint_every" in spec.join else {})
        server_pids = [cluster.coordinator.pid, *(shard.pid for shard in cluster.shards)]
        with _trainers(
            replace(spec, address=cluster.address, join=join, security=security), server_pids=server_pids
        ) as group:
            yield group


def _cluster(spec: TrainerSpec, folder: str, num_shards: int) -> shardwell.LocalCluster:
    """Returns a cluster, with new certificates in the folder if the spec has TLS."""
    if not spec.encrypt:
        return shardwell.LocalCluster(num_shards=num_shards)
    make_certificates(Path(folder), ["127.0.0.1"], days=1)
    files = {name: f"{folder}/{file}.pem" for name, file in (("ca", "ca"), ("cert", "server"), ("key", "server-key"))}
    return shardwell.LocalCluster(num_shards=num_shards, tls=shardwell.TlsOptions(**files, encrypt=spec.encrypt))


def _trainers(spec: TrainerSpec, *, server_pids: Sequence[int] = ()) -> workers.GroupContext:
    command_lines = [[replace(spec, dp_rank=dp_rank).to_json()] for dp_rank in range(spec.dp)]
    return workers.start_group("benchmarks.trainers", command_lines, server_pids=server_pids)


def estimated_bytes(spec: TrainerSpec, *, num_shards: int = 0) -> int:
    """Estimates the memory of a group, to decide whether several groups can be alive at once.

    The estimate counts weights, gradient and two moments per parameter, and half as much for buckets, gathered weights
    or contributions in flight.
    """
    interpreter = 300 << 20
    per_process = interpreter + 16 * spec.batch_size * spec.length * spec.model.vocab_size
    parameters = 24 * count_parameters(spec.model)
    if spec.mode == "shardwell":
        return parameters + spec.dp * (per_process + parameters // 3) + (num_shards + 1) * interpreter
    return spec.dp * (per_process + parameters)


# ---- the process ----


def serve_steps(steps: Generator[StepResult, None, None]) -> None:
    """Runs the requested steps until the input ends."""
    taken = 0

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        nonlocal taken
        first, seconds, results = taken, [], []
        for _ in range(command["steps"]):
            started = time.perf_counter()
            results.append(next(steps))
            seconds.append(time.perf_counter() - started)
        taken += len(results)
        losses, totals = [result.loss for result in results], [result.totals for result in results]
        return {"first_step": first, "seconds": seconds, "losses": losses, "totals": totals}

    workers.serve(answer)
    steps.close()


def main() -> None:
    torch.set_num_threads(1)
    spec = TrainerSpec.from_json(sys.argv[1])
    serve_steps(shardwell_steps(spec) if spec.mode == "shardwell" else baseline_steps(spec))


if __name__ == "__main__":
    main()
