"""The configuration file: one table of names, which arguments and variables override, in servers, commands and join."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

import shardwell
from shardwell.command import cli
from shardwell.find_credentials import find_credentials
from shardwell.options import JoinConfig, LauncherPlace, TransferOptions, WaitOptions, variable_of
from shardwell_server.cli import build_parser, main
from shardwell_wire.errors import UsageError
from shardwell_wire.host import variables
from shardwell_wire.host.variables import NAMES, PREFIX, take_config_options

FILE = """
address = "node0:50051"
coordinator = "node0:50051,node1:50051"
memory_budget = "1GiB"
lease_s = 2.5
insecure = true
dp = 4
min_trainers = 1
transports = ["socket", "grpc"]
gather_dtype = "bfloat16"

[contexts.other]
address = "node9:50051"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SHARDWELL_CONFIG", "SHARDWELL_CONTEXT"):
        monkeypatch.setenv(name, "")  # restored after the test
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    return path


def parsed(*given: str) -> argparse.Namespace:
    left = take_config_options(given)
    return build_parser(left[0]).parse_args(left)


def address(*given: str) -> str:
    left = take_config_options(given)
    return str(cli.build_parser(left[0]).parse_args(left).address)


def test_server_takes_arguments_then_variables_then_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_THREADS", "3")
    monkeypatch.setenv("SHARDWELL_MEMORY_BUDGET", "2GiB")
    found = parsed("--config", str(file), "shard", "--coordinator", "here:1")
    assert (found.coordinator, found.memory_budget, found.threads, found.insecure) == ("here:1", 2 << 30, 3, True)
    assert parsed(f"--config={file}", "shard").coordinator == "node0:50051,node1:50051"
    assert parsed("coordinator").lease_s == 2.5  # the variable names the file in this process from now on
    assert not parsed("coordinator", "--no-insecure").insecure


def test_commands_take_the_file_and_a_context_of_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert address("--config", str(file), "status") == "node0:50051"
    assert address("--context", "other", "status") == "node9:50051"
    monkeypatch.setenv("SHARDWELL_ADDRESS", "variable:1")
    assert address("status") == "variable:1" and address("status", "--address", "argument:1") == "argument:1"


def test_join_takes_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_CONFIG", str(file))
    monkeypatch.setenv("SHARDWELL_MIN_TRAINERS", "2")
    config = JoinConfig.from_env({"transfers": TransferOptions(gather_dtype="float32")})
    assert (config.address, config.world, config.min_trainers) == ("node0:50051", shardwell.World(dp=4), 2)
    assert (config.transfers.gather_dtype, config.transfers.transports) == ("float32", "socket,grpc")


def test_credentials_come_from_the_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("0" * 64)
    (tmp_path / "key").chmod(0o600)
    file.write_text(f'token_file = "{tmp_path}/key"\n')
    monkeypatch.setenv("SHARDWELL_CONFIG", str(file))
    assert find_credentials("node0:50051").key is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lease = 1", r"unknown key lease: did you mean 'lease_s'"),
        ("[contexts.a]\nadress = ''", r"unknown key contexts.a.adress: did you mean 'address'"),
        ("token = 'secret'", r"unknown key token: name its file with token_file"),
        ("lease_s = {a = 1}", r"lease_s is {'a': 1}: expected text, a number, true or false"),
        ("lease_s = ", r"cannot be read: Invalid value"),
        ("contexts = 1", r"contexts must have tables"),
    ],
)
def test_mistake_in_the_file_is_named(file: Path, text: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    assert main(["--config", str(file), "health", "localhost:1"]) == 1
    assert cli.main(["--config", str(file), "status"]) == 1
    variables._read.cache_clear()
    with pytest.raises(UsageError, match=expected):
        variables.variables()
    assert str(file) in capsys.readouterr().err


def test_mistake_in_the_options_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--config"]) == 1 and "--config needs a value" in capsys.readouterr().err
    assert cli.main(["--context", "x", "status"]) == 1 and "no file is named" in capsys.readouterr().err
    assert cli.main(["--config", str(file), "--context", "x", "status"]) == 1
    assert "has no context 'x', only 'other'" in capsys.readouterr().err
    assert cli.main(["--config", f"{file}.no", "status"]) == 1 and "cannot be read" in capsys.readouterr().err


def test_table_of_names_has_every_option_with_a_variable() -> None:
    groups = (JoinConfig, TransferOptions, WaitOptions, shardwell.World)
    named = {variable for group in groups for field in fields(group) if (variable := variable_of(field))}
    named |= {variable_of(field) for field in fields(LauncherPlace) if field.name == "dp_rank"}
    (commands,) = (each.choices for each in build_parser()._actions if isinstance(each.choices, dict))
    options = [action for parser in commands.values() for action in parser._actions]
    named |= {found for each in options for found in _variables_of(each)}
    named |= {"SHARDWELL_SPOOL_DIR", "SHARDWELL_ADDRESS"}
    assert {name.removeprefix(PREFIX).lower() for name in named if name} == NAMES


def _variables_of(option: argparse.Action) -> list[str]:
    """Returns the variable of an option, which its help names."""
    names = {f"{PREFIX}{name.removeprefix('--').replace('-', '_').upper()}" for name in option.option_strings}
    return [name for name in names if name in (option.help or "")]
