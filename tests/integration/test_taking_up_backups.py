"""A process takes up the backups of its predecessor, at every state of a step, as primaries or as backups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.shard_spec import Role
from shardwell_wire.host.server_folders import FolderOwner
from shardwell_wire.v1 import coordinator_pb2, shard_pb2
from tests.integration.test_buffer_shards import FIRST, LAYOUT
from tests.support.backup_pair import BACKUP, Pair, adam, gradients, hash_of, shard_on, straight
from tests.support.shard_server import MIXED, PLAIN, OneUnit, ShardServer

OWNER = FolderOwner(server_id="backup", coordinator="here:1")
PRIMARY = shard_pb2.SHARD_ROLE_PRIMARY


@contextmanager
def process(directory: Path) -> Iterator[ShardServer]:
    """A process of the backup's server. It leaves its folder."""
    with closing(SharedMemory(directory, OWNER)) as shared, ShardServer(shared=shared) as server:
        yield server


@pytest.fixture
def primary() -> Iterator[ShardServer]:
    with ShardServer() as server:
        yield server


def next_process(stack: ExitStack, directory: Path, pair: Pair, role: Any) -> tuple[OneUnit, coordinator_pb2.HeldShard]:
    """Starts the next process, and adopts the shard in a role. Returns the unit there, and what was reported."""
    server = stack.enter_context(process(directory))
    assert server.store.of_former is not None
    (held,) = server.store.of_former.held()
    adopted = coordinator_pb2.HeldShard()
    adopted.CopyFrom(held)
    adopted.role = role
    server.evaluate(lambda: server.store.adopt([adopted]))
    assert server.store.of_former.held() == []
    one = OneUnit(server, pair.backup.layout, dp=pair.backup.dp)
    assert (shard_on(one).role, one.shard.version) == (Role.BACKUP if role == BACKUP else Role.PRIMARY, held.version)
    return one, held


@pytest.mark.parametrize("layout", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("state", ["copied", "updated", "prepared", "due"])
def test_a_backup_becomes_the_primary_of_the_next_process(
    layout: Any, dp: int, state: str, primary: ShardServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        with process(tmp_path) as former:
            pair = Pair((primary, former), layout, dp=dp)
            pair.copy()
            version = 0
            if state != "copied":
                pair.train(0)
                pair.train(1)
                version = 2
            if state in ("prepared", "due"):
                pair.push(2)
                pair.primary.prepare(2, optimizer=adam(pair.primary, 2).optimizer)
        one, held = next_process(stack, tmp_path, pair, PRIMARY)
        assert (held.role, held.version, held.updating) == (BACKUP, version, False)
        assert held.can_update == (state in ("prepared", "due"))
        if state == "due":  # the step was committed
            one.server.call("Update", adam(one, 2))
            version = 3
        elif state == "prepared":  # it was not, and its work items have new attempts
            one.fence(2, *((rank, 1, 1) for rank in range(dp)))
        for step in range(version, 4):
            attempt = 1 if (state, step) == ("prepared", 2) else 0
            for rank in range(dp):
                one.push(gradients(one, step, rank), step=step, rank=rank, attempt=attempt)
            one.prepare(step, *((rank, attempt, 1) for rank in range(dp)))
            one.server.call("Update", adam(one, step))
        assert hash_of(one).role == PRIMARY and one.gather(4)[0] == 4
        assert list(hash_of(one).tensors) == list(straight(layout, dp, 4))


@pytest.mark.parametrize("is_due", [False, True])
def test_a_backup_that_stays_one_can_be_promoted_later(is_due: bool, primary: ShardServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        with process(tmp_path) as former:
            pair = Pair((primary, former), dp=2)
            pair.copy()
            pair.train(0)
            pair.push(1)
            pair.primary.prepare(1, optimizer=adam(pair.primary, 1).optimizer)
        one, held = next_process(stack, tmp_path, pair, BACKUP)
        assert held.can_update
        pair.backup = one
        if is_due:
            pair.promote(2)
            one.server.call("Update", adam(one, 1))
        else:
            pair.promote(1, fences=[(0, 1, 1), (1, 1, 1)])
            for rank in range(2):
                one.push(gradients(one, 1, rank), step=1, rank=rank, attempt=1)
            one.prepare(1, (0, 1, 1), (1, 1, 1))
            one.server.call("Update", adam(one, 1))
        assert list(hash_of(one).tensors) == list(straight(PLAIN, 2, 2))


def test_a_primary_can_become_a_backup(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with process(tmp_path) as former:
            one = OneUnit(former, PLAIN).begin()
        pair = Pair.__new__(Pair)
        pair.backup = one
        again, held = next_process(stack, tmp_path, pair, BACKUP)
        assert held.role == PRIMARY
        assert again.server.store.memory.shared is not None
        (record,) = again.server.store.memory.shared.records().values()
        assert b'"role":"backup"' in record


@pytest.mark.parametrize("kind", ["skipped", "fenced"])
def test_a_step_without_its_gradient_is_recorded(kind: str, primary: ShardServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        with process(tmp_path) as former:
            pair = Pair((primary, former))
            pair.copy()
            pair.train(0)
            pair.push(1)
            if kind == "skipped":
                pair.primary.prepare(1, skip=True, optimizer=adam(pair.primary, 1).optimizer)
            else:
                pair.primary.prepare(1, optimizer=adam(pair.primary, 1).optimizer)
                former.call(
                    "Fence",
                    shard_pb2.FenceRequest(
                        context=pair.backup.context(1), ranks=[shard_pb2.RankFence(dp_rank=0, epoch=1, attempt=1)]
                    ),
                )
            before = list(hash_of(pair.backup).tensors)
        one, held = next_process(stack, tmp_path, pair, PRIMARY)
        assert (held.version, held.can_update) == (1, kind == "skipped")
        if held.can_update:
            one.server.call("Update", adam(one, 1))
            after = {tensor.name: tensor.xxh3 for tensor in hash_of(one).tensors}
            assert {tensor.name: tensor.xxh3 for tensor in before}.items() == after.items()


def test_buffers_of_a_prepared_step_are_recorded(primary: ShardServer, tmp_path: Path) -> None:
    new = [torch.full_like(value, 7) for value in FIRST]
    with ExitStack() as stack:
        with process(tmp_path) as former:
            pair = Pair((primary, former), LAYOUT, initial=FIRST)
            pair.copy()
            pair.primary.push(new, step=0)
            pair.primary.prepare(0)
        one, held = next_process(stack, tmp_path, pair, PRIMARY)
        assert (held.version, held.can_update) == (0, True)
        one.update(0)
        version, values = one.gather(1)
        assert version == 1
        for found, expected in zip(values, new, strict=True):
            assert torch.equal(found, expected.flatten())


def test_copies_that_are_not_adopted_are_dropped_with_their_files(primary: ShardServer, tmp_path: Path) -> None:
    with process(tmp_path) as former:
        pair = Pair((primary, former))
        pair.copy()
        pair.train(0)
    with process(tmp_path) as server:
        (folder,) = tmp_path.iterdir()
        server.evaluate(lambda: server.store.adopt([]))
        assert not server.store.runs and server.store.memory.reserved_bytes == 0
        assert {path.name for path in folder.iterdir()} == {"lock", "owner.json", "socket"}
    assert not folder.exists()
