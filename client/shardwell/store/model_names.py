"""The names in the model of a run's parameters and buffers.

A ``fully_shard`` call names tensors after its unit and their places in its module. Only the outermost call knows where
this module is in the model. The run learns the names in the model when an optimizer is made.
"""

from __future__ import annotations

from collections import defaultdict

from shardwell.module.new_units import NAMES_IN_MODEL
from shardwell.module.unit import owner_of
from shardwell.module.units import Units
from shardwell.store.module_buffers import find_buffers


def model_names(units: Units) -> dict[str, tuple[str, ...]]:
    """Returns the names in the model of parameters and buffers that differ from those in the run, by the latter.

    They are the names in the outermost sharded module. If there are several, such as the two networks of a GAN, the
    name of its ``fully_shard`` call comes first. In a run with several pipeline stages, only stages of a ``ModelSplit``
    have names in a model.

    Args:
        units: The units of a session.
    """
    modules = units.named_modules
    inside = {id(part) for _, module in modules for part in module.modules() if part is not module}
    roots = [(prefix, module) for prefix, module in modules if id(module) not in inside]
    if units.place.pp > 1:
        roots = [("", module) for _, module in roots if NAMES_IN_MODEL in vars(module)]
    elif len(roots) == 1:
        roots = [("", roots[0][1])]
    whole = {name: names for _, module in roots for name, names in vars(module).get(NAMES_IN_MODEL, {}).items()}
    in_run: dict[str, list[str]] = {}
    found: defaultdict[str, list[str]] = defaultdict(list)
    for prefix, module in roots:
        for path, part in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
            for name, parameter in part._parameters.items():
                owner = None if parameter is None else owner_of(parameter)
                if owner is not None and units.has(owner.unit):
                    described = owner.unit.layout.parameters[owner.index]
                    in_run[described.name] = [described.name, *described.aliases]
                    found[described.name].append(f"{path}.{name}" if path else name)
    of_buffers = {id(buffer.tensor): buffer.names for buffer in find_buffers(modules)}
    for buffer in find_buffers(roots):
        if (names := of_buffers.get(id(buffer.tensor))) is not None:
            in_run[names[0]], found[names[0]] = names, buffer.names
    named = {
        name: dict.fromkeys(each for own in names for each in whole.get(own, (own,))) for name, names in found.items()
    }
    return {name: tuple(names) for name, names in named.items() if [*names] != in_run[name]}
