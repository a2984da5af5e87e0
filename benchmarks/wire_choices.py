"""The ways in which values travel between a trainer and the shard servers that the benchmarks compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How values travel between a trainer and the shard servers; options of ``shardwell.TransferOptions``."""

    gather_dtype: str = "float32"
    push_dtype: str = "float32"
    push_error_feedback: bool = False

    def options(self) -> dict[str, Any]:
        return asdict(self)


TRANSFERS = {
    "fp32": Transfer(),
    "bf16": Transfer(gather_dtype="bfloat16", push_dtype="bfloat16"),
    "int8": Transfer(gather_dtype="int8", push_dtype="int8", push_error_feedback=True),
}
