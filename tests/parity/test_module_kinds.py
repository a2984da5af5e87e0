"""Every kind of module and parameter matches plain PyTorch bit for bit when sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from shardwell.module.fully_shard import fully_shard
from tests.support.module_kinds import Calls, Residual, run
from tests.support.module_parity import (
    Pair,
    gpt,
    gpt_loss,
    inputs,
    wrap_blocks,
    wrap_children,
    wrap_whole,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Modules.


def test_recurrent_modules_that_cache_their_weights_match_torch() -> None:
    parts = [nn.LSTM(12, 12, num_layers=2, batch_first=True), nn.GRU(12, 12, batch_first=True)]
    run(Residual(*(Calls(lambda self, x: self.rnn(x)[0], rnn=part) for part in parts)), 2, 5, 7)


def test_multihead_attention_with_one_tensor_as_query_key_and_value_matches_torch() -> None:
    def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, value=x, need_weights=False)[0]

    def wrap(model: Any, session: Any) -> None:
        fully_shard(model.parts[0].attention, session)
        wrap_children(model, session)

    run(Residual(Calls(attend, attention=nn.MultiheadAttention(12, 3, batch_first=True))), 2, 5, 7, wrap=wrap)


def test_identity_of_inputs_is_kept() -> None:
    seen: list[tuple[bool, ...]] = []

    def compare(self: Any, x: torch.Tensor, same: torch.Tensor, other: torch.Tensor, nested: Any) -> torch.Tensor:
        seen.append((x is same, x is other, nested[0] is x))
        return self.layer(x + same + other)

    def use(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.part(x, x, x.clone(), (x, 1))

    model = Residual(Calls(use, part=Calls(compare, layer=nn.Linear(12, 12))))

    def wrap(sharded: Any, session: Any) -> None:
        fully_shard(sharded.parts[0].part, session)
        wrap_children(sharded, session)

    run(model, 4, 7, wrap=wrap)
    assert set(seen) == {(True, False, True)}


def test_transformer_encoder_layer_matches_torch_in_training_and_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 17, batch_first=True, dropout=0.0)
    model = Residual(layer)
    pair = run(model, 2, 5, 7)
    results = []
    for each in (pair.plain, pair.sharded.model):
        each.eval()
        with torch.no_grad():
            results.append(each(inputs(9, 2, 5, 7)))
    assert torch.equal(*results)


def test_convolution_and_batch_norm_match_torch() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.Conv2d(5, 7, 3), nn.Flatten()
    )
    pair = run(model, 2, 3, 8, 8)
    assert "1.running_mean" in pair.sharded.state()


def test_parametrized_weights_match_torch() -> None:
    run(Residual(parametrizations.weight_norm(nn.Linear(12, 12)), nn.utils.spectral_norm(nn.Linear(12, 12))), 4, 7)


def test_traced_module_matches_torch() -> None:
    run(Residual(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)))), 4, 7)


def test_embedding_bag_and_sparse_gradient_match_torch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse, self.bag, self.out = nn.Embedding(11, 5, sparse=True), nn.EmbeddingBag(11, 5), nn.Linear(5, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.sparse(tokens).mean(1) + self.bag(tokens))

    model = Model()
    dense = Model()
    dense.load_state_dict(model.state_dict())
    dense.sparse = nn.Embedding.from_pretrained(model.sparse.weight.detach().clone(), freeze=False)
    sharded = Pair(model, wrap_children)
    sharded.plain, sharded.optimizer = (
        dense,
        sharded.optimizer.__class__(dense.parameters(), lr=1e-2, weight_decay=0.1, fused=True),
    )
    sharded.train(lambda each, number: each(torch.tensor([[1, 2, 3], [1, 1, 10]])).square().mean())


# Parameters.


@pytest.mark.parametrize("widths", [(7, 15), (15, 17), (1, 1), (257, 3)])
def test_uneven_sizes_match_torch(widths: tuple[int, int]) -> None:
    run(nn.Sequential(nn.Linear(7, widths[0]), nn.Linear(*widths), nn.Linear(widths[1], 1)), 3, 7)


def test_empty_scalar_and_prime_sized_parameters_match_torch() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 5))
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.prime = nn.Parameter(torch.randn(10007))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.prime[:7].sum() + (self.prime**2).mean() + self.empty.sum()

    run(nn.Sequential(nn.Linear(7, 7), Odd()), 3, 7)


def test_unit_of_empty_parameters_matches_torch() -> None:
    model = nn.Sequential(nn.Linear(7, 7), Calls(lambda self, x: x))
    model[1].nothing = nn.Parameter(torch.empty(0))
    run(model, 3, 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_mixed_dtypes_in_one_unit_match_torch(dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(7, 9).to(dtype)
            self.full = nn.Linear(9, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.full(self.low(x.to(dtype)).float())

    Pair(Mixed(), wrap_whole, make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=False)).train(
        lambda model, number: model(inputs(number, 3, 7)).square().mean()
    )


def test_parameters_may_be_frozen_and_unfrozen_between_steps() -> None:
    model = gpt()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    pair = Pair(model, wrap_blocks)
    for number in range(4):
        if number == 2:
            for each in (pair.plain, pair.sharded.model):
                each.blocks[0].requires_grad_(True)
                each.blocks[2].requires_grad_(False)
        pair.backward(gpt_loss, number)
        pair.step()
    pair.compare()
    assert pair.sharded.store.pushes == {"Block-0": 2, "Block-2": 2, "Gpt-0": 4}


def test_only_trainable_elements_are_sent() -> None:
    """Only the biases train, as in BitFit."""
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    pair = Pair(model, wrap_blocks)
    pair.train(gpt_loss)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert pair.sharded.store.pushed_bytes == 4 * trained * 4


def test_parameters_without_gradient_keep_their_optimizer_state() -> None:
    """Adam must skip such a parameter: a zero gradient would still move it."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
            self.extra = nn.Linear(7, 7)
            self.number = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.number += 1
            x = self.branches[self.number % 2](x)
            return x if self.number % 3 else self.extra(x)

    for wrap in (wrap_children, wrap_whole):
        pair = run(Branches(), 3, 7, wrap=wrap, steps=6)
        if wrap is wrap_children:
            assert pair.sharded.store.pushes["Linear-0"] == 3 and pair.sharded.store.pushes["Linear-2"] == 2


def test_module_used_three_times_matches_torch() -> None:
    shared = nn.Linear(12, 12)
    run(Residual(shared, nn.Linear(12, 12), shared, shared), 4, 7)


def test_nested_units_match_torch() -> None:
    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(12)), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * self.scale) * self.scale

    def wrap(model: Any, session: Any) -> None:
        for part in model.parts:
            fully_shard(part.inner, session)
            fully_shard(part, session)
        fully_shard(model, session)

    run(Residual(Feed(), Feed()), 4, 7, wrap=wrap)


def test_module_may_call_another_module_of_its_unit() -> None:
    """The inner call must not free the unit that the outer call still needs."""
    layers = {name: nn.Linear(12, 12) for name in ("before", "inner", "after")}
    model = Residual(Calls(lambda self, x: self.after(self.inner(self.before(x))), **layers))

    def wrap(sharded: Any, session: Any) -> None:
        fully_shard([sharded.parts[0], sharded.parts[0].inner], session)
        wrap_children(sharded, session)

    pair = Pair(model, wrap, prefetch_bytes=0)
    pair.train(lambda each, number: each(inputs(number, 4, 7)).square().mean())
    assert pair.sharded.store.gathers["Calls+Linear-0"] == 2 * 4 + 1


def test_hooks_on_parameters_and_modules_run() -> None:
    """Parameter hooks belong to the parameter objects, which sharding does not replace."""
    seen: dict[str, list[float]] = {"plain": [], "sharded": []}

    def triple(parameter: torch.Tensor, key: str) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3)
        seen[key].append(parameter.grad.sum().item())

    def hooked(model: nn.Module, key: str) -> None:
        first = model[0].weight
        first.register_hook(lambda gradient: gradient * 2)
        first.register_post_accumulate_grad_hook(lambda parameter: triple(parameter, key))
        model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
        model[1].register_forward_pre_hook(lambda module, args: (args[0] + module.weight.mean(),))

    pair = Pair(nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 12), nn.Linear(12, 3)), wrap_children)
    hooked(pair.plain, "plain")
    hooked(pair.sharded.model, "sharded")
    pair.train(lambda model, number: model(inputs(number, 4, 7)).square().mean())
    assert seen["plain"] == seen["sharded"] and len(seen["plain"]) == 4


def test_registered_method_other_than_forward_matches_torch() -> None:
    from shardwell.module.fully_shard import register_forward_method

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

        def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return self.layer(x) * scale

    def wrap(model: Any, session: Any) -> None:
        fully_shard(model.parts[0].encoder, session)
        register_forward_method(model.parts[0].encoder, "encode")
        wrap_children(model, session)

    pair = Pair(Residual(Calls(lambda self, x: self.encoder.encode(x, scale=2.0), encoder=Encoder())), wrap)
    pair.train(lambda model, number: model(inputs(number, 4, 7)).square().mean())
    assert pair.sharded.store.pushes["Encoder-0"] == 4


def test_gradient_set_by_the_user_is_pushed() -> None:
    """The user assigns gradients of ``torch.autograd.grad`` to ``.grad``."""
    pair = Pair(nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 3)), wrap_children)
    for number in range(3):
        for model in (pair.plain, pair.sharded.model):
            loss = F.mse_loss(model(inputs(number, 4, 7)), inputs(number, 4, 3))
            parameters = list(model.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient * 2
                assert torch.equal(parameter.grad, gradient * 2)
        # torch's fused optimizers misread this layout.
        weight = pair.sharded.model[0].weight
        weight.grad = weight.grad.T.contiguous().T
        pair.step()
    pair.compare()


def test_ignored_parameters_stay_ordinary() -> None:
    def wrap(model: Any, session: Any) -> None:
        fully_shard(model, session, ignored_params={model[1].weight})

    pair = Pair(nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 3)), wrap)
    local = torch.optim.AdamW([pair.sharded.model[1].weight], lr=1e-2, weight_decay=0.1, fused=True)
    for number in range(3):
        pair.backward(lambda model, at: model(inputs(at, 4, 7)).square().mean(), number)
        local.step()
        local.zero_grad()
        pair.step()
    pair.compare()
