"""Samples of gradients: when the coordinator says that data ranks probably read the same data."""

from __future__ import annotations

import asyncio

from tests.support.coordinator import Harness, Trainer


async def finish(trainers: list[Trainer], step: int, samples: list[int]) -> None:
    for trainer, sample in zip(trainers, samples, strict=True):
        finished = trainer.finished()
        for item in finished:
            item.gradient_sample = sample
        await trainer.finish(step, finished)


async def test_only_equal_gradients_in_a_row_count_and_steps_without_samples_are_left_out(cluster: Harness) -> None:
    trainers = await cluster.team(*"abc", dp=3)
    await cluster.publish_unit(trainers, "u", (3,))

    def warnings() -> list[str]:
        return [message for kind, message in cluster.events() if kind == "gradients_equal"]

    for step, samples in enumerate([[5, 5, 6], [7, 7, 7], [5, 6, 7], [1, 2, 2], [0, 0, 0], [3, 4, 4], [9, 8, 8]]):
        assert warnings() == []
        await finish(trainers, step, samples)
        await asyncio.gather(*(trainer.commit(step, wait_s=5) for trainer in trainers))
    (warning,) = warnings()
    assert "the data ranks 1, 2 have pushed equal gradients in the steps 3, 5, 6" in warning
