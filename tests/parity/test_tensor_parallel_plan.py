"""Planned tensor parallelism against the unsplit model: two processes, losses and gradients, and the bytes sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT, GPTConfig
from shardwell.parallel import plan_tensor_parallel
from shardwell.parallel.description import ActivationShape, CollectivePhase
from shardwell_wire.errors import UsageError
from tests.support import gloo, small_transformer
from tests.support.processes import run_ranks

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 62, 16, 4, 6, 3


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, context=LENGTH, num_layers=2, num_heads=HEADS, width=WIDTH))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "head norms": partial(small_transformer.Transformer, "head norms"),
    "scaled branches": partial(small_transformer.Transformer, "scaled branches"),
    "norms after": partial(small_transformer.Transformer, "norms after"),
}

CASES: dict[str, list[dict[str, Any]]] = {
    "gpt": [
        {},
        {"vocabulary": False},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "loss_parallel": True},
        {"sequence_parallel": True, "vocabulary": False},
    ],
    "llama": [{}, {"loss_parallel": True}, {"sequence_parallel": True}],
    "bert": [{}, {"vocabulary": False}],
    "head norms": [{}, {"sequence_parallel": True}],
    "scaled branches": [{}, {"sequence_parallel": True}],
    "norms after": [{"sequence_parallel": True, "loss_parallel": True}],
}
"""Options of the plan by model."""


class Sent(TorchDispatchMode):
    """Adds up the payload of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith("_c10d_functional::all_reduce"):
            self.bytes["all_reduce"] += args[0].nbytes
        elif name.startswith("_c10d_functional::all_gather"):
            self.bytes["all_gather"] += result.nbytes
        elif name.startswith("_c10d_functional::reduce_scatter"):
            self.bytes["reduce_scatter"] += args[0].nbytes
        return result


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens, targets = batch()
    output = model(tokens)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(kind: str) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[kind]()
    with torch.no_grad():  # norms of ones and biases of zeros would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def worker(rank: int, path: str, kind: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for options in CASES[kind]:
        try:
            check(kind, mesh, **options)
        except BaseException as error:
            error.add_note(f"{kind} with {options}")
            raise
    gloo.leave()


def check(kind: str, mesh: DeviceMesh, **options: Any) -> None:
    """Compares a split model with the plain one, and the bytes that it sends with those of the plan."""
    plain, split = build(kind), build(kind)
    expected = loss_of(plain)
    expected.backward()

    plan = plan_tensor_parallel(split, 2, fused_by_head=True, **options)
    plan.apply(split, mesh)
    with plan.loss_context():
        with Sent() as forward:
            loss = loss_of(split)
        with Sent() as backward:
            loss.backward()
    got = loss.full_tensor() if isinstance(loss, DTensor) else loss
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    with Sent() as gradients:
        summed = {name: whole_gradient(parameter) for name, parameter in split.named_parameters()}
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                summed[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )

    predicted = plan.collectives(ActivationShape(batch=BATCH, length=LENGTH))
    assert dict(forward.bytes) == predicted[CollectivePhase.FORWARD], (
        forward.bytes,
        predicted[CollectivePhase.FORWARD],
    )
    assert dict(backward.bytes) == predicted[CollectivePhase.BACKWARD], (
        backward.bytes,
        predicted[CollectivePhase.BACKWARD],
    )
    expected_gradients = predicted[CollectivePhase.GRADIENTS].get("all_reduce", 0)
    assert gradients.bytes["all_reduce"] == expected_gradients, (gradients.bytes, expected_gradients)


def whole_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    return gradient.redistribute(placements=parameter.placements).full_tensor()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", CASES)
def test_split_model_has_the_loss_gradients_and_bytes_of_the_plan(tmp_path: Path, kind: str) -> None:
    run_ranks(worker, str(tmp_path / "store"), kind)


def checkpoint_worker(rank: int, path: str) -> None:
    """Partial gradients add up over backwards, also if a block is recomputed in its backward."""
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    plain: Any = build("head norms")
    split: Any = build("head norms")
    plan_tensor_parallel(split, 2).apply(split, init_device_mesh("cpu", (2,)))
    for block in split.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for model in (plain, split):
        for _ in range(2):
            loss_of(model).backward()
    for (name, parameter), other in zip(plain.named_parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(whole_gradient(other), parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    norm = split.blocks[0].attn.q_norm
    assert isinstance(norm.weight, nn.Parameter), "the whole parameter is back after the forward"
    with pytest.raises(RuntimeError):
        norm(torch.zeros(2, 3))
    assert isinstance(norm.weight, nn.Parameter)
    gloo.leave()


def test_partial_gradients_add_up_and_survive_recomputation(tmp_path: Path) -> None:
    run_ranks(checkpoint_worker, str(tmp_path / "store"))


def refusal_worker(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = gpt()
    plan = plan_tensor_parallel(model, 2, fused_by_head=True, sequence_parallel=True)
    plan.apply(model, mesh)
    for length in (LENGTH - 1, 1):
        with pytest.raises(UsageError, match=rf"tp does not divide the sequence length {length}. Use sequences of "):
            model(torch.zeros(2, length, dtype=torch.int64))
    model(torch.zeros(2, LENGTH, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"'.*' is a DTensor already: apply one plan, once"):
        plan.apply(model, mesh)
    gloo.leave()


def test_a_second_plan_and_odd_lengths_are_refused(tmp_path: Path) -> None:
    run_ranks(refusal_worker, str(tmp_path / "store"))


def tie_worker(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    model: Any = gpt()
    plan_tensor_parallel(model, 2, fused_by_head=True).apply(model, init_device_mesh("cpu", (2,)))
    assert model.head.weight is model.token_embedding.weight
    assert model.blocks[0].num_heads == HEADS // 2
    masked: Any = bert()
    plan_tensor_parallel(masked, 2).apply(masked, init_device_mesh("cpu", (2,)))
    head = masked.cls.predictions
    assert head.bias is head.decoder.bias and isinstance(head.bias, DTensor)
    gloo.leave()


def test_tied_weights_stay_tied_and_heads_are_divided(tmp_path: Path) -> None:
    run_ranks(tie_worker, str(tmp_path / "store"))
