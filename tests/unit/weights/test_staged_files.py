"""Staged files appear together, even if the writer is interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwell.weights.weight_files import staged

MARKERS = ("index",)


def write(folder: Path, content: str, count: int) -> None:
    with staged(folder, markers=MARKERS, is_exported=lambda name: name.startswith("part")) as stage:
        for number in range(count):
            (stage / f"part{number}").write_text(content)
        (stage / "index").write_text(content)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_staged_files_replace_old_files_and_keep_others(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("mine")
    write(tmp_path, "old", 3)
    write(tmp_path, "new", 2)
    assert contents(tmp_path) == {"config": "mine", "part0": "new", "part1": "new", "index": "new"}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_interruption_during_the_move_leaves_no_marker(
    tmp_path: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "old", 2)
    replace, moved = Path.replace, []

    def stopping(path: Path, target: Path) -> Path:
        if len(moved) == stop_after:
            raise KeyboardInterrupt
        moved.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, "new", 2)
    assert "index" not in contents(tmp_path) and moved == ["part0", "part1"][:stop_after]


def test_created_folder_is_removed_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ValueError), staged(tmp_path / "new", markers=MARKERS, is_exported=lambda name: False) as stage:
        (stage / "part0").write_text("x")
        raise ValueError
    assert contents(tmp_path) == {} and not (tmp_path / "new").exists()
