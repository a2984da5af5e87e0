"""Runs every block of Python code in README.md and docs/, and checks paths, links and options on the pages.

A block can use the names of ``_default_names``. After ``python on a sharded model`` the model is sharded and has an
``optimizer``. A block that calls ``shardwell.join`` finds a cluster in its environment. Each block runs in its own
folder. Blocks with the name of a file, and those ``with trackers``, have tests of their own.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import textwrap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import shardwell
from examples.gpt import GPT, GPTConfig
from tests.support import long_gpt

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"^(?P<indent> *)```python(?P<mark>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
_PROSE_PAGES = [*_PAGES, *(_ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY"))]
_PATH = re.compile(r"`([\w.-]+/[\w./-]*\.(?:py|proto|md|sh|yml)|[\w-]+/[\w/-]*/)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
_PATH_ROOTS = [
    _ROOT,
    _ROOT / "protos",
    _ROOT / "client" / "shardwell",
    *(_ROOT / "server" / "shardwell_server" / room for room in ("", "shard", "coordinator")),
]
"""Folders that a path on a page may be relative to."""
_SHARDED = "on a sharded model"
_ELSEWHERE = re.compile(r"title=|.*with trackers$")
"""Blocks that other tests run: test_tutorial.py, test_ray.py and test_experiment_trackers.py."""
_SIZE = 8


class Block(nn.Module):
    """The ``Block`` of the pages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_SIZE)
        self.proj = nn.Linear(_SIZE, _SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.proj(self.norm(x)))


class Config:
    """A fake config of Transformers."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")


class Model(nn.Module):
    """An embedding, blocks and a head. The forward returns a loss, like the models of Hugging Face."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(16, _SIZE)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(_SIZE, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> types.SimpleNamespace:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x), tokens))


class MyOptimizer(torch.optim.SGD):
    """A user-defined optimizer with an additional option."""

    def __init__(self, params: Any, *, lr: float, mix: tuple[float, float]) -> None:
        super().__init__(params, lr=lr * sum(mix))


def _blocks() -> Iterator[Any]:
    for page in _PAGES:
        text = page.read_text()
        for found in _BLOCK.finditer(text):
            if _ELSEWHERE.match(found["mark"].strip()):
                continue
            line = text[: found.start()].count("\n") + 1
            source = "\n" * line + textwrap.dedent(found["code"])  # keeps the page's line numbers in tracebacks
            yield pytest.param(compile(source, str(page), "exec"), found["mark"].strip(), id=f"{page.stem}-{line}")


def _default_names() -> dict[str, Any]:
    """Returns the names that every block can use."""
    torch.manual_seed(0)
    config = Config()
    model = Model(config)
    return {
        "torch": torch,
        "nn": nn,
        "math": math,
        "shardwell": shardwell,
        "config": config,
        "Block": Block,
        "Expert": Block,
        "Model": Model,
        "model": model,
        "block": model.blocks[0],
        "policy": shardwell.ModuleTypePolicy({Block}),
        "num_layers": len(model.blocks),
        "width": _SIZE,
        "vocabulary": 100,
        "linear": nn.Linear(_SIZE, 100),
        "groups": [{"params": list(model.parameters())}],
        "MyOptimizer": MyOptimizer,
        "batch": torch.zeros(2, dtype=torch.long),
        "dataset": [torch.tensor(token) for token in range(16)],
        "make_gpt": lambda: GPT(
            GPTConfig(vocab_size=16, context=_SIZE, width=_SIZE, num_heads=2, num_layers=2, tied=False)
        ),
        "make_long_gpt": long_gpt.gpt,
        "work_item": torch.zeros(4, _SIZE, dtype=torch.long),
        "micro_batch": torch.zeros(1, _SIZE, dtype=torch.long),
        "make_batch": lambda step, dp_rank: torch.zeros(2, 4, _SIZE, dtype=torch.long).unbind(),
        "next_token_loss": lambda logits, targets: nn.functional.cross_entropy(logits.mT, targets),
    }


@contextmanager
def _names(code: types.CodeType, mark: str, cluster: shardwell.LocalCluster) -> Iterator[dict[str, Any]]:
    """Yields the names for ``code``, and closes the session at the end."""
    names = _default_names()
    Path("checkpoint").mkdir()
    safetensors.torch.save_file(names["model"].state_dict(), "checkpoint/model.safetensors")
    if "join" not in code.co_names:
        names["session"] = shardwell.join()
    if mark == _SHARDED:
        shardwell.auto_wrap(names["model"], names["session"], names["policy"])
        names["optimizer"] = shardwell.optim.AdamW(names["model"].parameters(), lr=3e-4)
    names["address"] = cluster.address
    try:
        yield names
    finally:
        if "session" in names:
            names["session"].close()


# Warnings of Lightning about itself, and about a machine that has Slurm.
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning", "ignore:The `srun` command")
@pytest.mark.parametrize(("code", "mark"), list(_blocks()))
def test_code_block_runs(
    code: types.CodeType,
    mark: str,
    cluster: shardwell.LocalCluster,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert mark in ("", _SHARDED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWELL_ADDRESS", cluster.address)
    monkeypatch.setenv("SHARDWELL_RUN", run_name)
    with _names(code, mark, cluster) as names:
        exec(code, names)


def test_every_option_and_public_name_is_described() -> None:
    pages = "\n".join(page.read_text() for page in _PAGES)
    groups = (shardwell.TransferOptions, shardwell.WaitOptions)
    fields = [field.name for group in groups for field in dataclasses.fields(group)]
    settings = [*inspect.signature(shardwell.join).parameters, *fields, *shardwell.__all__]
    assert not [name for name in settings if not re.search(rf"\b{name}\b", pages)]
    rooms = [path.read_text() for room in ("client", "server") for path in (_ROOT / room).rglob("*.py")]
    variables = set(re.findall(r"SHARDWELL_([A-Z_]+[A-Z])\b", "\n".join(rooms)))
    assert variables
    assert not [name for name in variables if f"SHARDWELL_{name}" not in pages and f"`_{name}`" not in pages]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", _PROSE_PAGES, ids=lambda page: page.stem)
def test_paths_and_links_of_page_exist(page: Path) -> None:
    text = page.read_text()
    paths = [path for path in _PATH.findall(text) if "NAME" not in path]
    assert not [path for path in paths if not any((root / path).exists() for root in _PATH_ROOTS)]
    for target, anchor in _LINK.findall(text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), f"{target}#{anchor}"


def test_every_python_block_is_found() -> None:
    texts = [page.read_text() for page in _PAGES]
    elsewhere = sum(bool(_ELSEWHERE.match(mark)) for text in texts for mark in re.findall(r"```python (.*)", text))
    assert sum(text.count("```python") for text in texts) == len(list(_blocks())) + elsewhere
