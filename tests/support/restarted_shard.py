"""A shard server's state without its rpcs, in a process that may be killed and started again in the same folder.

The program plays the coordinator too: it writes the number of a step to a file when the step is committed. A new
process repeats the update of a committed step, and the whole step otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import xxhash

from shardwell_server.shard.arithmetic import update_pieces
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.requests import steps
from shardwell_server.shard.requests.peers import GrpcPeers
from shardwell_server.shard.requests.replication import Replicator
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.contributions import Contribution
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire import fault_points
from shardwell_wire.host.server_folders import FolderOwner
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, shard_pb2

DP = 2
STEPS = 4
OWNER = FolderOwner(server_id="shard-0", coordinator="localhost:1")
RUN = RunIdentity("run", "0123456789abcdef")
SHAPES = [(48, 64), (7, 3), (5, 2), (33, 40)]
ADAMW = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "amsgrad": 0.0, "maximize": 0.0}
BUFFERS = 2
"""Index of the unit of buffers."""


def layouts(dtype: str) -> list[UnitLayout]:
    parameters = tuple(Parameter(f"p{number}", shape, dtype) for number, shape in enumerate(SHAPES))
    buffers = (Parameter("running_mean", (640,), "float32"),)
    return [
        UnitLayout("block", parameters),
        UnitLayout("head", parameters[:1]),
        UnitLayout("buffers", buffers, kind="buffers"),
    ]


class Program:
    """One process.

    Args:
        folder: Directory for shared memory and for the number of the last committed step.
        optimizer: The optimizer of every step.
        dtype: Dtype of the parameters.
        dp: Number of data ranks.
        new_state_at: The step that drops the optimizer state of the steps before. -1: none.
    """

    def __init__(
        self, folder: Path, optimizer: common_pb2.OptimizerStep, dtype: str, dp: int, new_state_at: int = -1
    ) -> None:
        self.folder, self.optimizer, self.dtype, self.dp = folder, optimizer, dtype, dp
        self.new_state_at = new_state_at
        self.attempt = 0

    async def run(self) -> dict[str, object]:
        with ThreadPoolExecutor(1) as threads, closing(SharedMemory(self.folder, OWNER)) as shared:
            store = ShardStore(256 << 20, threads, shared)
            assert store.of_former is not None
            held = store.of_former.held()
            store.adopt(held)
            run = store.runs[RUN.run_id] if held else await self.begin(store)
            committed = self.committed()
            if held and run.step == committed:
                assert all(shard.can_update for shard in held if shard.version == committed), held
                await self.update(run, store, committed)
            elif held:
                self.attempt = 1
                fences = [shard_pb2.RankFence(dp_rank=rank, attempt=1) for rank in range(self.dp)]
                context = common_pb2.RequestContext(step=run.step)
                steps.fence(run, shard_pb2.FenceRequest(context=context, ranks=fences))
            for step in range(run.step, STEPS):
                await self.step(run, store, step)
                self.attempt = 0
            return {"held": len(held), "hash": digest(run), "files": len(list(shared._directory.iterdir()))}

    async def begin(self, store: ShardStore) -> HostedRun:
        generator = torch.Generator().manual_seed(0)
        for index, layout in enumerate(layouts(self.dtype)):
            spec = ShardSpec(
                run=RUN, layout=layout, index=index, start_bytes=0, stop_bytes=layout.size_bytes, dp=self.dp
            )
            shard = store.reserve(spec)
            room = store.memory.incoming(shard.size_bytes, shard.initial_quota, wait_s=1.0, what=shard.what)
            with await room as received:
                for view in shard.views(received.buffer):
                    view.copy_(torch.randn(view.numel(), generator=generator))
                shard.values.accept_initial(0, received)
        for layout in layouts(self.dtype):
            store.runs[RUN.run_id].publish(layout.unit, 0)
        return store.runs[RUN.run_id]

    async def step(self, run: HostedRun, store: ShardStore, step: int) -> None:
        pushed = {rank: self.push(run, step, rank) for rank in range(self.dp)}
        ranks = [
            shard_pb2.RankManifest(dp_rank=rank, attempt=self.attempt, units=units) for rank, units in pushed.items()
        ]
        context = common_pb2.RequestContext(step=step)
        prepare = shard_pb2.PrepareStepRequest(
            context=context, ranks=ranks, dp=self.dp, optimizer=self.optimizer_of(step)
        )
        answer = await steps.prepare(run, prepare, Replicator(store, GrpcPeers()))
        assert answer.update_ready
        (self.folder / "committed").write_text(str(step))
        await self.update(run, store, step)

    def optimizer_of(self, step: int) -> common_pb2.OptimizerStep:
        optimizer = common_pb2.OptimizerStep(new_state=step == self.new_state_at)
        optimizer.MergeFrom(self.optimizer)
        return optimizer

    def push(self, run: HostedRun, step: int, rank: int) -> list[common_pb2.UnitParts]:
        units = []
        generator = torch.Generator().manual_seed(100 * step + rank)
        for shard in sorted(run.shards.values(), key=lambda shard: shard.index):
            if shard.index == BUFFERS and (rank or step == 1):
                continue  # only rank 0 pushes buffers, and not in every step
            buffer = torch.empty(shard.size_bytes, dtype=torch.uint8)
            views = shard.views(buffer)
            for view in views:
                view.copy_(torch.randn(view.numel(), generator=generator))
            present = set(range(len(views)))
            if shard.index == 0 and step == 0:
                present.remove(1)  # the state of this parameter starts one step later
            shard.gradient.discard_reduced()
            shard.gradient.contributions.drop(rank)
            shard.gradient.contributions.add(
                rank, Contribution(0, self.attempt, buffer, views, lambda: None, present, [None])
            )
            units.append(common_pb2.UnitParts(unit_index=shard.index, part_count=1))
        return units

    async def update(self, run: HostedRun, store: ShardStore, step: int) -> None:
        context = common_pb2.RequestContext(step=step)
        request = shard_pb2.UpdateRequest(context=context, optimizer=self.optimizer_of(step), clip_coefficient=0.5)
        assert (await steps.update(run, request)).version == step + 1

    def committed(self) -> int:
        file = self.folder / "committed"
        return int(file.read_text()) if file.exists() else -1


def digest(run: HostedRun) -> str:
    """Returns a hash of all values, versions and optimizer state of a run."""
    hasher = xxhash.xxh3_64()
    for shard in sorted(run.shards.values(), key=lambda shard: shard.index):
        hasher.update(f"{shard.unit} {shard.version}".encode())
        assert shard.values.live is not None
        for view in shard.views(shard.values.live.buffer):  # bytes between parameters are undefined
            hasher.update(view.view(torch.uint8).numpy().tobytes())
        for number in range(len(shard.segments) if shard.optimizer is not None else 0):
            hasher.update(f"{number} {_steps(shard, number)}".encode())
            for name, tensor in sorted(_state(shard, number).items()):
                hasher.update(name.encode())
                hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _steps(shard: UnitShard, number: int) -> int:
    assert shard.optimizer is not None
    return shard.optimizer.steps_of(number)


def _state(shard: UnitShard, number: int) -> dict[str, torch.Tensor]:
    assert shard.optimizer is not None
    return dict(shard.optimizer.state(number))


def optimizer_step(algorithm: str, settings: dict[str, float]) -> common_pb2.OptimizerStep:
    """Returns the step of an optimizer with averages and clipping, for all parameters of both units."""
    step = common_pb2.OptimizerStep(algorithm=algorithm, ema_decay=0.9, clip_value=0.75)
    step.groups.add(hyperparameters=settings)
    for index, count in ((0, len(SHAPES)), (1, 1)):
        step.units.add(unit_index=index, group_indices=[0] * count)
    return step


def play(
    folder: str,
    algorithm: str,
    dtype: str,
    dp: int,
    settings: dict[str, float],
    slice_bytes: int = 4096,
    new_state_at: int = -1,
) -> dict[str, object]:
    """Runs one process's life; see the module. With small slices, every shard is updated by itself."""
    update_pieces.SLICE_BYTES = slice_bytes
    return asyncio.run(Program(Path(folder), optimizer_step(algorithm, settings), dtype, dp, new_state_at).run())


def main() -> None:
    """Reads cases from standard input, one JSON object a line, and plays each in a child process.

    The children are forked, because importing torch takes longer than a case.
    """
    torch.set_num_threads(1)
    is_warm = False
    for line in sys.stdin:
        case = json.loads(line)
        if not is_warm:  # the first update takes a second, which every child would need again
            with TemporaryDirectory() as folder:
                play(folder, "adamw", case["dtype"], case["dp"], ADAMW)
            is_warm = True
        result = Path(case["folder"]) / "result"
        if (pid := os.fork()) == 0:
            with _armed(case.pop("fault")):
                result.write_text(json.dumps(play(**case)))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code, **(json.loads(result.read_text()) if code == 0 else {})}), flush=True)


def _armed(fault: list[object] | None) -> AbstractContextManager[object]:
    """Arms a point, given by name and occurrence, to kill this process."""
    return fault_points.armed(str(fault[0]), "kill", nth=int(str(fault[1]))) if fault else nullcontext()


if __name__ == "__main__":
    main()
