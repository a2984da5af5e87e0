"""A trainer of a grid that uses torch's schedules, for tests. Prints one JSON line per item and a hash at the end.

``python -m tests.support.pipeline_trainer --address A --run R --dp 2 --tp 1 --pp 2 --global-rank 0 [--signal 9
--at-step K]`` sends a signal to itself in the forward of step K.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial

import torch

import shardwell
from shardwell.parallel import PipelineSchedule, PipelineStage, SchedulePlan, plan_tensor_parallel, split_model
from tests.support import split_gpt
from tests.support.cluster import join_options
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
    shardwell.auto_wrap(module, session)
    group = mesh["pp"].get_group()
    stage = PipelineStage(module, index, plan.num_stages, "cpu", example=examples[index], group=group)
    return stage, PipelineSchedule(plan, [stage], loss_of)


def read_hash(session: shardwell.Session) -> str:
    """Returns the hash of the whole weights."""
    plain = gpt()
    with shardwell.attach(session.config.address, run=session.run) as reader:
        reader.follow(plain)
    return sha256(plain.state_dict())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", required=True)
    for name, default in (("dp", 1), ("tp", 1), ("pp", 1), ("global-rank", None), ("steps", 5), ("signal", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--at-step", type=int)
    options = parser.parse_args()
    with shardwell.join(
        options.address,
        run=options.run,
        world=shardwell.World(dp=options.dp, tp=options.tp, pp=options.pp),
        trainer=f"trainer{options.global_rank}",
        global_rank=options.global_rank,
        **join_options(wait_limit_s=60),
    ) as session:
        stage, schedule = make_schedule(session)
        optimizer = shardwell.optim.AdamW(stage.submod.parameters(), lr=1e-2)

        def send_signal(*_: object) -> None:
            if session.step == options.at_step:
                os.kill(os.getpid(), options.signal)

        stage.submod.register_forward_pre_hook(send_signal)
        for step in session.steps(options.steps):
            for tokens, targets in step.batches(batch):
                schedule.step(tokens, target=targets)
                print(json.dumps({"step": step.number, "loss": 0.0}), flush=True)
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        print(json.dumps({"sha256": read_hash(session)}), flush=True)
    os._exit(0)  # see tests.support.gloo.leave


if __name__ == "__main__":
    main()
