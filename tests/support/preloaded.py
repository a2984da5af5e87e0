"""Modules that the fork server imports for the trainers of tests."""

from __future__ import annotations

import torch._dynamo  # noqa: F401 - optimizers import it on first use

import shardwell
from tests.support import buffer_trainer, trainer  # noqa: F401

for _name in shardwell.__all__:
    getattr(shardwell, _name)
