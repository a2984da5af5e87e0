"""Frameworks that have a training loop of their own: ``transformers`` and ``lightning``. See docs/frameworks.md.

Nothing else imports this package, and each module imports its framework.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from shardwell.session.session import Session
from shardwell_wire.errors import UsageError

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


def check_session(session: Session) -> None:
    """Raises UsageError for a run with tensor or pipeline parallelism, or an asynchronous one."""
    if session.world.replica_size > 1:
        raise UsageError(
            f"the run has {session.world}, but this framework can only divide the data: use World(dp=N), or a training "
            "loop over session.steps"
        )
    if session.consistency.asynchronous:
        raise UsageError(
            f"the run has consistency={session.consistency}, but this framework counts the steps of synchronous runs: "
            "use SYNCHRONOUS, or a training loop over session.steps"
        )


def refuse_resuming(argument: str, call: str) -> NoReturn:
    """Raises UsageError for a framework's checkpoint, which does not have the state that is on the shard servers."""
    raise UsageError(
        f"{argument} is refused: the weights and the optimizer's state are on the shard servers. Call {call} without "
        "it, and the run continues at its committed step. To continue on another cluster, let the run save checkpoints "
        "(shardwell.join(checkpoint_dir=...)), and join there with resume='latest'"
    )


def refuse_unknown_steps(session: Session) -> NoReturn:
    """Raises UsageError for a run whose steps were committed without the framework's state."""
    raise UsageError(
        f"run {session.run!r} has {session.step} steps of another loop, so the state of its schedule and callbacks is "
        "unknown here: let one call train all steps, also in a script that is started again, by a larger number of "
        "steps or epochs. To train another model, start another run, shardwell.join(run=NAME)"
    )


def encode_state(value: Any) -> Any:
    """Returns a state that a run can store: tensors and dicts with other keys than strings as plain maps."""
    if isinstance(value, torch.Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict) and (
        isinstance(value, Counter)
        or not all(isinstance(key, str) for key in value)
        or value.keys() in ({"tensor", "dtype"}, {"items", "type"})
    ):
        items = [[key, encode_state(item)] for key, item in value.items()]
        return {"items": items, "type": "Counter" if isinstance(value, Counter) else "dict"}
    if isinstance(value, dict):
        return {key: encode_state(item) for key, item in value.items()}
    return [encode_state(item) for item in value] if isinstance(value, list | tuple) else value


def decode_state(value: Any) -> Any:
    """Returns the state that ``encode_state`` was called with. Tuples have become lists."""
    if isinstance(value, dict):
        if value.keys() == {"tensor", "dtype"}:
            return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
        if value.keys() == {"items", "type"}:
            items = {tuple(key) if isinstance(key, list) else key: decode_state(item) for key, item in value["items"]}
            return Counter(items) if value["type"] == "Counter" else items
        return {key: decode_state(item) for key, item in value.items()}
    return [decode_state(item) for item in value] if isinstance(value, list) else value
