"""Parallel plans: limits of what trainers report, and the comparison with the run's plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardwell_wire.errors import InvalidRequestError, RunMismatchError
from shardwell_wire.model.names import MAX_PLAN_BYTES, MAX_PLAN_MODELS, MAX_PLAN_ROWS, check_path
from shardwell_wire.v1 import coordinator_pb2

_MAX_NAMED = 3
"""Most differences that an error names."""


def check_plan(plan: coordinator_pb2.ParallelPlan) -> None:
    """Raises InvalidRequestError if a plan is too large, or has a text that is too long or not printable."""
    stages = [stage for model in plan.models for stage in model.stages]
    layers = [layer for stage in stages for layer in stage.layers]
    collectives = [collective for layer in layers for collective in layer.collectives]
    for what, size, limit in (
        ("bytes", plan.ByteSize(), MAX_PLAN_BYTES),
        ("models", len(plan.models), MAX_PLAN_MODELS),
        ("rows", len(stages) + len(layers) + len(collectives), MAX_PLAN_ROWS),
        ("sizes of a micro-batch", max((len(model.micro_batch_shape) for model in plan.models), default=0), 2),
    ):
        if size > limit:
            raise InvalidRequestError(f"a parallel plan with {size} {what}: expected at most {limit}")
    texts = {
        "model": {text for model in plan.models for text in (model.model, model.schedule)},
        "layer": {text for stage in stages for text in (stage.first_layer, stage.last_layer)}
        | {text for layer in layers for text in (layer.name, layer.kind, layer.class_name, layer.style, layer.part)},
        "collective": {text for at in collectives for text in (at.operation, at.phase)},
    }
    for what, found in texts.items():
        for text in filter(None, found):
            check_path(what, text)


def require_same_plan(
    run: str, expected: coordinator_pb2.ParallelPlan, trainer: str, found: coordinator_pb2.ParallelPlan
) -> None:
    """Raises RunMismatchError, naming the first differences, if a trainer's plan is not that of the run."""
    ours, theirs = dict(_facts(expected)), dict(_facts(found))
    differences = [
        (name, ours.get(name, "none"), theirs.get(name, "none"))
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    if not differences:
        return
    named = "; ".join(f"{name}: expected {before}, found {now}" for name, before, now in differences[:_MAX_NAMED])
    more = len(differences) - _MAX_NAMED
    raise RunMismatchError(
        f"trainer {trainer!r} divides its model differently than run {run!r}: {named}"
        f"{f'; and {more} more differences' if more > 0 else ''}. All trainers of a run need the same parallel plan: "
        "use the run's, or start a run with another name (resume= takes the weights from a checkpoint)",
        run=run,
        name=differences[0][0],
        expected=differences[0][1],
        actual=differences[0][2],
    )


def _facts(plan: coordinator_pb2.ParallelPlan) -> Iterator[tuple[str, str]]:
    """Yields everything that a plan says as (what, value), the most important first."""
    yield "models", ", ".join(model.model for model in plan.models) or "none"
    for number, model in enumerate(plan.models):
        of = f" of {model.model}" if len(plan.models) > 1 else ""
        of += f" ({number})" if sum(other.model == model.model for other in plan.models) > 1 else ""
        yield f"schedule{of}", model.schedule or "none"
        yield f"num_micro_batches{of}", str(model.num_micro_batches)
        yield f"size of a micro-batch{of}", " x ".join(map(str, model.micro_batch_shape)) or "unknown"
        yield f"number of stages{of}", str(len(model.stages))
        for index, stage in enumerate(model.stages):
            yield f"first layer of stage {index}{of}", repr(stage.first_layer)
            yield f"last layer of stage {index}{of}", repr(stage.last_layer)
            yield f"pipeline rank of stage {index}{of}", str(stage.pp_rank)
        yield f"sequence_parallel{of}", str(model.sequence_parallel)
        yield f"loss_parallel{of}", str(model.loss_parallel)
        for index, stage in enumerate(model.stages):
            yield from _layer_facts(f"of stage {index}{of}", stage)
        yield f"rows left out{of}", str(model.omitted_row_count)


def _layer_facts(of: str, stage: coordinator_pb2.PlannedStage) -> Iterator[tuple[str, str]]:
    counts = Counter(layer.name for layer in stage.layers)
    for position, layer in enumerate(stage.layers):
        name = f"layer {layer.name!r}{f' ({position})' if counts[layer.name] > 1 else ''} {of}"
        yield f"style of {name}", f"{layer.style or 'whole'} {layer.part}".strip()
        yield name, f"{layer.count} {layer.kind} of class {layer.class_name or 'none'}, {layer.element_count} elements"
        yield f"bytes of {name}", str(layer.size_bytes)
        causes = [f"{at.phase} {at.operation} of {at.bytes_per_step} bytes" for at in layer.collectives]
        yield f"collectives of {name}", ", ".join(causes) or "none"
    yield f"parameters {of}", f"{stage.element_count} elements, {stage.size_bytes} bytes"
