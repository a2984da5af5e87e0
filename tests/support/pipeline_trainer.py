"""A trainer of a grid that uses torch's schedules, for tests. Prints one JSON line per item and a hash at the end.

``python -m tests.support.pipeline_trainer --address A --run R --dp 2 --tp 1 --pp 2 --global-rank 0 [--signal 9
--at-step K] [--in-process]`` sends a signal to itself in the first forward at step K, once. ``--in-process``: it forms
its replica again in the same process. The stage has a buffer, and the run tracks an LR scheduler. ``--client-side N``
selects torch's optimizer of that name on the trainers. ``--kill-in-update K`` kills the process during the update of
step K, after one segment of a partition is updated. ``--evaluate`` evaluates after each step, and sends the signal in
the evaluation before step K. ``--fail-at-step K`` raises ValueError in the loop of step K.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import shardwell
from shardwell.parallel import PipelineSchedule, PipelineStage, SchedulePlan, plan_tensor_parallel, split_model
from tests.support import split_gpt
from tests.support.cluster import join_options, wait_until
from tests.support.mortal_optimizers import client_side
from tests.support.reference import sha256
from tests.support.split_gpt import LENGTH, loss_of

MICRO_BATCHES, BATCH = 2, 4
gpt, batch = partial(split_gpt.gpt, 2), partial(split_gpt.batch, batch_size=BATCH)


def make_schedule(session: shardwell.Session) -> tuple[PipelineStage, PipelineSchedule]:
    """Returns this trainer's stage and its schedule."""
    world, mesh, model = session.world, session.replica_mesh(), gpt()
    plan = SchedulePlan(schedule="1F1B", pp=world.pp, num_micro_batches=MICRO_BATCHES)
    tensor_plan, split = plan_tensor_parallel(model, world.tp, fused_by_head=True), split_model(model, plan.num_stages)
    examples = split.examples(torch.zeros(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.int64))
    index = session.pp_rank or 0
    module = tensor_plan.apply(split.module(index), mesh["tp"])
    module.register_buffer(f"mean{index}", torch.zeros(()))
    module.register_forward_pre_hook(partial(_average, name=f"mean{index}"))
    shardwell.auto_wrap(module, session)
    group = mesh["pp"].get_group()
    stage = PipelineStage(module, index, plan.num_stages, "cpu", example=examples[index], group=group)
    return stage, PipelineSchedule(plan, [stage], loss_of)


def _average(module: nn.Module, inputs: tuple[torch.Tensor, ...], *, name: str) -> None:
    """Updates the buffer, a moving average of the stage's inputs."""
    if module.training:
        module.get_buffer(name).lerp_(inputs[0].detach().float().mean(), 0.25)


def read_hash(session: shardwell.Session) -> str:
    """Returns the hash of the whole weights and of the buffers of all stages."""
    plain = gpt()
    for index in range(session.world.pp):
        plain.register_buffer(f"mean{index}", torch.zeros(()))
    with shardwell.attach(session.config.address, run=session.run) as reader:
        reader.follow(plain)
    return sha256(plain.state_dict())


class Script:
    """The training script of one process. ``train`` is called again if the replica is formed again in process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._signals = 0 if options.at_step is None else 1
        self._models: list[weakref.ref[nn.Module]] = []
        """The models of all calls of ``train``."""

    def train(self, session: shardwell.Session) -> None:
        assert gc.get_freeze_count() > 0, "join makes collections short"
        gc.collect()
        assert not any(model() for model in self._models), "the former model is released"
        stage, schedule = make_schedule(session)
        self._models.append(weakref.ref(stage.submod))
        optimizer = self._make_optimizer(stage.submod.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        session.track(scheduler=scheduler)
        stage.submod.register_forward_pre_hook(lambda *_: self._send_signal(session.step))
        for step in session.steps(self._options.steps):
            for tokens, targets in step.batches(batch):
                schedule.step(tokens, target=targets)
                print(json.dumps({"step": step.number, "loss": 0.0}), flush=True)
                self._pause(step.number)
                if step.number == self._options.fail_at_step:
                    raise ValueError("bad batch")
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if self._options.evaluate:
                schedule.eval(tokens, target=targets)
        mean = stage.submod.get_buffer(f"mean{stage.stage_index}").item()
        state = {"mean": mean, "lr": scheduler.get_last_lr(), "models": len(self._models)}
        print(json.dumps({"sha256": read_hash(session), "state": state}), flush=True)

    def _make_optimizer(self, parameters: Iterable[nn.Parameter]) -> shardwell.optim.ShardedOptimizer:
        if (name := self._options.client_side) is not None:
            return client_side(name, self._options.kill_in_update, 1)(parameters)
        return shardwell.optim.AdamW(parameters, lr=1e-2)

    def _send_signal(self, step: int) -> None:
        if self._signals and step == self._options.at_step:
            self._signals -= 1
            os.kill(os.getpid(), self._options.signal)

    def _pause(self, step: int) -> None:
        if step == self._options.pause_at_step:
            wait_until(self._options.pause_until.exists, "the test continues", timeout_s=60)


def main() -> None:
    gc.unfreeze()  # the fork server has frozen its objects, and `train` checks that `join` does
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", required=True)
    for name, default in (("dp", 1), ("tp", 1), ("pp", 1), ("global-rank", None), ("steps", 5), ("signal", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--at-step", type=int)
    parser.add_argument("--fail-at-step", type=int)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--pause-at-step", type=int)
    parser.add_argument("--pause-until", type=Path)
    parser.add_argument("--client-side")
    parser.add_argument("--kill-in-update", type=int)
    options = parser.parse_args()
    with shardwell.join(
        options.address,
        run=options.run,
        world=shardwell.World(dp=options.dp, tp=options.tp, pp=options.pp),
        trainer=f"trainer{options.global_rank}",
        global_rank=options.global_rank,
        **join_options(
            wait_limit_s=60, checkpoint_dir=options.checkpoint_dir, checkpoint_every=options.checkpoint_every
        ),
    ) as session:
        script = Script(options)
        session.run_replica(script.train) if options.in_process else script.train(session)
    os._exit(0)  # see tests.support.gloo.leave


if __name__ == "__main__":
    main()
