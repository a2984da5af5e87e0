"""Optimizers whose state and arithmetic live on the shard servers.

They are ``torch.optim.Optimizer`` objects: parameter groups, LR schedulers and per-group changes
between steps work as in torch. Their hyper-parameters travel with every step's commit.
"""

from shardwell.optimizers.combined_optimizer import Combined
from shardwell.optimizers.range_optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    NAdam,
    RAdam,
    RMSprop,
)
from shardwell.optimizers.sharded_optimizer import ShardedOptimizer
from shardwell.optimizers.whole_tensor_optimizers import LAMB, Adafactor, Muon

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
