"""Modules that the fork server imports for the trainers and servers of tests."""

from __future__ import annotations

import torch._dynamo  # noqa: F401 - optimizers import it on first use

import shardwell
import shardwell_server.cli
import shardwell_server.coordinator.command
import shardwell_server.shard.process.command  # noqa: F401
from tests.support import buffer_trainer, checkpoint_trainer, long_trainer, trainer  # noqa: F401

for _name in shardwell.__all__:
    getattr(shardwell, _name)
