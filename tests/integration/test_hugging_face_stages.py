"""Models of Hugging Face in pipeline stages, built on the meta device: each stage streams its part of a checkpoint."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwell
from shardwell.parallel import PipelineSchedule, PipelineStage, SchedulePlan, split_model
from tests.support import gloo, hugging_face
from tests.support.hugging_face import FAMILIES, LENGTH, VOCABULARY
from tests.support.processes import run_ranks

MICRO_BATCHES, BATCH, STEPS, LR = 2, 4, 2, 0.1
QUICK = ("tied llama", "gpt2", "t5")
"""One decoder with tied weights, one with convolutions as linear layers, and one with an encoder."""
OTHERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "bart")


def batch(family: str, step: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    inputs = hugging_face.inputs_of(family, tokens)
    return inputs, inputs[-1] if family in ("t5", "bart") else tokens


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def reference(family: str) -> dict[str, torch.Tensor]:
    """Trains in this process. Of a tied model, embedding and head have a parameter each, whose gradients are added."""
    model: Any = hugging_face.make(family)
    shared, head = model.get_input_embeddings().weight, None
    if model.get_output_embeddings().weight is shared:
        head = model.get_output_embeddings().weight = nn.Parameter(shared.detach().clone())
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter is not head}
    optimizer = torch.optim.SGD(parameters.values(), lr=LR, momentum=0.9, fused=True)
    for step in range(STEPS):
        model.zero_grad()
        inputs, targets = batch(family, step)
        for part in zip(*(whole.chunk(MICRO_BATCHES) for whole in (*inputs, targets)), strict=True):
            loss_of(model(*part[:-1]).logits, part[-1]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(MICRO_BATCHES)
        if head is not None:
            shared.grad += head.grad
        optimizer.step()
        if head is not None:
            with torch.no_grad():
                head.copy_(shared)
    stored = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {name: parameter.detach() for name, parameter in parameters.items()} | buffers


def worker(rank: int, address: str, run: str, folder: str, families: tuple[str, ...]) -> None:
    """Trains a stage of each family, one after another."""
    for family in families:
        with torch.device("meta"):
            model: Any = FAMILIES[family]()
        plan = SchedulePlan(schedule="1F1B", pp=2, num_micro_batches=MICRO_BATCHES)
        world = shardwell.World(pp=2)
        with shardwell.join(address, run=run + family, world=world, global_rank=rank, host="here") as session:
            split = split_model(model, 2)
            examples = split.examples(*(whole[: BATCH // MICRO_BATCHES] for whole in batch(family, 0)[0]))
            stage_module, init = split.module(rank), model._init_weights
            source = shardwell.from_safetensors(stage_module, Path(folder, family), init=init)
            shardwell.auto_wrap(stage_module, session, source=source)
            group = session.replica_mesh()["pp"].get_group()
            stage = PipelineStage(stage_module, rank, 2, "cpu", example=examples[rank], group=group)
            schedule = PipelineSchedule(plan, [stage], loss_of)
            optimizer = shardwell.optim.SGD(stage_module.parameters(), lr=LR, momentum=0.9)
            for step in session.steps(STEPS):
                for inputs, targets in step.batches(lambda number, _, family=family: batch(family, number)):
                    schedule.step(*inputs, target=targets)
                optimizer.step()
                optimizer.zero_grad()
    gloo.leave()


@pytest.mark.parametrize("families", [QUICK, pytest.param(OTHERS, marks=pytest.mark.long)], ids="-".join)
def test_stages_load_their_part_and_train_as_one_process(
    cluster: shardwell.LocalCluster, tmp_path: Path, one_thread: None, families: tuple[str, ...]
) -> None:
    run = uuid.uuid4().hex
    for family in families:
        model: Any = hugging_face.make(family)
        model.save_pretrained(tmp_path / family)
    run_ranks(worker, cluster.address, run, str(tmp_path), families)
    for family in families:
        expected, plain = reference(family), FAMILIES[family]()
        with shardwell.attach(cluster.address, run=run + family) as reader, reader.pin() as pinned:
            found = dict(pinned.values())
        assert found.keys() == expected.keys(), family
        differing = [name for name in found if not torch.equal(found[name], expected[name])]
        assert not differing, f"{family}: {differing}"
        with shardwell.attach(cluster.address, run=run + family) as reader:
            reader.follow(plain)
        assert all(torch.equal(value, expected[name]) for name, value in plain.named_parameters())
