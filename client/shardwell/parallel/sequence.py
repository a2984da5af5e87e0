"""Styles of sequence parallelism that torch does not have: the cut of a block's input, and norms that gather."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SEQUENCE_DIM = 1
"""Dimension of activations along the sequence: ``[batch, length, width]``."""


class SplitSequence(ParallelStyle):
    """Cuts a module's first input, which is whole on every rank, along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            whole = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return (whole.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local(), *inputs[1:])

        module.register_forward_pre_hook(cut)
        return module


class GatheredNorm(ParallelStyle):
    """A norm that computes its part of the sequence, and gathers the result.

    The parameters are whole on every rank, and their gradients are sums over the ranks.

    Args:
        local: Whether the output is a plain tensor that is the same on all ranks, and has the same gradient on all
            ranks. Otherwise it is a ``DTensor`` for layers that are split by columns: its gradient is their sum.
    """

    def __init__(self, *, local: bool = False) -> None:
        super().__init__()
        self._local = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(part.named_parameters(recurse=False)):
                values = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))

        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            part: torch.Tensor = inputs[0]
            return (DTensor.from_local(part, mesh, [Shard(SEQUENCE_DIM)], run_check=False), *inputs[1:])

        def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
            whole = output.redistribute(placements=[Replicate()])
            return whole.to_local() if self._local else whole

        return distribute_module(module, device_mesh, replicate, enter, leave)  # type: ignore[arg-type]
