"""What join is told: the environment, and explicit arguments over it."""

import pytest

from shardwell.session.config import JoinConfig
from shardwell_wire.errors import UsageError, WorldError
from shardwell_wire.topology import World

ENVIRONMENT = {
    "SHARDWELL_ADDRESS": "host:1",
    "SHARDWELL_RUN": "gpt",
    "SHARDWELL_DP": "4",
    "SHARDWELL_PP": "2",
    "SHARDWELL_ORDER": "pp,dp,tp",
    "SHARDWELL_SEED": "7",
    "SHARDWELL_RANK": "3",
    "SHARDWELL_MIN_TRAINERS": "2",
    "SHARDWELL_TRAINER": "t3",
    "SHARDWELL_WORLD_SIZE": "8",
    "SHARDWELL_HOST_CACHE_BYTES": "4096",
    "OTHER": "x",
}


def test_the_environment_is_read() -> None:
    config = JoinConfig.from_env({}, ENVIRONMENT)
    assert config.world == World(dp=4, pp=2, order=("pp", "dp", "tp"))
    assert (config.address, config.run, config.seed, config.global_rank) == ("host:1", "gpt", 7, 3)
    assert (config.min_trainers, config.trainer, config.world_size) == (2, "t3", 8)
    assert config.host_cache_bytes == 4096


def test_explicit_arguments_win() -> None:
    config = JoinConfig.from_env({"run": "other", "world": World(dp=2), "seed": 0, "trainer": None}, ENVIRONMENT)
    assert (config.run, config.world, config.seed, config.trainer) == ("other", World(dp=2), 0, "t3")


@pytest.mark.parametrize(
    ("arguments", "environment", "error", "message"),
    [
        ({}, {"SHARDWELL_DP": "two"}, UsageError, "SHARDWELL_DP='two': expected an integer"),
        ({}, {"SHARDWELL_DP": "0"}, WorldError, "dp=0"),
        ({"run": ""}, {}, UsageError, "run is ''"),
        ({"seed": -1}, {}, UsageError, "seed=-1"),
        ({"chunk_bytes": 1 << 30}, {}, UsageError, "chunk_bytes="),
        ({"min_trainers": 3, "world": World(dp=2)}, {}, WorldError, "min_trainers=3: expected 1 to 2"),
        ({"wait_limit_s": 0.0}, {}, UsageError, "wait_limit_s=0.0"),
        ({"wait_limit_s": float("inf")}, {}, UsageError, "wait_limit_s=inf: expected a positive number"),
        ({"host_cache_bytes": -1}, {}, UsageError, "host_cache_bytes=-1: expected at least 0"),
    ],
)
def test_impossible_values_are_named(
    arguments: dict[str, object], environment: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        JoinConfig.from_env(arguments, environment)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_torchrun_gives_the_world_and_the_rank() -> None:
    config = JoinConfig.from_env({}, TORCHRUN)
    assert (config.world, config.global_rank, config.trainer) == (World(dp=4), 1, "rank-1")
    assert config.world_size == 4 and config.torchrun is not None
    grid = JoinConfig.from_env({"world": World(dp=2, tp=2)}, TORCHRUN)
    assert (grid.world, grid.global_rank) == (World(dp=2, tp=2), 1)


def test_torchrun_does_not_override_what_is_given() -> None:
    launched = JoinConfig.from_env({}, {**TORCHRUN, **ENVIRONMENT})
    assert (launched.world.dp, launched.global_rank, launched.trainer, launched.world_size) == (4, 3, "t3", 8)
    elastic = JoinConfig.from_env({"address": "a:1", "world": World(dp=8)}, TORCHRUN)
    assert (elastic.world.dp, elastic.global_rank, elastic.trainer, elastic.world_size) == (8, None, "", 0)


def test_one_process_of_torchrun_is_like_none() -> None:
    config = JoinConfig.from_env({}, {"RANK": "0", "WORLD_SIZE": "1"})
    assert (config.torchrun, config.world, config.global_rank) == (None, World(), None)


@pytest.mark.parametrize("variables", [{"RANK": "x"}, {"RANK": "4"}, {"WORLD_SIZE": "-1"}])
def test_impossible_places_of_torchrun_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(variables))):
        JoinConfig.from_env({}, {**TORCHRUN, **variables})
