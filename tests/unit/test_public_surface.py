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
import shardwell_wire.errors as wire_errors

PROTOS = sorted((Path(__file__).parents[2] / "protos/shardwell_wire/v1").glob("*.proto"))

NAMES = """
    ASYNCHRONOUS BOUNDED_STALENESS BackwardPrefetch ClientSide Consistency CustomPolicy FlatClientSide LocalCluster
    MemoryOptions MemoryStrategy MixedPrecisionPolicy ModuleTypePolicy NoWrapPolicy Reader ReplicaOptions SYNCHRONOUS
    Session ShardedModule ShardingStrategy ShardwellError SizePolicy Step TlsOptions TransferOptions UsageError
    WaitOptions World amp attach auto_wrap engines errors from_safetensors full_state_dict fully_shard init join
    monitor offload_activations optim parallel register_forward_method save_safetensors testing unwrap weights wrapping
"""

GROUPS = {
    "errors": """
        AccessError CapacityError ChunkError ConflictError CorruptDataError DeadlineError DuplicateError
        FreedParameterError HyperparameterMismatchError IncompleteStepError InternalError InvalidRequestError
        MissingTorchError NonFiniteError NotFoundError ReplicaLostError RunDeletedError RunMismatchError ShardwellError
        StaleEpochError StepRestartedError StepStateError TiedParameterError TlsError TooManyRequestsError
        UnauthenticatedError UnavailableError UnitMismatchError UsageError VersionGoneError WorldError
    """,
    "monitor": """
        Bottleneck MemoryReport PerformanceReport Severity StepPart UnitMemory local_ratio num_parameters
    """,
    "weights": """
        CheckpointReader TensorSlice checkpoint_to_dcp dcp_to_checkpoint iter_full_state_dict join_state_dicts
        open_checkpoint save_dcp sharded_state_dict weights_digest
    """,
    "wrapping": "ActivationOffload TiledLinear merge_experts split_experts",
}
"""Public names that ``shardwell`` resolves, too, and does not list: earlier versions had them there."""

OPTIMIZERS = """
    Adadelta Adafactor Adagrad Adam AdamW Adamax Combined LAMB Lion Muon NAdam RAdam RMSprop SGD ShardedOptimizer
"""


def names_of(group: str) -> set[str]:
    """Returns the public names that ``dir`` lists."""
    module = getattr(shardwell, group)
    names = {name for name in dir(module) if not name.startswith("_")}
    assert names == {*module.__all__}
    return names


def test_public_names_are_unchanged() -> None:
    assert sorted(shardwell.__all__) == sorted(NAMES.split())
    assert sorted(shardwell.optim.__all__) == sorted(OPTIMIZERS.split())
    assert {name: names_of(name) for name in GROUPS} == {name: {*names.split()} for name, names in GROUPS.items()}


def test_few_names_are_listed_at_the_top() -> None:
    assert dir(shardwell) == sorted(shardwell.__all__)
    assert len(dir(shardwell)) <= 50


@pytest.mark.parametrize("group", GROUPS)
def test_names_of_a_group_are_found_at_the_top_and_listed_in_the_group_only(group: str) -> None:
    for name in names_of(group):
        assert getattr(shardwell, name) is getattr(getattr(shardwell, group), name)
    assert names_of(group) & {*dir(shardwell)} == ({"ShardwellError", "UsageError"} if group == "errors" else set())


def test_errors_are_those_of_the_wire_and_of_no_other_name() -> None:
    found = [
        cls
        for cls in vars(wire_errors).values()
        if isinstance(cls, type) and issubclass(cls, wire_errors.ShardwellError)
    ]
    assert sorted(cls.__name__ for cls in found) == sorted(names_of("errors"))
    assert all(getattr(shardwell.errors, cls.__name__) is cls for cls in found)


_FORMER = {name for names in GROUPS.values() for name in names.split()} - {*NAMES.split()}
FORMER = re.compile(rf"\bshardwell\.({'|'.join(_FORMER)})\b")
TEXTS = {".md", ".proto", ".py", ".pyi", ".sh", ".yaml", ".yml"}
"""A spelling of an earlier version, which still works."""


@pytest.mark.parametrize(
    "place", ["README.md", "SECURITY.md", "docs", "examples", "benchmarks", "deploy", "client", "server", "protos"]
)
def test_texts_have_the_spelling_that_is_listed(place: str) -> None:
    root = Path(__file__).parents[2]
    paths = [root / place] if "." in place else [path for path in (root / place).rglob("*") if path.suffix in TEXTS]
    found = [(str(path.relative_to(root)), name[0]) for path in paths for name in FORMER.finditer(path.read_text())]
    assert found == []


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
    statements = "import shardwell.errors; from shardwell import errors; import shardwell"
    assert not is_imported(
        "torch", after=f"{statements}; errors.TlsError, shardwell.errors.TlsError, shardwell.TlsError"
    )


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shardwell' has no attribute 'nonsense'"):
        shardwell.nonsense  # noqa: B018
    typo = [sys.executable, "-c", "import shardwell; shardwell.fuly_shard"]
    error = subprocess.run(typo, capture_output=True, text=True, timeout=60, check=False).stderr
    assert "Did you mean: 'fully_shard'" in error
    with pytest.raises(AttributeError, match=r"module 'shardwell\.weights' has no attribute 'nonsense'"):
        shardwell.weights.nonsense  # noqa: B018


@pytest.mark.parametrize("name", sorted({*NAMES.split(), *_FORMER}))
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
