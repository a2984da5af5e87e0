"""Waiting rpcs see every change, also one made while they look."""

import asyncio

from shardwell_server.coordinator.waiting import Signal, poll


def test_a_change_made_while_looking_is_not_missed() -> None:
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


def test_a_poll_ends_when_its_time_is_over() -> None:
    async def scenario() -> str | None:
        async def look() -> str | None:
            return None

        return await poll(Signal(), look, wait_s=0.01)

    assert asyncio.run(scenario()) is None
