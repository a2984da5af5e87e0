"""``join(backups=)``, ``shardwell backups``, ``drain``, ``rebalance`` and ``verify RUN`` during training."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

import shardwell
from shardwell.command.cli import main
from shardwell_wire.v1 import coordinator_pb2
from tests.support import transformer
from tests.support.cluster import wait_until
from tests.support.named_training import DP, plain
from tests.support.reference import ADAMW, sha256

STEPS, DRAINED = 40, "shard-1"


class Operator:
    """A person who drains a server and brings it back, step by step, with the commands.

    Args:
        session: A session of the run.
        address: Address of the coordinator.
    """

    def __init__(self, session: shardwell.Session, address: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._session, self._address, self._capsys = session, address, capsys
        self.done: list[str] = []

    def run(self, *command: str) -> str:
        assert main([*command, "--address", self._address]) == 0
        return self._capsys.readouterr().out

    def act(self) -> None:
        """Takes the next action if the one before has had its effect."""
        run = self._session.run
        match len(self.done):
            case 0 if "no backup in sync" not in self.run("verify", run):
                self.run("drain", DRAINED)
                self.done.append("protected")
            case 1 if "no shards left" in self.run("drain", DRAINED):
                assert DRAINED not in self.owners()
                self.run("drain", DRAINED, "--cancel")
                self.run("rebalance", run)
                self.done.append("drained")
            case 2 if DRAINED in self.owners():
                self.run("backups", run, "0")
                self.done.append("rebalanced")

    def owners(self) -> set[str]:
        request = coordinator_pb2.ListUnitsRequest(run=self._session.run)
        units = self._session.coordinator.call("ListUnits", request).units
        return {shard.server_id for unit in units for shard in unit.shards if shard.stop_bytes > shard.start_bytes}


@pytest.mark.usefixtures("one_thread")
def test_a_server_is_drained_and_comes_back_while_a_run_trains(
    run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096) as cluster,
        shardwell.join(
            cluster.address, run=run_name, world=shardwell.World(dp=DP), min_trainers=1, backups=1
        ) as session,
    ):
        model = transformer.build()
        shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({transformer.Block}))
        optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
        operator = Operator(session, cluster.address, capsys)
        for step in session.steps(STEPS):
            for tokens in step.batches(transformer.batch):
                model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            operator.act()
        assert operator.done == ["protected", "drained", "rebalanced"]
        assert sha256(shardwell.full_state_dict(model)) == sha256(plain(STEPS)[0])


def test_commands_show_backups_and_what_was_sent_to_them(run_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        shardwell.LocalCluster(num_shards=2, lease_s=1.5, min_shard_bytes=4096) as cluster,
        shardwell.join(cluster.address, run=run_name, backups=1) as session,
    ):
        model = torch.nn.Linear(64, 64)
        shardwell.auto_wrap(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        operator = Operator(session, cluster.address, capsys)

        def protected() -> bool:
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            return "no backup in sync" not in operator.run("verify", run_name)

        wait_until(protected, "every shard has a backup")
        shown = operator.run("units", run_name)
        assert re.search(r"^version \d+; backups: \d+ in sync\n", shown) and "PRIMARY" in shown
        assert "shard-0 (in sync)" in shown or "shard-1 (in sync)" in shown

        def servers() -> list[dict[str, Any]]:
            listed: list[dict[str, Any]] = json.loads(operator.run("servers", "--json"))["servers"]
            return listed

        # The shards may be on one of the servers, and their backups are then on the other.
        primary = next(server for server in servers() if server["primary_count"])
        other = next(server for server in servers() if server["server_id"] != primary["server_id"])
        assert other["backup_count"] == primary["primary_count"] and other["backup_bytes"] == primary["primary_bytes"]

        def reported() -> bool:
            return all(int(each["replicated_bytes"]) > 0 for each in servers() if each["primary_count"])

        wait_until(reported, "heartbeats report the bytes that were sent to backups")
        headings, *rows = operator.run("servers").splitlines()
        assert re.search(r"PRIMARIES +BACKUPS +SENT TO BACKUPS", headings)
        row = next(row for row in rows if row.startswith(primary["server_id"]))
        assert re.search(r" \d+ \(\S+ \S+\) .*\S+ (KiB|MiB) +\S+ s ago", row)


def test_unknown_names_are_reported(cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["verify", "nothing"], ["drain", "nothing"], ["rebalance", "nothing"], ["backups", "nothing", "1"]):
        assert main([*command, "--address", cluster.address]) == 1
        assert "nothing" in capsys.readouterr().err
