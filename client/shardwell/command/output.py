"""What the commands print: answers as tables or JSON, once or again and again, and the progress of long work.

A command that shows something makes an ``Answer``. ``show`` is the only place that prints one, so every command has the
same formats.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from shardwell.command.arguments import positive_seconds
from shardwell_wire.errors import DeadlineError, UnavailableError


def progress(*columns: ProgressColumn) -> Progress:
    """Returns a display of progress on standard error, which only a terminal shows, and only until the command ends."""
    console = Console(stderr=True, highlight=False)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def byte_columns() -> Sequence[ProgressColumn]:
    """Returns the columns of a display that counts bytes."""
    return TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()


@contextmanager
def progress_bar(what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Shows a bar while the block runs; yields a function that counts bytes.

    Args:
        what: What is in progress, such as ``exporting``.
        total_bytes: All bytes. None: not known.
    """
    with progress(*byte_columns()) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda count_bytes: bar.advance(task, count_bytes)


_NUMBERS = re.compile(r'\[\n((?:\s+"?-?[\d.e+-]+"?,?\n)+)\s*\]')
"""A list of numbers, one per line; 64-bit integers are in quotes."""

_UNLIMITED = 100_000
"""Width of lines that end nowhere but at their end, in characters."""
_WATCH_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command shows.

    Attributes:
        documents: What ``-o json`` prints: messages, or values that ``json`` can encode.
        view: What ``-o table`` and ``-o wide`` print.
        one_per_line: True if each document takes one line of JSON, because there may be several.
        exit_code: Exit code of the command.
    """

    documents: Sequence[Any]
    view: RenderableType
    one_per_line: bool = False
    exit_code: int = 0


def add_output_arguments(parser: argparse.ArgumentParser, *, can_watch: bool = True) -> None:
    """Adds ``--output``, ``--json`` and, if the command can be repeated, ``--watch``."""
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "wide", "json"),
        default="table",
        help="table leaves out columns that do not fit the terminal, wide prints all of them, json prints the response "
        "of the rpc (default: table)",
    )
    parser.add_argument("--json", dest="output", action="store_const", const="json", help="the same as -o json")
    if can_watch:
        parser.add_argument(
            "-w",
            "--watch",
            nargs="?",
            type=positive_seconds,
            const=_WATCH_S,
            metavar="SECONDS",
            help=f"ask again every SECONDS (default: {_WATCH_S:g}) until Ctrl-C; write it after the other arguments",
        )


def output(*, wide: bool = False) -> Console:
    """Returns a console on standard output. A pipe and ``wide`` get lines of any length."""
    return Console(width=_UNLIMITED if wide or not sys.stdout.isatty() else None, highlight=False)


def to_json(document: Any, *, indent: int | None = 2) -> str:
    """Returns a document as JSON. A message has its proto field names and all defaults. Numbers share one line."""
    value = (
        MessageToDict(document, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        if isinstance(document, Message)
        else document
    )
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def as_dict(message: Message) -> Any:
    """Returns a message as ``to_json`` prints it, as a part of a larger document."""
    return json.loads(to_json(message))


def show(arguments: argparse.Namespace, ask: Callable[[], Answer | Iterator[Answer]]) -> int:
    """Prints an answer in the format of ``--output``; with ``--watch``, every new answer until Ctrl-C.

    A terminal shows the newest answer only. A pipe gets all of them, JSON as one document per line.

    Args:
        arguments: The arguments of ``add_output_arguments``.
        ask: Returns the answer, or answers that are printed as they come. While watching, an unavailable coordinator
            does not end the command.

    Returns:
        The exit code: that of the answer, or 0 after Ctrl-C if there were several.
    """
    answer, interval_s = ask(), getattr(arguments, "watch", None)
    if isinstance(answer, Answer) and interval_s is None:
        _print(arguments, answer)
        return answer.exit_code
    try:
        if isinstance(answer, Answer):
            _watch(arguments, answer, cast(Callable[[], Answer], ask))
        else:
            for each in answer:
                _print(arguments, each)
    except KeyboardInterrupt:
        pass
    return 0


def _print(arguments: argparse.Namespace, answer: Answer, *, compact: bool = False) -> None:
    if arguments.output == "json":
        indent = None if compact or answer.one_per_line else 2
        for document in answer.documents:
            print(to_json(document, indent=indent), flush=True)
    else:
        # A name that is longer than a line is printed whole: the terminal breaks the line.
        output(wide=arguments.output == "wide").print(answer.view, crop=False)


def _watch(arguments: argparse.Namespace, answer: Answer, ask: Callable[[], Answer]) -> None:
    """Prints an answer, and then new ones until KeyboardInterrupt."""
    console = output()
    redraws = arguments.output == "table" and console.is_terminal
    with Live(console=console, auto_refresh=False) if redraws else nullcontext() as live:
        while True:
            head = Text(f"{datetime.now():%H:%M:%S}, every {arguments.watch:g} s, Ctrl-C ends", "dim")
            if live is not None:
                live.update(Group(head, answer.view), refresh=True)
            elif arguments.output == "json":
                _print(arguments, answer, compact=True)
            else:
                _print(arguments, Answer((), Group(head, answer.view, "")))
                sys.stdout.flush()
            time.sleep(arguments.watch)
            try:
                answer = ask()
            except (UnavailableError, DeadlineError) as error:
                answer = Answer(({"error": str(error)},), Text(str(error), "red"))
