"""The ``SHARDWELL_*`` variables of this process, and the configuration file that sets those that are not given.

``SHARDWELL_CONFIG`` names a TOML file. Its keys are the names of variables without the prefix, in lower case, such as
``token_file``. A table ``[contexts.NAME]`` has keys that replace those of the file if ``SHARDWELL_CONTEXT`` is NAME.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import cache

from shardwell_wire.errors import UsageError
from shardwell_wire.model.names import nearest

PREFIX = "SHARDWELL_"
CONFIG_VARIABLE, CONTEXT_VARIABLE = "SHARDWELL_CONFIG", "SHARDWELL_CONTEXT"
_OPTIONS = {"--config": CONFIG_VARIABLE, "--context": CONTEXT_VARIABLE}
_CONTEXTS = "contexts"

_NAMES = """
    address advertise allow_gradient_differences audit_log backups backward_prefetch checkpoint_dir checkpoint_every
    checkpoint_root chunk_bytes consistency coordinator cp dashboard_host dashboard_port delta_cache_bytes dp
    dp_rank drain_s encrypt etcd_ca etcd_cert etcd_key etcd_lease_s gather_dtype global_rank gradient_reduction host
    host_cache_bytes id insecure keep keep_bytes keep_versions lease_s listen log_format log_level
    max_gathers_in_flight max_reader_lag memory_budget metrics_host metrics_port min_servers min_shard_bytes
    min_trainers node_group num_layers order own_memory_limit pp prefetch_bytes processes push_bytes push_dtype
    push_error_feedback reduction_groups restart_wait_s resume rewrap rpc_timeout_s run seed servers_on_host shm_dir
    spool_dir state state_dir threads tls_ca tls_cert tls_key tls_require_client_cert tls_server_name token_file tp
    trainer transports wait_limit_s warn_after_s without_token world_size
"""
NAMES = frozenset(_NAMES.split())
"""Keys of the file: every variable that is an option of a server, of ``shardwell.join`` or of a command. A token is not
one of them, because a configuration file may be readable by others."""


def variables() -> Mapping[str, str]:
    """Returns the environment, and the file's values of the variables that it lacks.

    Raises:
        UsageError: The file cannot be read, or a key or value of it is invalid.
    """
    path, context = os.environ.get(CONFIG_VARIABLE), os.environ.get(CONTEXT_VARIABLE)
    if path:
        return ChainMap(os.environ, _read(path, context or ""))
    if context:
        raise UsageError(f"{CONTEXT_VARIABLE} (--context) is {context!r}, but no file is named: set {CONFIG_VARIABLE}")
    return os.environ


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config`` and ``--context`` to the help of a command. ``take_config_options`` reads them."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"TOML file with values for options and variables that are not given ({CONFIG_VARIABLE})",
    )
    parser.add_argument(
        "--context", metavar="NAME", help=f"use the table [contexts.NAME] of the file, too ({CONTEXT_VARIABLE})"
    )


def take_config_options(given: Sequence[str]) -> list[str]:
    """Sets the variables of the options at the start of a command's arguments; returns the other arguments.

    This process and its children then find the file.

    Raises:
        UsageError: An option has no value.
    """
    left = list(given)
    while left and (name := left[0].partition("=")[0]) in _OPTIONS:
        _, equals, value = left.pop(0).partition("=")
        if not equals and not left:
            raise UsageError(f"{name} needs a value")
        os.environ[_OPTIONS[name]] = value if equals else left.pop(0)
    return left


@cache
def _read(path: str, context: str) -> dict[str, str]:
    """Returns the variables that a file sets."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration file {path} ({CONFIG_VARIABLE}) cannot be read: {error}") from error
    contexts = found.pop(_CONTEXTS, {})
    if not isinstance(contexts, dict) or not all(isinstance(each, dict) for each in contexts.values()):
        raise UsageError(f"{path}: {_CONTEXTS} must have tables, such as [{_CONTEXTS}.production]")
    if context and context not in contexts:
        raise UsageError(f"{path} has no context {context!r}, only {nearest(context, contexts) or 'none'}")
    checked = {name: _variables(path, f"{_CONTEXTS}.{name}.", table) for name, table in contexts.items()}
    return _variables(path, "", found) | checked.get(context, {})


def _variables(path: str, where: str, table: Mapping[str, object]) -> dict[str, str]:
    values = {}
    for key, value in table.items():
        if key not in NAMES:
            secret = ": name its file with token_file" if key == "token" else f": did you mean {nearest(key, NAMES)}?"
            raise UsageError(f"{path}: unknown key {where}{key}{secret}")
        values[f"{PREFIX}{key.upper()}"] = _text(f"{path}: {where}{key}", value)
    return values


def _text(where: str, value: object) -> str:
    """Returns a value as the text of a variable."""
    if isinstance(value, list):
        return ",".join(_text(where, each) for each in value)
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"{where} is {value!r}: expected text, a number, true or false, or a list of these")
