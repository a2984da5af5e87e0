"""Weights of runs, models and checkpoints: loading, saving, reading and following them.

The names that most scripts use are in ``shardwell`` itself, such as ``shardwell.full_state_dict``.
"""

from typing import TYPE_CHECKING

from shardwell_wire.errors import import_on_use

if TYPE_CHECKING:
    from shardwell.weights.checkpoint_conversion import checkpoint_to_dcp, dcp_to_checkpoint
    from shardwell.weights.checkpoint_reader import CheckpointReader, open_checkpoint
    from shardwell.weights.digest import weights_digest
    from shardwell.weights.state_dict import (
        TensorSlice,
        iter_full_state_dict,
        join_state_dicts,
        save_dcp,
        sharded_state_dict,
    )

__all__ = [
    "CheckpointReader", "TensorSlice", "checkpoint_to_dcp", "dcp_to_checkpoint", "iter_full_state_dict",
    "join_state_dicts", "open_checkpoint", "save_dcp", "sharded_state_dict", "weights_digest",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    __getattr__, __dir__ = import_on_use(
        __name__,
        {
            "shardwell.weights.checkpoint_conversion": "checkpoint_to_dcp dcp_to_checkpoint",
            "shardwell.weights.checkpoint_reader": "CheckpointReader open_checkpoint",
            "shardwell.weights.digest": "weights_digest",
            "shardwell.weights.state_dict": "TensorSlice iter_full_state_dict join_state_dicts "
            "save_dcp sharded_state_dict",
        },
    )
