"""The locked packages of the images are those that the project needs, at the tested versions, each with a hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path.read_text() for path in (ROOT / "deploy" / "locks").glob("*.txt")}
PINNED = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def locked(*names: str) -> dict[str, str]:
    """Returns the version of each package in some files. The last one counts."""
    text = "\n".join(LOCKS[name] for name in names)
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def test_images_have_the_tested_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    trainer = [each for each in extras["demo"] if each != "shardwell[train]"]
    locks = {"server": [*project["dependencies"], *extras["dashboard"]], "torch": extras["train"], "trainer": trainer}
    for needed, found in ((needed, locked(name)) for name, needed in locks.items()):
        for name in (re.split(r"[<>=~]", requirement)[0] for requirement in needed):
            assert found[name] == PINNED[name], f"{name}: run make lock"


def test_every_package_has_a_hash() -> None:
    assert LOCKS.keys() == {"torch", "cuda", "server", "trainer", "grpcurl"}
    for name, text in LOCKS.items():
        for entry in re.split(r"\n(?=[\w-])", text)[1:]:
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), (name, entry)
