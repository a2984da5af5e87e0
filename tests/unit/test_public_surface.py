"""The public surface: pinned names with docstrings, and a comment on every proto field."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwell

PROTOS = sorted((Path(__file__).parents[2] / "protos/shardwell_wire/v1").glob("*.proto"))

NAMES = """
    AccessError CapacityError ChunkError ClientSide ConflictError CorruptDataError CustomPolicy DeadlineError
    DuplicateError FlatClientSide FreedParameterError HyperparameterMismatchError IncompleteStepError InternalError
    InvalidRequestError ReplicaLostError LocalCluster MissingTorchError MixedPrecisionPolicy RunDeletedError amp
    ModuleTypePolicy NoWrapPolicy NonFiniteError NotFoundError RunMismatchError Session ShardedModule ShardwellError
    SizePolicy StaleEpochError Step StepRestartedError StepStateError TiedParameterError TooManyRequestsError
    UnauthenticatedError
    UnavailableError
    UnitMismatchError UsageError
    ActivationOffload BackwardPrefetch MemoryOptions MemoryStrategy offload_activations ReplicaOptions ShardingStrategy
    TransferOptions VersionGoneError WaitOptions World WorldError auto_wrap full_state_dict fully_shard
    iter_full_state_dict join optim parallel Reader attach
    register_forward_method MemoryReport UnitMemory num_parameters local_ratio TiledLinear TlsError TlsOptions
    engines from_safetensors init join_state_dicts TensorSlice save_dcp save_safetensors sharded_state_dict testing
    CheckpointReader open_checkpoint checkpoint_to_dcp dcp_to_checkpoint
    weights_digest Bottleneck PerformanceReport Severity StepPart unwrap merge_experts split_experts
    ASYNCHRONOUS BOUNDED_STALENESS Consistency SYNCHRONOUS
"""

OPTIMIZERS = """
    Adadelta Adafactor Adagrad Adam AdamW Adamax Combined LAMB Lion Muon NAdam RAdam RMSprop SGD ShardedOptimizer
"""


def test_public_names_are_unchanged() -> None:
    assert sorted(shardwell.__all__) == sorted(NAMES.split())
    assert sorted(shardwell.optim.__all__) == sorted(OPTIMIZERS.split())


def is_imported(module: str, after: str) -> bool:
    """Returns whether a new interpreter has imported ``module`` after it ran a program."""
    program = f"{after}\nimport sys; print({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()[-1] == "True"


def test_importing_all_public_names_does_not_import_the_torch_compiler() -> None:
    """Importing the compiler takes as long as importing torch."""
    assert is_imported("torch", after="from shardwell import *; join")
    assert not is_imported("torch._dynamo", after="from shardwell import *; join")


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["runs", "--help"], ["launch", "--help"]], ids=" ".join
)
def test_commands_without_tensors_do_not_import_torch(arguments: list[str]) -> None:
    run = f"import contextlib\nwith contextlib.suppress(SystemExit): main({arguments})"
    assert not is_imported("torch", after=f"from shardwell.command.cli import main\n{run}")


def test_inspecting_a_cluster_does_not_import_torch() -> None:
    ask = "main(['runs', '--address', '127.0.0.1:1', '--timeout', '1'])"
    assert not is_imported("torch", after=f"from shardwell.command.cli import main; {ask}")


def test_local_cluster_and_errors_do_not_import_torch() -> None:
    assert not is_imported("torch", after="import shardwell; shardwell.LocalCluster, shardwell.UsageError")


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shardwell' has no attribute 'nonsense'"):
        shardwell.nonsense  # noqa: B018
    assert set(shardwell.__all__) <= set(dir(shardwell))


@pytest.mark.parametrize("name", sorted(shardwell.__all__))
def test_public_names_have_docstrings(name: str) -> None:
    assert inspect.getdoc(getattr(shardwell, name))


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_service_rpc_field_and_enum_value_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    declaration = re.compile(r"\s*(service|enum) \w+|\s+rpc \w+|\s+.* = \d+;")
    bare = [
        line.strip()
        for before, line in itertools.pairwise(lines)
        if declaration.match(line) and not before.strip().startswith("//")
    ]
    assert bare == []
