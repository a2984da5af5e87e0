"""The documentation as a site: every page is in the navigation, and what pages must have is there.

The generated reference has everything public, the runbook every alert, and troubleshooting quotes messages that exist.

`make docs` builds the site and checks its links.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import Default

import shardwell
import shardwell_wire.v1
from docs import site_hooks
from tests.unit.test_advice import messages

ROOT = Path(__file__).parents[2]


def leaves(nav: Any) -> Iterator[str]:
    for part in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else []:
        yield from [part] if isinstance(part, str) else leaves(part)


def test_navigation_has_every_page_once() -> None:
    listed = [page for page in leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]) if "/" not in page]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_reference_of_python_has_every_public_name_once() -> None:
    lines = site_hooks.python_reference().splitlines()
    groups = [getattr(shardwell, name) for name in site_hooks.GROUPS]
    listed = {name for group in groups for name in dir(group) if not name.startswith("_")}
    public = {*shardwell.__all__, *listed} - {*site_hooks.GROUPS}
    assert sorted(line.rpartition(".")[2] for line in lines if line.startswith(":::")) == sorted(public)


@pytest.mark.parametrize("path", site_hooks.PROTOS, ids=lambda path: path.stem)
def test_reference_of_protos_has_what_the_stubs_have(path: Path) -> None:
    importlib.import_module(f"{shardwell_wire.v1.__name__}.{path.stem}_pb2")
    file: FileDescriptor = Default().FindFileByName(f"shardwell_wire/v1/{path.name}")
    found: dict[str, set[str]] = {}
    for block in site_hooks.blocks(path)[1:]:
        message = block.name.rpartition(".")[0] if block.kind == "oneof" else block.name
        found.setdefault(message, set()).update(name for name, _, _ in block.rows)
        assert all(comment for _, _, comment in block.rows), block.name
    expected = {name: {field.name for field in of.fields} for name, of in file.message_types_by_name.items()}
    expected |= {name: {value.name for value in of.values} for name, of in file.enum_types_by_name.items()}
    expected |= {name: {method.name for method in of.methods} for name, of in file.services_by_name.items()}
    assert found == expected
    page = site_hooks.proto_reference()[f"reference/{path.stem}.md"]
    assert all(f"## {name}\n" in page for name in expected)


def test_lists_are_indented_for_python_markdown() -> None:
    page = "- a\n  b\n\n  ```\n  code\n    more\n  ```\n   1. c\n\n```\n  kept\n```"
    assert "\n".join(site_hooks._indented_lists(page.splitlines())) == (
        "- a\n    b\n\n    ```\n    code\n      more\n    ```\n    1. c\n\n```\n  kept\n```"
    )


def test_runbook_has_an_entry_for_each_alert() -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in alerts]
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_troubleshooting_quotes_messages_of_the_source() -> None:
    quotes = re.findall(r"^> (.*)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    patterns = [re.compile(r".*?".join(map(re.escape, quote.split("..."))), re.DOTALL) for quote in quotes]
    texts = [" ".join(text.content.split()) for text in messages()]
    assert len(quotes) > 20
    assert [quote for quote, p in zip(quotes, patterns, strict=True) if not any(map(p.search, texts))] == []
