"""Which optimizers of the training script have taken a step: the first step of a new one starts with new state.

Note: [New optimizers]
    In torch, an optimizer that a script makes for the next stage of training starts with new state, and a script that
    is restarted continues with the state of its checkpoint. Here the state is on the shard servers, and both make an
    optimizer for parameters that have state. Trainers therefore number the optimizers that replace an earlier one for
    the same parameters, in the order in which the script makes them. A restarted script gives the same numbers. The
    run's state, which is stored with every commit and in checkpoints, has the numbers that have taken a step.
"""

from __future__ import annotations

from shardwell_wire.v1 import coordinator_pb2

_KEPT = 64
"""Limit of the numbers in the run's state."""


def starts_anew(state: coordinator_pb2.RunState | None, generation: int) -> bool:
    """True if the next step of an optimizer is its first one, which starts with new state.

    Args:
        state: The run's state.
        generation: ``OptimizerStep.generation``. 0: the optimizer replaces no other one.
    """
    if not generation:
        return False
    known = [] if state is None else state.optimizer_generations
    return generation not in known and not (len(known) == _KEPT and generation < known[0])


def note_step(state: coordinator_pb2.RunState, generation: int) -> None:
    """Records in the run's state that an optimizer takes its first step."""
    known = sorted([*state.optimizer_generations, generation])[-_KEPT:]
    del state.optimizer_generations[:]
    state.optimizer_generations.extend(known)
