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
