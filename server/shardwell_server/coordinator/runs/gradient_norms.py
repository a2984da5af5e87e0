"""Global gradient norms from the partial sums that the shard servers report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwell_wire.errors import NonFiniteError
from shardwell_wire.v1 import shard_pb2

MAX_OTHER_NORMS = 16
"""Limit of the norms that are kept per step besides the Euclidean norm. Another one replaces the oldest."""


@dataclass(frozen=True, slots=True)
class NormKind:
    """Which norm of the step's gradient to compute besides the Euclidean norm."""

    norm_type: float
    bound: float = 0.0
    """Elements count as clamped to ``[-bound, bound]``. 0: not clamped."""


@dataclass(frozen=True, slots=True)
class OtherNorm:
    """A norm of the step's gradient besides the Euclidean norm."""

    kind: NormKind
    value: float
    partials: tuple[shard_pb2.UnitNorm, ...] = ()
    """Partial sums by unit and server, from which it was computed."""

    @classmethod
    def combine(cls, partials: Iterable[shard_pb2.UnitNorm], kind: NormKind) -> OtherNorm:
        """Combines the partial sums of all units and servers."""
        found = tuple(partials)
        if kind.norm_type == math.inf:
            return cls(kind, max((norm.max_abs for norm in found), default=0.0), found)
        powers = _exact_sum(partial for norm in found for partial in norm.power_partials)
        return cls(kind, _root(powers, kind.norm_type), found)


@dataclass(frozen=True, slots=True)
class PreparedGradients:
    """The servers' responses to ``PrepareStep``, combined."""

    grad_norm: float
    """Euclidean norm."""
    other_norms: tuple[OtherNorm, ...] = ()
    """The other norms that were requested, in this order."""
    norms: tuple[shard_pb2.UnitNorm, ...] = ()
    """Partial sums by unit and server, from which the Euclidean norm was computed."""
    memory_ready_for: bytes | None = None
    """``allocation_key`` of the optimizer for which every server has allocated memory. None: no optimizer."""
    changed_buffers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Layout indices of the buffers that the update will change, by unit index."""

    def find(self, kind: NormKind | None) -> float | None:
        """Returns a norm; None if it is not known. ``kind`` None: the Euclidean norm."""
        if kind is None:
            return self.grad_norm
        return next((norm.value for norm in self.other_norms if norm.kind == kind), None)

    def add_norms(self, former: PreparedGradients | None) -> PreparedGradients:
        """Returns this result together with the other norms of an earlier result for the same gradient."""
        if former is None:
            return self
        known = {norm.kind: norm for norm in (*former.other_norms, *self.other_norms)}
        return replace(self, other_norms=tuple(known.values())[-MAX_OTHER_NORMS:])

    @classmethod
    def combine(cls, norms: Iterable[shard_pb2.UnitNorm], kind: NormKind | None = None) -> PreparedGradients:
        """Combines the partial sums of all units and servers into global norms.

        The sums are exact, so the result does not depend on how units are cut into shards.

        Args:
            norms: Partial sums by unit and server.
            kind: Another norm to compute. None: none.
        """
        found = tuple(norms)
        grad_norm = math.sqrt(_exact_sum(partial for norm in found for partial in norm.square_partials))
        return cls(grad_norm, () if kind is None else (OtherNorm.combine(found, kind),), found)

    @classmethod
    def skipped(cls, kind: NormKind | None) -> PreparedGradients:
        """Returns the result of a step that is skipped because a gradient is not finite."""
        return cls(math.inf, () if kind is None else (OtherNorm(kind, math.inf),))

    def restricted_to(self, unit_indices: Collection[int]) -> PreparedGradients:
        """Returns the norms over some units only."""
        if not self.norms:
            return self  # the step was skipped, or it is committed and only the totals are stored
        return replace(
            self,
            grad_norm=PreparedGradients.combine(_of_units(self.norms, unit_indices)).grad_norm,
            other_norms=tuple(
                OtherNorm.combine(_of_units(norm.partials, unit_indices), norm.kind) for norm in self.other_norms
            ),
        )


def _of_units(norms: Iterable[shard_pb2.UnitNorm], indices: Collection[int]) -> Iterable[shard_pb2.UnitNorm]:
    return (norm for norm in norms if norm.unit_index in indices)


def _root(value: float, norm_type: float) -> float:
    try:
        return float(value ** (1.0 / norm_type))
    except OverflowError:  # norm_type close to 0
        return math.inf


def _exact_sum(partials: Iterable[float]) -> float:
    found = list(partials)
    if any(map(math.isnan, found)):
        raise NonFiniteError("a shard server reported a gradient norm that is not a number")
    try:
        return math.inf if math.inf in found else math.fsum(found)
    except OverflowError:
        return math.inf
