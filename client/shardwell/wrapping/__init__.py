"""Which modules of a model become units, and with which options.

The names that most scripts use are in ``shardwell`` itself, such as ``shardwell.auto_wrap``.
"""

from typing import TYPE_CHECKING

from shardwell_wire.errors import import_on_use

if TYPE_CHECKING:
    from shardwell.wrapping.activation_offload import ActivationOffload
    from shardwell.wrapping.experts import merge_experts, split_experts
    from shardwell.wrapping.tiled_linear import TiledLinear

__all__ = ["ActivationOffload", "TiledLinear", "merge_experts", "split_experts"]

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    __getattr__, __dir__ = import_on_use(
        __name__,
        {
            "shardwell.wrapping.activation_offload": "ActivationOffload",
            "shardwell.wrapping.experts": "merge_experts split_experts",
            "shardwell.wrapping.tiled_linear": "TiledLinear",
        },
    )
