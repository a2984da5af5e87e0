"""Real models wrapped without configuration match plain PyTorch bit for bit."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.module.residency import UnitState
from shardwell.seeds import derive_seed
from tests.support.module_parity import Pair
from tests.support.real_models import (
    CASES,
    BasicBlock,
    Case,
    Expert,
    MixtureLayer,
    build,
    gpt2,
    llama,
    own_loss,
    tokens,
)

ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
STEPS = 4

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def train_plain(case: Case, dp: int) -> tuple[list[float], nn.Module]:
    """Trains one rank after another. Every rank starts from rank 0's buffers; gradients are added in rank order."""
    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    losses = []
    for step in range(STEPS):
        before = [buffer.clone() for buffer in model.buffers()]
        after: list[torch.Tensor] = []
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for dp_rank in range(dp):
            set_buffers(model, before)
            torch.manual_seed(derive_seed(0, step, dp_rank))
            loss = case.loss(model, case.batch(step, dp_rank))
            loss.backward()
            losses.append(loss.item())
            after = after or [buffer.clone() for buffer in model.buffers()]
            for parameter in model.parameters():
                if parameter.grad is not None:
                    own, parameter.grad = parameter.grad, None
                    sums[parameter] = sums[parameter] + own if parameter in sums else own
        set_buffers(model, after)
        for parameter, total in sums.items():
            parameter.grad = total / dp
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def set_buffers(model: nn.Module, values: list[torch.Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def train_sharded(
    case: Case, session: shardwell.Session, policy: Any = None
) -> tuple[list[float], dict[str, torch.Tensor], nn.Module]:
    model = shardwell.auto_wrap(build(case), session, policy)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for step in session.steps(STEPS):
        for batch in step.batches(case.batch):
            loss = case.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, shardwell.full_state_dict(model), model


def compare_training(case: Case, dp: int, address: str, policy: Any = None) -> nn.Module:
    expected_losses, plain = train_plain(case, dp)
    with shardwell.join(address, run=uuid.uuid4().hex, world=shardwell.World(dp=dp), min_trainers=1) as session:
        losses, state, model = train_sharded(case, session, policy)
        report, stats = session.memory(), session.stats()
    assert report.num_parameters == shardwell.num_parameters(model)
    assert (report.gather_count, report.reduce_scatter_count) == (stats["gather_count"], stats["push_count"])
    assert losses == expected_losses
    expected = plain.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), f"{name} differs by {(state[name] - value).abs().max()}"
    return model


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_training_matches_plain_pytorch_bit_for_bit(cluster: shardwell.LocalCluster, name: str, dp: int) -> None:
    compare_training(CASES[name], dp, cluster.address)


def test_experts_may_be_separate_units(cluster: shardwell.LocalCluster) -> None:
    """Some experts are used by one rank only, and some by no rank in a step."""
    model = compare_training(CASES["mixture"], 2, cluster.address, shardwell.ModuleTypePolicy({Expert, MixtureLayer}))
    layer = model.layers[0]
    ranks = list(zip(layer.used[::2], layer.used[1::2], strict=True))
    assert any(first != second for first, second in ranks)
    assert all(len(first | second) < MixtureLayer.NUM_EXPERTS for first, second in ranks)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("recompute", [None, True, False], ids=["saved", "reentrant", "nonreentrant"])
def test_hugging_face_attention_and_gradient_checkpointing_match_torch(
    make: Any, attention: str, recompute: bool | None
) -> None:
    torch.manual_seed(0)
    model: Any = make(attention).train()
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    Pair(model, shardwell.auto_wrap).train(lambda each, number: own_loss(each, tokens(number, 0)), steps=3)


def test_checkpointing_may_be_enabled_after_sharding() -> None:
    torch.manual_seed(0)
    pair = Pair(llama().train(), shardwell.auto_wrap)
    for model in (pair.plain, pair.sharded.model):
        model.gradient_checkpointing_enable()
    pair.train(lambda each, number: own_loss(each, tokens(number, 0)), steps=2)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_hugging_face_generation_matches_torch(make: Any) -> None:
    torch.manual_seed(0)
    pair = Pair(make(), shardwell.auto_wrap)
    pair.train(lambda each, number: own_loss(each, tokens(number, 0)), steps=2)
    prompt = torch.randint(3, 60, (2, 4), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 8, "attention_mask": torch.ones_like(prompt)}
    for sampling in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2, "do_sample": False}):
        results = []
        for model in (pair.plain, pair.sharded.model):
            torch.manual_seed(0)
            results.append(model.eval().generate(prompt, **options, **sampling))
        assert torch.equal(*results), sampling
    assert all(unit.state is not UnitState.UNSHARDED for unit in pair.sharded.units)
    pair.plain.train(), pair.sharded.model.train()
    pair.train(lambda each, number: own_loss(each, tokens(number, 0)), steps=1)


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("llama", ["model.layers.0", "model.layers.1", "model.layers.2", "LlamaForCausalLM"]),
        ("gpt2", ["transformer.h.0", "transformer.h.1", "transformer.h.2", "GPT2LMHeadModel"]),
        ("resnet", ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "ResNet"]),
        ("lstm", ["LstmLanguageModel"]),
        ("mixture", ["layers.0", "layers.1", "MixtureOfExperts"]),
    ],
)
def test_default_policy_wraps_the_repeated_blocks(name: str, units: list[str]) -> None:
    pair = Pair(build(CASES[name]), shardwell.auto_wrap)
    assert [unit.name for unit in pair.sharded.units] == units


def test_batch_norm_statistics_are_those_of_rank_0(cluster: shardwell.LocalCluster) -> None:
    model = compare_training(CASES["resnet"], 2, cluster.address)
    assert isinstance(model.layer1[0], BasicBlock)
    assert model.bn1.num_batches_tracked == STEPS
