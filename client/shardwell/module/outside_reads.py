"""Reads of a unit's weights by a forward that is not the unit's own, such as a head that uses the embedding's weight.

The first such read gathers the unit for the module whose forward reads, and from then on the unit is gathered whenever
that module runs. It is the innermost sharded module that runs and contains the weight, or, if no unit is running, as in
``generate`` of a model inside the sharded one, the outermost module that runs and contains the weight.
"""

from __future__ import annotations

from types import FrameType

from torch import nn

from shardwell.module.hooks import hook_module, hooked_method, keep_attribute
from shardwell.module.passes import NO_TASK, ForwardBackward, backward_task
from shardwell.module.unit import ForwardCall, Owner

_CALL = nn.Module._call_impl.__code__


def gather_for_reader(passes: ForwardBackward, owner: Owner, frame: FrameType | None) -> bool:
    """Gathers the freed unit of a parameter for the running forward that reads the parameter.

    Args:
        passes: The forwards of the unit's session.
        owner: The parameter's unit.
        frame: The frame that reads.

    Returns:
        False if no forward of a module that contains the parameter is running.
    """
    unit = owner.unit
    module, reader = _find_reader(owner, passes, frame)
    if module is None or module in unit.modules:
        return False
    undo = vars(unit.modules[0])["_shardwell_sharding"].undo
    if reader is not None:
        undo += [handle.remove for handle in hook_module(module, unit, passes)]
    else:
        undo.append(keep_attribute(module, "forward"))
        module.forward = hooked_method(unit, passes, module, "forward")
    if backward_task() == NO_TASK and reader is None:
        passes.unshard_by_hand([unit])  # until the next forward of the module
        unit.unshard()
    else:
        passes.join_forward(unit, reader)
    return True


def _find_reader(
    owner: Owner, passes: ForwardBackward, frame: FrameType | None
) -> tuple[nn.Module | None, ForwardCall | None]:
    """Returns the module that reads and, if it is sharded, the call of its unit."""
    holders = [site.module for site in owner.unit.sites[owner.index]]
    outermost = None
    while frame is not None:
        module = frame.f_locals["self"] if frame.f_code is _CALL else None
        if module is not None and any(part is holder for part in module.modules() for holder in holders):
            for call in reversed(passes.running):
                if module in call.unit.modules:
                    return module, call
            outermost = module
        frame = frame.f_back
    return outermost, None
