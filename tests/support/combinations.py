"""A model with many kinds of layers, and a training loop written by hand to compare with."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwell import MixedPrecisionPolicy

VOCABULARY, WIDTH, LENGTH, ROWS = 13, 6, 3, 4
KINDS = ("mlp", "lstm", "batch norm", "in place", "attention")

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Layer(nn.Module):
    """A block of a given kind. ``recompute`` is None or ``checkpoint``'s ``use_reentrant``."""

    def __init__(self, kind: str, recompute: bool | None) -> None:
        super().__init__()
        self.kind, self.recompute = kind, recompute
        self.first, self.second = nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH)
        if kind == "lstm":
            self.inner: nn.Module = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        elif kind == "batch norm":
            self.inner = nn.BatchNorm1d(LENGTH)
        elif kind == "attention":
            self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "lstm":
            x = x + self.inner(x)[0]
        elif self.kind == "batch norm":
            x = self.inner(x)
        elif self.kind == "attention":
            x = x + self.inner(x, x, x, need_weights=False)[0]
        hidden = self.first(x)
        hidden = F.relu_(hidden) if self.kind == "in place" else F.dropout(F.gelu(hidden), 0.2, self.training)
        return x + self.second(hidden)


class Combination(nn.Module):
    """Layers between an embedding and a head, which may share their weight.

    Attributes:
        skipped: Layers that the next forwards skip.
        fails: Whether the next forwards raise ``ZeroDivisionError`` after the last layer.
    """

    def __init__(self, kinds: Sequence[str], recompute: Sequence[bool | None], *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Layer(*chosen) for chosen in zip(kinds, recompute, strict=True))
        self.norm = nn.LayerNorm(WIDTH)
        if tied:
            self.head.weight = self.embedding.weight
        self.skipped: frozenset[int] = frozenset()
        self.fails = False

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * scale
        for number, block in enumerate(self.blocks):
            if number in self.skipped:
                continue
            recompute = block.recompute if self.training else None
            x = block(x) if recompute is None else checkpoint(block, x, use_reentrant=recompute)
        if self.fails:
            raise ZeroDivisionError
        return self.head(self.norm(x))


def loss_of(model: Any, number: int) -> torch.Tensor:
    """Returns the loss on batch ``number``, with the same dropout each time."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    scale = torch.rand(1, generator=generator) + 0.5
    torch.manual_seed(number)
    logits: torch.Tensor = model(tokens, scale).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


@dataclass
class ByHand:
    """Sharding, mixed precision and servers in plain torch: master parameters, a computing model, and gradients.

    Args:
        masters: The model whose parameters are trained.
        make_optimizer: Makes the optimizer of the masters.
        policy: The dtypes to compute in.
        gather_dtype: Dtype to which weights are rounded on the wire.
        push_dtype: Dtype to which gradients are rounded on the wire.
        unit_of: The unit of each parameter. Accumulated gradients are pushed when their unit took part in a backward.
    """

    masters: Combination
    make_optimizer: MakeOptimizer
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    gather_dtype: torch.dtype = torch.float32
    push_dtype: torch.dtype = torch.float32
    unit_of: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computing = copy.deepcopy(self.masters)
        dtype = self.policy.param_dtype or torch.float32
        for parameter in self.computing.parameters():
            parameter.data = parameter.data.to(dtype)
        for module in self.computing.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and self.policy.buffer_dtype is not None:
                    module._buffers[name] = buffer.to(self.policy.buffer_dtype)
        if self.policy.param_dtype is not None:
            self.computing.register_forward_pre_hook(lambda _, inputs: (inputs[0], inputs[1].to(dtype)))
        self.optimizer = self.make_optimizer(list(self.masters.parameters()))
        self._parameters = list(zip(self.masters.parameters(), self.computing.parameters(), strict=True))
        self._accumulated: dict[int, torch.Tensor] = {}
        self._item: dict[int, torch.Tensor] = {}
        self._total: dict[int, torch.Tensor] = {}
        self._receive()

    def _receive(self) -> None:
        with torch.no_grad():
            for master, parameter in self._parameters:
                parameter.copy_(master.to(self.gather_dtype).float())

    def backward(self, number: int, *, sync: bool, scale: float = 1.0) -> torch.Tensor:
        """Runs one micro-batch. Its gradients are pushed, or accumulated until the next push."""
        loss = loss_of(self.computing, number)
        (loss * scale).backward()
        used = set()
        for index, (_, parameter) in enumerate(self._parameters):
            if parameter.grad is not None:
                used.add(self.unit_of[index])
                gradient, parameter.grad = parameter.grad, None
                if not self.policy.keep_low_precision_grads:
                    gradient = gradient.to(self.policy.reduce_dtype or torch.float32)
                self._accumulated[index] = (
                    self._accumulated[index] + gradient if index in self._accumulated else gradient
                )
        if sync:
            self.push([index for index in self._accumulated if self.unit_of[index] in used])
        return loss.detach()

    def push(self, indices: Sequence[int]) -> None:
        """Adds the accumulated gradients of some parameters to the item's gradient."""
        for index in indices:
            gradient = self._accumulated.pop(index)
            part = gradient.to(self.policy.reduce_dtype or torch.float32).float().to(self.push_dtype).float()
            self._item[index] = self._item[index] + part if index in self._item else part

    def drop(self) -> None:
        """Drops all gradients of the item."""
        self._accumulated.clear()
        self._item.clear()

    def finish_item(self) -> None:
        """Ends the item of a rank. Later gradients belong to the next rank."""
        self.push(list(self._accumulated))
        for index, gradient in self._item.items():
            self._total[index] = self._total[index] + gradient if index in self._total else gradient
        self._item.clear()

    def step(self, dp: int, *, scale: float = 1.0) -> None:
        """Updates the masters by the mean of the ranks' gradients."""
        for index, (master, _) in enumerate(self._parameters):
            gradient = self._total.get(index)
            master.grad = None if gradient is None else gradient / dp / scale
        self.optimizer.step()
        self._total.clear()
        self._receive()

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the masters and the buffers under torch's names."""
        return {**self.masters.state_dict(), **dict(self.computing.named_buffers())}


def random_model(rng: random.Random, *, recomputes: bool = True) -> Combination:
    """Returns a model with a few layers of random kinds."""
    count = rng.randint(2, 4)
    recompute = [rng.choice([None, None, False, True]) if recomputes else None for _ in range(count)]
    torch.manual_seed(rng.randrange(1 << 30))
    return Combination(rng.choices(KINDS, k=count), recompute, tied=rng.random() < 0.5)


def random_policy(rng: random.Random) -> MixedPrecisionPolicy:
    """Returns a policy that in half of the cases computes in another dtype than the stored one."""
    if rng.random() < 0.5:
        return MixedPrecisionPolicy()
    low = torch.bfloat16
    return MixedPrecisionPolicy(
        param_dtype=low,
        reduce_dtype=rng.choice([None, torch.float32, low]),
        output_dtype=rng.choice([None, torch.float32]),
        buffer_dtype=low,
        keep_low_precision_grads=rng.random() < 0.3,
    )
