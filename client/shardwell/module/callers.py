"""Which code of torch asks for something that it will not find here, so that the error can say what to use instead."""

from __future__ import annotations

import sys
from types import FrameType

_MAX_FRAMES = 60
"""Of torch's own calls above an error none is further away."""

_ADVICE = {
    "torch/nn/parallel/distributed.py": "do not wrap a sharded module in DistributedDataParallel: the servers take the "
    "mean of the trainers' gradients. A replica per trainer is strategy=ShardingStrategy.NO_SHARD",
    "torch/distributed/fsdp/": "do not wrap a sharded module with torch's FSDP: shardwell.fully_shard replaces it",
    "torch/nn/init.py": "initialise before fully_shard, or pass what initialises as fully_shard(..., source=function)",
    "torch/nn/utils/parametrizations.py": "parametrise modules before fully_shard",
    "torch/nn/utils/prune.py": "prune before fully_shard",
    "torch/export/": "export a plain model that was given shardwell.full_state_dict(model)",
    "torch/optim/swa_utils.py": "set optimizer.ema_decay: the servers keep the average",
}
"""What to do instead, by a part of the path of the file that asks."""


def called_from(path: str) -> bool:
    """Whether a file whose path has this in it is among the callers."""
    return any(path in frame.f_code.co_filename for frame in _callers(sys._getframe(1)))


def advice() -> str | None:
    """What to do instead of what the nearest caller that is known does."""
    for frame in _callers(sys._getframe(1)):
        for path, text in _ADVICE.items():
            if path in frame.f_code.co_filename:
                return text
    return None


def _callers(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found
