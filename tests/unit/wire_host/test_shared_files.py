"""Files of other processes are opened only if they are regular files of this user, in a folder of this user."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwell_wire.host.shared_memory import (
    UntrustedFileError,
    open_file,
    open_folder,
    open_in_folder,
    opened,
    server_folder,
)

CONTENT = b"precious"


def _symbolic_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _dangling_link(path: Path, target: Path) -> None:
    path.symlink_to(target.with_name("missing"))


def _hard_link(path: Path, target: Path) -> None:
    path.hardlink_to(target)


def _folder(path: Path, _: Path) -> None:
    path.mkdir()


def _fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _writable_by_others(path: Path, _: Path) -> None:
    path.write_bytes(CONTENT)
    path.chmod(0o622)


def _longer(path: Path, _: Path) -> None:
    path.write_bytes(CONTENT + b"!")


def _shorter(path: Path, _: Path) -> None:
    path.write_bytes(CONTENT[1:])


WRONG = {
    _symbolic_link: "found a symbolic link",
    _dangling_link: "found a symbolic link",
    _hard_link: r"found one with 2 \(hard links\)",
    _folder: "found a folder",
    _fifo: "found a FIFO",
    _socket: "found a socket",
    _writable_by_others: "no other user can write to, found one with mode 0622",
    _longer: "expected a file of 8 bytes, found 9",
    _shorter: "expected a file of 8 bytes, found 7",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shardwell-folder"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def target(tmp_path: Path) -> Path:
    made = tmp_path / "target"
    made.write_bytes(CONTENT)
    made.chmod(0o600)
    return made


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__.strip("_"))
def test_path_that_is_not_a_regular_file_is_rejected(
    folder: Path, target: Path, make: Callable[[Path, Path], None], write: bool
) -> None:
    path = folder / "file"
    make(path, target)
    with pytest.raises(UntrustedFileError, match=WRONG[make]) as caught:
        open_in_folder(str(path), write=write, size_bytes=len(CONTENT))
    assert caught.value.filename == "file"
    assert target.read_bytes() == CONTENT
    assert not target.with_name("missing").exists()


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_device_is_rejected(path: str) -> None:
    with pytest.raises(UntrustedFileError, match=r"expected a regular file .*, found a device"):
        open_file(path)


def test_file_of_another_user_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_bytes(CONTENT)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UntrustedFileError, match=f"expected a regular file of user {owner + 1} .* user {owner}"):
        open_file(folder / "file")
    with pytest.raises(UntrustedFileError, match=f"expected a folder of user {owner + 1} .* user {owner}"):
        open_folder(folder)


@pytest.mark.parametrize("create", [False, True])
def test_regular_file_is_opened_without_truncation(folder: Path, create: bool) -> None:
    path = folder / "file"
    path.write_bytes(CONTENT)
    path.chmod(0o600)
    with opened(open_file(path, write=True, create=create, size_bytes=len(CONTENT))) as descriptor:
        assert os.pread(descriptor, 100, 0) == CONTENT
        os.pwrite(descriptor, b"P", 0)
        assert not os.get_inheritable(descriptor)
    assert path.read_bytes() == b"Precious"


def test_missing_file_is_created_only_on_request(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_in_folder(str(folder / "file"), write=True)
    with opened(open_file(folder / "file", create=True)):
        assert (folder / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o704, 0o702, 0o740, 0o770, 0o777, 0o1777])
def test_folder_that_other_users_can_list_or_write_to_is_rejected(folder: Path, mode: int) -> None:
    (folder / "file").write_bytes(CONTENT)
    folder.chmod(mode)
    with pytest.raises(UntrustedFileError, match=f"no other user can list or write to, found one with mode {mode:04o}"):
        open_in_folder(str(folder / "file"))


@pytest.mark.parametrize("make", [_symbolic_link, _fifo, _socket, _longer])
def test_path_that_is_not_a_folder_is_rejected(
    tmp_path: Path, folder: Path, make: Callable[[Path, Path], None]
) -> None:
    make(tmp_path / "other", folder)
    with pytest.raises(UntrustedFileError, match="expected a folder"):
        open_folder(tmp_path / "other")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "../target"])
def test_names_with_separators_are_rejected(folder: Path, target: Path, name: str) -> None:
    with opened(open_folder(folder)) as descriptor, pytest.raises(UntrustedFileError, match="plain name"):
        open_file(name, folder=descriptor)


@pytest.mark.parametrize(
    "path",
    ["", "file", "shardwell-a/file", "/home/me/file", "/dev/shm/shardwell-a/../x/file", "/dev/shm/shardwell-a//file"],
)
def test_path_outside_a_server_folder_is_rejected(path: str) -> None:
    with pytest.raises(UntrustedFileError):
        server_folder(path)
