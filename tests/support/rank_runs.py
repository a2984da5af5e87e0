"""Runs of one trainer process per data rank, for comparisons of the routes of gradients."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

import shardwell
from tests.support import transformer
from tests.support.processes import TrainerProcess

STEPS = 4


def train_ranks(
    cluster: shardwell.LocalCluster,
    dp: int,
    *options: Sequence[object],
    environments: Sequence[Mapping[str, str]] = (),
) -> list[dict[str, Any]]:
    """Runs one trainer per rank, each with its own options and variables; returns their results in rank order."""
    run, trainers = uuid.uuid4().hex, list[TrainerProcess]()
    with ExitStack() as stack:
        for rank in range(dp):
            own = options[rank] if options else ()
            with pytest.MonkeyPatch.context() as patch:
                for name, value in (environments[rank] if environments else {}).items():
                    patch.setenv(name, value)
                trainer = TrainerProcess(
                    cluster.address, run, "--dp", dp, "--steps", STEPS, "--global-rank", rank, *own
                )
            trainers.append(stack.enter_context(trainer))
        return [trainer.finish() for trainer in trainers]


def hashes(results: Sequence[dict[str, Any]]) -> list[str]:
    return [result.get("sha256", str(result)) for result in results]


def total(results: Sequence[dict[str, Any]], name: str) -> float:
    """Returns the sum of a statistic over all trainers."""
    return float(sum(result["stats"][name] for result in results))


def gradient_bytes() -> int:
    """Returns the bytes of one rank's gradients in one step."""
    return sum(parameter.nbytes for parameter in transformer.build().parameters())
