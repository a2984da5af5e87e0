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

from typing import TYPE_CHECKING, Any

from shardwell_wire.errors import (
    AccessError,
    CapacityError,
    ChunkError,
    ConflictError,
    CorruptDataError,
    DeadlineError,
    DuplicateError,
    FreedParameterError,
    HyperparameterMismatchError,
    IncompleteStepError,
    InternalError,
    InvalidRequestError,
    MissingTorchError,
    NonFiniteError,
    NotFoundError,
    ReplicaLostError,
    RunDeletedError,
    RunMismatchError,
    ShardwellError,
    StaleEpochError,
    StepRestartedError,
    StepStateError,
    TiedParameterError,
    TlsError,
    TooManyRequestsError,
    UnauthenticatedError,
    UnavailableError,
    UnitMismatchError,
    UsageError,
    VersionGoneError,
    WorldError,
    import_with_torch,
)
from shardwell_wire.model.topology import ASYNCHRONOUS, BOUNDED_STALENESS, SYNCHRONOUS, Consistency, World
from shardwell_wire.security.tls import TlsOptions

if TYPE_CHECKING:
    from shardwell import amp, engines, init, optim, parallel, testing
    from shardwell.module.fully_shard import ShardedModule, fully_shard, register_forward_method
    from shardwell.module.mixed_precision import MixedPrecisionPolicy
    from shardwell.module.strategy import BackwardPrefetch, ReplicaOptions, ShardingStrategy
    from shardwell.monitor.report import Bottleneck, PerformanceReport, Severity
    from shardwell.monitor.step_times import StepPart
    from shardwell.optimizers.client_side import ClientSide, FlatClientSide
    from shardwell.options import TransferOptions, WaitOptions
    from shardwell.processes.local_cluster import LocalCluster
    from shardwell.session.memory_report import MemoryReport, UnitMemory, local_ratio, num_parameters
    from shardwell.session.session import Session, join
    from shardwell.training.training_step import Step
    from shardwell.weights.checkpoint_conversion import checkpoint_to_dcp, dcp_to_checkpoint
    from shardwell.weights.checkpoint_reader import CheckpointReader, open_checkpoint
    from shardwell.weights.digest import weights_digest
    from shardwell.weights.reader import Reader, attach
    from shardwell.weights.state_dict import (
        TensorSlice,
        full_state_dict,
        iter_full_state_dict,
        join_state_dicts,
        save_dcp,
        save_safetensors,
        sharded_state_dict,
    )
    from shardwell.weights.weight_files import from_safetensors
    from shardwell.wrapping.activation_offload import ActivationOffload, offload_activations
    from shardwell.wrapping.auto_wrap import auto_wrap, unwrap
    from shardwell.wrapping.experts import merge_experts, split_experts
    from shardwell.wrapping.policies import (
        CustomPolicy,
        MemoryOptions,
        MemoryStrategy,
        ModuleTypePolicy,
        NoWrapPolicy,
        SizePolicy,
    )
    from shardwell.wrapping.tiled_linear import TiledLinear

__all__ = [
    "ASYNCHRONOUS",
    "BOUNDED_STALENESS",
    "SYNCHRONOUS",
    "AccessError",
    "ActivationOffload",
    "BackwardPrefetch",
    "Bottleneck",
    "CapacityError",
    "CheckpointReader",
    "ChunkError",
    "ClientSide",
    "ConflictError",
    "Consistency",
    "CorruptDataError",
    "CustomPolicy",
    "DeadlineError",
    "DuplicateError",
    "FlatClientSide",
    "FreedParameterError",
    "HyperparameterMismatchError",
    "IncompleteStepError",
    "InternalError",
    "InvalidRequestError",
    "LocalCluster",
    "MemoryOptions",
    "MemoryReport",
    "MemoryStrategy",
    "MissingTorchError",
    "MixedPrecisionPolicy",
    "ModuleTypePolicy",
    "NoWrapPolicy",
    "NonFiniteError",
    "NotFoundError",
    "PerformanceReport",
    "Reader",
    "ReplicaLostError",
    "ReplicaOptions",
    "RunDeletedError",
    "RunMismatchError",
    "Session",
    "Severity",
    "ShardedModule",
    "ShardingStrategy",
    "ShardwellError",
    "SizePolicy",
    "StaleEpochError",
    "Step",
    "StepPart",
    "StepRestartedError",
    "StepStateError",
    "TensorSlice",
    "TiedParameterError",
    "TiledLinear",
    "TlsError",
    "TlsOptions",
    "TooManyRequestsError",
    "TransferOptions",
    "UnauthenticatedError",
    "UnavailableError",
    "UnitMemory",
    "UnitMismatchError",
    "UsageError",
    "VersionGoneError",
    "WaitOptions",
    "World",
    "WorldError",
    "amp",
    "attach",
    "auto_wrap",
    "checkpoint_to_dcp",
    "dcp_to_checkpoint",
    "engines",
    "from_safetensors",
    "full_state_dict",
    "fully_shard",
    "init",
    "iter_full_state_dict",
    "join",
    "join_state_dicts",
    "local_ratio",
    "merge_experts",
    "num_parameters",
    "offload_activations",
    "open_checkpoint",
    "optim",
    "parallel",
    "register_forward_method",
    "save_dcp",
    "save_safetensors",
    "sharded_state_dict",
    "split_experts",
    "testing",
    "unwrap",
    "weights_digest",
]

_NAMES = {
    "shardwell.amp": "amp",
    "shardwell.engines": "engines",
    "shardwell.init": "init",
    "shardwell.module.fully_shard": "ShardedModule fully_shard register_forward_method",
    "shardwell.module.mixed_precision": "MixedPrecisionPolicy",
    "shardwell.module.strategy": "BackwardPrefetch ReplicaOptions ShardingStrategy",
    "shardwell.monitor.report": "Bottleneck PerformanceReport Severity",
    "shardwell.monitor.step_times": "StepPart",
    "shardwell.optim": "optim",
    "shardwell.optimizers.client_side": "ClientSide FlatClientSide",
    "shardwell.options": "TransferOptions WaitOptions",
    "shardwell.parallel": "parallel",
    "shardwell.processes.local_cluster": "LocalCluster",
    "shardwell.session.memory_report": "MemoryReport UnitMemory local_ratio num_parameters",
    "shardwell.session.session": "Session join",
    "shardwell.testing": "testing",
    "shardwell.training.training_step": "Step",
    "shardwell.weights.checkpoint_conversion": "checkpoint_to_dcp dcp_to_checkpoint",
    "shardwell.weights.checkpoint_reader": "CheckpointReader open_checkpoint",
    "shardwell.weights.digest": "weights_digest",
    "shardwell.weights.reader": "Reader attach",
    "shardwell.weights.state_dict": "TensorSlice full_state_dict iter_full_state_dict join_state_dicts save_dcp "
    "save_safetensors sharded_state_dict",
    "shardwell.weights.weight_files": "from_safetensors",
    "shardwell.wrapping.activation_offload": "ActivationOffload offload_activations",
    "shardwell.wrapping.auto_wrap": "auto_wrap unwrap",
    "shardwell.wrapping.experts": "merge_experts split_experts",
    "shardwell.wrapping.policies": "CustomPolicy MemoryOptions MemoryStrategy ModuleTypePolicy NoWrapPolicy SizePolicy",
    "shardwell.wrapping.tiled_linear": "TiledLinear",
}
"""Public names by their module, which is imported on first use: most need torch, which takes seconds to import."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_with_torch(_MODULES[name])
        value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
