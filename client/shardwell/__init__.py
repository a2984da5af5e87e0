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

from shardwell import optim
from shardwell.activation_offload import ActivationOffload, offload_activations
from shardwell.fully_shard import ShardedModule, fully_shard, register_forward_method
from shardwell.local_cluster import LocalCluster
from shardwell.memory_strategy import MemoryOptions, MemoryStrategy
from shardwell.session import Session, join
from shardwell.state_dict import full_state_dict, iter_full_state_dict
from shardwell.step import Step
from shardwell.strategy import BackwardPrefetch, ReplicaOptions, ShardingStrategy
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
    "MemoryStrategy",
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
    "TiedParameterError",
    "UnavailableError",
    "UnitMismatchError",
    "UsageError",
    "VersionGoneError",
    "World",
    "WorldError",
    "auto_wrap",
    "full_state_dict",
    "fully_shard",
    "iter_full_state_dict",
    "join",
    "offload_activations",
    "optim",
    "register_forward_method",
]
