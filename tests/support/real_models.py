"""Models as users write them: a ResNet, an LSTM, a mixture of experts and two Hugging Face models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

VOCABULARY, LENGTH, BATCH = 61, 9, 3
WIDTH = 24


@dataclass(frozen=True)
class Case:
    """Functions that build and train a model."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    """Returns the batch of (step, dp_rank)."""
    loss: Callable[[nn.Module, Any], torch.Tensor]


def tokens(step: int, dp_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def next_token_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


# Written as in torchvision.


class BasicBlock(nn.Module):
    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or in_planes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 13, stride=2), BasicBlock(13, 13))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(13, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def images(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    return torch.randn(4, 3, 12, 12, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def classification_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


class LstmLanguageModel(nn.Module):
    """Has two layers with dropout between them. The head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(batch))
        return self.head(hidden)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.up(x)))


class MixtureLayer(nn.Module):
    """Routes each token to one expert. Experts without a token are not called."""

    NUM_EXPERTS = 12

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, self.NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(self.NUM_EXPERTS))
        self.used: list[set[int]] = []
        """Experts used by each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        self.used.append(set(choice.tolist()))
        result = torch.zeros_like(flat)
        for number in sorted(self.used[-1]):
            rows = (choice == number).nonzero().squeeze(1)
            result = result.index_add(0, rows, self.experts[number](flat[rows]) * weight[rows, None])
        return x + result.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MixtureLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def few_tokens(step: int, dp_rank: int) -> torch.Tensor:
    """Returns too few tokens for all experts."""
    return tokens(step, dp_rank)[:1, :5]


# Hugging Face models.


def llama(attention: str = "sdpa") -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH + 1,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(attention: str = "sdpa") -> nn.Module:
    """Returns a GPT-2 with dropout and a head tied to the embedding."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=3,
        n_head=4,
        n_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config)


def own_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Returns the loss that Hugging Face's models compute themselves."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


CASES = {
    "llama": Case(llama, tokens, own_loss),
    "gpt2": Case(gpt2, tokens, own_loss),
    "resnet": Case(ResNet, images, classification_loss),
    "lstm": Case(LstmLanguageModel, tokens, next_token_loss),
    "mixture": Case(MixtureOfExperts, few_tokens, next_token_loss),
}


def build(case: Case) -> nn.Module:
    """Returns the model in training mode, with the same weights on every call."""
    torch.manual_seed(0)
    return case.build().train()
