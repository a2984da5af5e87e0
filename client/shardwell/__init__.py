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

from shardwell import amp, init, optim
from shardwell.activation_offload import ActivationOffload, offload_activations
from shardwell.client_optim import ClientSide
from shardwell.fully_shard import ShardedModule, fully_shard, register_forward_method
from shardwell.joining import join
from shardwell.loading import from_safetensors
from shardwell.local_cluster import LocalCluster
from shardwell.memory_report import MemoryReport, UnitMemory, local_ratio, num_parameters
from shardwell.memory_strategy import MemoryOptions, MemoryStrategy
from shardwell.mixed_precision import MixedPrecisionPolicy
from shardwell.saving import save_dcp, save_safetensors
from shardwell.session import Session
from shardwell.sharded_state import TensorSlice, sharded_state_dict
from shardwell.state_dict import full_state_dict, iter_full_state_dict
from shardwell.step import Step
from shardwell.strategy import BackwardPrefetch, ReplicaOptions, ShardingStrategy
from shardwell.tiled_linear import TiledLinear
from shardwell.wrap import CustomPolicy, ModuleTypePolicy, NoWrapPolicy, SizePolicy, auto_wrap
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
    NonFiniteError,
    NotFoundError,
    RunMismatchError,
    ShardwellError,
    StaleEpochError,
    StepStateError,
    TiedParameterError,
    UnavailableError,
    UnitMismatchError,
    UsageError,
    VersionGoneError,
    WorldError,
)
from shardwell_wire.topology import World

__all__ = [
    "AccessError",
    "ActivationOffload",
    "BackwardPrefetch",
    "CapacityError",
    "ChunkError",
    "ClientSide",
    "ConflictError",
    "CorruptDataError",
    "CustomPolicy",
    "DeadlineError",
    "DuplicateError",
    "FreedParameterError",
    "HyperparameterMismatchError",
    "IncompleteStepError",
    "InternalError",
    "InvalidRequestError",
    "LocalCluster",
    "MemoryOptions",
    "MemoryReport",
    "MemoryStrategy",
    "MixedPrecisionPolicy",
    "ModuleTypePolicy",
    "NoWrapPolicy",
    "NonFiniteError",
    "NotFoundError",
    "ReplicaOptions",
    "RunMismatchError",
    "Session",
    "ShardedModule",
    "ShardingStrategy",
    "ShardwellError",
    "SizePolicy",
    "StaleEpochError",
    "Step",
    "StepStateError",
    "TensorSlice",
    "TiedParameterError",
    "TiledLinear",
    "UnavailableError",
    "UnitMemory",
    "UnitMismatchError",
    "UsageError",
    "VersionGoneError",
    "World",
    "WorldError",
    "amp",
    "auto_wrap",
    "from_safetensors",
    "full_state_dict",
    "fully_shard",
    "init",
    "iter_full_state_dict",
    "join",
    "local_ratio",
    "num_parameters",
    "offload_activations",
    "optim",
    "register_forward_method",
    "save_dcp",
    "save_safetensors",
    "sharded_state_dict",
]
