"""Shardwell: train PyTorch models whose parameters live on shard servers.

>>> session = shardwell.join("localhost:50051", run="gpt", world=shardwell.World(dp=2))
>>> for block in model.blocks:
...     shardwell.fully_shard(block, session)
>>> shardwell.fully_shard(model, session)
>>> optimizer = shardwell.optim.AdamW(model.parameters(), lr=3e-4)
>>> for step in session.steps(1000):
...     for batch in step.batches(dataset, batch_size=8):
...         model(batch).loss.backward()
...     optimizer.step()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwell_wire.errors import ShardwellError, UsageError, import_on_use
from shardwell_wire.model.topology import ASYNCHRONOUS, BOUNDED_STALENESS, SYNCHRONOUS, Consistency, World
from shardwell_wire.security.tls import TlsOptions

if TYPE_CHECKING:
    from shardwell import amp, engines, errors, init, monitor, optim, parallel, testing, weights, wrapping
    from shardwell.errors import *  # noqa: F403
    from shardwell.module.fully_shard import ShardedModule, fully_shard, register_forward_method
    from shardwell.module.mixed_precision import MixedPrecisionPolicy
    from shardwell.module.strategy import BackwardPrefetch, ReplicaOptions, ShardingStrategy
    from shardwell.monitor import *  # noqa: F403
    from shardwell.optimizers.client_side import ClientSide, FlatClientSide
    from shardwell.options import TransferOptions, WaitOptions
    from shardwell.processes.local_cluster import LocalCluster
    from shardwell.session.session import Session, join
    from shardwell.training.training_step import Step
    from shardwell.weights import *  # noqa: F403
    from shardwell.weights.reader import Reader, attach
    from shardwell.weights.state_dict import full_state_dict, save_safetensors
    from shardwell.weights.weight_files import from_safetensors
    from shardwell.wrapping import *  # noqa: F403
    from shardwell.wrapping.activation_offload import offload_activations
    from shardwell.wrapping.auto_wrap import auto_wrap, unwrap
    from shardwell.wrapping.policies import (
        CustomPolicy,
        MemoryOptions,
        MemoryStrategy,
        ModuleTypePolicy,
        NoWrapPolicy,
        SizePolicy,
    )

__all__ = [
    "ASYNCHRONOUS", "BOUNDED_STALENESS", "SYNCHRONOUS", "BackwardPrefetch", "ClientSide", "Consistency", "CustomPolicy",
    "FlatClientSide", "LocalCluster", "MemoryOptions", "MemoryStrategy", "MixedPrecisionPolicy", "ModuleTypePolicy",
    "NoWrapPolicy", "Reader", "ReplicaOptions", "Session", "ShardedModule", "ShardingStrategy", "ShardwellError",
    "SizePolicy", "Step", "TlsOptions", "TransferOptions", "UsageError", "WaitOptions", "World", "amp", "attach",
    "auto_wrap", "engines", "errors", "from_safetensors", "full_state_dict", "fully_shard", "init", "join", "monitor",
    "offload_activations", "optim", "parallel", "register_forward_method", "save_safetensors", "testing", "unwrap",
    "weights", "wrapping",
]  # fmt: skip

_NAMES = {
    "shardwell.amp": "amp",
    "shardwell.engines": "engines",
    "shardwell.errors": "errors",
    "shardwell.init": "init",
    "shardwell.module.fully_shard": "ShardedModule fully_shard register_forward_method",
    "shardwell.module.mixed_precision": "MixedPrecisionPolicy",
    "shardwell.module.strategy": "BackwardPrefetch ReplicaOptions ShardingStrategy",
    "shardwell.monitor": "monitor",
    "shardwell.optim": "optim",
    "shardwell.optimizers.client_side": "ClientSide FlatClientSide",
    "shardwell.options": "TransferOptions WaitOptions",
    "shardwell.parallel": "parallel",
    "shardwell.processes.local_cluster": "LocalCluster",
    "shardwell.session.session": "Session join",
    "shardwell.testing": "testing",
    "shardwell.training.training_step": "Step",
    "shardwell.weights": "weights",
    "shardwell.weights.reader": "Reader attach",
    "shardwell.weights.state_dict": "full_state_dict save_safetensors",
    "shardwell.weights.weight_files": "from_safetensors",
    "shardwell.wrapping": "wrapping",
    "shardwell.wrapping.activation_offload": "offload_activations",
    "shardwell.wrapping.auto_wrap": "auto_wrap unwrap",
    "shardwell.wrapping.policies": "CustomPolicy MemoryOptions MemoryStrategy ModuleTypePolicy NoWrapPolicy SizePolicy",
}
"""Public names by their module, which is imported on first use: most need torch, which takes seconds to import."""

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    _import_public, __dir__ = import_on_use(__name__, _NAMES)

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used. Names of the groups may also be used without their group."""
        for group in ("errors", "monitor", "weights", "wrapping"):
            if name in (module := import_module(f"{__name__}.{group}")).__all__:
                return getattr(module, name)
        return _import_public(name)
