"""Options of ``join``: defaults, environment variables, torchrun and arguments, in rising precedence."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import shardwell
from shardwell.options import JoinConfig, TransferOptions, WaitOptions, read_environment, variable_of
from shardwell_wire.errors import UsageError, WorldError
from shardwell_wire.model.topology import World
from tests.support.cluster import join_options

JOIN_OPTIONS = Path(__file__).parents[3] / "docs" / "join-options.md"

ENVIRONMENT = {
    "SHARDWELL_ADDRESS": "host:1",
    "SHARDWELL_RUN": "gpt",
    "SHARDWELL_DP": "4",
    "SHARDWELL_PP": "2",
    "SHARDWELL_ORDER": "pp,dp,tp",
    "SHARDWELL_SEED": "7",
    "SHARDWELL_GLOBAL_RANK": "3",
    "SHARDWELL_MIN_TRAINERS": "2",
    "SHARDWELL_TRAINER": "t3",
    "SHARDWELL_WORLD_SIZE": "8",
    "SHARDWELL_HOST_CACHE_BYTES": "4096",
    "OTHER": "x",
}


def test_options_are_read_from_the_environment() -> None:
    config = JoinConfig.from_env({}, ENVIRONMENT)
    assert config.world == World(dp=4, pp=2, order=("pp", "dp", "tp"))
    assert (config.address, config.run, config.seed, config.global_rank) == ("host:1", "gpt", 7, 3)
    assert (config.min_trainers, config.trainer, config.world_size) == (2, "t3", 8)
    assert config.transfers.host_cache_bytes == 4096


def test_context_axis_is_read_from_the_environment() -> None:
    config = JoinConfig.from_env({}, ENVIRONMENT | {"SHARDWELL_CP": "2", "SHARDWELL_WORLD_SIZE": "16"})
    assert config.world == World(dp=4, pp=2, cp=2, order=("pp", "dp", "cp", "tp"))


def test_explicit_arguments_override_the_environment() -> None:
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
        ({"rewrap": True}, {}, UsageError, "rewrap=True needs resume"),
        ({"host_cache_bytes": -1}, {}, UsageError, "host_cache_bytes=-1: expected at least 0"),
    ],
)
def test_invalid_values_are_named(
    arguments: dict[str, object], environment: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        JoinConfig.from_env(join_options(**arguments), environment)


def test_passed_fields_override_the_environment_and_other_fields_are_read_from_it() -> None:
    variables = {"SHARDWELL_PREFETCH_BYTES": "7", "SHARDWELL_PUSH_DTYPE": "int8", "SHARDWELL_WAIT_LIMIT_S": "1.5"}
    transfers = TransferOptions(prefetch_bytes=128 << 20, push_error_feedback=True)
    config = JoinConfig.from_env({"transfers": transfers}, variables)
    assert config.transfers == TransferOptions(push_dtype="int8", push_error_feedback=True)
    assert config.waits == WaitOptions(wait_limit_s=1.5)


def test_every_field_of_the_option_groups_has_a_variable() -> None:
    for group in (TransferOptions, WaitOptions):
        for option in fields(group):
            default = getattr(group(), option.name)
            value = 0 if default is None else default
            text = str(int(value)) if isinstance(value, bool) else str(value)
            assert read_environment(group, {f"SHARDWELL_{option.name.upper()}": text}) == {option.name: value}


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SHARDWELL_PREFETCH_BYTES", "1GB", "SHARDWELL_PREFETCH_BYTES='1GB': expected an integer"),
        ("SHARDWELL_WAIT_LIMIT_S", "long", "SHARDWELL_WAIT_LIMIT_S='long': expected a number"),
        ("SHARDWELL_PUSH_ERROR_FEEDBACK", "yes", "SHARDWELL_PUSH_ERROR_FEEDBACK='yes': expected 0 or 1"),
        ("SHARDWELL_NODE_GROUP", "mpi", "node_group='mpi': expected one of none, gloo, nccl"),
        ("SHARDWELL_TRANSPORTS", "tcp", "transports='tcp': expected some of shm, socket, grpc"),
    ],
)
def test_invalid_variable_is_named(variable: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JoinConfig.from_env({}, {variable: text})


def test_error_feedback_of_context_parallel_ranks_is_rejected() -> None:
    transfers = TransferOptions(push_dtype="int8", push_error_feedback=True)
    with pytest.raises(UsageError, match=r"push_error_feedback=True needs a world with cp=1, got World\(dp=2, cp=2"):
        JoinConfig.from_env({"transfers": transfers, "world": World(dp=2, cp=2)}, {})


def test_error_feedback_without_rounding_is_rejected() -> None:
    with pytest.raises(UsageError, match="push_error_feedback=True with push_dtype='float32'"):
        JoinConfig.from_env({"transfers": TransferOptions(push_error_feedback=True)}, {})


@pytest.mark.parametrize("dtype", ["topk-1%", "topk-10%", "lowrank-1", "lowrank-4", "lowrank-16"])
def test_dtype_that_leaves_out_most_of_a_gradient_needs_error_feedback(dtype: str) -> None:
    transfers = TransferOptions(push_dtype=dtype)
    with pytest.raises(UsageError, match=f"push_dtype='{dtype}' without push_error_feedback: most of each gradient"):
        JoinConfig.from_env({"transfers": transfers}, {})
    JoinConfig.from_env({"transfers": transfers}, {"SHARDWELL_PUSH_ERROR_FEEDBACK": "1"})


@pytest.mark.parametrize("dtype", ["topk-1%", "lowrank-4"])
def test_dtype_that_leaves_out_most_values_is_for_gradients_only(dtype: str) -> None:
    with pytest.raises(
        UsageError, match=f"gather_dtype='{dtype}': expected one of float32, bfloat16, float16, int8, f"
    ):
        TransferOptions(gather_dtype=dtype)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_torchrun_variables_set_the_world_and_the_rank() -> None:
    config = JoinConfig.from_env({}, TORCHRUN)
    assert (config.world, config.global_rank, config.trainer) == (World(dp=4), 1, "rank-1")
    assert config.world_size == 4 and config.launcher is not None
    grid = JoinConfig.from_env({"world": World(dp=2, tp=2)}, TORCHRUN)
    assert (grid.world, grid.global_rank) == (World(dp=2, tp=2), 1)


def test_torchrun_starts_the_trainers_of_one_replica() -> None:
    variables = {**TORCHRUN, "SHARDWELL_DP": "3", "SHARDWELL_TP": "2", "SHARDWELL_PP": "2", "SHARDWELL_DP_RANK": "2"}
    config = JoinConfig.from_env({"address": "a:1"}, variables)
    assert (config.global_rank, config.trainer, config.world_size) == (9, "rank-9", 0)
    fast = JoinConfig.from_env({"address": "a:1"}, {**variables, "SHARDWELL_ORDER": "tp,pp,dp"})
    assert fast.global_rank == World(3, 2, 2, ("tp", "pp", "dp")).global_rank(dp_rank=2, tp_rank=0, pp_rank=1)
    with pytest.raises(WorldError, match="dp_rank 3 is not in"):
        JoinConfig.from_env({"address": "a:1"}, {**variables, "SHARDWELL_DP_RANK": "3"})
    with pytest.raises(UsageError, match=r"must start all trainers of one replica, which are tp \* pp = 2"):
        JoinConfig.from_env({"address": "a:1"}, {**variables, "SHARDWELL_PP": "1"})


def test_torchrun_variables_do_not_override_arguments() -> None:
    launched = JoinConfig.from_env({}, {**TORCHRUN, **ENVIRONMENT})
    assert (launched.world.dp, launched.global_rank, launched.trainer, launched.world_size) == (4, 3, "t3", 8)
    elastic = JoinConfig.from_env({"address": "a:1", "world": World(dp=8)}, TORCHRUN)
    assert (elastic.world.dp, elastic.global_rank, elastic.trainer, elastic.world_size) == (8, None, "", 0)


def test_single_torchrun_process_is_ignored() -> None:
    config = JoinConfig.from_env({}, {"RANK": "0", "WORLD_SIZE": "1"})
    assert (config.launcher, config.world, config.global_rank) == (None, World(), None)


@pytest.mark.parametrize("variables", [{"RANK": "x"}, {"RANK": "4"}, {"WORLD_SIZE": "-1"}])
def test_invalid_torchrun_variables_are_rejected(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(variables))):
        JoinConfig.from_env({}, {**TORCHRUN, **variables})


SRUN = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPIEXEC = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(("variables", "rank"), [(SRUN, 2), (MPIRUN, 3), (MPIEXEC, 1)])
def test_other_launchers_set_the_world_and_the_rank(variables: dict[str, str], rank: int) -> None:
    config = JoinConfig.from_env({"address": "a:1"}, variables)
    assert (config.world, config.global_rank, config.trainer) == (World(dp=4), rank, f"rank-{rank}")
    replica = {**variables, "SHARDWELL_DP": "3", "SHARDWELL_TP": "4", "SHARDWELL_DP_RANK": "2"}
    assert JoinConfig.from_env({"address": "a:1"}, replica).global_rank == 8 + rank
    size = next(name for name in variables if variables[name] == "4")
    with pytest.raises(UsageError, match=f"{size}=4: the launcher must start all trainers of one replica"):
        JoinConfig.from_env({"address": "a:1"}, {**replica, "SHARDWELL_TP": "2"})
    with pytest.raises(UsageError, match=f"{size}='1x'"):
        JoinConfig.from_env({"address": "a:1"}, {**variables, size: "1x"})


def test_inner_launcher_counts() -> None:
    """torchrun and mpirun may run in a job of Slurm, whose variables they pass on."""
    assert JoinConfig.from_env({}, {**SRUN, **TORCHRUN}).global_rank == 1
    assert JoinConfig.from_env({}, {**SRUN, **MPIRUN}).global_rank == 3


def test_task_of_srun_has_a_name_that_survives_a_requeue() -> None:
    alone = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SHARDWELL_DP": "4"}
    config = JoinConfig.from_env({"address": "a:1"}, alone)
    assert (config.world, config.global_rank, config.trainer) == (World(dp=4), None, "slurm-41.0-0")
    fewer = JoinConfig.from_env({"address": "a:1", "world": World(dp=8)}, SRUN)
    assert (fewer.global_rank, fewer.trainer) == (None, "slurm-41.0-2")
    assert JoinConfig.from_env({}, {**alone, "SHARDWELL_TRAINER": "a"}).trainer == "a"
    for without in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):  # a batch script
        assert JoinConfig.from_env({}, {name: alone[name] for name in alone if name != without}).trainer == ""
    assert JoinConfig.from_env({}, {**alone, "SLURM_PTY_PORT": "40123"}).trainer == "", "a shell"


def table_after(heading: str) -> list[list[str]]:
    """Returns the rows of the table in docs/join-options.md whose header begins with a cell."""
    after = JOIN_OPTIONS.read_text().partition(f"| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after.splitlines()[2:]]


def test_arguments_of_join_are_the_options_and_are_documented_with_their_variables() -> None:
    options = {option.name: option for option in fields(JoinConfig)}
    arguments = list(inspect.signature(shardwell.join).parameters)
    assert options.keys() - set(arguments) == {"world_size", "launcher"}, "set by launchers only"
    rows = {row[0].strip("`"): row[1] for row in table_after("argument") if row[0]}
    assert rows.keys() == set(arguments)
    for name, variable in rows.items():
        if (known := variable_of(options[name])) is not None:
            assert variable == f"`{known}`"
    of_launchers = [row[1].strip("`") for row in table_after("argument") if not row[0]]
    assert of_launchers == [variable_of(options["world_size"]), "SHARDWELL_DP_RANK"]


@pytest.mark.parametrize("group", [TransferOptions, WaitOptions])
def test_documented_fields_of_option_groups_are_all_there_are(group: type[TransferOptions | WaitOptions]) -> None:
    documented = [
        name for row in table_after(f"field of `{group.__name__}`") for name in re.findall(r"`(\w+)`", row[0])
    ]
    assert sorted(documented) == sorted(option.name for option in fields(group))
