"""The micro-batches whose activations a trainer holds at once in a pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

from shardwell.parallel.schedules import SchedulePlan, schedule_class


def micro_batches_in_flight(plan: SchedulePlan, pp_rank: int) -> list[Mapping[int, int]]:
    """Returns the number of micro-batches with activations by stage, after each forward of a trainer.

    A micro-batch counts until its backward is complete, with the gradients of the weights.

    Args:
        plan: The schedule.
        pp_rank: The trainer.
    """
    if plan.schedule in ("GPipe", "1F1B"):
        count = plan.num_micro_batches if plan.schedule == "GPipe" else plan.pp - pp_rank
        return [{pp_rank: min(count, plan.num_micro_batches)}]
    held = dict.fromkeys(plan.stages_of(pp_rank), 0)
    found: list[Mapping[int, int]] = []
    for kind, stage in _actions(plan, pp_rank):
        if kind == "FORWARD":
            held[stage] += 1
            found.append(dict(held))
        elif kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):
            held[stage] -= 1
    return found


def _actions(plan: SchedulePlan, pp_rank: int) -> Iterator[tuple[str, int]]:
    """Yields kind and stage of each action of a trainer, in the order of torch's schedule."""
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=plan.num_stages,
            group_size=plan.pp,
            group_rank=pp_rank,
            is_first=index == 0,
            is_last=index == plan.num_stages - 1,
            submod=None,
        )
        for index in plan.stages_of(pp_rank)
    ]
    make = schedule_class(plan.schedule)
    schedule = make(stages, n_microbatches=plan.num_micro_batches, loss_fn=lambda *_: None)
    for action in schedule.pipeline_order[pp_rank]:
        for part in () if action is None else (action.sub_actions or (action,)):
            yield part.computation_type.name, part.stage_index
