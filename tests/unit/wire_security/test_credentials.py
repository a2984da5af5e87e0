"""Servers check the cluster's token, and processes of the user find its file."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from shardwell import find_credentials as local
from shardwell.find_credentials import PublishedCredentials, find_credentials
from shardwell.transport.service_client import CoordinatorClient
from shardwell_server.cli import main as server_command
from shardwell_wire.errors import UnauthenticatedError, UsageError
from shardwell_wire.security import credentials as wire
from shardwell_wire.security import secret_files
from shardwell_wire.security.credentials import (
    NO_CREDENTIALS,
    Credentials,
    MemberCredentials,
    new_key,
    read_key_file,
    read_token_file,
    token_in,
)
from shardwell_wire.security.tokens import LIFETIME_S, ClusterKey, Role

TOKEN = "0123456789abcdef"
OTHER = "fedcba9876543210"

HOLD = """
import sys
from shardwell.find_credentials import PublishedCredentials
from shardwell_wire.security.tokens import ClusterKey
published = PublishedCredentials(sys.argv[1], ClusterKey(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


def operator(secret: str) -> Credentials:
    return Credentials(ClusterKey(secret))


# What a caller sends.


def test_credentials_send_their_token() -> None:
    key = new_key()
    made = Credentials(key)
    assert made.metadata == (("authorization", f"Bearer {made.token}"),)
    assert made.header == f"authorization: Bearer {made.token}"
    assert made.token == made.token, "made once"
    assert token_in([("user-agent", "x"), *made.metadata]) == made.token
    assert new_key() != key
    assert (NO_CREDENTIALS.metadata, NO_CREDENTIALS.header, bool(NO_CREDENTIALS)) == ((), "", False)


def test_key_holder_makes_a_new_token_before_the_former_one_expires() -> None:
    now = [1000.0]
    made = Credentials(ClusterKey(TOKEN, lambda: now[0]), role=Role.SERVER)
    first = made.token
    now[0] += LIFETIME_S / 2 - 1
    assert made.token == first
    now[0] += 1
    assert made.token != first
    assert made.key.verify(first).role is made.key.verify(made.token).role is Role.SERVER


def test_member_uses_the_renewed_token() -> None:
    member = MemberCredentials.of(Credentials(text="sw1.base"))
    assert (member.token, member.is_member) == ("sw1.base", False)
    member.renew("sw1.first")
    member.renew("")
    assert (member.token, member.is_member) == ("sw1.first", True)
    member.renew("sw1.second")
    assert member.token == "sw1.second"
    member.forget()
    assert (member.token, member.is_member) == ("sw1.base", False)


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ([], "carries no token"),
        ([("x-authorization", f"Bearer {TOKEN}")], "carries no token"),
        ([("authorization", TOKEN)], "something else than a token"),
        ([("authorization", f"bearer {TOKEN}")], "something else than a token"),
        ([("authorization", b"\xff")], "something else than a token"),
        ([("authorization", f"Bearer {OTHER}"), ("authorization", f"Bearer {TOKEN}")], "2 authorization headers"),
    ],
)
def test_metadata_without_one_token_is_explained(metadata: list[tuple[str, str | bytes]], problem: str) -> None:
    with pytest.raises(UnauthenticatedError, match=problem) as refused:
        token_in(metadata)
    assert TOKEN not in str(refused.value)
    assert OTHER not in str(refused.value)


def test_secrets_are_not_in_repr() -> None:
    made = Credentials(ClusterKey(TOKEN))
    for shown in (made, Credentials(text=made.token), MemberCredentials.of(made)):
        assert TOKEN not in f"{shown!r} {shown} {[shown]}"
        assert made.token not in f"{shown!r} {shown} {[shown]}"


def test_client_repr_does_not_contain_the_token() -> None:
    made = Credentials(new_key())
    with closing(CoordinatorClient("127.0.0.1:1", made)) as client:
        stubs = [client.byte_response_stub("WatchEvents"), client._open_unary("ListRuns")]
        assert made.token not in repr((stubs, vars(client)))
        assert made.key.secret not in repr((stubs, vars(client)))


# Files.


def write(path: Path, text: str = f"{TOKEN}\n", mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("text", [TOKEN, f"{TOKEN}\n", f"  {TOKEN}\r\n"])
def test_token_file_is_read(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "token", text, 0o400)
    (tmp_path / "link").symlink_to(path)
    assert read_token_file(path) == read_token_file(tmp_path / "link") == operator(TOKEN)


def test_token_file_may_have_one_token(tmp_path: Path) -> None:
    token = ClusterKey(TOKEN).mint(Role.TRAINER, run="a run/with 100% ünusual.names", run_id="0011", member="t 1")
    path = write(tmp_path / "token", token)
    assert read_token_file(path) == Credentials(text=token)
    with pytest.raises(UsageError, match="a server needs the cluster's key") as refused:
        read_key_file(path)
    assert token not in str(refused.value)
    assert read_key_file(write(tmp_path / "key")) == operator(TOKEN)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o777])
def test_token_file_accessible_to_other_users_is_rejected(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match=f"other users can access it \\(mode {mode:04o}\\): run chmod 600"):
        read_token_file(write(tmp_path / "token", mode=mode))


@pytest.mark.parametrize(
    "text", ["", "\n", "short", "x" * 513, "two words of text here", f"{TOKEN}\n{OTHER}", "é" * 20]
)
def test_invalid_token_is_rejected_and_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="expected one line with a token, or with a key of 16 to 512") as caught:
        read_token_file(write(tmp_path / "token", text))
    assert TOKEN not in str(caught.value)
    assert not text.strip() or text.strip() not in str(caught.value)


def _missing(_: Path) -> None:
    pass


@pytest.mark.parametrize("make", [_missing, Path.mkdir, os.mkfifo])
def test_token_file_that_is_not_a_regular_file_is_rejected(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "token")
    with pytest.raises(
        UsageError, match=r"token file .*/token(: expected a regular file| cannot be read: No such file)"
    ):
        read_token_file(tmp_path / "token")


def test_token_file_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, owner = write(tmp_path / "token"), os.geteuid()
    if owner == 0:
        os.chown(path, 1, 1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 2)
    with pytest.raises(UsageError, match=f"it belongs to user {owner or 1}, expected user {owner + 2} or root"):
        read_token_file(path)


# Looking up the token of a local cluster.


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Yields the user's runtime folder."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(local, "_SHARED_DIRECTORY", tmp_path)
    monkeypatch.delenv("SHARDWELL_TOKEN_FILE", raising=False)
    return folder


@pytest.fixture
def publish() -> Iterator[Callable[..., PublishedCredentials]]:
    """Publishes a token, and removes it at the end of the test."""
    with ExitStack() as stack:

        def make(address: str = "127.0.0.1:7", token: str = TOKEN) -> PublishedCredentials:
            published = PublishedCredentials(address, ClusterKey(token))
            stack.callback(published.withdraw)
            return published

        yield make


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("address", ["127.0.0.1:7", "localhost:7", "[::1]:7", "127.3.0.1:7"])
def test_local_cluster_is_found_by_any_name_of_this_host(
    runtime: Path, publish: Callable[..., PublishedCredentials], address: str
) -> None:
    published = publish()
    assert find_credentials(address) == operator(TOKEN)
    assert find_credentials("127.0.0.1:8") == find_credentials("elsewhere:7") == NO_CREDENTIALS
    (path,) = files(runtime)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for _ in range(2):
        published.withdraw()
    assert find_credentials(address) == NO_CREDENTIALS
    assert list(runtime.iterdir()) == []


def test_token_sources_are_tried_in_order(
    runtime: Path, tmp_path: Path, publish: Callable[..., PublishedCredentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(token="p" * 16)
    monkeypatch.setenv("SHARDWELL_TOKEN_FILE", str(write(tmp_path / "environment", "e" * 16)))
    explicit = str(write(tmp_path / "explicit", "x" * 16))
    given = ClusterKey(TOKEN).mint(Role.READER, run="r", run_id="0011")
    assert find_credentials("localhost:7", explicit) == operator("x" * 16)
    assert find_credentials("localhost:7") == operator("p" * 16), "the token of another cluster would be rejected"
    assert find_credentials("localhost:8") == operator("e" * 16)
    monkeypatch.setenv("SHARDWELL_TOKEN", given)
    assert find_credentials("localhost:7") == operator("p" * 16)
    assert find_credentials("localhost:8") == Credentials(text=given)
    monkeypatch.setenv("SHARDWELL_TOKEN", TOKEN)
    with pytest.raises(UsageError, match="SHARDWELL_TOKEN: expected a token") as refused:
        find_credentials("localhost:8")
    assert TOKEN not in str(refused.value)


def test_token_of_killed_process_is_ignored_and_removed(
    runtime: Path, publish: Callable[..., PublishedCredentials]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, "127.0.0.1:7", TOKEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert find_credentials("localhost:7") == operator(TOKEN)
        publish("127.0.0.1:8", OTHER)
        assert len(files(runtime)) == 2, "tokens of live processes are not removed"
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        assert find_credentials("localhost:7") == NO_CREDENTIALS
        publish("127.0.0.1:9", OTHER)
        assert sorted(path.name.partition(".")[0] for path in files(runtime)) == ["localhost:8", "localhost:9"]
    finally:
        process.kill()
        process.communicate()


def _foreign(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)
    write(path / "localhost:7.1", OTHER)


def _link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.mkdir(mode=0o700)
    write(target / "localhost:7.1", OTHER)
    path.symlink_to(target)


@pytest.mark.parametrize("squat", [_foreign, _link, Path.touch, os.mkfifo])
def test_folder_of_another_user_is_not_used(
    runtime: Path,
    tmp_path: Path,
    publish: Callable[..., PublishedCredentials],
    monkeypatch: pytest.MonkeyPatch,
    squat: Callable[[Path], object],
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    squat(tmp_path / f"shardwell_tokens-{os.geteuid()}")
    before = set(files(tmp_path))
    assert find_credentials("localhost:7") == NO_CREDENTIALS
    publish()
    assert find_credentials("localhost:7") == operator(TOKEN)
    (made,) = set(files(tmp_path)) - before
    assert made.parent.name.startswith(f"shardwell_tokens-{os.geteuid()}-")


def test_runtime_folder_of_another_user_is_not_used(
    runtime: Path, tmp_path: Path, publish: Callable[..., PublishedCredentials]
) -> None:
    runtime.chmod(0o755)
    publish()
    assert list(runtime.iterdir()) == []
    assert find_credentials("localhost:7") == operator(TOKEN)
    assert (tmp_path / f"shardwell_tokens-{os.geteuid()}").is_dir()


def test_missing_folder_is_logged_and_the_cluster_starts(
    runtime: Path,
    publish: Callable[..., PublishedCredentials],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(local, "_candidates", lambda: [runtime / "missing" / "folder"])
    with caplog.at_level(logging.WARNING):
        publish()
    assert "cannot look up the key of the cluster at 127.0.0.1:7" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_invalid_entry_in_the_token_folder_is_ignored(
    runtime: Path, publish: Callable[..., PublishedCredentials], make: Callable[[Path], object]
) -> None:
    publish("127.0.0.1:8")
    make(runtime / "shardwell_tokens" / "localhost:7.0")
    assert find_credentials("localhost:7") == NO_CREDENTIALS
    publish()
    assert find_credentials("localhost:7") == operator(TOKEN)


# Pipes.


@pytest.fixture
def _no_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what other tests have read from pipes whose numbers are used again."""
    monkeypatch.setattr(wire, "_piped", {})


@pytest.mark.usefixtures("_no_pipes")
def test_pipe_is_read_once_and_closed() -> None:
    read, written = os.pipe()
    os.write(written, f"{TOKEN}\n".encode())
    os.close(written)
    path = f"/dev/fd/{read}"
    assert read_token_file(path) == read_token_file(path) == operator(TOKEN)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


@pytest.mark.usefixtures("_no_pipes")
def test_pipe_that_stays_open_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_files, "_PIPE_TIMEOUT_S", 0.05)
    read, written = os.pipe()
    try:
        os.write(written, TOKEN.encode())
        with pytest.raises(UsageError, match="must close it") as refused:
            read_token_file(f"/proc/self/fd/{read}")
        assert TOKEN not in str(refused.value)
    finally:
        os.close(written)


@pytest.mark.usefixtures("_no_pipes")
def test_descriptor_of_a_file_is_checked_as_the_file(tmp_path: Path) -> None:
    for mode in (0o600, 0o644):
        with write(tmp_path / f"{mode:o}", mode=mode).open() as file:
            path = f"/dev/fd/{file.fileno()}"
            if mode == 0o600:
                assert read_token_file(path) == operator(TOKEN)
            else:
                with pytest.raises(UsageError, match="other users can access it"):
                    read_token_file(path)


def test_pipe_is_refused_for_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    read, written = os.pipe()
    try:
        options = ["--coordinator", "127.0.0.1:1", "--processes", "2", "--token-file", f"/dev/fd/{read}"]
        assert server_command(["shard", *options]) == 1
        assert "is a pipe, which one process can read: name a file for --processes 2" in capsys.readouterr().err
    finally:
        os.close(read)
        os.close(written)
