"""Parameter groups as torch's optimizers keep them, and as shard servers apply them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from shardwell_wire.errors import UsageError
from shardwell_wire.optimizers import OPTIMIZERS

_CLASSES = {
    name.lower(): each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
}
"""torch's optimizers by the names of ``OPTIMIZERS``."""
_FUSED = ("adam", "adamw", "sgd")
"""Optimizers for which shard servers use torch's fused kernels."""


def find_algorithm(groups: Iterable[Mapping[str, Any]], state_names: Collection[str]) -> str:
    """Returns the optimizer that has these parameter groups and state.

    Args:
        groups: Parameter groups of a torch optimizer.
        state_names: Names of its state tensors.

    Raises:
        UsageError: None or several fit.
    """
    groups = list(groups)
    found = [name for name, each in _CLASSES.items() if name in OPTIMIZERS and _fits(name, each, groups, state_names)]
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in groups}
    if {"adam", "adamw"} <= set(found) and len(decoupled) == 1:
        found.remove("adam" if decoupled == {True} else "adamw")
    if len(found) != 1:
        fitting = " and ".join(sorted(found)) or "none"
        raise UsageError(
            f"which optimizer wrote the state {sorted(state_names)}? {fitting} of the known ones fit: name it "
            "(optimizer=, --optimizer)"
        )
    return found[0]


def _fits(
    name: str, optimizer: type[torch.optim.Optimizer], groups: list[Mapping[str, Any]], state_names: Collection[str]
) -> bool:
    spec = OPTIMIZERS[name]
    known = set(torch_group(name, {}, optimizer=optimizer))
    written = {key for group in groups for key in group} - {"params", "initial_lr"}
    return written <= known and set(state_names) <= {tensor.name for tensor in spec.state} and bool(written)


def hyperparameters(algorithm: str, group: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a parameter group, as in ``ParameterGroup.hyperparameters``.

    Raises:
        UsageError: A number is missing.
    """
    settings = {**torch_group(algorithm, {}), **group}
    if algorithm == "muon":
        settings["match_rms_adamw"] = settings.get("adjust_lr_fn") == "match_rms_adamw"
    if algorithm == "adafactor":
        eps1, eps2 = settings["eps"]
        settings["eps"] = (torch.finfo(torch.float32).eps if eps1 is None else eps1, eps2)
    numbers = {}
    for each in OPTIMIZERS[algorithm].hyperparameters:
        value = each.value_in(settings)
        if value is None:
            raise UsageError(f"the parameter group has no {each.label!r}, which {algorithm!r} needs")
        numbers[each.name] = float(value)
    return numbers


def torch_group(
    algorithm: str,
    numbers: Mapping[str, float],
    *,
    optimizer: type[torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Returns a parameter group with all settings of torch's optimizer, without ``params``.

    Args:
        algorithm: Name of the optimizer.
        numbers: As in ``ParameterGroup.hyperparameters``. Settings that are not named get torch's defaults.
        optimizer: torch's class. Default: the class of this name, if torch has one.
    """
    optimizer = _CLASSES.get(algorithm) if optimizer is None else optimizer
    settings: dict[str, Any] = {}
    if optimizer is not None:
        more: dict[str, Any] = {"lr": 1e-3} if algorithm == "sgd" else {}
        settings = dict(optimizer([torch.zeros(1, 1)], **more).param_groups[0])
        del settings["params"]
        if "fused" in settings:  # as on the shard servers: the bits of fused kernels differ from those of the others
            settings["fused"] = algorithm in _FUSED
    tuples: dict[str, dict[int, float]] = {}
    for each in OPTIMIZERS[algorithm].hyperparameters:
        if each.name in numbers:
            value: Any = numbers[each.name]
            value = bool(value) if each.is_flag else int(value) if each.is_integer else value
            if each.argument:
                tuples.setdefault(each.argument, {})[each.index] = value
            elif each.name == "match_rms_adamw":
                settings["adjust_lr_fn"] = "match_rms_adamw" if value else settings.get("adjust_lr_fn")
            else:
                settings[each.name] = value
    return settings | {argument: tuple(items[index] for index in sorted(items)) for argument, items in tuples.items()}
