"""A trainer process of the checks: ``python -m benchmarks.gpu_check.trainer SPEC`` with the fields of ``Spec`` as JSON.

Prints a JSON line per work item and commit, and the hash of the weights at the end.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import shardwell
from benchmarks.gpu_check.training import loss_of, tokens_of
from examples.gpt import GPT, GPTConfig
from shardwell.parallel import plan_tensor_parallel

VOCABULARY, LENGTH = 64, 16


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The task of one trainer."""

    address: str
    run: str
    device: str
    """The device to compute on."""
    dp: int = 1
    tp: int = 1
    backend: str = ""
    """Backend of the replica's process group. Empty: the usual one of the device."""
    min_trainers: int | None = None
    """As in ``join``."""
    trainer: str = ""
    width: int = 64
    steps: int = 6
    sgd: bool = True
    """SGD, whose bits are the same on a CPU; otherwise AdamW."""
    kill_at_step: int = -1
    """Step in whose backward the process kills itself."""
    wait_for: str = ""
    """Path of a file without which no step begins. Empty: none."""
    new_group: bool = False
    """Only form the replica's process group, and then a new group over its store."""

    @property
    def argument(self) -> str:
        return json.dumps(asdict(self))


def say(**fields: Any) -> None:
    print(json.dumps({**fields, "at": time.monotonic()}), flush=True)


def make_model(width: int) -> GPT:
    """Returns the same model in every process, on the CPU."""
    torch.manual_seed(0)
    sizes = GPTConfig(vocab_size=VOCABULARY, context=LENGTH, num_layers=2, num_heads=2, width=width, tied=False)
    return GPT(sizes)


def hash_of(state: Mapping[str, torch.Tensor]) -> str:
    """Returns the hash of the names and bits of tensors."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def replica_mesh(session: shardwell.Session, spec: Spec) -> Any:
    """Returns the mesh of the replica, with the backend of the task."""
    device_type = torch.device(spec.device).type
    options = {"backend": spec.backend} if spec.backend else {}
    return session.replica_mesh(device_type, **options)


def train(spec: Spec) -> str:
    """Trains a GPT; returns the hash of the weights, with ``tp=2`` none."""
    device = torch.device(spec.device)
    world = shardwell.World(dp=spec.dp, tp=spec.tp)
    with shardwell.join(
        spec.address, run=spec.run, world=world, trainer=spec.trainer or None, min_trainers=spec.min_trainers
    ) as session:
        say(joined=spec.trainer)
        if spec.new_group:
            check_new_group(session, spec)
            dist.destroy_process_group()
            return ""
        model: Any = make_model(spec.width)
        if spec.tp > 1:
            mesh = replica_mesh(session, spec)
            # gloo reduces tensors of a GPU, which is all that a plan without the vocabulary needs.
            plan = plan_tensor_parallel(model, spec.tp, fused_by_head=True, vocabulary=False)
            model = plan.apply(model.to(device), mesh["tp"])
        model.to(device)
        shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({type(model.blocks[0])}))
        kills = [spec.kill_at_step]
        model.blocks[0].register_full_backward_hook(lambda *_: kill_at(session.step, kills))
        make = shardwell.optim.SGD if spec.sgd else shardwell.optim.AdamW
        optimizer = make(model.parameters(), lr=0.5 if spec.sgd else 1e-3)
        for step in session.steps(spec.steps):
            while spec.wait_for and not os.path.exists(spec.wait_for):
                time.sleep(0.01)
            for tokens in step.batches(
                lambda number, dp_rank: tokens_of(100 * number + dp_rank, vocabulary=VOCABULARY)
            ):
                loss_of(model, tokens.to(device)[:, : LENGTH + 1]).backward()
                say(item=step.number)
            optimizer.step()
            optimizer.zero_grad()
            say(committed=step.number)
        result = "" if spec.tp > 1 else hash_of(shardwell.full_state_dict(model))
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def kill_at(step: int, kills: list[int]) -> None:
    """Kills this process in the backward of a step."""
    if step == kills[0]:
        os.kill(os.getpid(), signal.SIGKILL)


def check_new_group(session: shardwell.Session, spec: Spec) -> None:
    """Makes a group of this process alone over the store of its replica, and reduces over it.

    NCCL connects at the first collective through the store, which therefore must still be there.
    """
    rank = replica_mesh(session, Spec(**{**asdict(spec), "device": "cpu", "backend": ""}))["tp"].get_local_rank()
    gc.collect()
    backend = "nccl" if torch.device(spec.device).type == "cuda" else "gloo"
    groups = [dist.new_group([each], backend=backend) for each in range(2)]
    value = torch.full((4,), rank + 1.0, device=spec.device)
    dist.all_reduce(value, group=groups[rank])
    say(reduced=value.tolist(), expected=[rank + 1.0] * 4)
    dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    spec = Spec(**json.loads(sys.argv[1]))
    if torch.device(spec.device).type == "cuda":
        torch.cuda.set_device(spec.device)
    result = train(spec)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() and spec.device != "cpu" else 0
    say(result=result, peak_mb=peak / 1e6)


if __name__ == "__main__":
    main()
