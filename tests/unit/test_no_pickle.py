"""Shardwell does not use pickle: unpickling runs arbitrary code of the writer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
"""Modules that may run code or crash when they read untrusted bytes."""

PROCESS_PIPES = {"multiprocessing", "torch.multiprocessing"}
"""Modules whose queues, pipes and managers pickle every object."""

OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def findings(source: str) -> Iterator[str]:
    """Returns the places in a module that pickle or unpickle, one line each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = {base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)}
            if any(name.split(".")[0] in MODULES or name in PROCESS_PIPES for name in names):
                yield f"{node.lineno}: imports {sorted(names)}"
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in OBJECT_COLLECTIVES or name in MODULES:
            yield f"{getattr(node, 'lineno', 0)}: uses {name}"
        if isinstance(node, ast.Call):
            yield from _call_findings(node)


def _call_findings(call: ast.Call) -> Iterator[str]:
    text = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if text in ("torch.save", "torch.serialization.save"):
        yield f"{call.lineno}: calls {text}"
    if text in ("torch.load", "torch.serialization.load") and options.get("weights_only") != "True":
        yield f"{call.lineno}: calls {text} without weights_only=True"
    if options.get("allow_pickle", "False") != "False":
        yield f"{call.lineno}: allows numpy to unpickle"
    if text in ("eval", "exec"):
        yield f"{call.lineno}: calls {text}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.multiprocessing",
        "from torch import multiprocessing",
        "import torch.distributed as dist\ndist.all_gather_object(out, value)",
        "from torch.distributed import broadcast_object_list as send\nbroadcast_object_list(values)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.save(state, path)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_scan_finds_unpickling(source: str) -> None:
    assert list(findings(source))


def test_scan_accepts_code_that_does_not_unpickle() -> None:
    assert not list(findings("torch.load(path, weights_only=True)\nimport json\njson.loads(text)\nmodel.eval()"))


@pytest.mark.parametrize("folder", ["client", "server", "protos"])
def test_no_code_unpickles(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in findings(path.read_text())]
    assert not found, "\n".join(found)
