"""What messages and pages advise exists: commands, options, variables, names, and arguments of calls.

Reads every text in the source (messages, help texts and docstrings) and every page of documentation. That advice helps
is shown by ``tests/integration/test_advice.py``, which follows it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import shardwell
from shardwell.command import cli
from shardwell.optimizers.sharded_optimizer import ShardedOptimizer
from shardwell.options import JoinConfig, LauncherPlace, TransferOptions, WaitOptions
from shardwell_server import cli as server_cli
from shardwell_wire.checkpoints.storage import ROOT_OPTION

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("client", "server", "protos", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_TOOLS = [*sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]
COMPOSE = "\n".join(path.read_text() for path in (ROOT / "docker-compose.yml", *ROOT.glob("deploy/slurm/*")))
INSERTED = " _ "
"""Stands for what a formatted text inserts."""
OWNERS: dict[str, type] = {"session": shardwell.Session, "step": shardwell.Step, "optimizer": ShardedOptimizer}
"""Classes of the objects that texts name, such as ``session.steps()``."""
LONGEST_CALL = 400
OF_OTHER_PROGRAMS = {
    *("--build", "--build-arg", "--env", "--profile", "--rm", "--scale", "--shm-size", "--volumes"),  # docker
    *("--constraint", "--extra-index-url", "--wheel", "--its-own"),  # pip, and a script's options in an example
    *("--max-restarts", "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint"),  # torchrun
    *("--rdzv-id", "--kill"),
    *("--array", "--nodes", "--ntasks", "--batch", "--signal", "--nodelist", "--gpus-per-task"),  # Slurm
    *("--kill-on-bad-exit", "--pty"),
    *("--system", "--user-group", "--now"),  # useradd and systemctl
    *(
        "--set",
        "--reuse-values",
        "--target",
        "--from-file",
        "--follow",
        "--namespace",
        "--current",
        "--replicas",
    ),  # helm
}
NOT_OURS = {
    "shardwell.optim.X": "stands for every optimizer",
    "shardwell.internal": "a name in certificates of docker compose",
    "fully_shard() takes no argument 'mesh'": "FSDP2's",
    "there is no command shardwell and": "the names of both commands",
    "there is no command shardwell find": "prose",
    "there is no command shardwell deploy": "the name of a release of Helm",
    "there is no command shardwell development": "the name of an authority",
    "shardwell.engines.vllm": "needs vLLM",
    "shardwell.engines.vllm.update": "needs vLLM",
    "nothing has the option --weight-transfer-config": "vLLM's",
    "nothing has the option --custom-weight-loader": "SGLang's",
    "nothing has the option --no-deps": "pip's, as the next ones",
    "nothing has the option --only-binary": "pip's",
    "nothing has the option --no-index": "pip's",
    "nothing has the option --dest": "pip's",
    "nothing has the option --target": "pip's",
}


@dataclass(frozen=True)
class Text:
    """One text, and where it is."""

    place: str
    content: str


@cache
def pages() -> tuple[Text, ...]:
    return tuple(Text(path.name, path.read_text().replace("\\\n", " ")) for path in PAGES)


@cache
def messages() -> tuple[Text, ...]:
    """Returns the texts in the source. What a formatted text inserts is replaced."""
    return tuple(chain.from_iterable(map(_texts_in, SOURCES)))


def _texts_in(path: Path) -> Iterator[Text]:
    tree = ast.parse(path.read_text())
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in ast.walk(node)}
    for node in ast.walk(tree):
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.JoinedStr):
            pieces = [str(at.value) if isinstance(at, ast.Constant) else INSERTED for at in node.values]
            yield Text(place, "".join(pieces))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield Text(place, node.value)


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the subcommands of a parser."""
    actions = [at for at in parser._actions if isinstance(at, argparse._SubParsersAction)]
    return {name: each for action in actions for name, each in action.choices.items()}


PARSERS = {"shardwell": cli.build_parser(), "shardwell-server": server_cli.build_parser()}


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Returns the options of a parser and of its subcommands."""
    own = {option for action in parser._actions for option in action.option_strings}
    return own.union(*map(options, commands(parser).values()))


COMMAND = re.compile(r"(?<![\w./-])(shardwell(?:-server)?) ([a-z][a-z-]*[a-z])(?![\w=-])([^`;)\n]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def unknown_commands(text: Text) -> Iterator[str]:
    for program, name, rest in COMMAND.findall(text.content):
        parser = commands(PARSERS[program]).get(name)
        if parser is None:
            yield f"there is no command {program} {name}"
            continue
        own = re.split(r"\.py\b|\bshardwell|\| ", rest)[0]  # without the options of a script, and of a next command
        for option in set(OPTION.findall(own)) - options(parser):
            yield f"{program} {name} has no option {option}"


@cache
def known_options() -> set[str]:
    """Returns the options of the commands, the examples, the benchmarks and the test tools."""
    found = OF_OTHER_PROGRAMS.union(*map(options, PARSERS.values()))
    for path in [*SOURCES, *OTHER_TOOLS]:
        found.update(re.findall(r"add_argument\(\s*\"(--[a-z-]+)\"", path.read_text()))
    return found


def unknown_options(text: Text) -> Iterator[str]:
    for option in set(OPTION.findall(text.content)) - known_options():
        yield f"nothing has the option {option}"


@cache
def known_variables() -> set[str]:
    of_options = {
        f"SHARDWELL_{field.name.upper()}"
        for group in (JoinConfig, TransferOptions, WaitOptions, LauncherPlace, shardwell.World)
        for field in fields(group)
        if field.metadata.get("environment", True)
    }
    read = {text.content for text in messages() if re.fullmatch(r"SHARDWELL_[A-Z_]+", text.content)}
    calls = r"add_(?:option|switch)\(\s*parser,\s*\"--([a-z-]+)\""
    of_servers = {name for path in SOURCES for name in re.findall(calls, path.read_text())}
    of_servers.add(ROOT_OPTION.removeprefix("--"))
    read |= {f"SHARDWELL_{name.replace('-', '_').upper()}" for name in of_servers}
    return of_options | read | set(re.findall(r"\$\{(SHARDWELL_[A-Z_]+)", COMPOSE))


def unknown_variables(text: Text) -> Iterator[str]:
    for name in re.findall(r"\bSHARDWELL_[A-Z0-9_]*[A-Z0-9]\b", text.content):
        if name not in known_variables():
            yield f"nothing reads the variable {name}"


def resolve(name: str) -> Any:
    """Returns what a dotted name such as ``shardwell.optim.AdamW`` or ``session.steps`` stands for; None: unknown.

    Raises:
        AttributeError: The name does not exist.
        ImportError: The name does not exist.
    """
    first, *rest = name.split(".")
    found: Any = shardwell if first == "shardwell" else OWNERS.get(first)
    if found is None:
        return getattr(shardwell, first) if first in shardwell.__all__ and not rest else None
    for part in rest:
        if inspect.ismodule(found) and not hasattr(found, part):
            found = import_module(f"{found.__name__}.{part}")
        else:
            found = getattr(found, part)
    return found


def unknown_names(text: Text) -> Iterator[str]:
    for name in re.findall(r"(?<![\w./@-])shardwell\.[A-Za-z_][\w.]*\w", text.content):
        try:
            resolve(name)
        except (AttributeError, ImportError):
            yield name
    for owner, name in re.findall(r"(?<![\w./])(session|step)\.([a-z]\w*)", text.content):
        if not hasattr(OWNERS[owner], name) and f"self.{name}" not in inspect.getsource(OWNERS[owner]):
            yield f"{owner} has no {name}"


def unknown_arguments(text: Text) -> Iterator[str]:
    for found in re.finditer(r"(?<![\w.])([A-Za-z_][\w.]*)\(", text.content):
        given = _arguments(text.content, found.end())
        try:
            target = resolve(found[1])
            call = ast.parse(f"f({given})", mode="eval").body
        except (AttributeError, ImportError, SyntaxError):
            continue
        if not callable(target) or not isinstance(call, ast.Call):
            continue
        parameters = inspect.signature(target).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            continue
        for keyword in call.keywords:
            if keyword.arg not in (None, INSERTED.strip(), *parameters):
                yield f"{found[1]}() takes no argument {keyword.arg!r}"


def _arguments(content: str, start: int) -> str:
    """Returns the text between the parenthesis that ends before ``start`` and the one that closes it."""
    depth = 1
    for at in range(start, min(len(content), start + LONGEST_CALL)):
        depth += (content[at] in "([{") - (content[at] in ")]}")
        if depth == 0:
            return content[start:at]
    return ""


def unknown_advised_arguments(text: Text) -> Iterator[str]:
    """Finds advice such as "pass keep_bytes to join" whose argument no public function takes."""
    for name, function in re.findall(r"\b[Pp]ass (?:a (?:larger|smaller) )?(\w+)\S* to (\w+)\b", text.content):
        target = resolve(function) if function in shardwell.__all__ and "_" in name else None
        if callable(target) and name not in inspect.signature(target).parameters:
            yield f"{function}() takes no argument {name!r}"


Check = Callable[[Text], Iterator[str]]
CHECKS: list[Check] = [
    unknown_commands,
    unknown_options,
    unknown_variables,
    unknown_names,
    unknown_arguments,
    unknown_advised_arguments,
]


@pytest.mark.parametrize("check", CHECKS)
def test_what_texts_name_exists(check: Check) -> None:
    found = [(text.place, problem) for text in (*pages(), *messages()) for problem in check(text)]
    assert not [each for each in found if each[1] not in NOT_OURS]
    assert len(messages()) > 5000


@pytest.mark.parametrize(
    ("check", "content", "problem"),
    [
        (unknown_commands, "delete it (shardwell remove-run r)", "there is no command shardwell remove-run"),
        (unknown_commands, "`shardwell drain s0 --force`", "shardwell drain has no option --force"),
        (unknown_options, "start it with --publish HOST", "nothing has the option --publish"),
        (unknown_variables, "set SHARDWELL_ADRESS", "nothing reads the variable SHARDWELL_ADRESS"),
        (unknown_names, "use shardwell.gather_all(model)", "shardwell.gather_all"),
        (unknown_names, "call session.finish()", "session has no finish"),
        (
            unknown_arguments,
            "shardwell.join(address, transports='shm')",
            "shardwell.join() takes no argument 'transports'",
        ),
        (unknown_advised_arguments, "Pass keep_bytes=5 to join, ...", "join() takes no argument 'keep_bytes'"),
    ],
)
def test_wrong_advice_is_found(check: Check, content: str, problem: str) -> None:
    assert list(check(Text("here", content))) == [problem]
