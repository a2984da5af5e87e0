"""``auto_wrap``: ``fully_shard`` for a whole model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from shardwell.module.fully_shard import HasUnits, fully_shard, shard_modules
from shardwell.module.guards import check_batch_norm, check_ignored, check_modules, check_session
from shardwell.module.sharded_module import ShardedModule
from shardwell.wrapping.choice import choose_units
from shardwell.wrapping.memory_strategy import MemoryOptions, MemoryStrategy, prepare_session, resolve, save_less
from shardwell.wrapping.policies import CustomPolicy, ModuleTypePolicy, WrapPolicy
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.session.session import Session


def auto_wrap(
    model: nn.Module,
    session: HasUnits,
    policy: WrapPolicy | None = None,
    *,
    ignored_params: Collection[nn.Parameter] = (),
    memory: MemoryStrategy | MemoryOptions | None = None,
    **options: Any,
) -> Any:
    """Calls ``fully_shard`` on the modules that a policy chooses, inner ones first, and on the model.

    Units and parameters get their names in the model; the last unit, which takes what is left, is
    named for the model's class. A module that shares a parameter, or a module, with one outside it is not made a
    unit: its parameters go to the unit around both. Modules that are sharded already stay as they are.
    The tiles of a ``TiledLinear`` are units under every policy.

    Args:
        model: The whole model.
        session: Where the parameters go.
        policy: ``SizePolicy``, ``ModuleTypePolicy``, ``CustomPolicy``, ``NoWrapPolicy`` or the like. None:
            the model's repeated blocks and what is as large as one, see ``default_policy.BlockPolicy``.
        ignored_params: Parameters to leave alone: they stay ordinary ones in this process.
        memory: How much time to give for memory, such as ``MemoryStrategy.STANDARD``, or
            ``MemoryStrategy.EXTREME.options(offload_to="/scratch")``. For the first model of a session.
        **options: Further ones of ``fully_shard``, for every unit, such as ``strategy`` or ``mp_policy``; they have
            precedence over ``memory``.

    Returns:
        The model.

    Raises:
        UsageError: The model is sharded already, or can not be; the message says why.
    """
    ignored_params = list(ignored_params)
    check_ignored(ignored_params)
    check_modules([model], ignored_params)
    check_session(session)
    check_batch_norm([model], session)
    _check_policy(policy)
    _check_options(options)
    saving = None if memory is None else resolve(memory)
    chosen = choose_units(model, policy, ignored_params)
    if not chosen and isinstance(policy, ModuleTypePolicy | CustomPolicy) and not _holds_units(model):
        _warn_of_one_unit(model, policy)
    if saving is not None:
        prepare_session(cast("Session", session), saving)
        options = {**saving.of_units(options), **options}
    options["ignored_params"] = ignored_params
    for unit in chosen:
        prefixes = [f"{name}." for name in unit.modules]
        shard_modules(list(unit.modules.values()), session.units, name=unit.name, prefixes=prefixes, **options)
    root = session.units.unused_name(type(model).__name__)
    shard_modules([model], session.units, name=root, prefixes=[""], **options)
    if saving is not None:
        save_less([module for unit in chosen for module in unit.modules.values()], saving)
    return model


def _check_policy(policy: object) -> None:
    if policy is not None and (isinstance(policy, type) or not callable(getattr(policy, "choose", None))):
        raise UsageError(
            f"policy={policy!r}: expected a policy such as SizePolicy(min_num_params=1_000_000), "
            "ModuleTypePolicy({Block}), CustomPolicy(function) or NoWrapPolicy(); None chooses by itself"
        )


def _check_options(options: Mapping[str, object]) -> None:
    known = inspect.signature(fully_shard).parameters.keys() - {"module", "session", "name", "ignored_params"}
    for name in options:
        if name not in known:
            raise UsageError(f"auto_wrap({name}=...): expected one of {', '.join(sorted(known))}, policy or memory")


def _holds_units(model: nn.Module) -> bool:
    return any(isinstance(module, ShardedModule) for module in model.modules())


def _warn_of_one_unit(model: nn.Module, policy: WrapPolicy) -> None:
    kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in model.modules() if module is not model))
    warnings.warn(
        f"{policy} chooses no module of {type(model).__name__}, so the whole model is one unit and trainers gather all "
        f"of it at once. It has {kinds or 'no modules inside'}. If one unit is wanted, use NoWrapPolicy(); without a "
        "policy auto_wrap finds the model's blocks itself",
        stacklevel=3,
    )
