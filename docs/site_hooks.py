"""Hooks of MkDocs: add the reference and linked files outside ``docs/``, and adapt pages to Python-Markdown.

The reference of Python has every public name of ``shardwell`` and of the rooms in ``GROUPS``. The reference of the
protos has every service, rpc, message and enum with its comments. Neither is kept by hand.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
PROTOS = sorted((ROOT / "protos/shardwell_wire/v1").glob("*.proto"))
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
"""A link from a page of ``docs/`` to a file outside."""
GROUPS = {room: f"client/shardwell/{room}/__init__.py" for room in ("monitor", "weights", "wrapping")}
GROUPS["errors"] = "protos/shardwell_wire/errors.py"
"""Modules with public names that ``shardwell`` itself does not list, and the files that list them."""
PROJECT = ("CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "LICENSE")


def on_config(config: Any) -> None:
    """Gives headings the anchors that they have on GitHub, and lists the pages of the protos in the navigation."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    [reference] = [part["Reference"] for part in config.nav if "Reference" in part]
    reference[-1] = {"Protos": [{path.name: f"reference/{path.stem}.md"} for path in PROTOS]}


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages, and the files of the repository that pages link."""
    pages = {"reference/python.md": python_reference()} | proto_reference()
    linked = set(PROJECT)
    for file in files.documentation_pages():
        linked.update(OUTSIDE.findall(file.content_string))
    for name in sorted(linked):
        pages[f"project/{name}"] = _moved((ROOT / name).read_text(), posixpath.dirname(name))
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def _moved(text: str, folder: str) -> str:
    """Returns a page with the links that fit its place on the site, where the repository is the folder ``project``."""
    up = "../" * (1 + len(folder.split("/")) if folder else 1)
    return re.sub(r"\]\((?:\.\./)*docs/", f"]({up}", text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapts links to files outside ``docs/``, blocks of code, and lists: Python-Markdown indents by 4 spaces."""
    if not page.file.src_uri.startswith(("project/", "reference/")):
        markdown = OUTSIDE.sub(r"](project/\1", markdown)
    markdown = re.sub(r"^( *```python) (?!title=)[^\n]+$", r"\1", markdown, flags=re.MULTILINE)
    return "\n".join(_indented_lists(markdown.splitlines()))


def _indented_lists(lines: list[str]) -> Iterator[str]:
    fence: int | None = None  # the indent of the fence that is open
    for line in lines:
        indent = len(line) - len(line.lstrip(" "))
        own = indent if fence is None else fence
        yield " " * (4 * -(-own // 3)) + line[min(own, indent) :]
        if line.lstrip(" ").startswith("```"):
            fence = indent if fence is None else None


def python_reference() -> str:
    """Returns the page of the public names. MkDocs' plugin replaces its ``:::`` lines by signatures and docstrings."""
    imports, public = _imports_and_names("client/shardwell/__init__.py")
    rooms: dict[str, list[str]] = defaultdict(list)
    for node in sorted(imports, key=lambda node: (node.module or "").split(".")[0]):  # shardwell, then shardwell_wire
        parts = (node.module or "").split(".")
        rooms[parts[1] if len(parts) > 1 else "modules"] += [alias.name for alias in node.names if alias.name in public]
    groups = {room: [*_imports_and_names(path)[1] - public] for room, path in GROUPS.items()}
    rooms["modules"] = [name for name in rooms["modules"] if name not in groups]
    lines = ["# Python", "", "Every public name of `shardwell`, by the room that defines it."]
    for room, names in rooms.items():
        if names:
            lines += ["", f"## {room.capitalize()}", *(f"\n::: shardwell.{name}" for name in sorted(names))]
    for room, names in groups.items():
        lines += ["", f"## shardwell.{room}", *(f"\n::: shardwell.{room}.{name}" for name in sorted(names))]
    return "\n".join(lines)


def _imports_and_names(path: str) -> tuple[list[ast.ImportFrom], set[str]]:
    """Returns what a module imports, and its public names."""
    tree = ast.parse((ROOT / path).read_text())
    [public] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)], set(ast.literal_eval(public))


@dataclass
class Block:
    """A service, message, enum or oneof of a proto file, and its comment. ``rows`` are its fields, values or rpcs."""

    kind: str
    name: str
    comment: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)


def blocks(path: Path) -> list[Block]:
    """Returns what a proto file defines, in its order. Its first block is the file itself."""
    found = [Block("file", path.name, "")]
    open_blocks: list[Block] = []
    comment: list[str] = []
    for line in path.read_text().splitlines():
        text = line.strip()
        if text.startswith("//"):
            comment.append(text[2:].strip())
            continue
        about, comment = "\n".join(comment), []
        if text.startswith("syntax"):
            found[0].comment = about
        elif begin := re.match(r"(service|message|enum|oneof) (\w+) \{", text):
            outer = [block.name for block in open_blocks]
            open_blocks.append(Block(begin[1], ".".join([*outer, begin[2]]), about))
            found.append(open_blocks[-1])
        elif rpc := re.match(r"rpc (\w+)\((.*)\) returns \((.*)\)", text):
            open_blocks[-1].rows.append((rpc[1], f"{rpc[2]} -> {rpc[3]}", about))
        elif member := re.match(r"(?:(.+) )?(\w+) = \d+(?: \[.*\])?;", text):
            open_blocks[-1].rows.append((member[2], member[1] or "", about))
        if text.endswith("}"):
            open_blocks.pop()
    return found


def proto_reference() -> dict[str, str]:
    """Returns a page for each proto file. Types link to the messages and enums of all files."""
    contents = {path.stem: blocks(path) for path in PROTOS}
    homes = {block.name: stem for stem, of_file in contents.items() for block in of_file[1:] if block.kind != "service"}
    return {f"reference/{stem}.md": "\n".join(_proto_lines(of_file, homes)) for stem, of_file in contents.items()}


def _proto_lines(of_file: list[Block], homes: dict[str, str]) -> Iterator[str]:
    def linked(types: str) -> str:
        return re.sub(
            r"\w+",
            lambda name: f"[{name[0]}]({homes[name[0]]}.md#{name[0].lower()})" if name[0] in homes else name[0],
            types,
        )

    file, *rest = of_file
    yield from (f"# {file.name}", "", file.comment, "")
    for block in rest:
        yield from (f"## {block.name}", "", f"*{block.kind.capitalize()}.* {block.comment}", "")
        if block.kind == "service":
            for name, types, comment in block.rows:
                yield from (f"### {name}", "", linked(types), "", comment, "")
        elif block.rows:
            columns = 2 if block.kind == "enum" else 3
            yield from ("| name | meaning |" if columns == 2 else "| name | type | meaning |", "|---" * columns + "|")
            for name, types, comment in block.rows:
                cells = [f"`{name}`", *([linked(types)] * (columns - 2)), " ".join(comment.split())]
                yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
            yield ""
