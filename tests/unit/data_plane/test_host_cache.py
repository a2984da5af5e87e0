"""Tests of the host cache: each version is fetched once, never mixed, and nothing remains when processes die."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from shardwell.data_plane import host_cache
from shardwell.data_plane.host_cache import MEMORY, CachedShard, CacheKey, Fetch, HostCache, HostFolder
from shardwell.transport.shared_vector import SegmentLocation, SharedVector
from shardwell_wire.errors import DeadlineError, UnavailableError, VersionGoneError
from shardwell_wire.model.layout import BLOCK_BYTES
from tests.support.processes import ROOT

SIZE = 2 * BLOCK_BYTES
RUN = ("coordinator:1", "run", 17)

JOIN = """
import sys
from pathlib import Path
from tests.unit.data_plane.test_host_cache import SIZE, admit, join

cache = join(Path(sys.argv[1]), 1 << 20)
shard = admit(cache)

def say(text):
    print(text, flush=True)

def fetch(target, _):
    say("fetching")
    target[: SIZE // 2] = b"x" * (SIZE // 2)
    sys.stdin.readline()
    target[:] = b"c" * SIZE
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of a memory file system."""
    with TemporaryDirectory(dir=MEMORY, prefix="shardwell_test-") as path:
        yield Path(path)


def join(
    memory: Path, budget_bytes: int = 1 << 20, *, run: tuple[Any, ...] = RUN, wait_limit_s: float = 20
) -> HostCache:
    return HostCache(run, budget_bytes, wait_limit_s=wait_limit_s, directory=memory)


def admit(cache: HostCache, unit: int = 0, size: int = SIZE, *, dtype: str = "float32") -> CachedShard:
    return cache.admit(f"unit {unit}", {0: CacheKey(unit, 0, size, dtype)})[0]


def refuses(cache: HostCache, unit: int, size: int = SIZE) -> bool:
    return not cache.admit(f"unit {unit}", {0: CacheKey(unit, 0, size, "float32")})


def filling(byte: bytes, calls: list[bytes] | None = None) -> Fetch:
    def fetch(target: memoryview, _: int | None) -> None:
        if calls is not None:
            calls.append(byte)
        target[:] = byte * len(target)

    return fetch


def failing(target: memoryview, _: int | None) -> None:
    target[:10] = b"x" * 10
    raise UnavailableError("the server is gone")


def content(shard: CachedShard, version: int, fetch: Fetch) -> bytes:
    target = bytearray(shard.location.stop_bytes - shard.location.start_bytes)
    assert shard.read(version, memoryview(target), fetch) == version
    assert len(set(target)) == 1, "the bytes mix two versions"
    return bytes(target[:1])


class Trainer:
    """Another process that uses the cache."""

    def __init__(self, memory: Path, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOIN + script, str(memory)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def resume(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


FETCH_ONE = """
shard.ensure(1, fetch)
say("done")
cache.close()
"""


# Within one process.


def test_first_trainer_fetches_and_others_hit(memory: Path) -> None:
    caches, calls = [join(memory), join(memory)], list[bytes]()
    first, second = (admit(cache) for cache in caches)
    assert content(first, 3, filling(b"a", calls)) == content(second, 3, filling(b"b", calls)) == b"a"
    assert content(second, 4, filling(b"b", calls)) == content(first, 4, filling(b"a", calls)) == b"b"
    assert calls == [b"a", b"b"]
    assert [cache.hit_bytes for cache in caches] == [SIZE, SIZE]
    for cache in caches:
        cache.close()


def test_threads_of_one_process_fetch_once(memory: Path) -> None:
    cache, calls, together = join(memory), list[bytes](), threading.Barrier(8)
    shard = admit(cache)

    def read(number: int) -> bytes:
        together.wait(10)
        return content(shard, 0, filling(bytes([number]), calls))

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(read, range(8)))
    assert [found[0]] == calls
    assert set(found) == {calls[0]}
    assert cache.hit_bytes == 7 * SIZE
    cache.close()


def test_server_and_cache_segments_are_mapped_side_by_side(memory: Path) -> None:
    cache, size = join(memory), SIZE + 100
    shards = {0: CacheKey(0, 0, SIZE, "float32"), 2: CacheKey(0, SIZE + BLOCK_BYTES, size + BLOCK_BYTES, "float32")}
    admitted = cache.admit("u", shards)
    server = memory / "server"
    server.write_bytes((5).to_bytes(8, "little").ljust(BLOCK_BYTES) + b"s" * BLOCK_BYTES)
    between = SegmentLocation(str(server), SIZE, SIZE + BLOCK_BYTES)
    vector = SharedVector("u", [admitted[0].location, between, admitted[2].location])
    assert not vector.shows(5)
    for shard, byte in zip(admitted.values(), (b"a", b"b"), strict=True):
        shard.ensure(5, filling(byte))
    vector.check(5)
    assert bytes(vector.bytes.tolist()) == b"a" * SIZE + b"s" * BLOCK_BYTES + b"b" * 100
    vector.bytes[0] = 0
    assert content(admitted[0], 5, failing) == b"a", "writes of a trainer are private"
    cache.close()


def test_failed_fetch_shows_no_version_and_is_retried(memory: Path) -> None:
    cache = join(memory)
    shard = admit(cache)
    vector = SharedVector("u", [shard.location])
    assert content(shard, 0, filling(b"a")) == b"a"
    with pytest.raises(UnavailableError):
        shard.ensure(1, failing)
    assert not vector.shows(0) and not vector.shows(1)
    assert content(shard, 1, filling(b"b")) == b"b"
    assert cache.hit_bytes == 0
    cache.close()


def test_late_trainer_gets_version_gone(memory: Path) -> None:
    cache = join(memory)
    shard = admit(cache)
    vector = SharedVector("u", [shard.location])
    shard.ensure(1, filling(b"a"))
    assert vector.shows(1)
    shard.ensure(2, filling(b"b"))
    with pytest.raises(VersionGoneError):
        vector.check(1)
    with pytest.raises(VersionGoneError, match=r"version 1 of unit 'unit 0' was replaced"):
        shard.ensure(1, filling(b"c"))
    assert content(shard, 2, failing) == b"b", "the older version was not restored"
    cache.close()


def test_older_version_is_rejected_after_a_newer_fetch_failed(memory: Path) -> None:
    cache = join(memory)
    shard = admit(cache)
    shard.ensure(1, filling(b"a"))
    with pytest.raises(UnavailableError):
        shard.ensure(2, failing)
    with pytest.raises(VersionGoneError):
        shard.ensure(1, filling(b"a"))
    cache.close()


def test_version_replaced_during_a_copy_is_detected(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = join(memory)
    shard = admit(cache)
    # `read` calls `count_hit` between its first check of the version and the copy.
    monkeypatch.setattr(shard, "count_hit", lambda: shard.ensure(2, filling(b"b")))
    shard.ensure(1, filling(b"a"))
    with pytest.raises(VersionGoneError):
        shard.read(1, memoryview(bytearray(SIZE)), failing)
    cache.close()


def test_wait_for_another_fetch_ends_at_the_limit(memory: Path) -> None:
    patient, hasty = join(memory), join(memory, wait_limit_s=0.02)
    slow, other = admit(patient), admit(hasty)

    def fetch(target: memoryview, _: int | None) -> None:
        with pytest.raises(
            DeadlineError, match=r"version 1 of unit 'unit 0' was not in the host cache after .* another trainer"
        ):
            other.ensure(1, failing)
        target[:] = b"a" * SIZE

    slow.ensure(1, fetch)
    assert content(other, 1, failing) == b"a"
    patient.close()
    hasty.close()


def test_close_stops_waiting_threads(memory: Path) -> None:
    patient, leaving = join(memory), join(memory, wait_limit_s=1000)
    slow, other = admit(patient), admit(leaving)

    def fetch(target: memoryview, _: int | None) -> None:
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(other.ensure, 1, failing)
            leaving.close()
            with pytest.raises(UnavailableError, match="left the host cache"):
                waiting.result(30)
        target[:] = b"a" * SIZE

    assert content(slow, 1, fetch) == b"a"
    patient.close()


# Contents of the cache.


def test_budget_of_the_first_trainer_applies_to_all(memory: Path) -> None:
    first, second = join(memory, 2 * SIZE), join(memory, 2 * SIZE)
    admit(first, 0)
    assert refuses(first, 1, 2 * SIZE)
    admit(second, 2)
    assert refuses(first, 3) and refuses(second, 4, 1)
    for cache in (first, second):
        for unit in (0, 2):
            admit(cache, unit)
        cache.close()


def test_trainer_with_a_smaller_budget_uses_cached_units(memory: Path) -> None:
    large, small = join(memory), join(memory, 1)
    assert refuses(small, 0)
    admit(large, 0).ensure(1, filling(b"a"))
    assert content(admit(small, 0), 1, failing) == b"a"
    assert refuses(small, 1)
    large.close()
    small.close()


def test_unit_is_admitted_whole_or_not_at_all(memory: Path) -> None:
    cache = join(memory, 3 * SIZE)
    halves = {number: CacheKey(0, number * 2 * SIZE, (number + 1) * 2 * SIZE, "float32") for number in range(2)}
    assert not cache.admit("u", halves)
    assert not list(memory.rglob("*.shard"))
    cache.close()


def test_runs_and_dtypes_have_separate_files(memory: Path) -> None:
    former, again = join(memory), join(memory, run=(*RUN[:2], 18))
    admit(former).ensure(0, filling(b"a"))
    assert content(admit(again), 0, filling(b"b")) == b"b"
    assert content(admit(former, dtype="int8"), 0, filling(b"c")) == b"c"
    former.close()
    again.close()


def test_full_memory_warns_once_and_keeps_cached_units(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, allocate = join(memory, 1 << 40), os.posix_fallocate
    shards = {0: CacheKey(1, 0, SIZE, "float32"), 1: CacheKey(1, SIZE, 3 * SIZE, "float32")}

    def full(descriptor: int, offset: int, size: int) -> None:
        if size > SIZE + BLOCK_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    admit(cache, 0)
    with caplog.at_level(logging.WARNING):
        assert not cache.admit("unit 1", shards)
        assert refuses(cache, 2)
    assert [f"unit 'unit 1' does not fit into {memory}" in record.message for record in caplog.records] == [True]
    assert [file.name for file in memory.rglob("*.shard")] == [f"0-0-{SIZE}-float32.shard"]
    assert not list(memory.rglob("new"))
    assert content(admit(cache, 0), 0, filling(b"a")) == b"a", "cached units are still used"
    cache.close()


# Other processes.


def test_concurrent_processes_fetch_once(memory: Path) -> None:
    cache = join(memory)
    shard = admit(cache)
    with Trainer(memory, FETCH_ONE) as other:
        assert other.read_line() == "fetching"
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(content, shard, 1, failing)
            other.resume()
            assert found.result(30) == b"c"
        assert other.read_line() == "done"
        assert other.process.wait(30) == 0
    assert cache.hit_bytes == SIZE
    cache.close()
    assert not list(memory.iterdir())


def test_fetch_of_a_killed_process_is_taken_over(memory: Path) -> None:
    cache = join(memory)
    shard = admit(cache)
    with Trainer(memory, FETCH_ONE) as other:
        assert other.read_line() == "fetching"
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(content, shard, 1, filling(b"a"))
            other.process.send_signal(signal.SIGKILL)
            assert found.result(30) == b"a"
    cache.close()
    assert not list(memory.iterdir())


def test_process_forked_during_a_fetch_holds_no_lock(memory: Path) -> None:
    caches = join(memory), join(memory, wait_limit_s=0.02)
    first, second = (admit(cache) for cache in caches)
    children: list[int] = []

    def fetch(target: memoryview, _: int | None) -> None:
        # The child inherits the open lock files. If the child kept a lock, the second cache would wait for it.
        if not (child := os.fork()):
            signal.pause()
        children.append(child)
        target[:] = b"a" * SIZE

    try:
        first.ensure(1, fetch)
        assert content(second, 2, filling(b"b")) == b"b"
        for cache in caches:
            cache.close()
        assert not list(memory.iterdir())
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# The folder.


def test_files_are_private_to_the_user(memory: Path) -> None:
    cache = join(memory)
    admit(cache)
    (folder,) = memory.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    cache.close()


def test_folder_writable_by_others_is_rejected(memory: Path) -> None:
    with_name = HostFolder("key", memory)
    with_name.close()
    with_name.path.mkdir()
    with_name.path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"expected a folder of user .* found one with mode 0777"):
        HostFolder("key", memory)


def test_missing_shared_memory_raises(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError):
        HostFolder("key", tmp_path / "missing")


def test_last_process_removes_the_folder(memory: Path) -> None:
    folders = [HostFolder("key", memory) for _ in range(3)]
    for folder in folders:
        assert list(memory.iterdir()) == [folders[0].path]
        folder.close()
    assert not list(memory.iterdir())


def test_folder_exists_while_used_under_concurrent_entering_and_leaving(memory: Path) -> None:
    def enter_and_leave(number: int) -> None:
        for turn in range(50):
            folder = HostFolder("key", memory)
            own = folder.path / f"{number}-{turn}"
            own.touch()
            assert own.exists(), "removed while in use"
            folder.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enter_and_leave, range(4)))
    assert not list(memory.iterdir())


def test_folders_of_killed_trainers_are_removed_by_any_run(memory: Path) -> None:
    with Trainer(memory, "say('here'); sys.stdin.readline()") as other:
        assert other.read_line() == "here"
        alive = join(memory, run=("another",))
        assert len(list(memory.iterdir())) == 2, "folders in use are not removed"
        other.process.send_signal(signal.SIGKILL)
        other.process.wait(30)
    (memory / f"shardwell_cache-{os.geteuid()}-emptied").mkdir(mode=0o700)
    (memory / "not ours").mkdir()
    third = join(memory, run=("third",))
    assert len(list(memory.iterdir())) == 3
    for cache in (alive, third):
        cache.close()
    assert [path.name for path in memory.iterdir()] == ["not ours"]


def test_aborted_removal_is_resumed(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = HostFolder("key", memory)
    (folder.path / "file").touch()

    def cut(path: Path) -> None:
        raise OSError(errno.EIO, "aborted")

    with monkeypatch.context() as patched:
        patched.setattr(host_cache, "_remove_empty", cut)
        folder.close()
    assert list(folder.path.iterdir()) == []
    HostFolder("other", memory).close()
    assert not list(memory.iterdir())
