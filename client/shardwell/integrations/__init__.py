"""Frameworks that have a training loop of their own: ``transformers`` and ``lightning``. See docs/frameworks.md.

Nothing else imports this package, and each module imports its framework.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_NTASKS",
    "SLURM_PROCID",
)


@contextmanager
def single_process() -> Iterator[None]:
    """Context that hides the variables of launchers, so that a framework takes this process for the only one.

    It then makes no process group and does not divide the data, which is what the session does. Not for use by several
    threads.
    """
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
