"""Structure of the packages: no import cycles, and unique names of public classes within client and server."""

from __future__ import annotations

import ast
from collections import defaultdict
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
