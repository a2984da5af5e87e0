"""Gives modules on the meta device real parameters and buffers: the same objects in the same places, without values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils import swap_tensors

from shardwell.module.tensors import local_part
from shardwell.module.unit_parameters import FoundParameter, Site
from shardwell_wire.errors import UsageError


@dataclass(slots=True)
class Blanks:
    """Parameters and buffers that were on the meta device and have no values yet."""

    parameters: frozenset[int] = frozenset()
    """Indices of a unit's parameters. They have a device now, but no memory."""
    buffers: list[Site] = field(default_factory=list)
    """Buffers, whose memory has arbitrary content."""

    def __bool__(self) -> bool:
        return bool(self.parameters or self.buffers)


@contextmanager
def materialized(
    found: Sequence[FoundParameter], modules: Sequence[nn.Module], device: torch.device
) -> Iterator[Blanks]:
    """Moves tensors from the meta device to a device, and undoes the move if the block raises.

    Parameters stay the same objects, so ties, optimizers and lists that hold them stay valid.

    Args:
        found: Parameters of a future unit.
        modules: Their modules, whose buffers are moved too.
        device: The device to move to.

    Raises:
        UsageError: A parameter has a hook already, or a weak reference to it exists.
    """
    blank = [index for index, entry in enumerate(found) if entry.parameter.is_meta]
    swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
    sites = [(site, site.module._buffers[site.name]) for site in _meta_buffers(modules)]
    try:
        for index in blank:
            parameter = found[index].parameter
            real = _without_memory(found[index], device)
            _swap(parameter, real, found[index].names[0])
            swapped.append((parameter, real))
        _replace_buffers(sites, device)
        yield Blanks(frozenset(blank), [site for site, _ in sites])
    except BaseException:
        for site, buffer in sites:
            site.module._buffers[site.name] = buffer
        for parameter, real in swapped:
            _swap_contents(parameter, real)
        raise


def _without_memory(entry: FoundParameter, device: torch.device) -> nn.Parameter:
    """Returns a parameter of the same shape on a device; all elements share the memory of one."""
    parameter, local = entry.parameter, local_part(entry.parameter)
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UsageError(
            f"parameter {entry.names[0]!r} is on the meta device and has hooks, which fully_shard would remove: "
            "register them after fully_shard",
            parameter=entry.names[0],
        )
    values = torch.empty((), dtype=local.dtype, device=device).expand(local.shape)
    if not hasattr(parameter, "placements"):
        return nn.Parameter(values, parameter.requires_grad)
    real = nn.Parameter(_as_dtensor(values, parameter), parameter.requires_grad)
    vars(real).update(vars(parameter))
    return real


def _as_dtensor(local: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _swap(parameter: nn.Parameter, real: nn.Parameter, name: str) -> None:
    try:
        _swap_contents(parameter, real)
    except RuntimeError as error:
        raise UsageError(
            f"parameter {name!r} is on the meta device and cannot be given memory ({error}): call fully_shard before "
            "a graph refers to the parameter, or build the module on another device",
            parameter=name,
        ) from error


def _swap_contents(parameter: nn.Parameter, real: nn.Parameter) -> None:
    if hasattr(parameter, "placements"):
        swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
    else:  # swap_tensors refuses parameters with weak references. nn.LSTM has some, which must see the new content
        torch._C._swap_tensor_impl(parameter, real)


def _meta_buffers(modules: Sequence[nn.Module]) -> list[Site]:
    parts = {part: None for module in modules for part in module.modules()}
    return [
        Site(part, name)
        for part in parts
        for name, buffer in part._buffers.items()
        if buffer is not None and buffer.is_meta
    ]


def _replace_buffers(sites: Sequence[tuple[Site, torch.Tensor | None]], device: torch.device) -> None:
    real: dict[int, torch.Tensor] = {}
    for site, buffer in sites:
        assert buffer is not None
        if id(buffer) not in real:
            real[id(buffer)] = torch.empty_like(buffer, device=device)
        site.module._buffers[site.name] = real[id(buffer)]
