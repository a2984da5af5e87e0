"""Which server relays for a trainer: the same for all trainers of a run on a host, if they can use it."""

from __future__ import annotations

from tests.support.coordinator import Harness, Trainer


async def start_relays(cluster: Harness) -> None:
    """Makes both shard servers relays of the trainers' host, and adds a relay that owns nothing."""
    await cluster.add_server("relay")
    servers = cluster.state.cluster.servers
    for server in servers.values():
        server.relays, server.reached, server.host = True, True, "h"
    servers["relay"].owns_nothing = True


async def find(cluster: Harness, trainer: Trainer, *refused: str) -> str:
    answer = await cluster.call("FindRelay", context=trainer.context(0), trainer=trainer.name, refused=refused)
    assert (answer.address or None) == (cluster.addresses[answer.server_id] if answer.server_id else None)
    return str(answer.server_id)


async def test_relays_that_cannot_be_used_are_followed_by_others(cluster: Harness) -> None:
    await start_relays(cluster)
    (trainer,) = await cluster.team_with_unit("a")
    assert await find(cluster, trainer) == "relay", "it owns nothing, so it does nothing else"
    assert await find(cluster, trainer, "relay") == "s0"
    assert await find(cluster, trainer, "relay", "s0") == "s1"
    assert await find(cluster, trainer, "relay", "s0", "s1") == ""


async def test_trainers_of_a_host_get_the_relay_that_the_others_use(cluster: Harness) -> None:
    await start_relays(cluster)
    a, b, c = await cluster.team_with_unit("a", "b", "c")
    assert [await find(cluster, trainer) for trainer in (a, b)] == ["relay", "relay"]
    assert await find(cluster, a, "relay") == "s0"
    assert await find(cluster, b, "relay") == "s0"
    assert await find(cluster, c) == "s0", "a relay that can be used again does not divide the trainers"
    cluster.state.cluster.servers["s0"].leaving = True
    assert await find(cluster, c) == "relay"


async def test_trainers_with_different_relays_get_the_same_one_when_they_ask_again(cluster: Harness) -> None:
    await start_relays(cluster)
    a, b = await cluster.team_with_unit("a", "b")
    assert await find(cluster, a, "relay") == "s0"
    assert await find(cluster, b, "s0") == "relay"
    assert {await find(cluster, trainer) for trainer in (a, b)} == {"relay"}
