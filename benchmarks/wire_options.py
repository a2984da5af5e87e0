"""Wire dtypes that the benchmarks compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """Options of ``shardwell.TransferOptions`` for the wire dtypes."""

    gather_dtype: str = "float32"
    push_dtype: str = "float32"
    push_error_feedback: bool = False

    def options(self) -> dict[str, Any]:
        return asdict(self)


WIRE_OPTIONS = {
    "fp32": WireOptions(),
    "bf16": WireOptions(gather_dtype="bfloat16", push_dtype="bfloat16"),
    "int8": WireOptions(gather_dtype="int8", push_dtype="int8", push_error_feedback=True),
}
"""Options of ``benchmarks.slow_network``, by name."""

REFERENCE = "float32"
"""Name of the lossless options in ``LOSS_OPTIONS``."""

LOSS_OPTIONS = {
    REFERENCE: WireOptions(),
    "push bfloat16": WireOptions(push_dtype="bfloat16"),
    "push int8": WireOptions(push_dtype="int8"),
    "push int8, feedback": WireOptions(push_dtype="int8", push_error_feedback=True),
    "push float8": WireOptions(push_dtype="float8"),
    "push float8, feedback": WireOptions(push_dtype="float8", push_error_feedback=True),
    "push topk-10%, feedback": WireOptions(push_dtype="topk-10%", push_error_feedback=True),
    "push topk-1%, feedback": WireOptions(push_dtype="topk-1%", push_error_feedback=True),
    "push lowrank-16, feedback": WireOptions(push_dtype="lowrank-16", push_error_feedback=True),
    "push lowrank-4, feedback": WireOptions(push_dtype="lowrank-4", push_error_feedback=True),
    "push lowrank-1, feedback": WireOptions(push_dtype="lowrank-1", push_error_feedback=True),
    "gather int8": WireOptions(gather_dtype="int8"),
    "gather float8": WireOptions(gather_dtype="float8"),
    "both bfloat16": WIRE_OPTIONS["bf16"],
    "both int8, feedback": WIRE_OPTIONS["int8"],
}
"""Options of ``benchmarks.wire_loss``, by name. The first is the reference."""
