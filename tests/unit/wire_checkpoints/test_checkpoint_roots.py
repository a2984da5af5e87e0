"""Which folders and URLs an operator's ``--checkpoint-root`` allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwell_wire.checkpoints.storage import CheckpointRoots, LocalStorage, absolute, check_writable
from shardwell_wire.errors import AccessError, InvalidRequestError


def refused(roots: CheckpointRoots, url: str) -> bool:
    try:
        roots.open(url)
    except AccessError:
        return True
    except InvalidRequestError as error:
        assert "lacks the package" in str(error)  # allowed, and this host has no package for it
    return False


def test_without_a_key_every_folder_is_allowed_and_with_a_key_none() -> None:
    assert not refused(CheckpointRoots.from_option("", is_protected=False), "/anywhere")
    assert refused(CheckpointRoots.from_option("", is_protected=True), "/anywhere")
    assert not refused(CheckpointRoots.from_option("any", is_protected=True), "/anywhere")
    assert refused(CheckpointRoots.from_option("/data", is_protected=False), "/anywhere")


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("gs://bucket/runs", True),
        ("gcs://bucket/runs/a/b", True),
        ("gs://bucket/runs/", True),
        ("gs://bucket/runs-2", False),
        ("gs://bucket", False),
        ("gs://other/runs", False),
        ("gs://bucket/runs/../x", False),
        ("gs://bucket/runs//x", False),
        ("gs://bucket/runs/./x", False),
        ("gs://bucket/runs/x?generation=1", False),
        ("s3://bucket/runs", False),
        ("az://container@account.dfs.core.windows.net/x", True),
        ("abfs://container@account.dfs.core.windows.net/x", True),
        ("az://container@other.dfs.core.windows.net/x", False),
        ("/data", True),
        ("/data/a/b", True),
        ("file:///data/a", True),
        ("/data/../etc", False),
        ("/data-2", False),
        ("/", False),
        ("bucket/runs", False),
    ],
)
def test_only_folders_below_a_root_are_allowed(url: str, is_allowed: bool) -> None:
    option = "gs://bucket/runs, /data,az://container@account.dfs.core.windows.net"
    assert refused(CheckpointRoots.from_option(option, is_protected=True), url) is not is_allowed


@pytest.mark.parametrize("option", ["relative", "./data", "ftp://host/x", "s3:/bucket", "/data,relative", "a::b://c"])
def test_a_root_is_an_absolute_path_or_a_known_url(option: str) -> None:
    with pytest.raises(ValueError, match="--checkpoint-root"):
        CheckpointRoots.from_option(option, is_protected=True)


def test_a_trainer_is_told_of_a_misspelt_protocol_before_it_connects() -> None:
    for url in ("s4://bucket/x", "http://host/x", "simplecache::s3://bucket/x"):
        with pytest.raises(InvalidRequestError, match="starts with file://, s3://, gs:// or az://"):
            absolute(url)


def test_links_lead_out_of_no_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "run", outside / "run"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    (root / "folder").symlink_to(outside)
    (root / "run" / "link").symlink_to(outside / "run" / "file")
    storage = CheckpointRoots([str(root)]).open(str(root))
    assert storage.read("run/file") == b"x"
    for action in (
        lambda: storage.read("run/link"),
        lambda: storage.size("run/link"),
        lambda: storage.names("folder"),
        lambda: storage.read("folder/run/file"),
        lambda: storage.write_whole("folder/new", b""),
        lambda: storage.create("folder/new", 1),
        lambda: storage.make_folder("folder/new"),
        lambda: storage.delete("folder/run/file"),
        lambda: storage.delete_folder("folder/run"),
        lambda: storage.below("folder").names(),
        lambda: check_writable(storage.below("folder")),
    ):
        with pytest.raises(AccessError, match="link out of"):
            action()
    storage.delete("run/link")  # the link itself
    assert sorted(path.name for path in outside.rglob("*")) == ["file", "run"]
    assert not (root / "run" / "link").is_symlink()


def test_a_root_may_be_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    for url in (tmp_path / "root", tmp_path / "disk"):
        storage = CheckpointRoots([str(tmp_path / "root")]).open(str(url / "run"))
        check_writable(storage)
        assert isinstance(storage, LocalStorage)
