"""Recognises errors of collectives whose cause is a lost process."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch.distributed as dist

_GLOO = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|timed out|connect timeout|socket closed)",
    re.IGNORECASE | re.DOTALL,
)
"""Gloo reports a lost process as a plain RuntimeError: its text begins with the path of a source file of gloo."""


def is_lost_peer(error: BaseException) -> bool:
    """True if an error, or an error that caused it, says that another process does not answer."""
    return any(isinstance(cause, dist.DistError) or _GLOO.search(str(cause)) for cause in _causes(error))


def first_line(error: BaseException) -> str:
    """Returns the first line of the error that caused all others."""
    *_, cause = _causes(error)
    return str(cause).strip().partition("\n")[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
