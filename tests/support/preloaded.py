"""Modules that the fork server imports for the trainers and servers of tests."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - the addresses of sockets need it
import gc

import pytest  # noqa: F401 - the files of tests import it
import torch._dynamo
import torch.distributed._tools
import torch.distributed.tensor.debug  # noqa: F401 - as `_dynamo`, which optimizers import on first use

import shardwell
import shardwell.command.cli
import shardwell.parallel
import shardwell.planning
import shardwell_server.cli
import shardwell_server.coordinator.command
import shardwell_server.shard.process.command  # noqa: F401
from tests.support import (  # noqa: F401
    buffer_trainer,
    checkpoint_trainer,
    forked_servers,
    grid_runs,
    grid_trainer,
    left_folders,
    long_gpt,
    long_trainer,
    natural_loop,
    pipeline_trainer,
    split_gpt,
    trainer,
)

for _package in (shardwell, shardwell.parallel, shardwell.planning):
    for _name in _package.__all__:
        getattr(_package, _name)

# The modules are never freed. Forked processes save time if their garbage collections skip the objects in them.
gc.freeze()
