"""Imports and paths in texts exist: in modules, in strings such as programs of tests, in docstrings, and in docs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "shardwell": ROOT / "client/shardwell",
    "shardwell_server": ROOT / "server/shardwell_server",
    "shardwell_wire": ROOT / "protos/shardwell_wire",
    "tests": ROOT / "tests",
    "benchmarks": ROOT / "benchmarks",
}
"""The packages and their folders."""

PLACES = ("client", "server", "protos", "tests", "benchmarks", "examples", "docs", "deploy", ".ci")
SUFFIXES = ("", ".md", ".proto", ".py", ".sh", ".yaml", ".yml")
"""Folders and kinds of files in which imports are looked for, besides the files of the root."""

MODULE = rf"((?:{'|'.join(FOLDERS)})(?:\.\w+)*)"
IMPORT = re.compile(
    rf"\bfrom {MODULE} import (?:\(([\w\s,#.]+)\)|([\w*]+(?: as \w+)?(?:, *[\w*]+(?: as \w+)?)*))"
    rf"|(?<![\w.] )\bimport {MODULE}\b(?! +\w)"
    rf"|(?:-m[ =]|\"-m\", \"){MODULE}"
)
"""``from MODULE import NAMES``, ``import MODULE`` and ``python -m MODULE``."""

PATH = re.compile(r"(?<!`)`{1,2}((?:[\w.-]+/)*(?:[\w-]+\.(?:py|proto)|[a-z_]+/))`{1,2}")
"""A file or a folder between backticks."""

EXAMPLES = {"train.py"}
"""Names of files that stand for a user's own."""


def texts() -> Iterator[Path]:
    """Yields the files in which imports are looked for."""
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in SUFFIXES)
    for place in PLACES:
        yield from (path for path in (ROOT / place).rglob("*") if path.is_file() and path.suffix in SUFFIXES)


def file_of(module: str) -> Path | None:
    """Returns the file of a module, or the folder of a package without one. None: it does not exist."""
    package, *rest = module.split(".")
    path = FOLDERS[package].joinpath(*rest)
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py", path) if each.exists()), None)


@cache
def names_of(module: str) -> frozenset[str]:
    """Returns the names that a module defines or imports, whatever the condition, and those in its ``__all__``."""
    path = file_of(module)
    if path is None or path.is_dir():
        return frozenset()
    names, statements = set[str](), list[ast.AST](ast.parse(path.read_text()).body)
    while statements:
        node = statements.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
            if isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*":
                names.update(names_of(node.module))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names.update(("__all__", *ast.literal_eval(node.value)))
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.Tuple):
            statements += ast.iter_child_nodes(node)
    return frozenset(names)


def missing(text: str) -> Iterator[str]:
    """Yields the modules and names that a text imports and that do not exist."""
    for found in IMPORT.finditer(text):
        module = found[1] or found[4] or found[5]
        if file_of(module) is None:
            yield module
        elif found[1] and "_pb2" not in module:
            listed = re.sub(r"#.*", "", found[2] or found[3]).replace("\n", " ").split(",")
            for name in (each.split(" as ")[0].strip() for each in listed):
                if name not in {"", "*"} | names_of(module) and file_of(f"{module}.{name}") is None:
                    yield f"{module}.{name}"


def test_imports_in_texts_exist() -> None:
    found = ((path, name) for path in texts() if path != Path(__file__) for name in missing(path.read_text()))
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, name in found]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('PROGRAM = """\nfrom shardwell_wire.gone import World\n"""', "shardwell_wire.gone"),
        (">>> from shardwell_wire.model.topology import World, Wrold", "shardwell_wire.model.topology.Wrold"),
        ("from shardwell.parallel import (\n    PipelineStage,  # a stage\n    Gone,\n)", "shardwell.parallel.Gone"),
        ("python -m shardwell.gone --help", "shardwell.gone"),
        ("    import shardwell.gone", "shardwell.gone"),
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str, name: str) -> None:
    assert list(missing(text)) == [name]


@cache
def paths() -> frozenset[str]:
    """Returns all files and folders below ``PLACES``, and each of their ends, such as ``module/unit.py``."""
    found = (path for place in PLACES for path in (ROOT / place).rglob("*") if "__pycache__" not in path.parts)
    parts = [path.relative_to(ROOT).parts for path in (*found, *map(ROOT.joinpath, PLACES))]
    return frozenset("/".join(each[first:]) for each in parts for first in range(len(each)))


def missing_paths(text: str) -> Iterator[str]:
    """Yields the files and folders that a text names and that do not exist. Capital words stand for other names."""
    for path in PATH.findall(text):
        if path.rstrip("/") not in paths() | EXAMPLES and not re.search(r"\b[A-Z]+(?=[_./-])", path):
            yield path


def test_paths_in_texts_exist() -> None:
    found = ((path, name) for path in texts() if path != Path(__file__) for name in missing_paths(path.read_text()))
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, name in found]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("| a gather | `module/unit.py`, `module/gone.py` |", "module/gone.py"),
        ("See Note: [Sums] in ``gone.py``.", "gone.py"),
        ("`shardwell_wire/v1/gone.proto`", "shardwell_wire/v1/gone.proto"),
        ("`client/shardwell/gone/`", "client/shardwell/gone/"),
    ],
)
def test_a_path_that_does_not_exist_is_found(text: str, path: str) -> None:
    assert list(missing_paths(text)) == [path]
