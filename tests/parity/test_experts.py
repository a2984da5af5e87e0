"""Mixtures of experts: only routed experts are gathered and pushed, and the bits are those of plain PyTorch."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardwell
from shardwell import BackwardPrefetch, MemoryStrategy, ShardingStrategy
from shardwell.module.fully_shard import sharding_of
from shardwell.module.residency import UnitState
from shardwell.wrapping.experts import SplitExperts
from shardwell_wire.errors import UsageError
from tests.support.module_parity import Pair
from tests.support.processes import run_ranks
from tests.support.real_models import (
    CASES,
    Expert,
    MixtureLayer,
    MixtureOfExperts,
    build,
    few_tokens,
    next_token_loss,
    own_loss,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, DP = 5, 2
COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 12},
    "Qwen2Moe": {"num_experts": 12, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    "Qwen3Moe": {"num_experts": 12, "moe_intermediate_size": 12},
    "Olmoe": {"num_experts": 12},
    "GptOss": {"num_local_experts": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}


def mixture() -> MixtureOfExperts:
    model = build(CASES["mixture"])
    assert isinstance(model, MixtureOfExperts)
    return model


def hugging_face(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family]})
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.train()


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return next_token_loss(model, few_tokens(number, 0))


def few_token_loss(model: nn.Module, number: int) -> torch.Tensor:
    return own_loss(model, few_tokens(number, 0))


def wrap_experts(model: nn.Module, session: Any, **options: Any) -> None:
    shardwell.auto_wrap(model, session, experts={Expert}, **options)


def used(model: MixtureOfExperts) -> Counter[str]:
    """Returns the units of the experts that the latest forward of a plain model used."""
    return Counter(f"layers.{at}.experts.{number}" for at in range(2) for number in model.layers[at].used[-1])


def of_experts(counts: Counter[str], before: Counter[str]) -> Counter[str]:
    return Counter({name: count for name, count in (counts - before).items() if ".experts." in name})


def times(factor: int, counts: Counter[str]) -> Counter[str]:
    return Counter({name: factor * count for name, count in counts.items()})


OPTIONS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "default": (2, {}, {}),
    "small window": (2, {"prefetch_bytes": 20_000}, {}),
    "no prefetch": (2, {"prefetch_bytes": 0, "keep_bytes": 0}, {}),
    "nothing kept": (2, {"keep_bytes": 0}, {}),
    "kept in the window": (2, {"keep_bytes": None}, {}),
    "kept": (1, {"keep_bytes": 1 << 20}, {}),
    "post": (2, {"backward_prefetch": BackwardPrefetch.POST}, {}),
    "one in flight": (2, {"max_gathers_in_flight": 1}, {}),
    "SHARD_GRAD_OP": (1, {}, {"strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "recomputed": (2, {}, {"memory": MemoryStrategy.STANDARD}),
    "by type": (2, {}, {"policy": shardwell.ModuleTypePolicy({MixtureLayer})}),
}
"""Gathers of a routed expert per forward and backward at most, arguments of the units, and arguments of auto_wrap."""


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_only_routed_experts_are_gathered_and_pushed(name: str, micro_batches: int) -> None:
    """Each backward routes to other experts than the one before it. A prediction from earlier steps would be wrong."""
    most, of_units, of_wrap = OPTIONS[name]
    pair = Pair(mixture(), lambda model, session: wrap_experts(model, session, **of_wrap), **of_units)
    store, routes = pair.sharded.store, set()
    for step in range(STEPS):
        for micro_batch in range(micro_batches):
            gathers, pushes = Counter(store.gathers), Counter(store.pushes)
            pair.backward(loss_of, step * micro_batches + micro_batch)
            routed = used(pair.plain)  # type: ignore[arg-type]
            routes.add(frozenset(routed))
            gathered = of_experts(store.gathers, gathers)
            assert set(gathered) <= set(routed)
            assert not gathered - times(most, routed)
            assert of_experts(store.pushes, pushes) == routed
        pair.step()
    assert len(routes) > 1
    pair.compare()


def test_prediction_of_other_units_does_not_depend_on_routes() -> None:
    """The next layer is gathered while the experts of a layer compute, whichever experts these are."""
    pair = Pair(mixture(), wrap_experts, keep_bytes=0)
    pair.train(loss_of, steps=2)
    session = pair.sharded.session
    order = [unit.name for unit in session.units.passes._policy.order._uses[1]]
    assert order == ["MixtureOfExperts", "layers.0", "layers.1"]


@pytest.mark.parametrize("family", FAMILIES)
def test_split_experts_of_hugging_face_train_to_the_bits_of_the_same_model_in_plain_pytorch(family: str) -> None:
    model = shardwell.split_experts(hugging_face(family))
    pair = Pair(model, shardwell.auto_wrap, keep_bytes=0)
    store, experts = pair.sharded.store, {name for name in pair.sharded.unit_bytes() if ".experts." in name}
    assert len(experts) == 24
    skipped = False
    for number in range(STEPS):
        gathers, pushes = Counter(store.gathers), Counter(store.pushes)
        pair.backward(few_token_loss, number)
        routed = Counter(
            name.rpartition(".")[0]
            for name, parameter in pair.plain.named_parameters()
            if name.endswith("down_proj") and ".experts." in name and parameter.grad is not None
        )
        assert of_experts(store.gathers, gathers) == times(2, routed)
        assert of_experts(store.pushes, pushes) == routed
        skipped |= len(routed) < len(experts)
        pair.step()
    assert skipped
    pair.compare()


@pytest.mark.parametrize(("experts_ahead", "expected"), [(0, 0), (2, 1), (3, 2), (12, 11)])
def test_routed_experts_of_a_layer_are_gathered_before_the_first_of_them_runs(
    experts_ahead: int, expected: int
) -> None:
    """The window limits how many are on their way when an expert ends: all that are left, or fewer."""
    model: Any = shardwell.split_experts(hugging_face("Mixtral"))
    expert_bytes = sum(parameter.nbytes for parameter in model.model.layers[0].mlp.experts[0].parameters())
    pair = Pair(model, shardwell.auto_wrap, prefetch_bytes=experts_ahead * expert_bytes)
    sharded: Any = pair.sharded.model
    ahead: list[int] = []

    def count(*_: object) -> None:
        ahead.append(sum(unit.state is not UnitState.FREED for unit in units))

    experts = sharded.model.layers[0].mlp.experts
    units = [sharding_of(expert).own_units[0] for expert in experts]
    for expert in experts:
        expert.register_forward_hook(count)
    loss = few_token_loss(sharded, 0)
    num_routed = len(ahead)
    assert num_routed > 3
    assert ahead == [min(expected, left) for left in reversed(range(num_routed))]
    loss.backward()
    pair.sharded.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_split_experts_train_to_the_bits_of_the_original_model(family: str) -> None:
    """With SGD, a gradient of zero and no gradient are the same. Tokens reach experts in the original order."""
    original = hugging_face(family)
    optimizer = torch.optim.SGD(original.parameters(), lr=0.1)
    split = shardwell.split_experts(copy.deepcopy(original))
    pair = Pair(split, shardwell.auto_wrap, make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for number in range(STEPS):
        pair.backward(few_token_loss, number)
        few_token_loss(original, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        pair.step()
    pair.compare()
    merged = shardwell.merge_experts(shardwell.unwrap(pair.sharded.model)).state_dict()
    assert list(merged) == list(original.state_dict())
    for name, value in original.state_dict().items():
        assert torch.equal(value, merged[name]), name


def plain_training() -> tuple[MixtureOfExperts, list[list[int]]]:
    """Trains one rank after another.

    Returns:
        The model, and for each rank the number of experts that it used in each step.
    """
    model = mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    routed: list[list[int]] = [[] for _ in range(DP)]
    for step in range(STEPS):
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for dp_rank in range(DP):
            next_token_loss(model, few_tokens(step, dp_rank)).backward()
            routed[dp_rank].append(used(model).total())
            for parameter in model.parameters():
                if parameter.grad is not None:
                    own, parameter.grad = parameter.grad, None
                    sums[parameter] = sums[parameter] + own if parameter in sums else own
        for parameter, total in sums.items():
            parameter.grad = total / DP
        optimizer.step()
        optimizer.zero_grad()
    return model, routed


def train_rank(index: int, address: str, run: str, keep_bytes: int, results: str) -> None:
    """Trains as one of ``DP`` trainers, and saves the weights and the bytes of one rank."""
    torch.set_num_threads(1)
    transfer = shardwell.TransferOptions(transports="socket", keep_bytes=keep_bytes)
    world = shardwell.World(dp=DP)
    with shardwell.join(address, run=run, world=world, min_trainers=DP, transfers=transfer) as session:
        model = shardwell.auto_wrap(mixture(), session, experts={Expert})
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        found = []
        for step in session.steps(STEPS):
            before = session.stats()
            for batch in step.batches(few_tokens):
                next_token_loss(model, batch).backward()
            after = session.stats()
            found.append({key: after[key] - before[key] for key in ("gathered_bytes", "pushed_bytes")})
            optimizer.step()
            optimizer.zero_grad()
        state = shardwell.full_state_dict(model)
        torch.save((session.dp_rank, found, state), f"{results}/{index}")


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_trainers_that_route_differently_gather_and_push_their_experts_only(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, keep_bytes: int
) -> None:
    """Rank 0 uses experts that rank 1 does not use, and some experts are used by none. No trainer waits for another."""
    plain, routed = plain_training()
    run_ranks(train_rank, cluster.address, run_name, keep_bytes, str(tmp_path), count=DP)
    expert = sum(parameter.nbytes for parameter in Expert().parameters())
    rest = sum(value.nbytes for name, value in plain.named_parameters() if ".experts." not in name)
    layers = rest - sum(value.nbytes for name, value in plain.named_parameters() if "layers" not in name)
    for index in range(DP):
        dp_rank, found, state = torch.load(tmp_path / str(index))
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name
        for stats, number in zip(found, routed[dp_rank], strict=True):
            uses = 1 if keep_bytes else 2
            activated = uses * (number * expert + layers) + rest - layers
            assert activated <= stats["gathered_bytes"] <= 1.02 * activated, (stats, activated)
            assert number * expert + rest <= stats["pushed_bytes"] <= 1.02 * (number * expert + rest)


def test_split_experts_load_states_of_the_original_model() -> None:
    original = hugging_face("Mixtral")
    split = shardwell.split_experts(hugging_face("Mixtral"))
    with torch.no_grad():
        for parameter in split.parameters():
            parameter.zero_()
    split.load_state_dict(original.state_dict())
    assert split.state_dict().keys() - original.state_dict().keys() >= {"model.layers.0.mlp.experts.3.down_proj"}
    for name, value in shardwell.merge_experts(split).state_dict().items():
        assert torch.equal(value, original.state_dict()[name]), name
    state = original.state_dict()
    state["model.layers.0.mlp.experts.down_proj"] = state["model.layers.0.mlp.experts.down_proj"][:5]
    with pytest.raises(RuntimeError, match=r"experts\.down_proj: got \(5, 16, 20\), expected 12 experts"):
        shardwell.split_experts(split).load_state_dict(state)


def test_split_experts_keep_devices_frozen_parameters_and_modes() -> None:
    with torch.device("meta"):
        model = hugging_face("Mixtral").eval()
    model.requires_grad_(False)
    shardwell.split_experts(model)
    parts = [part for part in model.modules() if isinstance(part, SplitExperts)]
    assert [len(part) for part in parts] == [12, 12]
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad or not parameter.is_meta for parameter in model.parameters())


def test_errors_say_how_to_split_experts() -> None:
    with pytest.raises(
        UsageError, match=r"MixtureOfExperts has no module .* pass its class: auto_wrap\(model, session, experts="
    ):
        shardwell.split_experts(mixture())
    with pytest.raises(UsageError, match="has no experts that split_experts has made"):
        shardwell.merge_experts(mixture())
    split = shardwell.split_experts(hugging_face("Mixtral"))
    with pytest.raises(UsageError, match="has no module"):
        shardwell.split_experts(split)
    sharded = Pair(split, shardwell.auto_wrap).sharded.model
    with pytest.raises(UsageError, match=r"call shardwell.unwrap\(model\) first"):
        shardwell.merge_experts(sharded)
    with pytest.raises(UsageError, match="call split_experts before auto_wrap"):
        shardwell.split_experts(
            Pair(
                hugging_face("Mixtral"), lambda model, session: wrap_types(model, session, "MixtralExperts")
            ).sharded.model
        )
    for experts, message in (
        ([Expert()], r"(?s)experts=\[Expert.*expected classes of modules"),
        (
            {nn.Conv2d},
            r"has no module of the class Conv2d; .* call shardwell\.wrapping\.split_experts\(model\) instead",
        ),
    ):
        session = Pair(nn.Linear(2, 2), shardwell.auto_wrap).sharded.session
        with pytest.raises(UsageError, match=message):
            shardwell.auto_wrap(mixture(), session, experts=experts)  # type: ignore[arg-type]


def wrap_types(model: nn.Module, session: Any, *names: str) -> None:
    shardwell.auto_wrap(model, session, shardwell.CustomPolicy(lambda module: type(module).__name__ in names))


def test_experts_with_other_parameters_are_refused() -> None:
    model: Any = hugging_face("Mixtral")
    model.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match=r"'experts' \(MixtralExperts\) has scale \(3,\), expected parameters"):
        shardwell.split_experts(model)
