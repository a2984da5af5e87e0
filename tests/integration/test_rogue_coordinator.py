"""A process at the coordinator's address, or a server in the cluster, that lacks the key changes nothing."""

from __future__ import annotations

import time
from pathlib import Path

import shardwell
from tests.support.cluster import small_run, wait_until
from tests.support.server_processes import ready_address, server_process


def test_coordinator_without_the_key_changes_nothing(tmp_path: Path) -> None:
    """Its term is unknown, and it answers every heartbeat that the run was deleted."""
    with shardwell.LocalCluster(2, state_dir=tmp_path / "state", lease_s=1.5) as cluster:
        port = cluster.address.rpartition(":")[2]
        with small_run(cluster.address, "gpt"):
            before = weights(cluster.address)
            cluster.coordinator.kill()
            with server_process("coordinator", "--listen", f"127.0.0.1:{port}") as rogue:
                ready_address(rogue)
                for server in cluster.shards:
                    wait_until(
                        lambda log=server.log_path: "does not have this cluster's key" in log.read_text(),  # type: ignore[misc]
                        "a server refuses the answer of the rogue coordinator",
                    )
            cluster.restart_coordinator()
            assert weights(cluster.address) == before


def test_shard_server_without_the_key_does_not_register(tmp_path: Path) -> None:
    with shardwell.LocalCluster(1) as cluster:
        stranger = tmp_path / "key"
        stranger.touch(mode=0o600)
        stranger.write_text("0123456789abcdef\n")
        operator = tmp_path / "operator"
        operator.touch(mode=0o600)
        operator.write_text(cluster.token)
        for options, problem in (
            ((), "the rpc carries no token"),
            (("--token-file", str(stranger)), "the rpc carries a token of another cluster"),
            (("--token-file", str(operator)), "a server needs the cluster's key"),
        ):
            arguments = ("shard", "--coordinator", cluster.address, "--id", "rogue", "--memory-budget", "900000GiB")
            with server_process(*arguments, *options) as rogue:
                output, errors = rogue.communicate(timeout=60)
            assert (rogue.returncode, output) == (1, "")
            assert problem in errors
            assert "Traceback" not in errors
        with small_run(cluster.address, "gpt"):
            assert weights(cluster.address)


def weights(address: str) -> list[tuple[str, bytes]]:
    deadline = time.monotonic() + 20
    while True:
        try:
            with shardwell.attach(address, "gpt") as reader, reader.pin() as pinned:
                return [(name, values.numpy().tobytes()) for name, values in pinned.values()]
        except shardwell.UnavailableError:
            if time.monotonic() > deadline:
                raise
