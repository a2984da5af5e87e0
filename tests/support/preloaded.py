"""Modules that the fork server imports for the trainers and servers of tests."""

from __future__ import annotations

import pytest  # noqa: F401 - the files of tests import it
import torch._dynamo  # noqa: F401 - optimizers import it on first use

import shardwell
import shardwell_server.cli
import shardwell_server.coordinator.command
import shardwell_server.shard.process.command  # noqa: F401
from tests.support import (  # noqa: F401
    buffer_trainer,
    checkpoint_trainer,
    grid_trainer,
    long_trainer,
    pipeline_trainer,
    trainer,
)

for _name in shardwell.__all__:
    getattr(shardwell, _name)
