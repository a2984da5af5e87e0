"""A cluster inside a test's process, to test an unchanged training script in seconds.

>>> def test_my_script_trains():
...     with shardwell.testing.in_process_cluster(dp=2):
...         runpy.run_path("train.py", run_name="__main__")
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shardwell.options import DEFAULT_RUN, LAUNCHER_VARIABLES
from shardwell.processes.local_cluster import write_key
from shardwell.session.session import sessions_at
from shardwell_server.in_process import InProcessServers
from shardwell_wire.errors import UsageError
from shardwell_wire.host.server_folders import temporary_folder
from shardwell_wire.security.credentials import new_key

__all__ = ["in_process_cluster"]

_PREFIX = "SHARDWELL_"


@contextmanager
def in_process_cluster(num_shards: int = 1, *, dp: int = 1, memory_budget: int = 1 << 30) -> Iterator[str]:
    """Runs a coordinator and shard servers in threads of this process, which ``shardwell.join()`` then uses.

    The servers compute like those of a real cluster: a script trains to the same weights as on a cluster of separate
    processes with the same number of threads. Units are cut into shards of 4 KiB or more. Each cluster starts empty.
    While the context is open, the environment has only the ``SHARDWELL_*`` variables below, and those of
    launchers, such as torchrun's RANK, are hidden. On exit, open sessions are closed.

    Do not measure speed with it: trainer and servers share one interpreter.

    Args:
        num_shards: Number of shard servers.
        dp: Size of the data axis (``SHARDWELL_DP``), unless the script passes ``join(world=...)``. This process plays
            all ranks (``SHARDWELL_MIN_TRAINERS=1``), one after another in ``step.batches``.
        memory_budget: Bytes that each shard server may use.

    Yields:
        The coordinator's host:port (``SHARDWELL_ADDRESS``).

    Raises:
        UsageError: ``num_shards`` or ``dp`` is not positive.
    """
    if num_shards < 1 or dp < 1:
        raise UsageError(f"in_process_cluster(num_shards={num_shards}, dp={dp}): expected at least 1 of each")
    with temporary_folder() as folder:
        state_dir = folder / "state"
        state_dir.mkdir()
        token_file = write_key(folder / "token", new_key())
        with _environment({}):  # the servers' options have variables, too
            servers = InProcessServers(state_dir, token_file, num_shards=num_shards, memory_budget=memory_budget)
        try:
            variables = {
                "ADDRESS": servers.address,
                "RUN": DEFAULT_RUN,
                "TOKEN_FILE": token_file,
                "DP": str(dp),
                "MIN_TRAINERS": "1",
            }
            with _environment({f"{_PREFIX}{name}": value for name, value in variables.items()}):
                try:
                    yield servers.address
                finally:
                    for session in sessions_at(servers.address):
                        session.close()
        finally:
            servers.stop()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replaces the variables of Shardwell and of launchers while the context is open."""
    former = dict(os.environ)
    hidden = [name for name in former if name.startswith(_PREFIX) or name in LAUNCHER_VARIABLES]
    try:
        for name in hidden:
            del os.environ[name]
        os.environ.update(variables)
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update({name: former[name] for name in hidden})
