"""Global gradient norms from the partial sums that the shard servers report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwell_wire.errors import NonFiniteError
from shardwell_wire.v1 import shard_pb2


@dataclass(frozen=True, slots=True)
class OtherNorm:
    """A norm of the step's gradient other than the Euclidean norm."""

    norm_type: float
    value: float


@dataclass(frozen=True, slots=True)
class PreparedGradients:
    """The servers' responses to ``PrepareStep``, combined."""

    grad_norm: float
    """Euclidean norm."""
    other_norm: OtherNorm | None = None
    """The other norm that was requested last. None: none was requested."""
    norms: tuple[shard_pb2.UnitNorm, ...] = ()
    """Partial sums by unit and server, from which the norms were computed."""
    memory_ready_for: bytes | None = None
    """``allocation_key`` of the optimizer for which every server has allocated memory. None: no optimizer."""
    changed_buffers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Layout indices of the buffers that the update will change, by unit index."""

    def has(self, norm_type: float) -> bool:
        """True if the norm of this type is known. 0: only the Euclidean norm is wanted."""
        return not norm_type or (self.other_norm is not None and self.other_norm.norm_type == norm_type)

    @classmethod
    def combine(cls, norms: Iterable[shard_pb2.UnitNorm], norm_type: float = 0.0) -> PreparedGradients:
        """Combines the partial sums of all units and servers into global norms.

        The sums are exact, so the result does not depend on how units are cut into shards.

        Args:
            norms: Partial sums by unit and server.
            norm_type: Type of another norm to compute. 0: none.
        """
        found = tuple(norms)
        grad_norm = math.sqrt(_exact_sum(partial for norm in found for partial in norm.square_partials))
        if not norm_type:
            return cls(grad_norm, norms=found)
        if norm_type == math.inf:
            return cls(grad_norm, OtherNorm(norm_type, max((norm.max_abs for norm in found), default=0.0)), found)
        powers = _exact_sum(partial for norm in found for partial in norm.power_partials)
        return cls(grad_norm, OtherNorm(norm_type, _root(powers, norm_type)), found)

    @classmethod
    def skipped(cls, norm_type: float) -> PreparedGradients:
        """Returns the result of a step that is skipped because a gradient is not finite."""
        return cls(math.inf, OtherNorm(norm_type, math.inf) if norm_type else None)

    def restricted_to(self, unit_indices: Collection[int]) -> PreparedGradients:
        """Returns the norms over some units only."""
        if not self.norms:
            return self  # the step was skipped, or it is committed and only the totals are stored
        norms = (norm for norm in self.norms if norm.unit_index in unit_indices)
        found = PreparedGradients.combine(norms, self.other_norm.norm_type if self.other_norm is not None else 0.0)
        return replace(self, grad_norm=found.grad_norm, other_norm=found.other_norm)


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
