"""The bytes that the trainers and servers of a grid exchange in one step, in theory.

Counts payloads: values of activations, weights and gradients, without headers and control messages. Each byte counts
once, when it is received.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from examples.gpt import GPT, Block, GPTConfig
from shardwell.parallel import ActivationShape, TensorParallelPlan, plan_tensor_parallel, split_model

_ITEM_SIZE = 4
"""Bytes per float32."""


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Size of one unit of a trainer."""

    gathered: int
    """Bytes of the weights that the trainer computes with."""
    pushed: int
    """Bytes of the gradients that the trainer pushes to servers. Less than ``gathered`` if a tensor-parallel peer
    pushes the parameters that are whole on every rank."""
    is_block: bool
    """True for a transformer block, False for the unit of the embeddings and the head."""


@dataclass(frozen=True, kw_only=True)
class GridTraffic:
    """Bytes of one step for each mode of the grid.

    ``gloo`` adds gradients in a ring: each of two ranks receives as many bytes as the tensor has. Its reduce-scatter
    moves as many bytes as its all-reduce.
    """

    dp: int
    replica: tuple[tuple[UnitBytes, ...], ...]
    """Units of each trainer of one replica."""
    activations: int
    """Bytes that the trainers of one replica exchange: activations and their gradients."""
    keeps_weights: bool
    """True if blocks stay gathered from the forward to the backward; otherwise they are gathered twice per step."""

    def bytes_per_step(self, mode: str) -> int:
        """Returns the bytes of all replicas over the network, for a mode of ``benchmarks.grid``."""
        gathered = sum(unit.gathered * self._gathers(unit) for unit in self._units())
        gradients = sum(unit.gathered for unit in self._units())
        pushed = sum(unit.pushed for unit in self._units())
        ring = 2 * (self.dp - 1) / self.dp
        exchanged = {
            "resident": 0.0,
            "all_reduce": ring * gradients,
            "fsdp2": (self.dp - 1) / self.dp * gathered + ring * gradients,
            "shardwell_shm": 0.0,
            "shardwell_socket": float(gathered + pushed),
        }
        return round(self.dp * (self.activations + exchanged[mode.removesuffix("_prefetch")]))

    @property
    def bytes_between_hosts(self) -> int:
        """Bytes of one step between two hosts, which have a replica and a shard server each.

        Each replica gathers and pushes the shards of the other host's server over the network. For each unit, the two
        replicas together do this for every shard once, wherever the unit is cut.
        """
        return sum(unit.gathered * self._gathers(unit) + unit.pushed for unit in self._units())

    def _units(self) -> Iterable[UnitBytes]:
        return (unit for trainer in self.replica for unit in trainer)

    def _gathers(self, unit: UnitBytes) -> int:
        return 2 if unit.is_block and not self.keeps_weights else 1


def pipeline_traffic(config: GPTConfig, *, dp: int, pp: int, batch_size: int, length: int) -> GridTraffic:
    """Returns the traffic of a pipeline with one stage per trainer, whose weights stay gathered.

    Args:
        config: Sizes of the model.
        dp: Number of replicas.
        pp: Number of stages.
        batch_size: Sequences of a work item, in all micro-batches together.
        length: Tokens per sequence.
    """
    with torch.device("meta"):
        split = split_model(GPT(config), pp)
    stages = [_units_of(split.module(index)) for index in range(pp)]
    boundary = batch_size * length * config.width * _ITEM_SIZE
    return GridTraffic(dp=dp, replica=tuple(stages), activations=2 * (pp - 1) * boundary, keeps_weights=True)


def tensor_traffic(config: GPTConfig, *, dp: int, tp: int, batch_size: int, length: int) -> GridTraffic:
    """Returns the traffic of tensor parallelism with the default plan, and blocks that are gathered twice per step."""
    with torch.device("meta"):
        model = GPT(config)
    plan = plan_tensor_parallel(model, tp, fused_by_head=True)
    split = _split_parameters(plan, model)
    trainers = [_units_of(model, split, tp_rank=tp_rank, tp=tp) for tp_rank in range(tp)]
    activations = 0.0
    for by_operation in plan.collectives(ActivationShape(batch=batch_size, length=length)).values():
        for operation, payload in by_operation.items():
            activations += payload * (tp - 1) * (2 if operation == "all_reduce" else 1)
    return GridTraffic(dp=dp, replica=tuple(trainers), activations=round(activations), keeps_weights=False)


def _split_parameters(plan: TensorParallelPlan, model: nn.Module) -> set[int]:
    """Returns the ids of the parameters that a plan splits. A weight that is split by columns has a whole bias."""
    found = set()
    for layer in plan.layers:
        for name, parameter in model.get_submodule(layer.name).named_parameters(recurse=False):
            if layer.part.startswith("rows") or (layer.part.startswith("columns") and name == "weight"):
                found.add(id(parameter))
    return found


def _units_of(model: nn.Module, split: Container[int] = (), *, tp_rank: int = 0, tp: int = 1) -> tuple[UnitBytes, ...]:
    """Returns a unit for each block, and one for the other parameters.

    Args:
        model: The model, or a stage of it.
        split: Ids of the parameters of which each tensor-parallel rank has a part.
        tp_rank: Tensor-parallel rank of the trainer. Rank 0 pushes the parameters that are whole on every rank.
        tp: Number of tensor-parallel ranks.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in in_blocks]
    units = []
    for parameters, is_block in [*((list(block.parameters()), True) for block in blocks), (rest, False)]:
        parts = _ITEM_SIZE * sum(each.numel() for each in parameters if id(each) in split) // tp
        whole = _ITEM_SIZE * sum(each.numel() for each in parameters if id(each) not in split)
        units.append(
            UnitBytes(gathered=parts + whole, pushed=parts + (whole if tp_rank == 0 else 0), is_block=is_block)
        )
    return tuple(units)
