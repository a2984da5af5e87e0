"""Warns before a fork that gRPC does not survive. See Note: [gRPC and fork] in ``shardwell_wire``."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

import shardwell_wire

logger = logging.getLogger(__name__)


@functools.cache
def watch(in_child: Callable[[], None]) -> None:
    """Calls a function in every process that this one forks from now on.

    Args:
        in_child: The function. It must not call gRPC.
    """
    if shardwell_wire.GRPC_HANDLES_FORKS:
        os.register_at_fork(before=_warn)
    os.register_at_fork(after_in_child=in_child)


@functools.cache
def _warn() -> None:
    logger.warning(
        "this process forks while gRPC handles forks, so the forked process, such as a worker of a DataLoader, may be "
        "killed: grpc was imported before shardwell. Import grpc after shardwell, set GRPC_ENABLE_FORK_SUPPORT=0, or "
        "use DataLoader(multiprocessing_context='spawn')"
    )
