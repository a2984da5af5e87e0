"""When the gradients of a run's work items are applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1 import coordinator_pb2


@dataclass(frozen=True, slots=True)
class Consistency:
    """Consistency mode of a run: ``SYNCHRONOUS``, ``ASYNCHRONOUS`` or ``BOUNDED_STALENESS(s)``.

    Args:
        asynchronous: Whether each work item is committed by itself.
        max_staleness: How many items a data rank may be ahead of the slowest one. None: any number.
    """

    asynchronous: bool
    max_staleness: int | None = None

    def __str__(self) -> str:
        if self.max_staleness is not None:
            return f"BOUNDED_STALENESS({self.max_staleness})"
        return "ASYNCHRONOUS" if self.asynchronous else "SYNCHRONOUS"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the mode that ``str`` describes. Raises InvalidRequestError if there is none."""
        name, _, argument = text.strip().upper().partition("(")
        if name in ("SYNCHRONOUS", "ASYNCHRONOUS") and not argument:
            return cls(name == "ASYNCHRONOUS")
        if name == "BOUNDED_STALENESS" and argument.endswith(")") and argument[:-1].isdecimal():
            return cls(True, int(argument[:-1]))
        raise InvalidRequestError(
            f"consistency={text!r}: expected SYNCHRONOUS, ASYNCHRONOUS or BOUNDED_STALENESS(s), with s the number of "
            "items that a data rank may be ahead of the slowest one"
        )

    @classmethod
    def from_proto(cls, config: coordinator_pb2.RunConfig) -> Self:
        """Returns the mode of a run's settings."""
        bounded = config.consistency == coordinator_pb2.CONSISTENCY_BOUNDED_STALENESS
        asynchronous = bounded or config.consistency == coordinator_pb2.CONSISTENCY_ASYNCHRONOUS
        return cls(asynchronous, config.max_staleness if bounded else None)

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields of ``RunConfig`` that describe the mode. None for a synchronous run."""
        if not self.asynchronous:
            return {}
        if self.max_staleness is None:
            return {"consistency": coordinator_pb2.CONSISTENCY_ASYNCHRONOUS}
        return {
            "consistency": coordinator_pb2.CONSISTENCY_BOUNDED_STALENESS,
            "max_staleness": self.max_staleness,
        }


SYNCHRONOUS = Consistency(asynchronous=False)
"""A step has one work item per data rank, and is committed when all of them are finished."""
ASYNCHRONOUS = Consistency(asynchronous=True)
"""Each work item is committed by itself when it is finished."""


def BOUNDED_STALENESS(max_staleness: int) -> Consistency:
    """Returns the mode in which each work item is committed by itself, and no data rank is far ahead of the others.

    Args:
        max_staleness: A data rank starts an item only if it is at most this many items ahead of the slowest data rank.

    Raises:
        InvalidRequestError: The number is negative.
    """
    if max_staleness < 0:
        raise InvalidRequestError(f"BOUNDED_STALENESS({max_staleness}): expected at least 0")
    return Consistency(asynchronous=True, max_staleness=max_staleness)
