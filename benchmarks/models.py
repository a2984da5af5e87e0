"""The model of the benchmarks: a GPT, by default with the sizes of GPT-2 124M, on synthetic tokens."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt import GPT, GPTConfig

GPT2 = GPTConfig(vocab_size=50257, context=1024, num_layers=12, num_heads=12, width=768)
"""Sizes of GPT-2 124M. The head is tied to the token embedding."""
_SEED = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the sizes of the model and the batch."""
    parser.add_argument("--num-layers", type=int, default=GPT2.num_layers)
    parser.add_argument("--width", type=int, default=GPT2.width)
    parser.add_argument("--num-heads", type=int, default=GPT2.num_heads)
    parser.add_argument("--vocab-size", type=int, default=GPT2.vocab_size)
    parser.add_argument("--context", type=int, default=GPT2.context, help="maximum number of positions")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per trainer and step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")


def config_from(arguments: argparse.Namespace) -> GPTConfig:
    """Returns the sizes from the command line."""
    return GPTConfig(
        vocab_size=arguments.vocab_size,
        context=arguments.context,
        num_layers=arguments.num_layers,
        num_heads=arguments.num_heads,
        width=arguments.width,
    )


def make_model(config: GPTConfig) -> GPT:
    """Creates a model with the same initial weights in every process."""
    torch.manual_seed(_SEED)
    return GPT(config)


def count_parameters(config: GPTConfig) -> int:
    """Returns the number of parameters, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


def make_tokens(config: GPTConfig, *, step: int, dp_rank: int, batch_size: int, length: int) -> Tensor:
    """Returns a rank's batch of a step, the same for every variant. [batch_size, length + 1]"""
    generator = torch.Generator().manual_seed(1_000_003 * step + dp_rank)
    return torch.randint(config.vocab_size, (batch_size, length + 1), generator=generator)


def compute(model: nn.Module, tokens: Tensor) -> float:
    """Runs forward and backward and returns the loss."""
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()
