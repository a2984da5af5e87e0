"""``shardwell backups``, ``drain``, ``rebalance`` and ``verify RUN``."""

from __future__ import annotations

import pytest

import shardwell
from shardwell.command.cli import main


def test_unknown_names_are_reported(cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["verify", "nothing"], ["drain", "nothing"], ["rebalance", "nothing"], ["backups", "nothing", "1"]):
        assert main([*command, "--address", cluster.address]) == 1
        assert "nothing" in capsys.readouterr().err
