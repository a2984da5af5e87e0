"""Files in shared memory: creation, full file systems, and removal after a server was killed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from shardwell_server.shard.memory import mapped_memory
from shardwell_server.shard.memory.mapped_memory import SharedMemory, ShmReserve
from shardwell_wire.errors import CapacityError
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY
from shardwell_wire.host.shared_memory import HEAD_BYTES, UPDATING, read_version

HOLD = """
import sys
from pathlib import Path
from shardwell_server.shard.memory.mapped_memory import SharedMemory
shared = SharedMemory(Path(sys.argv[1]))
shared.create_shard_file(4096, "a shard")
print("ready", flush=True)
sys.stdin.read()
shared.close()
"""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedMemory]:
    with closing(SharedMemory(tmp_path)) as made:
        yield made


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts another process that keeps a shard file in the directory until its standard input closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]


# Files.


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 10_007])
def test_file_starts_with_zeros_and_is_visible_to_other_processes(shared: SharedMemory, size_bytes: int) -> None:
    made = shared.create(size_bytes, "a gradient buffer")
    assert made.tensor.shape == (size_bytes,)
    assert made.tensor.dtype is torch.uint8
    assert not made.tensor.any()
    made.tensor.fill_(7)
    assert Path(made.path).read_bytes()[:size_bytes] == b"\7" * size_bytes
    assert Path(made.path).stat().st_mode & 0o777 == 0o600


def test_files_are_distinct(shared: SharedMemory) -> None:
    first, second = (shared.create(8, "a gradient buffer") for _ in range(2))
    first.tensor.fill_(1)
    assert first.path != second.path
    assert not second.tensor.any()


def test_unlinked_file_stays_mapped(shared: SharedMemory, tmp_path: Path) -> None:
    made = shared.create(4096, "a gradient buffer")
    view = made.tensor[100:200]
    for _ in range(2):
        made.unlink()
    assert files(tmp_path) == []
    del made
    view.fill_(3)
    assert view.sum() == 300


def test_shard_file_shows_no_version_before_publication_and_after_close(shared: SharedMemory, tmp_path: Path) -> None:
    segment = shared.create_shard_file(100, "a shard")
    head = memoryview(Path(segment.shared.path).read_bytes())
    assert (len(head), read_version(head)) == (HEAD_BYTES + 100, UPDATING)
    with open(segment.shared.path, "rb", buffering=0) as reader:
        for version in (0, 1 << 40):
            segment.show(version)
            assert read_version(memoryview(os.pread(reader.fileno(), 8, 0))) == version
        segment.buffer.fill_(9)
        assert os.pread(reader.fileno(), 200, HEAD_BYTES) == b"\t" * 100
        segment.close()
        assert read_version(memoryview(os.pread(reader.fileno(), 8, 0))) == UPDATING
    assert files(tmp_path) == []


# Full file systems.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT])
def test_full_file_system_raises_an_error_with_advice(
    shared: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fail)
        with pytest.raises(CapacityError) as caught:
            shared.create(1 << 20, "a gradient buffer for unit 'u'")
    for words in (
        "a gradient buffer for unit 'u'",
        "1048576 bytes",
        str(tmp_path),
        os.strerror(code),
        "--shm-dir none",
    ):
        assert words in str(caught.value)
    assert files(tmp_path) == []
    assert shared.create(8, "a gradient buffer").tensor.shape == (8,)


def test_full_file_system_without_inodes_raises(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(CapacityError):
        shared.create(8, "a gradient buffer")


def test_exhausted_file_descriptors_raise_capacity_error(shared: SharedMemory, tmp_path: Path) -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The next free descriptor, so that no further file can be opened.
    with open(os.devnull) as next_one:
        lowest = next_one.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, most))
    try:
        with pytest.raises(CapacityError, match=r"Too many open files\): raise the limit of open files"):
            shared.create(8, "a gradient buffer")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
    assert files(tmp_path) == []


def test_other_failures_are_not_capacity_errors(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        shared.create(8, "a gradient buffer")


def test_file_larger_than_the_file_system_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mapped_memory, "DEFAULT_DIRECTORY", tmp_path)  # no reserve applies outside the default folder
    with closing(SharedMemory(DEFAULT_DIRECTORY)) as shared:
        status = os.statvfs(DEFAULT_DIRECTORY)
        with pytest.raises(CapacityError, match="No space left on device"):
            shared.create(2 * status.f_blocks * status.f_frsize, "a shard")  # rejected before anything is allocated


# Removal.


def test_close_removes_all_files(tmp_path: Path) -> None:
    shared = SharedMemory(tmp_path)
    made = shared.create(4096, "a gradient buffer")
    shared.close()
    assert list(tmp_path.iterdir()) == []
    made.tensor.fill_(1)


def test_files_of_a_killed_server_are_removed_by_the_next(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    assert len(files(tmp_path)) == 1
    holder.send_signal(signal.SIGKILL)
    holder.wait(20)
    assert len(files(tmp_path)) == 1
    with closing(SharedMemory(tmp_path)):
        assert files(tmp_path) == []
        assert len(list(tmp_path.iterdir())) == 1, "only the new server's folder is left"


def test_files_of_a_running_server_are_kept(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    before = files(tmp_path)
    with closing(SharedMemory(tmp_path)):
        assert files(tmp_path) == before
    assert files(tmp_path) == before
    holder.communicate(b"", timeout=20)
    assert list(tmp_path.iterdir()) == []


def _folder(directory: Path) -> None:
    (directory / "shardwell-notes").mkdir()
    (directory / "shardwell-notes" / "notes").touch()


def _file(directory: Path) -> None:
    (directory / "shardwell-file").touch()


def _other(directory: Path) -> None:
    (directory / "other").mkdir()
    (directory / "other" / "lock").touch()


def test_occupied_folder_name_does_not_prevent_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*, prefix: str, **_: object) -> str:
        path = tmp_path / f"{prefix}abcdefgh"
        path.mkdir(mode=0o700)
        (tmp_path / path.name.removeprefix(".") / "taken").mkdir(parents=True)
        return str(path)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    # The server's folder would be named after its temporary folder, but that name is occupied.
    with closing(SharedMemory(tmp_path)) as shared:
        assert Path(shared.create(8, "a gradient buffer").path).parent.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["shardwell-abcdefgh"]


def _fifo(directory: Path) -> None:
    (directory / "shardwell-fifo").mkdir(mode=0o755)
    os.mkfifo(directory / "shardwell-fifo" / "lock")


def _own_fifo(directory: Path) -> None:
    (directory / "shardwell-fifo").mkdir(mode=0o700)
    os.mkfifo(directory / "shardwell-fifo" / "lock")


def _link(directory: Path) -> None:
    (directory / "elsewhere").mkdir(mode=0o700)
    (directory / "elsewhere" / "lock").touch()
    (directory / "shardwell-link").symlink_to(directory / "elsewhere")


@pytest.mark.parametrize("make", [_folder, _file, _other, _fifo, _own_fifo, _link])
def test_files_that_belong_to_no_server_are_kept(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    # In a separate process with a time limit: opening a FIFO for reading blocks until a process writes to it.
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ready\n", b"")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("is_default", "advice"), [(True, "docker: shm_size"), (False, "compose: SHARDWELL_SHM_SIZE")])
def test_advice_fits_the_file_system(
    is_default: bool, advice: str, shared: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module = "shardwell_server.shard.memory.mapped_memory"
    monkeypatch.setattr(f"{module}._map_new", no_room)
    if is_default:
        monkeypatch.setattr(f"{module}.DEFAULT_DIRECTORY", tmp_path)
    with pytest.raises(CapacityError, match=advice):
        shared.create(100, "a shard")


# Memory that is left free for other programs.


def test_reserve_stays_free_in_a_shared_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, block = os.statvfs(tmp_path), 4096
    free = {"blocks": 1 << 18}

    def sizes(_: object) -> os.statvfs_result:
        values = list(found)
        values[0], values[1], values[2], values[4] = block, block, 1 << 18, free["blocks"]
        return os.statvfs_result(values)

    monkeypatch.setattr(mapped_memory, "DEFAULT_DIRECTORY", tmp_path)
    monkeypatch.setattr(os, "statvfs", sizes)
    with closing(SharedMemory(tmp_path)) as shared:
        made = shared.create(4096, "a shard")
        free["blocks"] = (1 << 16) + 1  # a quarter of 1 GiB, and a block
        shared.create(4096, "a shard")
        for _ in range(3):
            with pytest.raises(CapacityError, match=r"268439552 of 1073741824 bytes are free, of which 268435456 are"):
                shared.create(4097, "a shard")
        assert len([line for line in caplog.messages if "are left to other programs" in line]) == 1, (
            "the message is logged once"
        )
        made.unlink()


def test_small_shared_file_system_is_not_used_and_a_private_one_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sizes(_: object) -> os.statvfs_result:
        values = list(os.statvfs_result(range(11)))
        values[0], values[1], values[2], values[4] = 4096, 4096, 1 << 14, 1 << 14  # 64 MiB, as in Docker
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", sizes)
    assert ShmReserve(tmp_path, tmp_path).problem(1) is not None
    assert ShmReserve(tmp_path, tmp_path / "nowhere").problem(1 << 26) is None
