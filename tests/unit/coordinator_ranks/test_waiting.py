"""``poll`` sees every change, including changes during its check. Background tasks end with the coordinator."""

import asyncio

from shardwell_server.coordinator.signals import BackgroundTasks, Signal, poll


def test_change_during_the_check_is_not_missed() -> None:
    async def scenario() -> str | None:
        changed, looks = Signal(), []

        async def look() -> str | None:
            looks.append(None)
            if len(looks) == 1:
                changed.notify()
                await asyncio.sleep(0)
                return None
            return "seen"

        return await poll(changed, look, wait_s=5.0)

    assert asyncio.run(asyncio.wait_for(scenario(), 2.0)) == "seen"


def test_poll_ends_after_its_timeout() -> None:
    async def scenario() -> str | None:
        async def look() -> str | None:
            return None

        return await poll(Signal(), look, wait_s=0.01)

    assert asyncio.run(scenario()) is None


def test_work_is_not_started_after_the_tasks_were_closed() -> None:
    started = []

    async def work() -> None:
        started.append(None)
        await asyncio.sleep(60)

    async def scenario() -> set[asyncio.Task[None]]:
        tasks = BackgroundTasks()
        tasks.start(work())
        await asyncio.sleep(0)
        await tasks.close()
        tasks.start(work())
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == set()
    assert len(started) == 1
