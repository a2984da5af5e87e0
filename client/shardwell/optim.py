"""Optimizers that run on the shard servers, which also store the optimizer state.

They are ``torch.optim.Optimizer`` objects: parameter groups, LR schedulers and changes of settings between steps work
as in torch. The hyper-parameters are part of every step's commit.
"""

from shardwell.optimizers.server_side import (
    LAMB,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
)
from shardwell.optimizers.sharded_optimizer import Combined, ShardedOptimizer

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Combined",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "ShardedOptimizer",
]
