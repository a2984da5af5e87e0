"""Forming a node group, and training without one after a failure."""

from __future__ import annotations

import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore

from shardwell.grid import replica
from shardwell.grid.replica import NodeMembers, form_node_group
from shardwell.options import JoinConfig, TransferOptions
from shardwell.peers.host_folder import HostFolder
from shardwell.peers.node_group import NodeGroup, NodeRendezvous
from tests.support.cluster import wait_until


def test_trainer_continues_alone_when_the_other_member_dies_after_connecting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key, membership = uuid.uuid4().hex, Any
    monkeypatch.setattr(replica, "_find_members", lambda *_: NodeMembers(key, (0, 1), 0))

    def connect_and_die() -> None:
        folder = HostFolder(key)
        board = NodeRendezvous(folder, 1, 2)
        assert board.meet(60.0)
        group = NodeGroup(board, "gloo", FileStore(str(folder.path / "store"), 2), rank=1, size=2)
        wait_until(lambda: board._read().num_arrived == 1, "the other to wait until both are connected")
        group.close()

    with ThreadPoolExecutor(1) as threads, caplog.at_level(logging.WARNING):
        dying = threads.submit(connect_and_die)
        assert (
            form_node_group(
                membership, JoinConfig(run="r", address="a:1", transfers=TransferOptions(node_group="gloo"))
            )
            is None
        )
        dying.result()
    assert "every trainer of this node fetches whole units for itself: member 1 of 2 is gone" in caplog.text
