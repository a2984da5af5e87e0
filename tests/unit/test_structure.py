"""Structure of the packages: no import cycles, and unique names of public classes within client and server."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "shardwell": ROOT / "client/shardwell",
    "shardwell_server": ROOT / "server/shardwell_server",
    "shardwell_wire": ROOT / "protos/shardwell_wire",
}


@cache
def modules(package: str) -> dict[str, ast.Module]:
    """Returns the syntax tree of each module by its qualified name. Generated stubs are left out."""
    folder = PACKAGES[package]
    return {
        ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in sorted(folder.rglob("*.py"))
        if "_pb2" not in path.name
    }


def imports(module: str, tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[str]:
    """Yields the modules of a package that a module imports, at any place, also under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if name in known)
            if node.module in known and any(name not in known for name in names):
                yield node.module


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_do_not_import_each_other_in_a_cycle(package: str) -> None:
    known = modules(package)
    graph = {module: set(imports(module, tree, known)) - {module} for module, tree in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle, counting imports under TYPE_CHECKING: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("package", ["shardwell", "shardwell_server"])
def test_public_class_names_are_unique(package: str) -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules(package).items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(module)
    assert {name: where for name, where in owners.items() if len(where) > 1} == {}


# Whoever exceeds a limit divides, merges or removes something. Only new capabilities raise a limit, by what they need:
# stages and dataflow of models that people use, and inference engines that follow a run, have raised files and lines.
MAX_FILES, MAX_LINES, MAX_PROTOCOLS, MAX_EQUAL_NAMES = 328, 96_000, 20, 20
MAX_FILES_OF_ROOM, MAX_FLOORS_OF_ROOM = 17, 8
MAX_LINES_OF_ADAPTER = 100
"""What an engine needs of its own. Code that other engines could use is in the package ``shardwell.engines``."""


def rooms() -> dict[str, dict[str, set[str]]]:
    """Returns the modules of each room, and the modules of the same room that each of them imports."""
    found: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for package in PACKAGES:
        known = modules(package)
        parents = {module.rpartition(".")[0] for module in known}
        room_of = {module: module if module in parents else module.rpartition(".")[0] for module in known}
        for module, tree in known.items():
            own = {name for name in imports(module, tree, known) if room_of[name] == room_of[module]}
            found[room_of[module]][module] = own - {module}
    return found


def test_rooms_are_small() -> None:
    assert {room: len(files) for room, files in rooms().items() if len(files) > MAX_FILES_OF_ROOM} == {}


def test_rooms_have_few_floors() -> None:
    """A module stands one floor above the highest module of its room that it imports."""
    for room, files in rooms().items():
        floors: dict[str, int] = {}
        for module in TopologicalSorter(files).static_order():
            floors[module] = 1 + max((floors[name] for name in files[module]), default=0)
        assert max(floors.values()) <= MAX_FLOORS_OF_ROOM, f"{room}: {floors}"


def test_source_is_small() -> None:
    paths = {path for folder in PACKAGES.values() for path in folder.rglob("*.py") if "_pb2" not in path.name}
    lines = sum(len(path.read_text().splitlines()) for path in paths)
    names = Counter(path.name for path in paths if path.name != "__init__.py")
    classes = [node for name in PACKAGES for tree in modules(name).values() for node in ast.walk(tree)]
    protocols = [
        node for node in classes if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
    ]
    found = {
        "files": len(paths),
        "lines": lines,
        "Protocols": len(protocols),
        "files that share their name": sum(count for count in names.values() if count > 1),
    }
    limits = dict(zip(found, (MAX_FILES, MAX_LINES, MAX_PROTOCOLS, MAX_EQUAL_NAMES), strict=True))
    assert {what: count for what, count in found.items() if count > limits[what]} == {}, limits


def test_adapters_of_engines_are_small() -> None:
    adapters = set((PACKAGES["shardwell"] / "engines").glob("*.py"))
    lines = {path.stem: len(path.read_text().splitlines()) for path in adapters}
    assert lines.pop("__init__") and lines.pop("live_model")  # for every engine, and for models without one
    assert lines and {name: count for name, count in lines.items() if count > MAX_LINES_OF_ADAPTER} == {}
