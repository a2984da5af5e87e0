"""Tests of shared gradient buffers on both sides: reuse, contributions, and memory in use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from shardwell.transport import shm_transport as client
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.transports import shm_buffers as server
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire.errors import ConflictError, InvalidRequestError, StepStateError
from shardwell_wire.host.shared_memory import opened
from shardwell_wire.model.names import RunIdentity
from tests.support.shard_server import PLAIN, layout_of

# The trainer's side.


class Made:
    """The buffers created so far, and the object under test."""

    def __init__(self) -> None:
        self.made: list[client.GradientBuffer] = []
        self.gradient_buffers = client.GradientBuffers(self._make)

    def _make(self, unit: str) -> client.GradientBuffer:
        self.made.append(client.GradientBuffer(len(self.made), memoryview(unit.encode())))
        return self.made[-1]


def test_released_buffer_is_reused() -> None:
    made = Made()
    first = made.gradient_buffers.acquire("u", 0)
    assert made.gradient_buffers.acquire("u", 0) is not first
    for _ in range(2):
        made.gradient_buffers.release(first)
    assert made.gradient_buffers.acquire("u", 1) is first
    assert made.gradient_buffers.acquire("u", 1) not in made.made[:2]


def test_units_do_not_share_buffers() -> None:
    made = Made()
    made.gradient_buffers.release(made.gradient_buffers.acquire("u", 0))
    assert bytes(made.gradient_buffers.acquire("v", 0).memory) == b"v"
    assert len(made.made) == 2


def test_release_rank_without_a_rank_frees_all_buffers() -> None:
    made = Made()
    taken = [made.gradient_buffers.acquire(unit, rank) for unit, rank in (("u", 0), ("u", 1), ("v", 0))]
    for _ in range(2):
        made.gradient_buffers.release_rank()
    assert {made.gradient_buffers.acquire("u", 0).buffer_id for _ in range(2)} == {0, 1}
    assert made.gradient_buffers.acquire("v", 0) is taken[2]
    assert len(made.made) == 3


def test_release_rank_frees_only_the_buffers_of_the_rank() -> None:
    made = Made()
    for unit, rank in (("u", 0), ("u", 1), ("v", 1)):
        made.gradient_buffers.acquire(unit, rank)
    made.gradient_buffers.release_rank(1)
    assert made.gradient_buffers.acquire("u", 0) is made.made[1]
    assert made.gradient_buffers.acquire("v", 0) is made.made[2]
    assert made.gradient_buffers.acquire("u", 0) is not made.made[0]
    made.gradient_buffers.release_rank()
    assert made.made[0] in [made.gradient_buffers.acquire("u", 0) for _ in range(3)]


def test_writes_to_a_buffer_reach_the_file_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "gradient_buffer"
    path.write_bytes(b"\xff" * 8192)
    with opened(os.open(path, os.O_RDWR)) as descriptor:
        gradient_buffer = client.GradientBuffer.map(7, descriptor, 8192)
    gradient_buffer.memory[256:260] = b"abcd"
    assert path.read_bytes() == b"\xff" * 256 + b"abcd" + b"\xff" * 7932


def test_mapped_buffer_keeps_no_file_open(tmp_path: Path) -> None:
    """A large model has more buffers than a process may have open files."""
    path = tmp_path / "gradient_buffer"
    path.write_bytes(bytes(8192))
    with opened(os.open(path, os.O_RDWR)) as descriptor:
        gradient_buffer = client.GradientBuffer.map(7, descriptor, 8192)
    assert str(path) not in [file.path for file in psutil.Process().open_files()]
    assert str(path) in [mapped.path for mapped in psutil.Process().memory_maps()]
    del gradient_buffer
    assert str(path) not in [mapped.path for mapped in psutil.Process().memory_maps()]


# The server's side.


class Serving:
    """A shard and its gradient buffers."""

    def __init__(self, shared: SharedMemory, dp: int = 1) -> None:
        self.memory, self._shared = Memory(1 << 30), shared
        self.memory.reserve(("r#id", PLAIN.unit, 0), PLAIN.size_bytes, dp)
        self.shard = self.of(PLAIN.unit, dp)

    def of(self, unit: str, dp: int = 1) -> UnitShard:
        layout = layout_of(unit, a=((40_000,), "float32"), b=((20_000,), "float32"))
        return UnitShard(
            ShardSpec(
                run=RunIdentity("r", "id"), layout=layout, index=0, start_bytes=0, stop_bytes=layout.size_bytes, dp=dp
            ),
            self.memory,
        )

    def gradient_buffer(self) -> server.SharedGradientBuffer:
        size = self.shard.size_bytes
        room = self.memory.grant(size, self.shard.gradient.quota, "a gradient buffer")
        return server.SharedGradientBuffer(self.shard, self._shared.create_sealed(size, "a gradient buffer"), room)

    @property
    def used(self) -> tuple[int, int, int]:
        """Returns the used bytes of shared memory, of staging memory and of the reservation."""
        return (
            self.memory._shared_bytes // self.shard.size_bytes,
            self.memory.unreserved.used_bytes // self.shard.size_bytes,
            self.shard.dp - self.shard.gradient.quota._free_count,
        )


@pytest.fixture
def serving() -> Iterator[Serving]:
    with closing(SharedMemory()) as shared:
        yield Serving(shared)


def test_buffer_counts_against_the_budget_until_it_is_closed(serving: Serving) -> None:
    covered, staged = serving.gradient_buffer(), serving.gradient_buffer()
    assert serving.used == (2, 1, 1)
    staged.close()
    assert serving.used == (1, 0, 1)
    covered.close()
    assert serving.used == (0, 0, 0)
    with pytest.raises(FileNotFoundError):
        covered.file.open_for_trainer()


def test_contribution_moves_to_the_reservation_when_there_is_room(serving: Serving) -> None:
    covered, staged = serving.gradient_buffer(), serving.gradient_buffer()
    covered.close()
    staged.claim()
    assert serving.used == (1, 0, 1)
    staged.release()
    staged.close()
    assert serving.used == (0, 0, 0)


def test_adopted_buffer_cannot_become_another_contribution(serving: Serving) -> None:
    gradient_buffer = serving.gradient_buffer()
    gradient_buffer.check_adoptable(serving.shard)
    assert gradient_buffer.claim() is gradient_buffer.buffer
    assert gradient_buffer.claimed
    with pytest.raises(StepStateError, match="already holds a contribution: use another one"):
        gradient_buffer.check_adoptable(serving.shard)
    gradient_buffer.release()
    gradient_buffer.check_adoptable(serving.shard)
    assert not gradient_buffer.claimed
    assert serving.used == (1, 0, 1), "the buffer stays open"


def test_buffer_of_another_shard_is_rejected(serving: Serving) -> None:
    for other in (serving.of("other"), serving.of(PLAIN.unit)):
        with pytest.raises(InvalidRequestError, match="the gradient buffer belongs to unit 'u'"):
            serving.gradient_buffer().check_adoptable(other)


def test_closed_buffer_is_freed_with_its_contribution(serving: Serving) -> None:
    gradient_buffer = serving.gradient_buffer()
    kept = gradient_buffer.claim().fill_(5)
    gradient_buffer.close()
    with pytest.raises(FileNotFoundError):
        gradient_buffer.file.open_for_trainer()
    assert serving.used == (1, 0, 1)
    assert int(kept[-1]) == 5
    gradient_buffer.release()
    assert serving.used == (0, 0, 0)


@pytest.mark.parametrize("held", [False, True])
def test_closed_buffer_rejects_contributions(serving: Serving, held: bool) -> None:
    gradient_buffer = serving.gradient_buffer()
    if held:
        gradient_buffer.claim()
    gradient_buffer.close()
    with pytest.raises(ConflictError, match="is closed"):
        gradient_buffer.check_adoptable(serving.shard)
