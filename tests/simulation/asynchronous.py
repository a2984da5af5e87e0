"""Runs whose work items are committed one by one: their trainers, and the bits that the commit records imply.

The order of the commits depends on time, so there is no run to compare with. The commit records name the item and the
version that it read. Together with the initial values they determine every bit, which ``replay`` computes with torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_wire.errors import StepStateError
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.simulation.jobs import Job
from tests.simulation.trainer import AbandonedItem, Membership


class AsynchronousMembership(Membership):
    """A membership in an asynchronous run. ``_step`` is the version that the item reads."""

    async def _do_steps(self) -> None:
        """Computes and commits items until each data rank of this trainer has enough."""
        while self._position < self._job.steps:
            item = next(iter(self._items.values()), None)
            if item is None:
                self._take((await self._finish()).work)
                continue
            try:
                await self._compute(item)
            except AbandonedItem as error:
                self._trace(f"item {item.number} of rank {item.dp_rank} is abandoned: {error}")
                self._items = {}
                continue
            answer = await self._finish(self._done[item.global_rank])
            if answer.all_finished:
                await self._commit_item(item)
            else:
                self._take(answer.work)

    async def _finish(self, *done: coordinator_pb2.FinishedItem) -> coordinator_pb2.FinishWorkResponse:
        request = coordinator_pb2.FinishWorkRequest(
            context=self._context(self._step),
            trainer=self._node.name,
            items=done,
            accept_work=True,
            item_limit=self._job.steps,
        )
        answer: coordinator_pb2.FinishWorkResponse = await self._poll(
            "FinishWork", request, lambda answer: answer.all_finished or answer.HasField("work")
        )
        return answer

    async def _commit_item(self, item: coordinator_pb2.WorkItem) -> None:
        request = coordinator_pb2.CommitStepRequest(
            context=self._context(self._step),
            trainer=self._node.name,
            optimizer=self._job.optimizer(),
            clip_coefficient=1.0,
            unit_order=range(len(self._job.layouts)),
            state=coordinator_pb2.RunState(step=self._step),
            item=coordinator_pb2.ItemName(dp_rank=item.dp_rank, number=item.number),
            item_limit=self._job.steps,
        )
        try:
            answer = await self._poll("CommitStep", request, lambda answer: answer.committed)
        except StepStateError as error:
            self._trace(f"CommitStep of item {item.number} of rank {item.dp_rank}: {error}")
            self._items = {}
            return
        self._trace(f"item {item.number} of rank {item.dp_rank} is committed, version {answer.version}")
        self._history.note_acknowledged(self._rollbacks, answer.version)
        self._take(answer.next_work)

    def _take(self, work: coordinator_pb2.StepWork) -> None:
        self._step, self._position = work.step, work.position
        self._set_items(work.items)


def replay(job: Job, records: Mapping[int, CommitRecord]) -> dict[str, bytes]:
    """Returns the final values and optimizer state of each parameter, such as ``a.w|exp_avg``.

    Args:
        job: The job.
        records: The commit record of each step.
    """
    state: dict[str, bytes] = {}
    for index, layout in enumerate(job.layouts):
        values = [tensor.clone().requires_grad_() for tensor in job.initial(index)]
        optimizer = _torch_optimizer(job.optimizer(), values)
        versions = [[tensor.detach().clone() for tensor in values]]
        for step in range(job.commits):
            record = records[step]
            gradients = job.gradient(index, versions[record.base_version], record.item, record.dp_rank)
            for tensor, gradient in zip(values, gradients, strict=True):
                tensor.grad = gradient
            optimizer.step()
            versions.append([tensor.detach().clone() for tensor in values])
        for parameter, tensor in zip(layout.parameters, values, strict=True):
            state[f"{parameter.name}|values"] = tensor.detach().numpy().tobytes()
            for key, content in optimizer.state[tensor].items():
                state[f"{parameter.name}|{key}"] = content.numpy().tobytes()
    return state


def find_item_problems(job: Job, records: Mapping[int, CommitRecord]) -> list[str]:
    """Returns what the commit records contradict: each item is committed once, in order, and reads a past version."""
    problems = [f"commit {step} has no record" for step in range(job.commits) if step not in records]
    committed = dict.fromkeys(range(job.dp), 0)
    for step, record in sorted(records.items()):
        if record.item != committed.get(record.dp_rank):
            problems.append(f"commit {step} is item {record.item} of rank {record.dp_rank}, after {committed}")
        if record.base_version > step:
            problems.append(f"commit {step} read version {record.base_version}")
        committed[record.dp_rank] = record.item + 1
    return problems


def _torch_optimizer(step: common_pb2.OptimizerStep, values: list[torch.Tensor]) -> torch.optim.Optimizer:
    given = step.groups[0].hyperparameters  # the servers use the fused kernels, too
    if step.algorithm == "sgd":
        return torch.optim.SGD(values, lr=given["lr"], momentum=given["momentum"], fused=True)
    return torch.optim.AdamW(
        values,
        lr=given["lr"],
        betas=(given["beta1"], given["beta2"]),
        eps=given["eps"],
        weight_decay=given["weight_decay"],
        fused=True,
    )
